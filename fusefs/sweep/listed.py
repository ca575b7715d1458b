"""Names that somebody listed, as jobs: read as they come, those of one directory together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator

from fusefs.core.names import split
from fusefs.sweep.jobs import Job, Kind

_TOGETHER = 1024


def jobs_of(names: Iterable[bytes], tops: Iterable[bytes], refuse: Callable[[bytes], None]) -> Iterator[Job]:
    """Jobs for names relative to the sweep's directory, or absolute and in it; their order stays, nearly.

    tops    the absolute paths that the directory has
    refuse  called with a name that is outside of it, or no plain path
    """
    prefixes = [top.rstrip(b"/") + b"/" for top in tops]
    upper, together = b"", list[str]()
    for name in names:
        path = _relative(name, prefixes)
        if path is None:
            refuse(name)
            continue
        above, _slash, last = path.rpartition(b"/")
        if above != upper or len(together) >= _TOGETHER:
            if together:
                yield Job(Kind.LOOK, upper, together)
            upper, together = above, []
        together.append(os.fsdecode(last))
    if together:
        yield Job(Kind.LOOK, upper, together)


def read_names(fd: int, end: bytes) -> Iterator[bytes]:
    """The names in a file, as soon as they can be read.

    end  what each ends with; what is empty between two of them is none
    """
    rest = b""
    while chunk := os.read(fd, 1 << 16):
        *whole, rest = (rest + chunk).split(end)
        yield from filter(None, whole)
    if rest:
        yield rest


def _relative(name: bytes, prefixes: Iterable[bytes]) -> bytes | None:
    """The plain path; None for one that is none."""
    if name.startswith(b"/"):
        inside = next((name[len(prefix) :] for prefix in prefixes if name.startswith(prefix)), None)
        if inside is None:
            return None
        name = inside
    plain = b"/".join(part for part in name.split(b"/") if part not in (b"", b"."))
    try:
        split(plain)
    except ValueError:
        return None
    return plain
