"""Runs a slice of a removal: empties a directory through its fd, one component at a time.

A slice never follows a link, crosses a mount or goes upwards (I6). Each name is unlinked first and checked only after
an error: for a directory, the kernel reports EISDIR. So no file costs a stat, and the reaper enters only directories.

A large file is truncated step by step at the requested pace, and only while no other process can see it. A write lease
proves that no process has the file open, and the link count after the unlink proves that no link remains. Without the
second check, a file that was linked in between would lose its content (measured).
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, suppress
from itertools import islice
from typing import NamedTuple, TypeVar

from fusefs.core.names import join_path
from fusefs.core.orphan_sums import STAT_BLOCK_BYTES
from fusefs.core.pacing import CUT_BYTES, NamesPerClockCheck, SliceBudget
from fusefs.core.record import MAX_ENTERED, Entered, Failure
from fusefs.core.results import LATE_ARRIVAL, add_failures
from fusefs.core.slices import (
    MAX_FAILED_NAMES,
    MAX_PASSES,
    RemovalSliceResult,
    Slice,
    SliceWork,
    UnfinishedDirectory,
    encode_name,
    pack_names,
    unpack_names,
)
from fusefs.engine.strategy import AllocationGroups, Strategy, Workers, in_order
from fusefs.linux.batched_calls import DirectoryWindow, StatxResult, lstat_all, read_window, unlink_all
from fusefs.linux.directory_metadata import thaw
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.reaper.inner_stores import InnerStores
from fusefs.reaper.late_arrivals import LateArrivals
from fusefs.reaper.server_outage import CUT_OFF, DOUBTFUL, probe_server
from fusefs.store.backing_and_mount import DIRECTORY
from fusefs.store.layout import HOISTED

_FOR_WRITING = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
_TO_INSPECT = os.O_PATH | os.O_NOFOLLOW


class UnnamedLargeFile(NamedTuple):
    """A large file that was unlinked so that it can be truncated step by step."""

    fd: Fd
    n_bytes: int


class LargeFiles:
    """Counts the bytes that a slice frees, and truncates large files step by step."""

    def __init__(self, kernel: Kernel, budget: SliceBudget) -> None:
        self._kernel = kernel
        self._budget = budget
        self._step_bytes = CUT_BYTES
        self.n_bytes = 0

    def n_entries_remaining(self, n_removed: int) -> int:
        """Return how many more entries may be removed before the budget is spent."""
        most = self._budget.n_entries
        return 1 << 30 if most is None else max(most - n_removed, 0)

    def is_spent(self, n_removed: int) -> bool:
        most = self._budget.n_bytes
        return (most is not None and self.n_bytes >= most) or self.n_entries_remaining(n_removed) == 0

    def count(self, dir_fd: Fd, entry_stat: StatxResult) -> UnnamedLargeFile | None:
        """Count a file's bytes before it is unlinked. If it is large and can be truncated, unlink and return it."""
        if stat.S_ISDIR(entry_stat.st_mode) or entry_stat.st_nlink != 1:
            return None
        n_bytes = entry_stat.st_blocks * STAT_BLOCK_BYTES
        if stat.S_ISREG(entry_stat.st_mode) and n_bytes > CUT_BYTES:
            fd = self._unlink_to_cut(dir_fd, entry_stat)
            if fd is not None:
                return UnnamedLargeFile(fd, entry_stat.st_size)
        self.n_bytes += n_bytes
        return None

    def _unlink_to_cut(self, dir_fd: Fd, entry_stat: StatxResult) -> Fd | None:
        """Unlink a file that is to be truncated; return its fd, or None if it must not be truncated."""
        try:
            fd = self._open(dir_fd, entry_stat.name)
        except OSError:
            return None
        try:
            self._kernel.lease(fd)
            st = self._kernel.fstat(fd)
            if (st.st_dev, st.st_ino) == (entry_stat.st_dev, entry_stat.st_ino) and st.st_nlink == 1:
                self._kernel.unlink(dir_fd, encode_name(entry_stat.name))
                if self._is_ours(fd):
                    return fd
        except OSError:
            pass  # EAGAIN: another process has it open; EINVAL: no leases on this filesystem. It is deleted as a whole.
        fd.close()
        return None

    def _open(self, dir_fd: Fd, name: str) -> Fd:
        try:
            return self._kernel.open_beneath(dir_fd, encode_name(name), _FOR_WRITING)
        except PermissionError:
            with self._kernel.open_beneath(dir_fd, encode_name(name), _TO_INSPECT) as fd:
                if self._kernel.fstat(fd).st_nlink == 1:
                    self._kernel.chmod(fd, stat.S_IRUSR | stat.S_IWUSR)
            return self._kernel.open_beneath(dir_fd, encode_name(name), _FOR_WRITING)

    def _is_ours(self, fd: Fd) -> bool:
        """Return whether a file has no link, and no process is waiting in open(2) for our lease to end."""
        return self._kernel.fstat(fd).st_nlink == 0 and self._kernel.has_lease(fd)

    def cut(self, fd: Fd, size: int) -> int:
        """Cut one step off the end of a file. Return the remaining size; 0 if nothing remains to be cut."""
        try:
            if not self._is_ours(fd):
                return 0
            remaining_bytes = max(size - self._step_bytes, 0)
            if self._step_bytes > CUT_BYTES and self._kernel.next_data(fd, remaining_bytes, size) < size:
                self._step_bytes = CUT_BYTES
                remaining_bytes = max(size - CUT_BYTES, 0)
            before = self._kernel.fstat(fd).st_blocks
            self._kernel.truncate(fd, remaining_bytes)
            n_freed = max(before - self._kernel.fstat(fd).st_blocks, 0) * STAT_BLOCK_BYTES
            self.n_bytes += n_freed
            # A hole may have exbibytes, so the steps through it grow.
            self._step_bytes = CUT_BYTES if n_freed or not remaining_bytes else 2 * self._step_bytes
        except OSError:
            return 0  # the file has no name, so closing its fd frees the rest
        return remaining_bytes


