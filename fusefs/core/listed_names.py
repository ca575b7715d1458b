"""What a list of names says of each, and how lists are written."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class ListedName(NamedTuple):
    """What a list says that has more than names.

    path           as it is listed; what can't be understood, if it is that
    ino            its inode number when the list was made; 0: not told
    is_understood  whether it is a path
    """

    path: bytes
    ino: int = 0
    is_understood: bool = True


NO_NAMES = frozenset((b"", b".", b".."))
"""What may stand behind a path's last slash, and names nothing in the directory before it."""


class ListedTogether(NamedTuple):
    """Several names of one directory, none of them `.`, `..` or with a slash. directory: as of a path"""

    directory: bytes
    names: list[str]


Listed = bytes | ListedName
"""A path alone, or with what else is known of it."""


class ListFormat(Enum):
    """How a list is written; docs/hpc.md says by which program."""

    LINES = "lines"
    NUL = "nul"
    MMAPPLYPOLICY = "mmapplypolicy"
