"""`trashd` on a kernel that has agreed to pass reads through, and does not: `python broken_passthrough.py HOW WORDS...`

How it is so does not matter to the daemon, which sees but what a read gives. So its answers to opens are spoilt, where
there is no kernel that spoils them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import fusefs.cli.main
from fusefs.core.inode_table import Node
from fusefs.linux.fd import Fd
from fusefs.mount.life import passthrough_probe
from fusefs.mount.tree.passthrough import Passthrough

_NO_ID = 1 << 20
_HASTE_S = 0.2

_opened = Passthrough.opened


def _asked(self: Passthrough, node: Node, fh: Fd, flags: int, size: int | None, writer: int | None) -> int:
    """The kernel keeps its pages, and asks us for them."""
    _opened(self, node, fh, flags, size, writer)
    return 0


def _refused(self: Passthrough, node: Node, fh: Fd, flags: int, size: int | None, writer: int | None) -> int:
    """The kernel refuses the open."""
    backing_id = _opened(self, node, fh, flags, size, writer)
    return backing_id and backing_id + _NO_ID


def misled(how: str) -> list[str | Path]:
    """The command. how: asks, refuses; or hurried: all is well, but it has less time"""
    return [sys.executable, Path(__file__), how]


def main() -> None:
    """Be `trashd`."""
    how = sys.argv.pop(1)
    sys.argv[0] = "trashd"
    match how:
        case "asks":
            Passthrough.opened = _asked  # type: ignore[method-assign]
        case "refuses":
            Passthrough.opened = _refused  # type: ignore[method-assign]
        case _:
            passthrough_probe._LIMIT_S = _HASTE_S
    fusefs.cli.main.main()


if __name__ == "__main__":
    main()