_CHUNK, _SERVERS_CHUNK = 1024, 128
_MOST_FRAMES = 400
"""How many levels a slice descends if it can't hoist directories, for example from a different project or subvolume."""
_DENIED = (errno.EACCES, errno.EPERM)
_NOT_EMPTY = (errno.ENOTEMPTY, errno.EEXIST)
_NOT_A_DIRECTORY = (errno.ENOTDIR, errno.ELOOP)
T = TypeVar("T")


class SliceRemover(NamedTuple):
    """Runs slices of a container's removal, in any process or thread.

    groups        the filesystem's allocation groups: two workers should not work in the same one
    inner_stores  decides which directories are stores that must be kept
    per_look      the number of names per check of the clock; nothing else is kept from one slice to the next
    by_force      whether to clear flags (immutable, append-only) that forbid a removal, at an administrator's request
    has_server    whether the container is on a network filesystem, whose server may be away
    by_paths      whether an unfinished slice may continue on another machine, by its path; if so, a slice does
                  not end before it has finished the directories whose identity can't be proven there
    """

    kernel: Kernel
    container: Fd
    strategy: Strategy
    groups: AllocationGroups
    late_arrivals: LateArrivals
    inner_stores: InnerStores
    per_look: NamesPerClockCheck
    by_force: bool = False
    has_server: bool = False
    by_paths: bool = False

    def run_slice(self, work: Slice, budget: SliceBudget) -> RemovalSliceResult:
        """Run a slice. Raises nothing: kernel errors are in the result."""
        return _RemovalRun(self, work, budget).run_slice()


class _Frame:
    """A directory that a slice has entered, or a large file to truncate. is_bound: only this process can finish it"""

    __slots__ = ("fd", "is_bound", "is_listed_by_fd", "is_opened_up", "name", "path", "work")

    def __init__(
        self, name: str, fd: Fd, path: bytes, work: SliceWork, *, is_bound: bool = False, is_listed_by_fd: bool = False
    ) -> None:
        self.name = name
        self.fd = fd
        self.path = path
        self.work = work
        self.is_bound = is_bound
        self.is_opened_up = False
        self.is_listed_by_fd = is_listed_by_fd


