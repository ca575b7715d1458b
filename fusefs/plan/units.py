"""Units: the entries of a directory, each judged as a whole by the newest file inside it.

A directory's own time only shows that a name in it has changed, so it counts only for empty directories. The walk ends
at the first young file; in a tree that is in use, this is often the very first file.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from fusefs.core.names import Name, join_path
from fusefs.core.plan_rules import RuleAge
from fusefs.core.record import Failure
from fusefs.core.results import NOT_TAKEN, ReportedMark, ShouldStop, Spared
from fusefs.core.selection import Field, Matcher, kind_letter
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.xattrs import restored_ns
from fusefs.plan.keep_protection import find_lock, why_exempt, why_held, why_kept, why_locked
from fusefs.store.backing_and_mount import READABLE, BackingAndMount
from fusefs.store.layout import is_store_name
from fusefs.store.walk import attribute_directory
from fusefs.sweep.request import TakingBoundary

MOUNTED = "contains a mount point"
_PATH_MAX_BYTES = 1 << 16
"""The longest path by which a directory in a unit is opened; a chain of a million directories would take hours."""
_NEVER_NS = 1 << 63
"""The birth time of a file if the filesystem records none; such a file never counts as old."""


class Unit(NamedTuple):
    """A unit that is old enough for the rule."""

    name: Name
    uid: int
    newest_ns: int
    n_bytes: int


class Young(NamedTuple):
    """A unit with a file that is too young."""

    name: Name


Judged = Unit | Young | Spared | Failure


def time_of(kernel: Kernel, fields: Sequence[Field], fd: Fd, st: os.stat_result) -> int:
    """Return the latest of a file's given times and the time of its restore, in nanoseconds since the epoch."""
    times: list[int] = [getattr(st, f"st_{field}_ns") for field in fields if field != "btime"]
    if "btime" in fields:
        times.append(kernel.statx(fd, asks_server=True).btime_ns or _NEVER_NS)
    if st.st_ctime_ns > max(times):  # a restore changes the ctime
        times.append(restored_ns(fd))
    return max(times)


def judge_units(
    kernel: Kernel,
    top: BackingAndMount,
    matcher: Matcher,
    age: RuleAge,
    stops: ShouldStop = lambda: False,
    boundary: TakingBoundary | None = None,
) -> Iterator[Judged]:
    """Judge each unit of a directory, lazily, in the order of the listing.

    top       the directory (O_PATH)
    matcher   selects the entries that are units, and excludes files, even inside units
    stops     called before each directory; if true, the current unit and those after it are not yielded
    boundary  for root: a unit that contains directories which root must not enter is not taken
    Raises    OSError: the directory can't be listed
    """
    is_unit, is_pruned = matcher.names_in(""), matcher.pruned_in("")
    with open_quietly(kernel, top.fd, b".") as fd, kernel.scan(fd) as entries:
        for entry in entries:
            if is_store_name(os.fsencode(entry.name)) or (is_pruned is not None and is_pruned(entry.name)):
                continue
            if is_unit is None or is_unit(entry.name):
                judged = _UnitWalk(kernel, top, matcher, age, stops, boundary, Name(os.fsencode(entry.name))).judge()
                if stops():
                    return
                if judged is not None:
                    yield judged


def open_quietly(kernel: Kernel, top: Fd, path: bytes) -> Fd:
    """Open a directory for listing without changing its atime, if we own it."""
    try:
        return kernel.open_beneath(top, path, READABLE | os.O_NOATIME)
    except PermissionError as error:
        if error.errno != errno.EPERM:
            raise
    return kernel.open_beneath(top, path, READABLE)


class _Decided(Exception):
    """Ends the walk of a unit, because the result is certain."""

    def __init__(self, judged: Young | Spared | Failure) -> None:
        super().__init__()
        self.judged = judged


class _UnitWalk:
    def __init__(
        self,
        kernel: Kernel,
        top: BackingAndMount,
        matcher: Matcher,
        age: RuleAge,
        stops: ShouldStop,
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
        """Directories to list, each with the owner of its parent."""

    def judge(self) -> Judged | None:
        """Return the result; None if the entry is not a unit, or is gone."""
        try:
            with self._kernel.open_beneath(self._top.fd, self.name) as found:
                st = self._kernel.fstat(found)
            if kind_letter(st.st_mode) not in self._matcher.types or not self._matcher.matches_stat(st, None):
                return None
            self._judge_entry(self.name, self._top.fd, self.name, 0 if self._boundary is None else self._boundary.whose)
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
        if self._newest_ns is None:  # everything in the unit was removed in the meantime
            return Young(self.name)
        return Unit(self.name, st.st_uid, self._newest_ns, self._n_bytes)

    def _list(self, path: bytes, whose: int) -> None:
        """Judge the entries of a directory."""
        if len(path) > _PATH_MAX_BYTES:
            raise self._spared("too deep to be checked")
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
                        raise self._spared("contains an excluded file")
                    name = Name(os.fsencode(entry.name))
                    if is_store_name(name):
                        raise self._spared("contains a trash store")
                    with suppress(FileNotFoundError):
                        self._judge_entry(join_path(path, name), fd, name, inside or 0)
            if self._n_entries == n_before:
                self._count(time_ns)

    def _whose(self, fd: Fd, whose: int) -> int | None:
        """Return the owner of a directory's contents; None if root must not take files from the directory."""
        return (
            0
            if self._boundary is None
            else attribute_directory(self._kernel, fd, whose, self._boundary.seen_directories)
        )

    def _judge_entry(self, path: bytes, directory: Fd, name: Name, whose: int) -> None:
        """Judge a file, or queue a directory to be listed later."""
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
        """Check for a lock that a process holds through a trashd mount."""
        if self._top.mounted is not None and (why := why_locked(self._kernel, self._top.mounted, path)) is not None:
            raise self._spared(why)

    def _count(self, time_ns: int) -> None:
        """Note the time of a file in the unit. Raises  _Decided if the file is too young"""
        if time_ns >= self._age.before_ns:
            raise _Decided(Young(self.name))
        self._newest_ns = max(time_ns, self._newest_ns or time_ns)

    def _spared(self, why: str | ReportedMark) -> _Decided:
        """Return the decision to spare the unit. If the reason is a ReportedMark, the result is a failure instead."""
        if isinstance(why, ReportedMark):
            return _Decided(Failure(self.name, errno.EPERM, why.why))
        return _Decided(Spared(self.name, why))
