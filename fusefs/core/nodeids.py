"""What nodes are known by: to the kernel by a number, to the daemon by their incarnation. The table is in C."""

from __future__ import annotations

import enum
from typing import NewType

from fusefs.core.inode_attributes import Attributes

NodeId = NewType("NodeId", int)
"""The number that the kernel knows a node by: the backing inode's own, unless another live node has it."""

SourceKey = tuple[int, bytes] | tuple[int, int, int]
"""One incarnation of one backing inode: (device, file handle), or (device, ino, birth time) without handles."""

ROOT = NodeId(1)
TOP = NodeId(1 << 62)
"""The root too, where the kernel knows it by another inode than the filesystem's own: see mount/life/root_inode.py."""
ROOTS = (ROOT, TOP)


def source_key(seen: Attributes, handle: bytes) -> SourceKey:
    """Which incarnation it is: by its handle, or where there are none by the time of its birth."""
    return (seen.dev, handle) if handle else (seen.dev, seen.ino, seen.btime_ns)


class NodeZone(enum.IntEnum):
    """Where a node lies: outside of all stores; in one, or it is one; in what a reaper takes from, or it is that."""

    OUTSIDE = 0
    STORE = 1
    TRASH = 2
