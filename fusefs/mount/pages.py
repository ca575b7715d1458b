"""Whether what the kernel has of a file's content is still right when it is opened, where others change it behind.

It is, if the file's times and size are those of the last time, and had been so for a while then: clocks of filesystems
tick slowly, and what is written in the same tick can't be told apart.
"""

from __future__ import annotations

import time

from fusefs.core.attributes import Attributes
from fusefs.core.inodes import Node

_RACY_NS = 2_000_000_000
"""As old as the slowest of them; another machine's clock may be off by more, and is then not believed."""


class Pages:
    """What files looked like when they were opened last."""

    def __init__(self) -> None:
        """Begin with none."""
        self._seen: dict[Node, tuple[int, int, int]] = {}

    def are_right(self, node: Node, seen: Attributes) -> bool:
        """Whether the kernel's pages of a file are, that was just opened and looked at."""
        version = (seen.mtime_ns, seen.ctime_ns, seen.size)
        are_right = self._seen.get(node) == version
        if time.time_ns() - max(seen.mtime_ns, seen.ctime_ns) > _RACY_NS:
            self._seen[node] = version
        else:
            self.drop(node)
        return are_right

    def drop(self, node: Node) -> None:
        """Its node has ended."""
        self._seen.pop(node, None)
