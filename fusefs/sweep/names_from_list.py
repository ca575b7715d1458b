"""Read names from a list as they arrive, in bounded memory, and group the names in one directory into jobs.

A newline in a name also ends a line, unless the list escapes it or terminates names with NUL.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator

from fusefs.core.errors import UsageError
from fusefs.core.names import ends_in_dots, join_path, split_path
from fusefs.core.results import DOTS, OUTSIDE, UNCLEAR
from fusefs.core.selection import NOT_NAMES, ListedName, ListedNames, ListedPath, ListFormat
from fusefs.sweep.agenda import Job, JobKind

_TOGETHER = 1024
_MOST_KNOWN = 1024
_LONGEST = 1 << 20
"""Limit on the bytes of a path, far above any real path: input without line ends must not fill the memory."""
_POLICY = re.compile(rb" *([0-9]+) +[0-9]+ +[0-9]+(?: .*)?", re.DOTALL)
_DELIMITER = b" -- "
_ESCAPED = re.compile(rb"%([0-9A-Fa-f]{2})")
_BROKEN_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})|%00")


class BrokenList(UsageError):
    """The list of names can't be read"""


def jobs_of(
    names: Iterable[ListedPath | ListedNames],
    tops: Iterable[bytes],
    refuse: Callable[[bytes, str], None],
    most: int | None = None,
) -> Iterator[Job]:
    """Yield jobs for names that are relative to the sweep's directory or absolute and inside it, mostly in list order.

    tops    the absolute paths of the directory
    refuse  called with a name and the reason: outside of the directory, not a plain path, ends in dots, or invalid
    most    maximum number of names in a job; with 1, no name is read before the action on the previous one has started
    """
    most = most or _TOGETHER
    places = _ListedPlaces(tops)
    upper, together, inos, directories = b"", list[str](), dict[str, int](), set[str]()

    def gathered() -> Iterator[Job]:
        """Yield a job for the names read since the last job, if there are any."""
        nonlocal together, inos, directories
        if together:
            yield Job(JobKind.CHECK, upper, together, inos=inos, directories=frozenset(directories))
            together, inos, directories = [], {}, set()

    for name in names:
        if isinstance(name, ListedNames):
            yield from gathered()
            place = places.of(name.directory)
            if place is None:
                refuse(name.directory, OUTSIDE)
            else:
                yield Job(JobKind.CHECK, join_path(*place), name.names)
            continue
        path, ino, is_understood = (name, 0, True) if isinstance(name, bytes) else name
        place = places.of(path) if is_understood else None
        if place is None:
            refuse(path, OUTSIDE if is_understood else UNCLEAR)
            continue
        above, last = place
        if not last:
            continue  # the sweep's directory itself, which find prints first; it never matches
        if ends_in_dots(path):
            refuse(path, DOTS)
            continue
        if above != upper:
            yield from gathered()
        upper = above
        together.append(os.fsdecode(last))
        if ino:
            inos[together[-1]] = ino
        if path.endswith(b"/"):
            directories.add(together[-1])
        if len(together) >= most:
            yield from gathered()
    yield from gathered()


class _ListedPlaces:
    """Resolves listed paths to directories below the sweep's directory, and caches these."""

    def __init__(self, tops: Iterable[bytes]) -> None:
        self._prefixes = [top.rstrip(b"/") + b"/" for top in tops]
        self._directories: dict[bytes, bytes | None] = {}

    def of(self, path: bytes) -> tuple[bytes, bytes] | None:
        """Return a path's directory and name (empty: the sweep's directory), or None if it is outside or invalid."""
        at = path.rfind(b"/") + 1
        above, last = path[:at], path[at:]
        if above not in self._directories:
            if len(self._directories) >= _MOST_KNOWN:
                self._directories.clear()
            self._directories[above] = _relative(above, self._prefixes)
        upper = self._directories[above]
        if upper is not None and last not in NOT_NAMES and b"\0" not in last:
            return upper, last
        whole = _relative(path, self._prefixes)
        if whole is None:
            return None
        upper, _slash, last = whole.rpartition(b"/")
        return upper, last


def read_list(fd: int, how: ListFormat) -> Iterator[ListedPath]:
    """Read a list lazily. Raises  the errors of `read_names`"""
    names = read_names(fd, b"\0" if how is ListFormat.NUL else b"\n")
    return map(_read_policy_line, names) if how is ListFormat.MMAPPLYPOLICY else names


def _read_policy_line(line: bytes) -> ListedName:
    """Read a line from mmapplypolicy: inode, generation and snapshot, the output of SHOW, ` -- `, and the path.

    Users control the output of SHOW and the path, so a line with two delimiters is invalid.
    Source  Storage Scale's "File list format", and "Policy rules: Terms" on ESCAPE
    """
    head, _delimiter, path = line.partition(_DELIMITER)
    numbers = _POLICY.fullmatch(head)
    if numbers is None or _DELIMITER in path or _BROKEN_ESCAPE.search(path):
        return ListedName(line, is_understood=False)
    path = _ESCAPED.sub(lambda found: bytes.fromhex(found[1].decode()), path)
    return ListedName(path, int(numbers[1])) if path.startswith(b"/") else ListedName(line, is_understood=False)


def read_names(fd: int, end: bytes) -> Iterator[bytes]:
    """Yield the names in a file as soon as they can be read.

    end     the delimiter; empty names are skipped
    Raises  BrokenList: the file is not a list of names, or read(2) failed (then its error is the cause)
    """
    rest = b""
    while chunk := _read(fd):
        if end != b"\0" and b"\0" in chunk:
            raise BrokenList("the list contains NUL characters", "use -0 for names terminated by NUL (find -print0)")
        *whole, rest = (rest + chunk).split(end)
        if len(rest) > _LONGEST:
            raise BrokenList(
                "the list contains a name that is too long or not terminated",
                "end each name with a newline, or with NUL for -0",
            )
        yield from filter(None, whole)
    if rest:
        yield rest


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 1 << 16)
    except OSError as error:
        raise BrokenList(f"the list can't be read: {os.strerror(error.errno or errno.EIO)}") from error


def _relative(name: bytes, prefixes: Iterable[bytes]) -> bytes | None:
    """Return a name's path below the sweep's directory (empty: that directory), or None if it is outside or invalid."""
    plain = b"/".join(part for part in name.split(b"/") if part not in (b"", b"."))
    if name.startswith(b"/"):
        whole = b"/" + plain + b"/"
        inside = next((whole[len(prefix) : -1] for prefix in prefixes if whole.startswith(prefix)), None)
        if inside is None:
            return None
        plain = inside
    if not plain:
        return plain
    try:
        split_path(plain)
    except ValueError:
        return None
    return plain
