"""Units: what lies directly in a directory, judged as a whole. The newest file inside decides.

A directory's own time says only that a name in it changed, so that it counts for an empty one only. The walk ends at
the first young file: of a tree that is in use one file is seen, more often than not.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from fusefs.core.names import Name, join
from fusefs.core.plan_rules import RuleAge
from fusefs.core.record import Failure
from fusefs.core.results import NOT_TAKEN, ReportedMark, Spared, Stops
from fusefs.core.selection import Field, Matcher, letter_of
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.xattrs import restored_ns
from fusefs.plan.keep_protection import find_lock, why_exempt, why_held, why_kept, why_locked
from fusefs.store.backing_and_mount import READABLE, BackingAndMount
from fusefs.store.layout import is_stores_own
from fusefs.store.walk import whose_is
from fusefs.sweep.request import TakingBoundary

MOUNTED = "it contains a mount point"
_PATH_MAX_BYTES = 1 << 16
"""Each directory is opened by its path from the unit on: a chain of a million would take hours."""
_NEVER_NS = 1 << 63
"""The birth of a file on a filesystem that keeps none: it is never called old."""


class Unit(NamedTuple):
    """What is old enough.

    uid        its owner
    newest_ns  the time that decides
    n_entries  in it, itself among them
    """

    name: Name
    uid: int
    newest_ns: int
    n_entries: int
    n_bytes: int


class Young(NamedTuple):
    """A unit with something in it that is too young."""

    name: Name


Judged = Unit | Young | Spared | Failure


def time_of(kernel: Kernel, fields: Sequence[Field], fd: Fd, st: os.stat_result) -> int:
    """The latest of these times of what an fd holds, in nanoseconds since the epoch; and of when it was restored."""
    times: list[int] = [getattr(st, f"st_{field}_ns") for field in fields if field != "btime"]
    if "btime" in fields:
        times.append(kernel.statx(fd, asks=True).btime_ns or _NEVER_NS)
    if st.st_ctime_ns > max(times):  # a restore changes that
        times.append(restored_ns(fd))
    return max(times)


def judge_units(
    kernel: Kernel,
    top: BackingAndMount,
    matcher: Matcher,
    age: RuleAge,
    stops: Stops = lambda: False,
    boundary: TakingBoundary | None = None,
) -> Iterator[Judged]:
    """Each unit of a directory in the order of its listing, judged when it is asked for.

    top      the directory (O_PATH)
    matcher  says which of its entries are units, and what is excluded, inside too
    stops    asked before each directory; the unit that is looked at is not told then, nor those after it
    boundary  of root: a unit in which it can't enter all is not taken
    Raises   OSError: it can't be listed
    """
    is_unit, is_pruned = matcher.names_in(""), matcher.pruned_in("")
    with open_quietly(kernel, top.fd, b".") as fd, kernel.scan(fd) as entries:
        for entry in entries:
            if is_stores_own(os.fsencode(entry.name)) or (is_pruned is not None and is_pruned(entry.name)):
                continue
            if is_unit is None or is_unit(entry.name):
                judged = _UnitLook(kernel, top, matcher, age, stops, boundary, Name(os.fsencode(entry.name))).judge()
                if stops():
                    return
                if judged is not None:
                    yield judged


def open_quietly(kernel: Kernel, top: Fd, path: bytes) -> Fd:
    """A directory opened for listing, so that it does not look used by it, if it is ours to say that."""
    try:
        return kernel.open_beneath(top, path, READABLE | os.O_NOATIME)
    except PermissionError as error:
        if error.errno != errno.EPERM:
            raise
    return kernel.open_beneath(top, path, READABLE)


class _Decided(Exception):
    """What a unit is; no more of it needs to be looked at."""

    def __init__(self, judged: Young | Spared | Failure) -> None:
        super().__init__()
        self.judged = judged


class _UnitLook:
    """One look at all that is in a unit."""

    def __init__(
        self,
        kernel: Kernel,
        top: BackingAndMount,
        matcher: Matcher,
        age: RuleAge,
        stops: Stops,
        boundary: TakingBoundary | None,
        name: Name,
    ) -> None:
        self.name = name
        self._kernel = kernel
        self._top = top
        self._matcher = matcher
        self._age = age
        self._stops = stops
        self._boundary = boundary
        self._newest_ns: int | None = None
        self._is_across = False
        self._n_entries = 0
        self._n_bytes = 0
        self._ahead: list[tuple[bytes, int]] = []
        """Directories, and whose that is which each is in."""

    def judge(self) -> Judged | None:
        """What it is; None if it is no unit, or gone."""
        try:
            with self._kernel.open_beneath(self._top.fd, self.name) as found:
                st = self._kernel.fstat(found)
            if letter_of(st.st_mode) not in self._matcher.types or not self._matcher.takes(st, None):
                return None
            self._look(self.name, self._top.fd, self.name, 0 if self._boundary is None else self._boundary.whose)
            while self._ahead and not self._stops():
                self._list(*self._ahead.pop())
        except _Decided as decided:
            return decided.judged
        except OSError as error:
            if error.errno == errno.ENOENT:
                return None
            is_mounted = error.errno == errno.EXDEV
            return Spared(self.name, MOUNTED) if is_mounted else Failure(self.name, error.errno or errno.EIO, "open")
        if self._is_across:
            return Failure(self.name, errno.EPERM, NOT_TAKEN)
        if self._newest_ns is None:  # all that was in it went meanwhile
            return Young(self.name)
        return Unit(self.name, st.st_uid, self._newest_ns, self._n_entries, self._n_bytes)

    def _list(self, path: bytes, whose: int) -> None:
        """Look at all in a directory."""
        if len(path) > _PATH_MAX_BYTES:
            raise self._spared("too deep to scan")
        is_pruned = self._matcher.pruned_in(os.fsdecode(path))
        try:
            fd = open_quietly(self._kernel, self._top.fd, path)
        except FileNotFoundError:
            return
        with fd:
            time_ns = time_of(self._kernel, self._age.fields, fd, self._kernel.fstat(fd))
            inside = self._whose(fd, whose)
            if inside is None and not self._kernel.is_empty(fd):
                self._is_across = True
                return
            if at_ns := restored_ns(fd):
                self._count(at_ns)
            mark = why_kept(self._kernel, fd) or find_lock(self._kernel, fd, holds=False)
            if mark is not None:
                raise self._spared(mark)
            self._ask_mount(path)
            n_before = self._n_entries
            with self._kernel.scan(fd) as entries:
                for entry in entries:
                    if is_pruned is not None and is_pruned(entry.name):
                        raise self._spared("contains excluded files")
                    name = Name(os.fsencode(entry.name))
                    if is_stores_own(name):
                        raise self._spared("contains a trash store")
                    with suppress(FileNotFoundError):
                        self._look(join(path, name), fd, name, inside or 0)
            if self._n_entries == n_before:
                self._count(time_ns)

    def _whose(self, fd: Fd, whose: int) -> int | None:
        """Whose it is what is in a directory; None if root must not take it from there."""
        return 0 if self._boundary is None else whose_is(self._kernel, fd, whose, self._boundary.seen)

    def _look(self, path: bytes, directory: Fd, name: Name, whose: int) -> None:
        """Look at one entry; a directory is remembered."""
        with self._kernel.open_beneath(directory, name) as found:
            st = self._kernel.fstat(found)
            self._n_entries += 1
            if stat.S_ISDIR(st.st_mode):
                self._ahead.append((path, whose))
                return
            self._n_bytes += st.st_size if stat.S_ISREG(st.st_mode) else 0
            self._count(time_of(self._kernel, self._age.fields, found, st))
            why = why_exempt(found, st, name) or why_held(self._kernel, found, st)
            if why is not None:
                raise self._spared(why)
        self._ask_mount(path)

    def _ask_mount(self, path: bytes) -> None:
        """Look for a lock that a process has through a mount of ours."""
        if self._top.mounted is not None and (why := why_locked(self._kernel, self._top.mounted, path)) is not None:
            raise self._spared(why)

    def _count(self, time_ns: int) -> None:
        """Take in the time of what is inside."""
        if time_ns >= self._age.before_ns:
            raise _Decided(Young(self.name))
        self._newest_ns = max(time_ns, self._newest_ns or time_ns)

    def _spared(self, why: str | ReportedMark) -> _Decided:
        """A mark of whoever has no say is reported, but as anybody's new file does it keeps the unit."""
        if isinstance(why, ReportedMark):
            return _Decided(Failure(self.name, errno.EPERM, why.why))
        return _Decided(Spared(self.name, why))
