"""The remaining work of a sweep: its jobs, the choice of the jobs that may run, and the results of slices."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from fusefs.core.names import join_path
from fusefs.core.record import MAX_FAILURES, Failure
from fusefs.core.results import Spared, SweepSums
from fusefs.sweep.request import ActionResult, Identified

_MOST_DIRS = 1024
_MOST_LISTED = 1024
"""Maximum number of listed names in a slice."""
_MOST_PLACES = 256
"""Maximum number of directories in such a slice; names that the slice does not reach must be sent again."""
_MOST_LISTINGS = 64
"""Maximum number of open, incomplete listings; if there are more, directories are listed completely."""
_MOST_PASSED = 64
"""Maximum number of jobs that are checked for one that may run; if there is none, wait until a running job ends."""
_OTHER_KIND = {"unlink": errno.EISDIR, "rmdir": errno.ENOTDIR}
"""Errors for a name that has a different type now: the chosen entry is gone."""
_USELESS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
_MOST_USELESS = 3
_NO_INOS: Mapping[str, int] = {}


class JobKind(Enum):
    ENTER = "open directories, and start listing them"
    LIST = "continue a listing"
    TAKE = "act on names that were chosen by their names only"
    AFTER = "act on directories when the work on everything found in them is done"
    CHECK = "choose among listed names, and act on them"


class Job(NamedTuple):
    """A piece of work in one directory.

    upper   the directory's path relative to the sweep's directory
    names   of entries, in reverse order
    packed  the names in a compact form until they are needed; a list takes ten times as much memory
    fd      the open listing to be continued
    inode   identity of the directory in which the names were found
    whose   the owner of the directory's content as root sees it (store.walk)
    strips  delete everything in the directory, which is a chosen directory or is inside one
    is_chosen  the names are those of chosen directories themselves
    again   a worker was lost with this job, so part of it may already be done
    inos    the inode number that each name must have, if the list contains it
    directories  the names that were listed with a trailing slash
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
        return self._replace(names=[], packed=os.fsencode("/".join(self.names))) if self.names else self

    def unpack(self) -> Job:
        return self._replace(names=os.fsdecode(self.packed).split("/"), packed=b"") if self.packed else self


class SweepSlice(NamedTuple):
    """The work of one slice; see HasFds.

    jobs         the next one is at the end
    lists_whole  whether to complete a listing before any work on its entries starts
    most         maximum number of matches to act on; None: no limit
    """

    jobs: tuple[Job, ...]
    lists_whole: bool
    most: int | None

    def fds(self) -> Sequence[int]:
        return [job.fd for job in self.jobs if job.fd >= 0]

    def with_fds(self, fds: Sequence[int]) -> SweepSlice:
        return self._replace(jobs=_with_fds(self.jobs, fds))


class SweepSliceResult(NamedTuple):
    """The result of a slice.

    rest        unfinished jobs; the next one is at the end
    why         the reason why it is useless to continue; empty if there is none
    remaining   number of matches on which the sweep may still act
    is_limited  whether there are more matches than that
    busy_s      the duration of the slice; for the other members, see SliceOutcome
    """

    sums: SweepSums
    failures: tuple[Failure, ...]
    spared: tuple[Spared, ...]
    rest: tuple[Job, ...]
    why: str = ""
    remaining: int | None = None
    is_limited: bool = False
    busy_s: float = 0.0

    @property
    def removed(self) -> int:
        return self.sums.n_done + self.sums.n_inside

    @property
    def n_bytes(self) -> int:
        return self.sums.n_bytes

    def fds(self) -> Sequence[int]:
        return [job.fd for job in self.rest if job.fd >= 0]

    def with_fds(self, fds: Sequence[int]) -> SweepSliceResult:
        return self._replace(rest=_with_fds(self.rest, fds))


def _with_fds(jobs: Sequence[Job], fds: Sequence[int]) -> tuple[Job, ...]:
    numbers = iter(fds)
    return tuple(job if job.fd < 0 else job._replace(fd=next(numbers)) for job in jobs)