class _RemovalRun:
    def __init__(self, remover: SliceRemover, work: Slice, budget: SliceBudget) -> None:
        self._remover = remover
        self._kernel = remover.kernel
        self._slice = work
        self._large = LargeFiles(remover.kernel, budget) if budget.is_paced() else None
        self._frames = [_Frame("", Fd(work.fd), work.path, work.work, is_listed_by_fd=True)]
        self._lookup_first = work.is_shared and self._remover.strategy.lookup_first and self._large is None
        self._remover.per_look.begin(budget.seconds)
        self._began_at = time.monotonic()
        self._ends_at = self._began_at + budget.seconds
        self._removed = 0
        self._failures: list[Failure] = []
        self._n_failed = 0
        self._doubts: set[int] = set()
        self._away = 0
        self._has_probed = False
        self._hoisted: list[str] = []
        self._made_hoisted = False
        self._entered: list[Entered] = []

    def run_slice(self) -> RemovalSliceResult:
        try:
            while not self._step() and not self._is_over():
                pass
        except BaseException:
            for frame in self._frames[1:]:
                frame.fd.close()
            raise
        bottom, *above = self._frames
        return RemovalSliceResult(
            self._removed,
            self._large.n_bytes if self._large is not None else 0,
            tuple(self._failures),
            self._n_failed,
            bottom.work,
            tuple(UnfinishedDirectory(frame.name, frame.fd, frame.work) for frame in above),
            tuple(self._hoisted),
            self._made_hoisted,
            tuple(self._entered),
            time.monotonic() - self._began_at,
            self._away,
            frozenset(self._doubts),
        )

    def _is_over(self) -> bool:
        """Return whether the slice's budget is spent, or the server does not answer."""
        if self._frames[-1].is_bound and not self._away:
            return False
        is_spent = self._large is not None and self._large.is_spent(self._removed)
        return is_spent or self._away != 0 or time.monotonic() >= self._ends_at

    def _step(self) -> bool:
        """Do the next step. Return whether the slice is finished."""
        frame = self._frames[-1]
        work = frame.work
        if work.cut_bytes:
            assert self._large is not None
            work.cut_bytes = self._large.cut(frame.fd, work.cut_bytes)
        elif work.emptied:
            name, n_passes = work.emptied.pop()
            if not self._rmdir_unseen(frame, name):  # the directory should be empty, but rmdir failed: enter it
                self._enter(frame, name, n_passes)
        elif work.names:
            self._unlink_some(frame)
        elif work.bundles:
            work.names = unpack_names(work.bundles.pop())
        elif work.subdirs:
            self._enter(frame, work.subdirs.pop())
        elif not work.is_listed:
            self._list(frame)
        elif len(self._frames) == 1:
            return True  # the plan decides whether to list it again: other workers may be busy in this directory
        else:
            work.relist_if_needed()
            if work.is_listed:
                self._leave(frame)
        return False

    # Files.

    def _unlink_some(self, frame: _Frame) -> None:
        """Unlink as many names as fit between two checks of the clock."""
        # Take names from the end of the list, which is cheap; the listing put those to be unlinked first at the end.
        n, began_at = self._remover.per_look.n, time.monotonic()
        names = frame.work.names[: -n - 1 : -1]
        del frame.work.names[-n:]
        if self._lookup_first and len(self._frames) == 1:
            self._kernel.lookup_names(frame.fd, names)
        with self._remover.groups.lock_group(frame.fd):
            self._unlink(frame, names)
        self._remover.per_look.record(len(names), time.monotonic() - began_at)

    def _unlink(self, frame: _Frame, names: list[str]) -> None:
        if self._large is not None:
            n_allowed = len(names) if frame.is_bound else self._large.n_entries_remaining(self._removed)
            frame.work.names += names[n_allowed:][::-1]
            names = self._stat_files(frame, names[:n_allowed])
        refused = unlink_all(self._kernel, frame.fd, names)
        n_removed = len(names) - len(refused)
        if refused:
            n_removed += self._refused(frame, refused)
        self._removed += n_removed
        frame.work.is_productive |= n_removed > 0

    def _refused(self, frame: _Frame, refused: list[tuple[str, int]]) -> int:
        """Handle names whose unlink failed. Return how many were removed after all."""
        may_again = any(number == errno.EACCES for _name, number in refused) and self._open_up(frame)
        again = [name for name, number in refused if may_again and number == errno.EACCES]
        final = unlink_all(self._kernel, frame.fd, again)
        n_removed = len(again) - len(final)
        final += [(name, number) for name, number in refused if not (may_again and number == errno.EACCES)]
        for name, number in final:
            if number == errno.EISDIR:
                frame.work.subdirs.append(name)
            elif number == errno.EPERM and self._remover.by_force:
                try:
                    _unlink_flagged(self._kernel, frame.fd, name)
                    n_removed += 1
                except OSError as error:
                    self._fail(frame, name, error.errno or errno.EIO, "unlink")
            elif number != errno.ENOENT:
                self._fail(frame, name, number, "unlink")
        return n_removed

    def _stat_files(self, frame: _Frame, names: list[str]) -> list[str]:
        """Count each file's bytes, for the pace; begin to truncate a large one. Return the names to unlink now."""
        assert self._large is not None
        stats, refused = lstat_all(self._kernel, frame.fd, names, needs_no_server=self._remover.strategy.is_at_once)
        may_go = [name for name, _number in refused]  # the unlink will report the error
        for at, entry_stat in enumerate(stats, 1):
            large = self._large.count(frame.fd, entry_stat)
            if large is None:
                may_go.append(entry_stat.name)
            else:
                self._removed += 1
                frame.work.is_productive = True
                path = join_path(frame.path, encode_name(entry_stat.name))
                work = SliceWork(cut_bytes=large.n_bytes)
                self._frames.append(_Frame(entry_stat.name, large.fd, path, work, is_bound=self._remover.by_paths))
            if large is not None or self._large.is_spent(self._removed + len(may_go)):
                frame.work.names += [later.name for later in reversed(stats[at:])]
                break
        return may_go

    # Directories.

    def _enter(self, frame: _Frame, name: str, n_passes: int = 0) -> None:
        if self._is_held_store(frame, name):  # check this before the directory is hoisted, which changes its name
            return
        if len(self._frames) > self._slice.max_depth:
            if self._hoist(frame, name):
                frame.work.is_productive = True
                return
            if len(self._frames) > _MOST_FRAMES:
                self._fail(frame, name, errno.EMFILE, "open")
                return
        try:
            fd = self._open(frame, name)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno in _NOT_A_DIRECTORY:
                # Something else has this name now: unlink it, but only a limited number of times.
                frame.work.n_passes += 1
                if frame.work.n_passes < MAX_PASSES:
                    frame.work.names.append(name)
                else:
                    self._fail(frame, name, errno.ENOTDIR, "open")
            elif error.errno not in _DENIED or not self._rmdir_unseen(frame, name):
                self._fail(frame, name, error.errno or errno.EIO, "open")
            return
        if fd is None:
            # An empty directory is never kept: a user who was able to move it in could also have removed it.
            if not self._rmdir_unseen(frame, name):
                self._fail(frame, name, errno.EPERM, LATE_ARRIVAL)
            return
        if frame.work.subdirs and self._remover.groups.is_crowded(fd):
            frame.work.subdirs.insert(0, name)
            fd.close()
            return
        work = SliceWork(is_listed=False, n_passes=n_passes)
        path = join_path(frame.path, encode_name(name))
        is_bound = frame.is_bound or (self._remover.by_paths and not self._remover.late_arrivals.is_lasting(fd, path))
        self._frames.append(_Frame(name, fd, path, work, is_bound=is_bound))

    def _is_held_store(self, frame: _Frame, name: str) -> bool:
        """Return whether a directory is, or may be, a store with content that must be kept; report it if so."""
        try:
            stop = self._remover.inner_stores.stop_at(frame.fd, frame.path, name)
        except OSError as error:
            self._fail(frame, name, error.errno or errno.EIO, "open")
            return True
        if stop is not None:
            self._fail(frame, name, errno.EBUSY, stop.why, stop.path)
        return stop is not None

    def _rmdir_unseen(self, frame: _Frame, name: str) -> bool:
        """Remove a directory without opening it if the kernel finds it empty. Return whether it was removed."""
        try:
            self._kernel.rmdir(frame.fd, encode_name(name))
        except OSError as error:
            self._is_outage(error.errno)
            return False
        self._removed += 1
        frame.work.is_productive = True
        return True

    def _open(self, frame: _Frame, name: str) -> Fd | None:
        """Open a directory for reading, adding missing permissions if we own it. Return None if it is in doubt."""
        try:
            return self._admit(frame, name, self._kernel.open_dir(frame.fd, encode_name(name)))
        except PermissionError:
            pass
        probe_fd = self._retry_opened_up(
            frame, lambda: self._admit(frame, name, self._kernel.open_beneath(frame.fd, encode_name(name), DIRECTORY))
        )
        if probe_fd is None:
            return None
        probe_fd.close()
        return self._admit(frame, name, self._kernel.open_dir(frame.fd, encode_name(name)))

    def _admit(self, frame: _Frame, name: str, fd: Fd) -> Fd | None:
        """Make a directory the reaper's own and return its fd. If it is in doubt, close it and return None."""
        with ExitStack() as owned:
            owned.enter_context(fd)
            if not self._remover.late_arrivals.admit(fd, join_path(frame.path, encode_name(name))):
                return None
            owned.pop_all()
        return fd

    def _list(self, frame: _Frame) -> None:
        """List a directory's entries; if it is large, only as many as the window holds."""
        work = frame.work
        was_productive, work.is_productive = work.is_productive, False
        # Skip failed entries whose names are not remembered: they come first, since everything before them was removed.
        n_passed = work.n_failed if work.n_failed > MAX_FAILED_NAMES else 0
        is_remote = self._remover.strategy.workers is Workers.THREADS
        # The time is limited, as some servers list names that do not exist.
        until_s = self._ends_at if is_remote and work.n_passes < MAX_PASSES else None
        try:
            with ExitStack() as owned:
                # Open it again, since some servers list an open directory only once, and a slice may stop midway.
                again = is_remote and frame.is_listed_by_fd
                fd = owned.enter_context(self._kernel.open_dir(frame.fd)) if again else frame.fd
                frame.is_listed_by_fd = True
                is_plain = until_s is None and not work.n_failed
                strategy = self._remover.strategy
                sizes = strategy.window, strategy.window_chars
                window = read_window(self._kernel, fd, *sizes, by_inode=strategy.by_inode) if is_plain else None
                if window is None:
                    entries = islice(owned.enter_context(self._kernel.scan(fd)), n_passed, None)
                    window = _read_window(entries, work.failed, self._remover.strategy, until_s)
        except OSError as error:
            work.is_listed = True
            if error.errno == errno.ENOENT:  # another worker has removed it: hoisted directories may be listed twice
                work.n_passes += 1
            else:
                self._fail(frame, "", error.errno or errno.EIO, "getdents")
            return
        work.bundles += window.bundles
        work.subdirs += window.subdirs
        work.n_passes += window.is_all or (until_s is not None and not was_productive)
        work.is_listed = window.is_all

    def _leave(self, frame: _Frame) -> None:
        """Finish a directory or large file that is done. Remove the directory unless an entry in it failed."""
        if frame.work.cut_bytes is None:
            parent = self._frames[-2]
            with self._remover.groups.lock_group(frame.fd):
                if not frame.work.n_failed and not self._rmdir(parent, frame):
                    return
            if frame.work.n_failed:
                parent.work.skip_failed(frame.name)
                if len(self._entered) < MAX_ENTERED:
                    with suppress(OSError):
                        self._entered += self._remover.late_arrivals.note([frame.fd])
        frame.fd.close()
        self._frames.pop()

    def _rmdir(self, parent: _Frame, frame: _Frame) -> bool:
        """Remove an empty directory. Return False if it has new entries, so that it must be listed again."""
        name = encode_name(frame.name)
        try:
            try:
                self._kernel.rmdir(parent.fd, name)
            except PermissionError as error:
                if error.errno == errno.EPERM and self._remover.by_force:
                    has_changed = _clear_flags(self._kernel, parent.fd, frame.fd)
                else:
                    has_changed = error.errno == errno.EACCES and self._open_up(parent)
                if not has_changed:
                    raise
                self._kernel.rmdir(parent.fd, name)
        except FileNotFoundError:
            return True
        except OSError as error:
            if error.errno in _NOT_EMPTY and frame.work.n_passes < MAX_PASSES:
                frame.work.is_listed = False
                return False
            self._fail(frame, "", error.errno or errno.EIO, "rmdir")
            return True
        self._removed += 1
        parent.work.is_productive = True
        return True

    def _hoist(self, frame: _Frame, name: str) -> bool:
        """Hoist a deep directory, that is, rename it up into the container. Return whether it was moved.

        A project or subvolume boundary, or missing permissions, can prevent this. The first hoisted directory becomes
        `hoisted`, into which the later ones are moved, because a full volume has no space for a new directory.
        A directory that can't be made the reaper's own is not hoisted: after the move, nothing would prove that it
        belongs to the tree.
        """
        try:
            deep = self._open(frame, name)
            if deep is None:
                return False
            with deep:
                if not self._remover.late_arrivals.is_own(deep):
                    return False
        except OSError as error:
            self._is_outage(error.errno)
            return False
        try:
            with self._kernel.open_dir(self._remover.container, HOISTED) as hoisted:
                # The name is random, because another worker or a killed run could have used the same number.
                new = os.urandom(8).hex()
                if not self._rename_up(frame, name, hoisted, encode_name(new)):
                    return False
        except FileNotFoundError:
            was_renamed = self._rename_up(frame, name, self._remover.container, HOISTED)
            self._made_hoisted |= was_renamed
            return was_renamed
        except OSError:
            return False
        if self._slice.is_hoisted:
            self._frames[0].work.subdirs.append(new)
        else:
            self._hoisted.append(new)
        return True

    def _rename_up(self, frame: _Frame, name: str, target: Fd, new: bytes) -> bool:
        try:
            self._retry_opened_up(frame, lambda: self._kernel.rename_free(frame.fd, encode_name(name), target, new))
        except OSError:
            return False
        return True

    # Obstacles.

    def _open_up(self, frame: _Frame) -> bool:
        """Give ourselves all permissions on a directory that we own. Return whether this worked; try it only once."""
        if not frame.is_opened_up:
            frame.is_opened_up = True
            with suppress(OSError):
                self._kernel.chmod(frame.fd, stat.S_IRWXU)
                return True
        return False

    def _retry_opened_up(self, frame: _Frame, call: Callable[[], T]) -> T:
        """Call a function; after EACCES, add permissions to the directory and call it again. Raises  OSError"""
        try:
            return call()
        except PermissionError:
            if not self._open_up(frame):
                raise
        return call()

    def _fail(self, frame: _Frame, name: str, number: int, call: str, reported_path: bytes = b"") -> None:
        """Record the failure of an entry or, if `name` is empty, of the directory itself.

        reported_path  the path to report instead of the name
        """
        if self._is_outage(number):
            return
        self._n_failed += 1
        if self._remover.has_server and number in CUT_OFF | DOUBTFUL:
            self._doubts.add(number)
        if name:
            frame.work.skip_failed(name)
        else:
            frame.work.n_failed += 1
        add_failures(self._failures, [Failure(join_path(frame.path, reported_path or encode_name(name)), number, call)])

    def _is_outage(self, number: int | None) -> bool:
        """Return whether an error means that the server does not answer, rather than that an entry is unreadable."""
        if self._remover.has_server and number in CUT_OFF | DOUBTFUL and not self._has_probed:
            self._has_probed = True  # one probe per slice is enough, as slices are short
            self._away = probe_server(self._kernel, self._remover.container)
        return self._away != 0


