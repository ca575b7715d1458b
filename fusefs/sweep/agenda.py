"""What is left to do in a sweep: jobs, which of them may run now, and what a slice of them did."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from fusefs.core.names import join
from fusefs.core.record import MAX_FAILURES, Failure
from fusefs.core.results import Spared, SweepSums
from fusefs.sweep.request import ActionResult, Identified

_MOST_DIRS = 1024
_MOST_LISTED = 1024
"""Names of a list that a slice takes"""
_MOST_PLACES = 256
"""from so many directories: what it does not come to is told to another worker once more, which costs as much."""
_MOST_LISTINGS = 64
"""Directories that are listed in part, and open for that; with more of them each is listed whole."""
_MOST_PASSED = 64
"""Jobs that are looked at for one that may run; if none of them may, those that run will end."""
_OTHER_KIND = {"unlink": errno.EISDIR, "rmdir": errno.ENOTDIR}
"""What a call says of a name that is of another kind now: what was chosen is there no more, as if it were gone."""
_USELESS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
_MOST_USELESS = 3
_NO_INOS: Mapping[str, int] = {}


class JobKind(Enum):
    """What a job is."""

    ENTER = "open directories, and begin to list them"
    LIST = "go on with a listing"
    TAKE = "act on names that were chosen, as far as names tell"
    AFTER = "act on directories when all that was found in them is done"
    LOOK = "choose among names that somebody listed, and act on them"


class Job(NamedTuple):
    """A piece of work in one directory.

    upper   its path relative to the sweep's directory
    names   of entries; those to be begun with are at the end
    packed  more of them, as long as they are not needed: as a list they take ten times the memory
    fd      its listing, where that goes on
    inode   the directory that the names were found in
    whose   what is in that, to root (store.walk)
    strips  what is in there goes with a directory that was chosen, whatever it is
    is_chosen  the names are of such directories themselves
    again   a worker was lost with it: part of it may be done
    inos    of names: the inode number that each must have, where the list tells it
    directories  those of the names that were listed with a slash at their end
    """

    kind: JobKind
    upper: bytes
    names: list[str]
    packed: bytes = b""
    fd: int = -1
    inode: Identified | None = None
    strips: bool = False
    is_chosen: bool = False
    again: bool = False
    inos: Mapping[str, int] = _NO_INOS
    directories: frozenset[str] = frozenset()
    whose: int = 0

    def pack(self) -> Job:
        """The job with its names packed."""
        return self._replace(names=[], packed=os.fsencode("/".join(self.names))) if self.names else self

    def unpack(self) -> Job:
        """The job with its names as a list."""
        return self._replace(names=os.fsdecode(self.packed).split("/"), packed=b"") if self.packed else self


class SweepSlice(NamedTuple):
    """The work of one slice.

    jobs         the next at the end
    lists_whole  a listing ends before anything that it found is begun with
    most         matches that it may act on
    """

    jobs: tuple[Job, ...]
    lists_whole: bool
    most: int | None

    def fds(self) -> Sequence[int]:
        """What goes with it to another process."""
        return [job.fd for job in self.jobs if job.fd >= 0]

    def with_fds(self, fds: Sequence[int]) -> SweepSlice:
        """The value in the process that its fds came to, where they have these numbers."""
        return self._replace(jobs=_with_fds(self.jobs, fds))


class SweepSliceResult(NamedTuple):
    """What a slice did.

    rest        what it left to do, the next at the end
    why         what makes it useless to go on
    left        matches that still may be acted on
    is_limited  there are more than that
    busy_s      how long it took
    """

    sums: SweepSums
    failures: tuple[Failure, ...]
    spared: tuple[Spared, ...]
    rest: tuple[Job, ...]
    why: str = ""
    left: int | None = None
    is_limited: bool = False
    busy_s: float = 0.0

    @property
    def removed(self) -> int:
        """See SliceOutcome."""
        return self.sums.n_done + self.sums.n_inside

    @property
    def n_bytes(self) -> int:
        """See SliceOutcome."""
        return self.sums.n_bytes

    def fds(self) -> Sequence[int]:
        """What goes with it to another process."""
        return [job.fd for job in self.rest if job.fd >= 0]

    def with_fds(self, fds: Sequence[int]) -> SweepSliceResult:
        """The value in the process that its fds came to, where they have these numbers."""
        return self._replace(rest=_with_fds(self.rest, fds))


def _with_fds(jobs: Sequence[Job], fds: Sequence[int]) -> tuple[Job, ...]:
    numbers = iter(fds)
    return tuple(job if job.fd < 0 else job._replace(fd=next(numbers)) for job in jobs)


class Agenda:
    """The jobs, last in first out: so few directories are begun at a time, whatever the tree's shape."""

    def __init__(
        self,
        first: Iterator[Job],
        n_workers: int,
        most: int | None,
        *,
        splits: bool,
        lists_whole: bool,
        asks_late: bool = False,
    ) -> None:
        """Begin.

        first   asked for a job whenever there is none that may run
        most    matches that may be acted on; then there is one worker
        splits  two workers may be at one directory's names
        lists_whole  see SweepSlice
        asks_late  `first` is not asked to see whether there is more, only for what runs then
        """
        self._first = first
        self._n_workers = n_workers
        self._splits = splits
        self._lists_whole = lists_whole
        self._may_be_more = self._asks_late = asks_late
        self._jobs: list[Job] = []
        self._running: dict[int, Job] = {}  # by their identity
        self._left = most

    def is_dry(self) -> bool:
        """Whether there is no work that `next` could give."""
        return not self._may_be_more and self._find() is None

    def next(self) -> SweepSlice | None:
        """A slice that may run beside those that do; None if there is none at the moment."""
        at = self._find()
        if at is None:
            return None
        jobs = [] if self._jobs[at].kind is JobKind.ENTER else [self._jobs.pop(at)]
        if not jobs or jobs[0].kind is JobKind.TAKE:
            jobs = [*self._directories(at - len(jobs))][::-1] + jobs
        # Those further up the same way follow each other; one at a time, each would be walked to from the top.
        while jobs[0].kind is JobKind.AFTER and len(jobs) < _MOST_DIRS and self._may_follow(at - 1):
            at -= 1
            jobs.insert(0, self._jobs.pop(at))
        if jobs[0].kind is JobKind.LOOK and not self._asks_late:
            jobs = [*self._listed_too(jobs[0])][::-1] + jobs
        self._running |= {id(one): one for one in jobs}
        is_crowded = sum(one.fd >= 0 for one in self._jobs) > _MOST_LISTINGS
        return SweepSlice(tuple(jobs), self._lists_whole or is_crowded, self._left)

    def _directories(self, at: int) -> Iterator[Job]:
        """A worker's share of the directories that are to be entered, from a job on, down to one of another kind."""
        n_dirs = sum(len(job.names) for job in self._jobs if job.kind is JobKind.ENTER)
        n_left = min(-(-n_dirs // self._n_workers), _MOST_DIRS)
        while n_left and at >= 0 and self._jobs[at].kind is JobKind.ENTER:
            job = self._jobs.pop(at)
            if len(job.names) > n_left:
                self._jobs.insert(at, job._replace(names=job.names[:-n_left]))
                job = job._replace(names=job.names[-n_left:])
            n_left, at = n_left - len(job.names), at - 1
            yield job

    def _listed_too(self, first: Job) -> Iterator[Job]:
        """More that is listed, as far as a slice has room: lists in no order have one name of a directory at a time."""
        busy = {one.upper for one in (first, *self._running.values()) if one.kind is not JobKind.ENTER}
        n_jobs, n_names = 1, len(first.names)
        while n_jobs < _MOST_PLACES and n_names < _MOST_LISTED:
            if not self._jobs and not self._take_in():
                return
            job = self._jobs[-1]
            if job.kind is not JobKind.LOOK or (not self._splits and job.upper in busy):
                return
            n_jobs, n_names = n_jobs + 1, n_names + len(job.names)
            busy.add(job.upper)
            yield self._jobs.pop()

    def _may_follow(self, at: int) -> bool:
        """Whether a job is one that waits for those alone that are above it, all of which are taken."""
        above = [*self._running.values(), *self._jobs[at + 1 :]]
        return at >= 0 and self._jobs[at].kind is JobKind.AFTER and self._may_run(self._jobs[at], above)

    def _find(self) -> int | None:
        passed = [*self._running.values()]
        for at in range(len(self._jobs) - 1, max(len(self._jobs) - _MOST_PASSED, 0) - 1, -1):
            job = self._jobs[at]
            if self._may_run(job, passed):
                return at
            passed.append(job)
        return len(self._jobs) - 1 if self._take_in() else None

    def _take_in(self) -> bool:
        """Whether there was one more to begin with."""
        job = next(self._first, None)
        if job is None:
            self._may_be_more = False
            return False
        self._jobs.append(job)
        return True

    def _may_run(self, job: Job, passed: Sequence[Job]) -> bool:
        """Whether a job may begin before these have ended."""
        if job.kind is JobKind.AFTER:
            return not any(_is_inside(one.upper, job.upper) for one in passed)
        if self._splits or job.kind is JobKind.ENTER:
            return True
        return not any(one.upper == job.upper and one.kind is not JobKind.ENTER for one in passed)

    def done(self, share: SweepSlice, outcome: SweepSliceResult) -> list[int]:
        """Take in what a slice did; the fds that may be closed now."""
        self._ended(share)
        self._jobs += outcome.rest
        self._left = outcome.left
        return [fd for fd in share.fds() if fd not in outcome.fds()]

    def lost(self, lost: SweepSlice) -> None:
        """A slice ended with its worker, it is not known how far: all of it is to be done again."""
        self._ended(lost)
        for fd in lost.fds():
            os.lseek(fd, 0, os.SEEK_SET)
        self._jobs += (job._replace(again=True) for job in lost.jobs)

    def _ended(self, share: SweepSlice) -> None:
        for job in share.jobs:
            del self._running[id(job)]

    def fds(self) -> list[int]:
        """The fds of what is unfinished: to be closed if it is left so."""
        return [job.fd for job in self._jobs if job.fd >= 0]


def _is_inside(upper: bytes, directory: bytes) -> bool:
    return not directory or upper == directory or upper.startswith(directory + b"/")


class SliceCounts:
    """Counts, and the first of what is told by name."""

    def __init__(self, left: int | None) -> None:
        """left: matches that may still be acted on; None: all."""
        self.left = left
        self.is_limited = False
        self.sums = SweepSums()
        self.failures: list[Failure] = []
        self.spared: list[Spared] = []
        self._useless: list[int] = []

    def count(self, sums: SweepSums) -> None:
        """So much more."""
        self.sums = self.sums.plus(sums)

    def add(self, sums: SweepSums, failures: Iterable[Failure], spared: Iterable[Spared]) -> None:
        """What a slice did, as well."""
        self.count(sums)
        self.failures += list(failures)[: MAX_FAILURES - len(self.failures)]
        self.spared += list(spared)[: MAX_FAILURES - len(self.spared)]

    def fail(self, name: bytes, number: int | None, call: str, n: int = 1) -> None:
        """Something could not be done: so many things, one of them by name."""
        self.count(SweepSums(n_failed=n))
        if len(self.failures) < MAX_FAILURES:
            self.failures.append(Failure(name, number or errno.EIO, call))

    def spare(self, name: bytes, why: str) -> None:
        """Something is left alone."""
        self.count(SweepSums(n_spared=1))
        if len(self.spared) < MAX_FAILURES:
            self.spared.append(Spared(name, why))

    def take(self, upper: bytes, n_names: int, taken: ActionResult, *, are_matches: bool, has_left: bool) -> None:
        """Take in what became of some names of a directory.

        has_left  they still are to be taken from what is left
        """
        vanished, failed = _split(taken)
        n_done = n_names - len(taken.refused) - len(taken.spared)
        if are_matches:
            self.count(SweepSums(n_matched=n_names, n_done=n_done, n_vanished=vanished))
            if self.left is not None and has_left:
                self.left -= n_done
        else:
            self.count(SweepSums(n_inside=n_done))
        for name, number in failed:
            self.fail(join(upper, os.fsencode(name)), number, taken.call)
        for name, why in taken.spared:
            self.spare(join(upper, os.fsencode(name)), why)
        if n_done:
            self._useless.clear()
        self._useless += [number for _name, number in failed if number in _USELESS]

    def why(self) -> str:
        """What makes it useless to go on; empty if nothing does."""
        return os.strerror(self._useless[-1]) if len(self._useless) >= _MOST_USELESS else ""


def _split(taken: ActionResult) -> tuple[int, list[tuple[str, int]]]:
    """How many vanished, and what failed."""
    no_match = (errno.ENOENT, _OTHER_KIND.get(taken.call, errno.ENOENT))
    failed = [one for one in taken.refused if one[1] not in no_match]
    return len(taken.refused) - len(failed), failed
