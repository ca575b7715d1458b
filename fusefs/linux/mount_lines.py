"""What of ours is to be mounted by itself: the lines of fstab, and the files of the unit trashd-mount@."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from fusefs.linux.mountinfo import OURS

_FSTAB, _OF_UNITS = b"/etc/fstab", b"/etc/trashd/mounts"
_OPTIONS = b"OPTIONS="


class MountLine(NamedTuple):
    """The options of one mount. place: file and line"""

    place: str
    options: frozenset[str]


def mount_lines() -> Iterator[MountLine]:
    """All that may be read. Source  fstab(5), systemd.exec(5) for EnvironmentFile="""
    for number, line in _lines(_FSTAB):
        fields = line.split()
        if len(fields) > 3 and fields[2] == OURS:
            yield _line(_FSTAB, number, fields[3])
    names = list[bytes]()
    with suppress(OSError):
        names = sorted(os.listdir(_OF_UNITS))
    for name in names:
        path = os.path.join(_OF_UNITS, name)
        for number, line in _lines(path):
            if name.endswith(b".conf") and line.startswith(_OPTIONS):
                yield _line(path, number, line.removeprefix(_OPTIONS).strip(b"\"' "))


def _line(path: bytes, number: int, options: bytes) -> MountLine:
    return MountLine(f"{os.fsdecode(path)}:{number}", frozenset(os.fsdecode(options).split(",")))


def _lines(path: bytes) -> list[tuple[int, bytes]]:
    """Those that say something, numbered; none of what can't be read."""
    try:
        with open(path, "rb") as file:
            return [(number, line.strip()) for number, line in enumerate(file, 1) if not line.lstrip().startswith(b"#")]
    except OSError:
        return []
