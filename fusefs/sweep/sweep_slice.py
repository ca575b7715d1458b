"""One slice of a sweep: open directories below the sweep's directory, list them, select entries and act on them.

No component of a path may be a link, a mount or `..` (openat2), so a slice never enters anything that another process
puts in the place of a listed directory. A name costs a stat only if the selection needs more than names and types.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import compress
from typing import NamedTuple

from fusefs.core.errors import AcrossUsers
from fusefs.core.names import join_path
from fusefs.core.pacing import NamesPerClockCheck, SliceBudget
from fusefs.core.results import NOT_GIVEN, NOT_TAKEN, ReportedMark, ShouldStop, SweepSums
from fusefs.core.selection import Matcher
from fusefs.engine.strategy import AllocationGroups
from fusefs.linux.batched_calls import FileSizes, lstat_all
from fusefs.linux.fd import Fd, close_on_error
from fusefs.linux.kernel import FUSE_MAGIC, Kernel
from fusefs.store.backing_and_mount import READABLE, BackingAndMount
from fusefs.store.walk import DeepOpeners, attribute_directory, is_parent, may_take_whole
from fusefs.sweep.actions import DeleteMatches
from fusefs.sweep.agenda import Job, JobKind, SliceCounts, SweepSlice, SweepSliceResult
from fusefs.sweep.matcher import (
    GONE,
    Chooser,
    Dirs,
    MatchedEntries,
    SweepStrategy,
    filter_in,
    missing_counts,
    read_window,
    strip_filter_in,
)
from fusefs.sweep.request import (
    Action,
    ActionPlace,
    ActionResult,
    Identified,
    SparesDirectory,
    TakingBoundary,
    identify,
)

_BUNDLE = 2048


class SweepWorker(NamedTuple):
    """Runs slices of one sweep, in any process or thread; only `per_look` changes from slice to slice.

    root    the sweep's directory
    groups  the filesystem's allocation groups; each worker should work in a group of its own
    per_look  number of names between two checks of the clock
    """

    kernel: Kernel
    root: BackingAndMount
    matcher: Matcher
    action: Action
    strategy: SweepStrategy
    groups: AllocationGroups
    spares: SparesDirectory | None
    is_stopped: ShouldStop
    per_look: NamesPerClockCheck
    boundary: TakingBoundary | None = None

    def run_slice(self, work: SweepSlice, budget: SliceBudget) -> SweepSliceResult:
        """Run a slice. Errors of single entries are not raised, but returned in the result."""
        with ExitStack() as owned:
            return _SweepRun(self, work, budget, owned).run_slice()


class _SweepRun:
    def __init__(self, worker: SweepWorker, work: SweepSlice, budget: SliceBudget, owned: ExitStack) -> None:
        self._kernel = worker.kernel
        self._root = worker.root
        self._matcher = worker.matcher
        self._action = worker.action
        self._strategy = worker.strategy
        self._groups = worker.groups
        self._spares = worker.spares
        self._is_stopped = worker.is_stopped
        self._per_look = worker.per_look
        self._boundary = worker.boundary
        # libfuse may assign inode numbers dynamically; then they do not last.
        self._numbers_last = worker.boundary is None or worker.kernel.filesystem(worker.root.fd) != FUSE_MAGIC
        self._lists_whole = work.lists_whole
        self._jobs = list(work.jobs)
        self._caller_fds = frozenset(work.fds())
        self._budget = budget
        self._began_at = time.monotonic()
        self._ends_at = self._began_at + budget.seconds
        self._per_look.begin(budget.seconds)
        self._tally = SliceCounts(work.most)
        self._chooser = Chooser(worker.kernel, worker.root, worker.matcher, worker.action, worker.strategy, self._tally)
        # Files are unlinked at once only if no limit must be met exactly, and no caller has wrapped the action.
        deletes = isinstance(worker.action, DeleteMatches) and not budget.is_paced() and work.most is None
        self._unlinks_at_once = deletes and self._chooser.chooses_at_once()
        self._ways = owned.enter_context(DeepOpeners(worker.kernel))

    def run_slice(self) -> SweepSliceResult:
        try:
            while self._jobs:
                self._step(self._jobs.pop())
                if self._is_over():
                    break
        except BaseException:
            for job in self._jobs:
                self._close(job.fd)
            raise
        tally = self._tally
        return SweepSliceResult(
            tally.sums,
            tuple(tally.failures),
            tuple(tally.spared),
            tuple(self._jobs),
            tally.why(),
            tally.remaining,
            tally.is_limited,
            time.monotonic() - self._began_at,
        )

    def _is_over(self) -> bool:
        """Whether the slice is over, because its budget is spent or there is a reason to stop."""
        sums, budget = self._tally.sums, self._budget
        return (
            time.monotonic() >= self._ends_at
            or (self._tally.is_limited and self._strategy.ends_at_limit())
            or self._is_stopped()
            or bool(self._tally.why())
            or (budget.n_entries is not None and sums.n_done + sums.n_inside >= budget.n_entries)
            or (budget.n_bytes is not None and sums.n_bytes >= budget.n_bytes)
        )

    def _step(self, job: Job) -> None:
        match job.kind:
            case JobKind.ENTER:
                name = job.names.pop()
                if job.names:
                    self._jobs.append(job)
                if not self._enter(job, join_path(job.upper, os.fsencode(name))):
                    job.names.insert(0, name)
            case JobKind.LIST:
                self._list_on(job, Fd(job.fd))
            case JobKind.TAKE | JobKind.AFTER:
                sides = self._open_or_report(job.upper, job.inode)
                if sides is not None:
                    self._take(job.unpack(), sides)
                    self._leave(sides)
            case JobKind.CHECK:
                self._process_listed(job.unpack())

    # Directories.

    def _open(self, upper: bytes) -> BackingAndMount:
        """Open a directory for reading, on both sides. Raises  OSError: EXDEV if the path crosses a mount"""
        if self._strategy.is_hidden(upper):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        return self._ways.opener_of(self._root).beneath(upper, flags=READABLE)

    def _open_or_report(self, upper: bytes, inode: Identified | None = None) -> BackingAndMount | None:
        """Open a directory for reading. If it was replaced or must be avoided, or after an error, return None."""
        try:
            sides = self._open(upper)
        except OSError as error:
            if error.errno == errno.EXDEV:
                self._tally.count(SweepSums(n_mounts=1))
            elif error.errno not in GONE:
                self._tally.fail(upper, error.errno, "open")
            return None
        avoided = self._action.avoided
        if avoided or inode is not None:
            identity = identify(self._kernel, sides.fd)
            if identity in avoided or inode not in (None, identity):
                sides.__exit__()
                return None
        return sides

    def _leave(self, sides: BackingAndMount) -> None:
        sides.close_mounted()
        self._close(sides.fd)

    def _close(self, fd: int) -> None:
        """Close a directory's listing, unless it belongs to the caller."""
        if fd >= 0 and fd not in self._caller_fds:
            Fd(fd).close()

    def _enter(self, job: Job, upper: bytes) -> bool:
        """Start on a directory. Return False if another directory of the job should be started first."""
        sides = self._open_or_report(upper)
        if sides is None:
            return True
        if job.names and self._groups.is_crowded(sides.fd):
            sides.__exit__()
            return False
        if job.is_chosen and not job.again:
            # The directory was chosen when its parent was listed, so check it again, unless a lost worker changed it.
            may_enter = self._chooser.is_chosen_still(sides.fd)
        else:
            may_enter = job.strips or not self._is_spared(upper, sides)
        whose = self._whose_is(job, upper, sides.fd) if may_enter else None
        if whose is not None:
            self._list(Job(JobKind.LIST, upper, [], fd=sides.fd, strips=job.strips, whose=whose), sides)
        else:
            sides.__exit__()
        return True

    def _whose_is(self, job: Job, upper: bytes, fd: Fd) -> int | None:
        """Return the owner of a directory's content before it is entered. If root must not take it, return None."""
        if self._boundary is None:
            return 0
        if not upper:
            return self._boundary.whose
        try:
            whose = attribute_directory(self._kernel, fd, job.whose, self._boundary.seen_directories)
            if whose and job.inode is not None and not is_parent(self._kernel, job.inode, fd):
                return None  # its parent was replaced after it was listed
            if whose is None and not self._kernel.is_empty(fd):
                self._tally.fail(upper, errno.EPERM, NOT_TAKEN)
        except OSError as error:
            self._tally.fail(upper, error.errno, "look")
            return None
        return whose

    def _whose_is_at(self, upper: bytes) -> int | None:
        """Return the same as `_whose_is` for a directory that was not reached by a walk. Raises  OSError"""
        if self._boundary is None:
            return 0
        whose: int | None = self._boundary.whose
        parts = upper.split(b"/") if upper else []
        for at in range(1, len(parts) + 1):
            if whose is not None:
                with self._ways.opener_of(self._root).beneath(b"/".join(parts[:at])) as sides:
                    whose = attribute_directory(self._kernel, sides.fd, whose, self._boundary.seen_directories)
        return whose

    def _is_spared(
        self, upper: bytes, sides: BackingAndMount, *, is_reported: bool = True, is_match: bool = False
    ) -> bool:
        """Whether the caller of the sweep spares a directory; an error of this check is counted as a failure.

        is_match  the directory itself would be taken, with its content
        """
        if self._spares is None:
            return False
        try:
            why = self._spares(self._kernel, sides)
        except OSError as error:
            self._tally.fail(upper, error.errno, "look")
            return True
        if isinstance(why, ReportedMark):
            if is_reported:
                self._tally.fail(upper, errno.EPERM, why.why)
            return why.is_spared or is_match
        if why is None:
            return False
        if is_reported:
            self._tally.spare(upper, why)
        return True

    def _list_on(self, job: Job, fd: Fd) -> None:
        """Continue a listing, unless the directory was moved, since the sweep does not cover its new place."""
        sides = self._open_or_report(job.upper, identify(self._kernel, fd))
        if sides is None:
            self._close(fd)
        else:
            sides.fd.close()
            self._list(job, BackingAndMount(fd, sides.mounted))

    def _list(self, job: Job, sides: BackingAndMount) -> None:
        """List a directory, as far as memory and time allow, and sort its entries into jobs."""
        strategy = self._strategy
        entry_filter = strip_filter_in(self._matcher, job.upper) if job.strips else filter_in(self._matcher, job.upper)
        window = None if self._lists_whole else strategy.window
        try:
            entries = read_window(
                self._kernel, sides.fd, entry_filter, window, self._ends_at, by_inode=strategy.by_inode
            )
        except OSError as error:
            self._tally.fail(job.upper, error.errno, "getdents")
            self._leave(sides)
            return
        self._tally.count(SweepSums(n_seen=entries.n_entries))
        self._chooser.refuse(job.upper, entries.untyped)
        if not entries.is_all:
            self._jobs.append(job)
        self._sort_dirs(job, entries, sides)
        self._sort_files(job, entries.names, sides)
        if entries.is_all:
            self._leave(sides)
        else:
            sides.close_mounted()

    def _sort_dirs(self, job: Job, entries: MatchedEntries, sides: BackingAndMount) -> None:
        """Enter or take directories, as the action requires."""
        upper, dirs = job.upper, entries.dirs
        enter_job = Job(JobKind.ENTER, upper, [], whose=job.whose)
        if entries.dirs and self._boundary is not None and self._numbers_last:
            enter_job = enter_job._replace(inode=identify(self._kernel, sides.fd))
        if job.strips:
            self._after(upper, entries.dirs, strips=True)
            self._push_enter(enter_job._replace(strips=True), dirs)
            return
        chosen = self._chooser.choose_dirs(upper, sides, entries.chosen) if entries.chosen else []
        match self._strategy.dirs:
            case Dirs.WHOLE:
                dirs = _without(dirs, chosen)
                self._push_enter(enter_job, dirs)
                self._take(Job(JobKind.AFTER, upper, chosen, whose=job.whose), sides)
            case Dirs.FIRST:
                self._push_enter(enter_job, dirs)
                self._take(Job(JobKind.AFTER, upper, chosen), sides)
            case Dirs.LAST:
                self._after(upper, chosen)
                self._push_enter(enter_job, _without(dirs, chosen) if self._matcher.needs_emptiness else dirs)
            case Dirs.STRIPPED:
                chosen = self._reserve(chosen)
                self._after(upper, chosen)
                self._push_enter(enter_job, _without(dirs, chosen))
                self._push_enter(enter_job._replace(strips=True, is_chosen=True), chosen)

    def _reserve(self, chosen: list[str]) -> list[str]:
        """Reduce chosen directories to the number that may still be taken, before their content is deleted."""
        tally = self._tally
        if tally.remaining is None:
            return chosen
        tally.is_limited |= len(chosen) > tally.remaining
        chosen = chosen[: tally.remaining]
        tally.remaining -= len(chosen)
        return chosen

    # A job consumes its list of names, so each job has its own list.

    def _push_enter(self, here: Job, dirs: list[str]) -> None:
        if dirs:
            self._jobs.append(here._replace(names=list(dirs)))

    def _after(self, upper: bytes, dirs: list[str], *, strips: bool = False) -> None:
        if dirs:
            self._jobs.append(Job(JobKind.AFTER, upper, list(dirs), strips=strips))

    # Actions

    def _sort_files(self, job: Job, names: list[str], sides: BackingAndMount) -> None:
        """Act on the first bundle of names; the other bundles become jobs for free workers."""
        take_job = Job(JobKind.TAKE, job.upper, names, strips=job.strips)
        if len(names) > _BUNDLE:
            take_job = take_job._replace(inode=identify(self._kernel, sides.fd))
            bundles = [names[at : at + _BUNDLE] for at in range(0, len(names), _BUNDLE)]
            self._jobs += [take_job._replace(names=bundle).pack() for bundle in bundles[:-1]]
            take_job = take_job._replace(names=bundles[-1])
        self._take(take_job, sides)

    def _take(self, job: Job, sides: BackingAndMount) -> None:
        """Act on names until the slice is over; the remaining names become a job."""
        names = job.names
        while names:
            if self._is_over():
                inode = job.inode or identify(self._kernel, sides.fd)
                self._jobs.append(job._replace(names=names, inode=inode))
                return
            n, began_at = self._per_look.n, time.monotonic()
            if self._budget.n_entries is not None:
                sums = self._tally.sums
                n = max(1, min(n, self._budget.n_entries - sums.n_done - sums.n_inside))
            some = names[: -n - 1 : -1]
            del names[-n:]
            names += self._apply_action(job, some, sides)[::-1]
            self._per_look.record(len(some), time.monotonic() - began_at)

    def _apply_action(self, job: Job, names: list[str], sides: BackingAndMount) -> list[str]:
        """Act on some names, and return those that must be tried again."""
        tally, are_dirs = self._tally, job.kind is JobKind.AFTER
        again: list[str] = []
        sizes = FileSizes([], [])
        if are_dirs and job.inode is not None and self._strategy.dirs is Dirs.WHOLE:
            names = self._chooser.chosen_still(sides, names)
        if are_dirs and self._strategy.dirs is Dirs.WHOLE:
            names = self._drop_forbidden(job, names, sides)
        if not are_dirs:
            if self._unlinks_at_once and not job.strips:
                names = self._unlink(job.upper, sides, names)
                if not names:
                    return []
            n_bytes = None if self._budget.n_bytes is None else self._budget.n_bytes - tally.sums.n_bytes
            names, sizes, again = self._chooser.choose_files(job.upper, sides, names, n_bytes, strips=job.strips)
        is_reserved = are_dirs and self._strategy.dirs is Dirs.STRIPPED
        if tally.remaining is not None and not job.strips and not is_reserved:
            tally.is_limited |= bool(names) and not tally.remaining
            again = names[tally.remaining :] + again if tally.remaining else []
            names, sizes = names[: tally.remaining], sizes.first(tally.remaining)
        with ExitStack() as held:
            if are_dirs and not job.strips:
                names = self._drop_spared(job.upper, names, held)
            if not names:
                return again
            here = ActionPlace(self._kernel, sides, job.upper, are_dirs, self._ways)
            taken = self._offer(here, names)
        tally.count_result(job.upper, len(names), taken, are_matches=not job.strips, counts_to_limit=not is_reserved)
        lengths, spaces = sizes
        if undone := {name for name, _why in (*taken.refused, *taken.spared)}:
            is_done = [name not in undone for name in names]
            lengths, spaces = [*compress(lengths, is_done)], [*compress(spaces, is_done)]
        tally.count(SweepSums(n_bytes=sum(lengths), taken_bytes=sum(spaces)))
        return again

    def _drop_forbidden(self, job: Job, names: list[str], sides: BackingAndMount) -> list[str]:
        """Return the directories that root may take with all their content; report the others."""
        boundary = self._boundary
        if boundary is None or boundary.is_judged:
            return names
        allowed = []
        for name in names:
            raw = os.fsencode(name)
            try:
                with sides.beneath(self._kernel, raw, READABLE) as top:
                    is_taken = may_take_whole(self._kernel, top.fd, job.whose, boundary.seen_directories)
            except OSError as error:
                if error.errno not in GONE:
                    self._tally.fail(join_path(job.upper, raw), error.errno, "look")
                    continue
                is_taken = True  # the action will get the same error
            if is_taken:
                allowed.append(name)
            else:
                self._tally.fail(join_path(job.upper, raw), errno.EPERM, NOT_TAKEN)
        return allowed

    def _unlink(self, upper: bytes, sides: BackingAndMount, names: list[str]) -> list[str]:
        """Delete the names that are clearly chosen, and return those that need a closer check."""
        with self._groups.lock_group(sides.fd):
            result = self._chooser.unlink_files(upper, sides, names)
        n_chosen = result.n_removed + len(result.refused)
        self._tally.count_result(
            upper, n_chosen, ActionResult(result.refused, "unlink"), are_matches=True, counts_to_limit=True
        )
        self._tally.count(SweepSums(n_bytes=result.n_bytes, taken_bytes=result.taken_bytes))
        return result.unsure

    def _offer(self, here: ActionPlace, names: Sequence[str]) -> ActionResult:
        try:
            with self._groups.lock_group(here.sides.fd):
                return self._action.take(here, names)
        except (OSError, AcrossUsers) as error:
            # The destination is not available; only names that are missing in the source have vanished.
            number = errno.ESTALE if error.errno == errno.ENOENT else error.errno or errno.EIO
            stats, _refused = lstat_all(self._kernel, here.sides.fd, names)
            present = {one.name for one in stats}
            call = NOT_GIVEN if isinstance(error, AcrossUsers) else "open"
            return ActionResult([(name, number if name in present else errno.ENOENT) for name in names], call)

    def _drop_spared(self, upper: bytes, names: list[str], held: ExitStack) -> list[str]:
        """Return the directories that are not spared; they stay open, because `spares` may lock them."""
        if self._spares is None:
            return names
        # Entered directories were reported when they were entered; empty ones are not entered.
        is_reported = self._strategy.dirs is Dirs.WHOLE or self._matcher.needs_emptiness
        remaining = []
        for name in names:
            path = join_path(upper, os.fsencode(name))
            sides = self._open_or_report(path)
            if sides is not None:
                held.enter_context(sides)
                if not self._is_spared(path, sides, is_reported=is_reported, is_match=True):
                    remaining.append(name)
        return remaining

    # Listed names

    def _process_listed(self, job: Job) -> None:
        """Act on the listed names that match. Directories are taken, but not searched for more matches."""
        upper = job.upper
        try:
            if not self._chooser.may_enter_path(upper):
                self._tally.count(SweepSums(n_unmatched=len(job.names)))
                return
            sides = self._open(upper)
            with close_on_error(sides):
                whose = self._whose_is_at(upper)
        except OSError as error:
            if error.errno == errno.EXDEV:
                self._tally.count(SweepSums(n_mounts=1))
            elif error.errno == errno.ENOENT:
                self._tally.count(missing_counts(len(job.names), job.again))
            else:
                self._tally.fail(upper, error.errno, "open", len(job.names))
            return
        if whose is None:
            self._tally.fail(upper, errno.EPERM, NOT_TAKEN, len(job.names))
        elif not self._is_spared(upper, sides):
            files, dirs = self._chooser.choose(upper, sides, job.names, job.inos, job.directories, are_again=job.again)
            if self._strategy.dirs is Dirs.STRIPPED:
                dirs = self._reserve(dirs)
                self._after(upper, dirs)
                self._push_enter(Job(JobKind.ENTER, upper, [], strips=True, is_chosen=True, whose=whose), dirs)
            else:
                self._take(Job(JobKind.AFTER, upper, dirs[::-1], whose=whose), sides)
            # Keep the list's order, which is mostly that of a listing: in reverse, ext4 searches more of each block.
            self._take(Job(JobKind.TAKE, upper, files[::-1]), sides)
        self._leave(sides)


def _without(names: Sequence[str], others: Sequence[str]) -> list[str]:
    left_out = frozenset(others)
    return [name for name in names if name not in left_out] if left_out else list(names)
