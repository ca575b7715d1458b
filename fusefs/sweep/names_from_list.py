"""Names from a list, as jobs: read as they come, those of one directory together."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator

from fusefs.core.errors import UsageError
from fusefs.core.listed_names import Listed, ListedName
from fusefs.core.names import split
from fusefs.core.sweep_result import OUTSIDE, UNCLEAR
from fusefs.sweep.agenda import Job, JobKind

_TOGETHER = 1024
_LONGEST = 1 << 20
"""Bytes of a path, far longer than any real one: what has no end at all must not fill the memory."""


class BrokenList(UsageError):
    """The list of names can't be read"""


def jobs_of(
    names: Iterable[Listed], tops: Iterable[bytes], refuse: Callable[[bytes, str], None], most: int | None = None
) -> Iterator[Job]:
    """Jobs for names relative to the sweep's directory, or absolute and in it; their order stays, nearly.

    tops    the absolute paths that the directory has
    refuse  called with a name and why: it is outside of it, no plain path, or not understood
    most    names of a job; with 1 no name is asked for before what is done to the last one has begun
    """
    most = most or _TOGETHER
    prefixes = [top.rstrip(b"/") + b"/" for top in tops]
    upper, together, inos = b"", list[str](), dict[str, int]()
    for name in names:
        one = name if isinstance(name, ListedName) else ListedName(name)
        path = _relative(one.path, prefixes) if one.is_understood else None
        if path is None:
            refuse(one.path, OUTSIDE if one.is_understood else UNCLEAR)
            continue
        if not path:
            continue  # the sweep's directory itself, which find tells first, and which is never chosen
        above, _slash, last = path.rpartition(b"/")
        if above != upper and together:
            yield Job(JobKind.LOOK, upper, together, inos=inos)
            together, inos = [], {}
        upper = above
        together.append(os.fsdecode(last))
        if one.ino:
            inos[together[-1]] = one.ino
        if len(together) >= most:
            yield Job(JobKind.LOOK, upper, together, inos=inos)
            together, inos = [], {}
    if together:
        yield Job(JobKind.LOOK, upper, together, inos=inos)


def read_names(fd: int, end: bytes) -> Iterator[bytes]:
    """The names in a file, as soon as they can be read.

    end     what each ends with; what is empty between two of them is none
    Raises  BrokenList for what is no list of names, or if the kernel refuses to read on (its error is the cause)
    """
    rest = b""
    while chunk := _read(fd):
        if end != b"\0" and b"\0" in chunk:
            raise BrokenList("it has NUL in it", "-0 reads names that end with it (find -print0)")
        *whole, rest = (rest + chunk).split(end)
        if len(rest) > _LONGEST:
            raise BrokenList("a name in it has no end", "names end with a newline, or with NUL if -0 is given")
        yield from filter(None, whole)
    if rest:
        yield rest


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 1 << 16)
    except OSError as error:
        raise BrokenList(os.strerror(error.errno or errno.EIO)) from error


def _relative(name: bytes, prefixes: Iterable[bytes]) -> bytes | None:
    """The path below the sweep's directory, empty for that itself; None for one that is none."""
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
        split(plain)
    except ValueError:
        return None
    return plain
