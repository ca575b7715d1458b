"""What clients have open: a handle is the number of the daemon's own fd."""

from __future__ import annotations

from fusefs.core.inodes import Node
from fusefs.linux.dirents import Dirents
from fusefs.linux.fd import Fd


class Handles:
    """Open files and directories, by handle and by node."""

    def __init__(self) -> None:
        """Begin with none."""
        self._nodes: dict[int, Node] = {}
        self._fds: dict[Node, list[Fd]] = {}
        self._listings: dict[int, Dirents] = {}

    def __len__(self) -> int:
        """How many are open."""
        return len(self._nodes)

    def add(self, node: Node, fd: Fd, listing: Dirents | None = None) -> int:
        """A handle of a node; the fd is closed with it."""
        self._nodes[fd] = node
        self._fds.setdefault(node, []).append(fd)
        if listing is not None:
            self._listings[fd] = listing
        node.n_open += 1
        return int(fd)

    def remove(self, fh: int) -> None:
        """Close a handle."""
        node = self._nodes.pop(fh)
        self._listings.pop(fh, None)
        fds = self._fds[node]
        fds.remove(Fd(fh))
        if not fds:
            del self._fds[node]
        node.n_open -= 1
        Fd(fh).close()

    def node(self, fh: int) -> Node:
        """Whose handle it is."""
        return self._nodes[fh]

    def file(self, fh: int) -> Fd:
        """The fd of a handle."""
        return Fd(fh)

    def fd_of(self, node: Node) -> Fd:
        """An fd of some handle of a node that is open."""
        return self._fds[node][0]

    def listing(self, fh: int) -> tuple[Node, Dirents]:
        """A directory and where its listing is."""
        return self._nodes[fh], self._listings[fh]

    def close(self) -> None:
        """Close all."""
        for fh in list(self._nodes):
            self.remove(fh)
