"""The nodes that the kernel knows: each nodeid means one incarnation of one inode, as long as the kernel has it.

Pure: what was seen of the backing filesystem is handed in. A node exists iff the kernel holds references to
it, a handle of it is open, or it is the root (I7); its nodeid is not given to anything else meanwhile (I9).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from typing import NewType

from fusefs.core.inode_attributes import Attributes

NodeId = NewType("NodeId", int)
"""The number that the kernel knows a node by: the backing inode's own, unless another live node has it."""

SourceKey = tuple[int, bytes] | tuple[int, int, int]
"""One incarnation of one backing inode: (device, file handle), or (device, ino, birth time) without handles."""

ROOT = NodeId(1)
_PRIVATE = 1 << 62
TOP = NodeId(_PRIVATE)
"""The root too, where the kernel knows it by another inode than the filesystem's own: see mount/life/root_inode.py."""
ROOTS = (ROOT, TOP)
_MOST_OTHERS = 8
_NEVER = -1


def source_key(seen: Attributes, handle: bytes) -> SourceKey:
    """Which incarnation it is: by its handle, or where there are none by the time of its birth."""
    return (seen.dev, handle) if handle else (seen.dev, seen.ino, seen.btime_ns)


class NodeZone(enum.Enum):
    """Where a node lies: outside of all stores; in one, or it is one; in what a reaper takes from, or it is that."""

    OUTSIDE = enum.auto()
    STORE = enum.auto()
    TRASH = enum.auto()


class Node:
    """One incarnation of one inode.

    ino, btime_ns  its inode number and birth time: what attributes tell of an incarnation, beside the device
    parent, name   where it was seen last; None for the root, and if no name is known (any more)
    others         some of its other names: it has hard links
    nlookup        references that the kernel holds
    n_open         open handles
    last           its attributes when its last link went and it was not open: that is all that is left of it
    is_told        whether the kernel was told what it is, since that was made void: the answer may still be on its way
    told_until_s   until when the kernel was told to believe its name and attributes; 0: unknown, or not at all
    zone, epoch    where it lies, as of that epoch of the table's; to be asked of that
    """

    __slots__ = (
        "btime_ns", "epoch", "ino", "is_directory", "is_told", "last", "n_open", "name", "nlookup", "nodeid", "others",
        "parent", "source", "told_until_s", "zone",
    )  # fmt: skip

    def __init__(
        self, nodeid: NodeId, source: SourceKey, seen: Attributes, parent: Node | None = None, name: bytes = b""
    ) -> None:
        self.nodeid = nodeid
        self.source = source
        self.ino = seen.ino
        self.btime_ns = seen.btime_ns
        self.is_directory = seen.is_directory()
        self.parent = parent
        self.name = name
        self.others: list[tuple[Node, bytes]] | None = None
        self.nlookup = 0
        self.n_open = 0
        self.last: Attributes | None = None
        self.is_told = False
        self.told_until_s = 0.0
        self.zone = NodeZone.OUTSIDE
        self.epoch = _NEVER

    @property
    def dev(self) -> int:
        """Its device."""
        return self.source[0]

    def is_seen_in(self, seen: Attributes) -> bool:
        """Whether attributes can be this incarnation's: same inode number, born at the same time."""
        return seen.ino == self.ino and seen.btime_ns == self.btime_ns and seen.dev == self.source[0]

    def places(self) -> Iterator[tuple[Node, bytes]]:
        """Where it may be found, the likeliest first."""
        if self.parent is not None:
            yield self.parent, self.name
        yield from self.others or ()


