"""Where a node lies, however it came there: the answer of the table is that of a walk up to the root."""

from __future__ import annotations

import stat
from collections.abc import Sequence

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fusefs.core.inode_attributes import Attributes
from fusefs.core.inode_table import InodeTable, Node, NodeZone

_DIRECTORY = Attributes(8, 1, stat.S_IFDIR | 0o755, 2, 0, 0, 0, 0, 0, 4096, 0, 0, 0, 7)
_NAMES = st.sampled_from([b"a", b"b", b"store", b"trash"])


def zone_in(above: NodeZone, name: bytes) -> NodeZone:
    """`store` is a store wherever it is, and `trash` in it holds trash."""
    if name == b"store":
        return above if above is NodeZone.TRASH else NodeZone.STORE
    return NodeZone.TRASH if name == b"trash" and above is not NodeZone.OUTSIDE else above


class Asked:
    """`zone_in`, and how often it was asked."""

    def __init__(self) -> None:
        self.n = 0

    def __call__(self, above: NodeZone, name: bytes) -> NodeZone:
        self.n += 1
        return zone_in(above, name)


def learn(nodes: InodeTable, ino: int, parent: Node, name: bytes, *, nlink: int = 2, is_file: bool = False) -> Node:
    mode = stat.S_IFREG if is_file else stat.S_IFDIR
    return nodes.learn((8, b"%d" % ino), _DIRECTORY._replace(ino=ino, mode=mode, nlink=nlink), parent, name)


def chain(nodes: InodeTable, parent: Node, depth: int, ino: int = 10) -> list[Node]:
    """Directories one in the other."""
    found = [parent]
    for number in range(depth):
        found.append(learn(nodes, ino + number, found[-1], b"d"))
    return found[1:]


def cost(nodes: InodeTable, asked: Asked, several: Sequence[Node]) -> int:
    before = asked.n
    for node in several:
        nodes.zone_of(node)
    return asked.n - before


def test_where_a_node_lies_is_found_out_once() -> None:
    nodes = InodeTable((8, b"1"), _DIRECTORY, asked := Asked())
    deep = chain(nodes, nodes.root, 20_000)
    assert cost(nodes, asked, deep[::-1]) == len(deep)
    assert cost(nodes, asked, deep) == 0
    learn(nodes, 9, deep[-1], b"new")
    assert cost(nodes, asked, [learn(nodes, 9, deep[-1], b"new")]) == 1


def test_renaming_a_directory_outside_of_stores_makes_nobody_find_out_anew() -> None:
    nodes = InodeTable((8, b"1"), _DIRECTORY, asked := Asked())
    deep = chain(nodes, nodes.root, 1000)
    cost(nodes, asked, deep)
    nodes.move(deep[500], (deep[499], b"d"), (nodes.root, b"top"))
    assert cost(nodes, asked, deep) == 0


def test_all_in_a_directory_that_is_dropped_or_taken_back_follows_it() -> None:
    nodes = InodeTable((8, b"1"), _DIRECTORY, zone_in)
    store = learn(nodes, 5, nodes.root, b"store")
    trash = learn(nodes, 6, store, b"trash")
    deep = chain(nodes, nodes.root, 1000)
    assert nodes.zone_of(deep[-1]) is NodeZone.OUTSIDE
    nodes.move(deep[0], (nodes.root, b"d"), (trash, b"x"))
    assert nodes.zone_of(deep[-1]) is NodeZone.TRASH
    nodes.move(deep[0], (trash, b"x"), (nodes.root, b"d"))
    assert nodes.zone_of(deep[-1]) is NodeZone.OUTSIDE


def test_removing_a_deep_tree_in_a_store_costs_each_level_the_same() -> None:
    nodes = InodeTable((8, b"1"), _DIRECTORY, asked := Asked())
    deep = chain(nodes, learn(nodes, 6, learn(nodes, 5, nodes.root, b"store"), b"trash"), 1000)
    cost(nodes, asked, deep)
    before = asked.n
    for node, parent in zip(deep[:0:-1], deep[-2::-1], strict=True):
        nodes.take_away(node, parent, b"d")
        nodes.detach(node, _DIRECTORY)
        assert nodes.zone_of(node) is nodes.zone_of(parent) is NodeZone.TRASH
    assert asked.n == before


class Moves(RuleBasedStateMachine):
    """Directories and a file with two names are looked up, moved, swapped and removed, through the mount and behind."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes = InodeTable((8, b"1"), _DIRECTORY, zone_in)
        self.known = [self.nodes.root]
        self.was: dict[Node, NodeZone] = {}

    def walked(self, node: Node) -> NodeZone:
        """By all that are above it."""
        if node.parent is None:
            return self.was.get(node, NodeZone.OUTSIDE)
        return zone_in(self.walked(node.parent), node.name)

    def note(self) -> None:
        """What loses its name in the next step lies where it lay."""
        self.was.update({node: self.walked(node) for node in self.known})

    def one(self, data: st.DataObject) -> Node:
        return data.draw(st.sampled_from(self.known))

    def is_above(self, node: Node, other: Node) -> bool:
        at: Node | None = other
        while at is not None and at is not node:
            at = at.parent
        return at is node

    @rule(data=st.data(), name=_NAMES, ino=st.integers(10, 18), is_file=st.booleans())
    def look(self, data: st.DataObject, name: bytes, ino: int, is_file: bool) -> None:
        """What is found may have been moved there behind the mount."""
        parent = self.one(data)
        if parent.is_directory:
            self.note()
            is_file &= ino > 15
            node = learn(self.nodes, ino + 10 * is_file, parent, name, is_file=is_file)
            if node not in self.known:
                self.known.append(node)

    @rule(data=st.data(), name=_NAMES)
    def rename(self, data: st.DataObject, name: bytes) -> None:
        node, to = self.one(data), self.one(data)
        if node.parent is not None and to.is_directory and not self.is_above(node, to):
            self.note()
            self.nodes.move(node, (node.parent, node.name), (to, name))

    @rule(data=st.data())
    def exchange(self, data: st.DataObject) -> None:
        a, b = self.one(data), self.one(data)
        if a.parent is None or b.parent is None or self.is_above(a, b) or self.is_above(b, a):
            return
        self.note()
        old, new = (a.parent, a.name), (b.parent, b.name)
        self.nodes.move(b, new, old)
        self.nodes.move(a, old, new)

    @rule(data=st.data(), is_last=st.booleans())
    def remove(self, data: st.DataObject, is_last: bool) -> None:
        node = self.one(data)
        if node.parent is not None:
            self.note()
            self.nodes.take_away(node, node.parent, node.name)
            if is_last:
                self.nodes.detach(node, _DIRECTORY)
                self.known.remove(node)

    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        """Of one alone: of the others it is not known where they lie, until they are asked."""
        node = self.one(data)
        assert self.nodes.zone_of(node) is self.walked(node)

    @rule()
    def ask_all(self) -> None:
        for node in self.known:
            assert self.nodes.zone_of(node) is self.walked(node)

    @invariant()
    def nothing_lies_in_itself(self) -> None:
        for node in self.known:
            assert node.parent is None or not self.is_above(node, node.parent)


TestMoves = Moves.TestCase
