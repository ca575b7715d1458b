"""Paths that one command removes together."""

from __future__ import annotations

from typing import NamedTuple


class RemovalVictim(NamedTuple):
    """Something to be removed.

    given  its path, as it was told
    path   the same, absolute, without links
    inode  st_dev and st_ino of what has it
    """

    given: bytes
    path: bytes
    inode: tuple[int, int]


class RemovalGroup(NamedTuple):
    """Several that lie on one mount. directory: above all of them"""

    directory: bytes
    victims: tuple[RemovalVictim, ...]