class InodeTable:
    """All nodes, by nodeid and by what they are incarnations of."""

    def __init__(self, source: SourceKey, seen: Attributes, zone_in: Callable[[NodeZone, bytes], NodeZone]) -> None:
        """A table with the root alone. zone_in: where lies what has a name in a directory that lies somewhere"""
        self.root = Node(ROOT, source, seen)
        self._zone_in = zone_in
        self._epoch = 0
        self._device = seen.dev
        self._by_nodeid: dict[int, Node] = {ROOT: self.root}
        self._by_source: dict[SourceKey, Node] = {source: self.root}
        self._n_private = 0
        self.get: Callable[[int], Node | None] = self._by_nodeid.get
        """The node that the kernel means by a nodeid. Asked by each request: a method would take twice as long."""

    def __len__(self) -> int:
        """How many nodes there are."""
        return len(self._by_nodeid) - (ROOT in self._by_nodeid and TOP in self._by_nodeid)

    def __iter__(self) -> Iterator[Node]:
        """All of them, the root too; that may come twice."""
        return iter(self._by_nodeid.values())

    def put_top(self, *, is_shown: bool) -> None:
        """Whether clients know the root by TOP; it is found by ROOT all the same, until `hide_root`."""
        self.root.nodeid = TOP if is_shown else ROOT
        self._by_nodeid[TOP] = self.root

    def hide_root(self) -> None:
        """From now on no node is ROOT."""
        self._by_nodeid.pop(ROOT, None)

    def find(self, source: SourceKey) -> Node | None:
        """The live node of an incarnation."""
        return self._by_source.get(source)

    def learn(self, source: SourceKey, seen: Attributes, parent: Node, name: bytes) -> Node:
        """The node of what was just seen under a name, a new one if need be; not counted yet."""
        node = self._by_source.get(source)
        if node is None:
            node = Node(self._free_nodeid(seen), source, seen, parent, name)
            self._by_nodeid[node.nodeid] = self._by_source[source] = node
        elif node is not self.root:
            self.put(node, parent, name, is_linked=seen.nlink > 1 and not node.is_directory)
        return node

    def put(self, node: Node, parent: Node, name: bytes, *, is_linked: bool) -> None:
        """A node has this name now; is_linked: beside those that it had."""
        if (node.parent is parent and node.name == name) or parent is node:  # a mount of it in itself
            return
        left = [place for place in node.places() if place != (parent, name)] if is_linked else []
        node.others = left[:_MOST_OTHERS] or None
        if node.is_directory and node.parent is not parent:
            self._leave_those_above(node, parent)
        node.parent, node.name = parent, name
        self._settle(node)

    def take_away(self, node: Node, parent: Node, name: bytes) -> None:
        """A node has not this name any more."""
        left = [place for place in node.places() if place != (parent, name)]
        if not left:
            self._lose(node)
            return
        node.parent, node.name = left[0]
        node.others = left[1:] or None
        self._settle(node)

    def move(self, node: Node, old: tuple[Node, bytes], new: tuple[Node, bytes]) -> None:
        """A node has another name instead of one."""
        if not node.is_directory:
            self.take_away(node, *old)
        self.put(node, *new, is_linked=not node.is_directory)

    def _leave_those_above(self, node: Node, parent: Node) -> None:
        """If it lies above its new parent by what is known, that has been moved behind the mount: cut it off there."""
        at = parent
        while at.parent is not None:
            if at.parent is node:
                self._lose(at)
                return
            at = at.parent

    def zone_of(self, node: Node) -> NodeZone:
        """Where a node lies. It costs no more the deeper that is, but for the first time in an epoch."""
        if node.epoch == self._epoch:
            return node.zone
        late = []
        at = node
        while at.epoch != self._epoch and at.parent is not None:
            late.append(at)
            at = at.parent
        at.epoch, zone = self._epoch, at.zone  # the root, or what has no name (any more): it lies where it lay
        for one in reversed(late):
            one.zone = zone = self._zone_in(zone, one.name)
            one.epoch = self._epoch
        return zone

    def _lose(self, node: Node) -> None:
        """It has no name any more, and lies where it lay, with all that is known in it."""
        self.zone_of(node)
        node.parent, node.name, node.others = None, b"", None

    def _settle(self, node: Node) -> None:
        """Its place has changed: if it lies elsewhere now, so does all that is known in it, and a new epoch begins."""
        if node.epoch != self._epoch:
            return  # nor was anything in it asked for in this epoch, which would have asked for this one
        before, node.epoch = node.zone, _NEVER
        if self.zone_of(node) is not before and node.is_directory:
            self._epoch += 1

    def _free_nodeid(self, seen: Attributes) -> NodeId:
        wanted = NodeId(seen.ino)
        if seen.dev == self._device and ROOT < wanted < _PRIVATE and wanted not in self._by_nodeid:
            return wanted
        self._n_private += 1
        return NodeId(_PRIVATE + self._n_private)

    def lacks_its_number(self, node: Node) -> bool:
        """Whether a node has a private number only because the kernel had not yet let go of what had its own before.

        What was deleted, and is not in use, is forgotten at once: the message is on its way.
        """
        ino = node.ino
        if node.nodeid == ino or node.dev != self._device or node.nlookup > 1:
            return False
        before = self._by_nodeid.get(ino)
        return before is None or (before.last is not None and not before.n_open)

    def renumber(self, node: Node) -> None:
        """Give a node its own number after all, if that is free by now; the kernel must not know it yet."""
        ino = NodeId(node.ino)
        if self.lacks_its_number(node) and ino not in self._by_nodeid:
            del self._by_nodeid[node.nodeid]
            node.nodeid = ino
            self._by_nodeid[ino] = node

    def forget(self, node: Node, n: int) -> bool:
        """The kernel lets go of n references; whether the node is gone now."""
        node.nlookup = max(0, node.nlookup - n)
        return self.drop_unused(node)

    def drop_unused(self, node: Node) -> bool:
        """End a node that the kernel does not refer to; whether it was ended."""
        if node.nlookup > 0 or node.n_open > 0 or node is self.root:
            return False
        if self._by_nodeid.pop(node.nodeid, None) is not None and self._by_source.get(node.source) is node:
            del self._by_source[node.source]
        return True

    def detach(self, node: Node, last: Attributes) -> None:
        """Its last link went, and it is not open: a request for it is answered with what it was.

        What gets its inode number, even its handle, from now on is another inode.
        """
        node.last = last.without_links()
        self._lose(node)
        if self._by_source.get(node.source) is node:
            del self._by_source[node.source]