class Agenda:
    """The remaining jobs. The newest one runs first, so that few directories are open at a time in any tree."""

    def __init__(
        self,
        first: Iterator[Job],
        n_workers: int,
        most: int | None,
        *,
        splits: bool,
        lists_whole: bool,
        reads_late: bool = False,
    ) -> None:
        """Start with no jobs.

        first   supplies a job whenever there is no job that may run
        most    maximum number of matches on which the sweep may act; if set, there is one worker
        splits  two workers may work on names of the same directory
        lists_whole  see SweepSlice
        reads_late  read `first` only when its next job can run, and not to check whether there is one
        """
        self._first = first
        self._n_workers = n_workers
        self._splits = splits
        self._lists_whole = lists_whole
        self._may_be_more = self._reads_late = reads_late
        self._jobs: list[Job] = []
        self._running: dict[int, Job] = {}  # by id()
        self._remaining = most

    def is_dry(self) -> bool:
        return not self._may_be_more and self._find() is None

    def next(self) -> SweepSlice | None:
        """Return a slice that may run in parallel with the running ones, or None if there is none at the moment."""
        at = self._find()
        if at is None:
            return None
        jobs = [] if self._jobs[at].kind is JobKind.ENTER else [self._jobs.pop(at)]
        if not jobs or jobs[0].kind is JobKind.TAKE:
            jobs = [*self._directories(at - len(jobs))][::-1] + jobs
        # Take the jobs higher up on the same path together: separately, each would open its path from the top again.
        while jobs[0].kind is JobKind.AFTER and len(jobs) < _MOST_DIRS and self._may_follow(at - 1):
            at -= 1
            jobs.insert(0, self._jobs.pop(at))
        if jobs[0].kind is JobKind.CHECK and not self._reads_late:
            jobs = [*self._listed_too(jobs[0])][::-1] + jobs
        self._running |= {id(one): one for one in jobs}
        is_crowded = sum(one.fd >= 0 for one in self._jobs) > _MOST_LISTINGS
        return SweepSlice(tuple(jobs), self._lists_whole or is_crowded, self._remaining)

    def _directories(self, at: int) -> Iterator[Job]:
        """Take a worker's share of the directories to enter: consecutive jobs from an index downwards."""
        n_dirs = sum(len(job.names) for job in self._jobs if job.kind is JobKind.ENTER)
        n_remaining = min(-(-n_dirs // self._n_workers), _MOST_DIRS)
        while n_remaining and at >= 0 and self._jobs[at].kind is JobKind.ENTER:
            job = self._jobs.pop(at)
            if len(job.names) > n_remaining:
                self._jobs.insert(at, job._replace(names=job.names[:-n_remaining]))
                job = job._replace(names=job.names[-n_remaining:])
            n_remaining, at = n_remaining - len(job.names), at - 1
            yield job

    def _listed_too(self, first: Job) -> Iterator[Job]:
        """Take more listed names for a slice, since in an unsorted list successive names may be in many directories."""
        busy = {one.upper for one in (first, *self._running.values()) if one.kind is not JobKind.ENTER}
        n_jobs, n_names = 1, len(first.names)
        while n_jobs < _MOST_PLACES and n_names < _MOST_LISTED:
            if not self._jobs and not self._read_next():
                return
            job = self._jobs[-1]
            if job.kind is not JobKind.CHECK or (not self._splits and job.upper in busy):
                return
            n_jobs, n_names = n_jobs + 1, n_names + len(job.names)
            busy.add(job.upper)
            yield self._jobs.pop()

    def _may_follow(self, at: int) -> bool:
        """Whether the job at an index is of the kind AFTER, and waits only for jobs that the next slice contains."""
        above = [*self._running.values(), *self._jobs[at + 1 :]]
        return at >= 0 and self._jobs[at].kind is JobKind.AFTER and self._may_run(self._jobs[at], above)

    def _find(self) -> int | None:
        passed = [*self._running.values()]
        for at in range(len(self._jobs) - 1, max(len(self._jobs) - _MOST_PASSED, 0) - 1, -1):
            job = self._jobs[at]
            if self._may_run(job, passed):
                return at
            passed.append(job)
        return len(self._jobs) - 1 if self._read_next() else None

    def _read_next(self) -> bool:
        """Take one more job from `first`, and return whether there was one."""
        job = next(self._first, None)
        if job is None:
            self._may_be_more = False
            return False
        self._jobs.append(job)
        return True

    def _may_run(self, job: Job, passed: Sequence[Job]) -> bool:
        """Whether a job may start before the jobs in `passed`, which precede it, have ended."""
        if job.kind is JobKind.AFTER:
            return not any(_is_inside(one.upper, job.upper) for one in passed)
        if self._splits or job.kind is JobKind.ENTER:
            return True
        return not any(one.upper == job.upper and one.kind is not JobKind.ENTER for one in passed)

    def finish_slice(self, share: SweepSlice, outcome: SweepSliceResult) -> list[int]:
        """Account for the result of a slice, and return the fds that may be closed now."""
        self._ended(share)
        self._jobs += outcome.rest
        self._remaining = outcome.remaining
        return [fd for fd in share.fds() if fd not in outcome.fds()]

    def lost(self, lost: SweepSlice) -> None:
        """Repeat a slice that was lost with its worker; how much of it was done is unknown."""
        self._ended(lost)
        for fd in lost.fds():
            os.lseek(fd, 0, os.SEEK_SET)
        self._jobs += (job._replace(again=True) for job in lost.jobs)

    def _ended(self, share: SweepSlice) -> None:
        for job in share.jobs:
            del self._running[id(job)]

    def fds(self) -> list[int]:
        """Return the fds of unfinished jobs. If the sweep ends early, the caller must close them."""
        return [job.fd for job in self._jobs if job.fd >= 0]


def _is_inside(upper: bytes, directory: bytes) -> bool:
    return not directory or upper == directory or upper.startswith(directory + b"/")


class SliceCounts:
    """The counts of a slice or sweep, and the first failures and spared entries by name."""

    def __init__(self, remaining: int | None) -> None:
        """remaining: number of matches on which the sweep may still act; None: no limit"""
        self.remaining = remaining
        self.is_limited = False
        self.sums = SweepSums()
        self.failures: list[Failure] = []
        self.spared: list[Spared] = []
        self._useless: list[int] = []

    def count(self, sums: SweepSums) -> None:
        self.sums = self.sums.plus(sums)

    def add(self, sums: SweepSums, failures: Iterable[Failure], spared: Iterable[Spared]) -> None:
        self.count(sums)
        self.failures += list(failures)[: MAX_FAILURES - len(self.failures)]
        self.spared += list(spared)[: MAX_FAILURES - len(self.spared)]

    def fail(self, name: bytes, number: int | None, call: str, n: int = 1) -> None:
        """Count n failures, and record one of them by name."""
        self.count(SweepSums(n_failed=n))
        if len(self.failures) < MAX_FAILURES:
            self.failures.append(Failure(name, number or errno.EIO, call))

    def spare(self, name: bytes, why: str) -> None:
        self.count(SweepSums(n_spared=1))
        if len(self.spared) < MAX_FAILURES:
            self.spared.append(Spared(name, why))

    def count_result(
        self, upper: bytes, n_names: int, taken: ActionResult, *, are_matches: bool, counts_to_limit: bool
    ) -> None:
        """Account for the result of an action on names in a directory.

        counts_to_limit  subtract the entries done from the number of remaining matches
        """
        vanished, failed = _split(taken)
        n_done = n_names - len(taken.refused) - len(taken.spared)
        if are_matches:
            self.count(SweepSums(n_matched=n_names, n_done=n_done, n_vanished=vanished))
            if self.remaining is not None and counts_to_limit:
                self.remaining -= n_done
        else:
            self.count(SweepSums(n_inside=n_done))
        for name, number in failed:
            self.fail(join_path(upper, os.fsencode(name)), number, taken.call)
        for name, why in taken.spared:
            self.spare(join_path(upper, os.fsencode(name)), why)
        if n_done:
            self._useless.clear()
        self._useless += [number for _name, number in failed if number in _USELESS]

    def why(self) -> str:
        """Return the reason why it is useless to continue, or an empty text if there is none."""
        return os.strerror(self._useless[-1]) if len(self._useless) >= _MOST_USELESS else ""


def _split(taken: ActionResult) -> tuple[int, list[tuple[str, int]]]:
    """Return the number of names that vanished, and the failures."""
    no_match = (errno.ENOENT, _OTHER_KIND.get(taken.call, errno.ENOENT))
    failed = [one for one in taken.refused if one[1] not in no_match]
    return len(taken.refused) - len(failed), failed