def _read_window(
    entries: Iterator[os.DirEntry[str]], passed: Collection[str], strategy: Strategy, until_s: float | None
) -> DirectoryWindow:
    """Read the first entries, within limits on their number, the total length of their names, and the time.

    passed   names to leave out
    until_s  when to stop reading (monotonic clock); some entries are read in any case
    """
    size = _CHUNK if until_s is None else _SERVERS_CHUNK
    if passed:
        entries = (entry for entry in entries if entry.name not in passed)
    names: list[str] = []
    subdirs: list[str] = []
    inos: list[int] = []
    n_chars = 0
    # Read in chunks, to free the entries early: an entry takes as much memory as four names.
    while len(names) + len(subdirs) < strategy.window and n_chars < strategy.window_chars:
        chunk = list(islice(entries, size))
        files = [e for e in chunk if not e.is_dir(follow_symlinks=False)] if strategy.lists_types else chunk
        if len(files) < len(chunk):
            subdirs += [e.name for e in chunk if e.is_dir(follow_symlinks=False)]
        file_names = [e.name for e in files]
        names += file_names
        n_chars += sum(map(len, file_names))
        if strategy.by_inode:
            inos += [e.inode() for e in files]
        if len(chunk) < size or (until_s is not None and time.monotonic() >= until_s):
            break
    ordered = in_order(names, inos, by_inode=strategy.by_inode)
    return DirectoryWindow(pack_names(ordered), subdirs, next(entries, None) is None)


def _unlink_flagged(kernel: Kernel, dir_fd: Fd, name: str) -> None:
    """Clear the flags of a file and its directory, and unlink the file.

    Raises  OSError: EPERM if the file has other names, since they would lose the flags, too
    """
    thaw(kernel, dir_fd)
    with kernel.open_beneath(dir_fd, encode_name(name), _TO_INSPECT) as path_fd:
        st = kernel.fstat(path_fd)
        # Only regular files have flags; opening a device or a FIFO would have effects.
        if stat.S_ISREG(st.st_mode) and st.st_nlink == 1:
            with kernel.reopen(path_fd, os.O_RDONLY | os.O_NONBLOCK) as fd:
                thaw(kernel, fd)
    kernel.unlink(dir_fd, encode_name(name))


def _clear_flags(kernel: Kernel, *directories: Fd) -> bool:
    """Clear the directories' immutable and append-only flags. Return whether any flag was set."""
    has_flags = False
    for fd in directories:
        with suppress(OSError):
            has_flags |= thaw(kernel, fd)
    return has_flags
