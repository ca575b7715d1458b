"""The table of nodes: a nodeid means one incarnation of one inode (I7, I9), and where each lies is known."""

import stat
import subprocess
import sys
from collections.abc import Sequence

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fusefs.core.container_states import State
from fusefs.core.metadata_cache import ROOT, Attributes, NodeId, NodeZone, SourceKey
from fusefs.core.names import STORE
from fusefs.mount.native._core import Node, Tables
from fusefs.store.layout import DROP, is_store_name

DEVICE = 8


def seen(ino: int, *, dev: int = DEVICE, mode: int = stat.S_IFREG | 0o644, nlink: int = 1) -> Attributes:
    return Attributes(dev, ino, mode, nlink, 0, 0, 0, 0, 0, 4096, 0, 0, 0, 7)


def source(ino: int, generation: int = 0, dev: int = DEVICE) -> SourceKey:
    return (dev, b"%d:%d" % (ino, generation))


def table() -> Tables:
    return Tables(source(2), seen(2, mode=stat.S_IFDIR | 0o755))


def known(nodes: Tables, ino: int, generation: int = 0, name: bytes = b"a") -> Node:
    """A node that the kernel was told of once."""
    node = nodes.learn(source(ino, generation), seen(ino), nodes.root, name)
    node.nlookup += 1
    return node


def forget(nodes: Tables, node: Node, n: int) -> bool:
    """The kernel releases so many references; whether the node has ended."""
    node.nlookup -= n
    return nodes.drop_unused(node)


def test_nodeid_is_the_inode_number() -> None:
    assert known(table(), 12).nodeid == 12


def test_root_is_one_whatever_its_inode_number() -> None:
    nodes = table()
    assert nodes.root.nodeid == ROOT
    assert nodes.find(source(2)) is nodes.root


_MANY_NODES = """
import os, sys
from fusefs.core.metadata_cache import Attributes
from fusefs.mount.native._core import Tables

def n_bytes():
    with open("/proc/self/statm") as told:
        return int(told.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

seen = Attributes(8, 2, 0o040755, 2, 0, 0, 0, 0, 0, 4096, 0, 0, 0, 7)
nodes = Tables((8, b"root"), seen)
root, before = nodes.root, n_bytes()
for ino in range(1 << 40, (1 << 40) + int(sys.argv[1])):
    nodes.learn((8, b"%020d" % ino), seen._replace(ino=ino, mode=0o100644), root, b"file-%09d.txt" % ino)
print(n_bytes() - before)
"""


def test_a_node_takes_few_bytes() -> None:
    """With its name, its handle and its places in the tables. A million of them is what a listing may leave behind."""
    n = 200_000
    completed = subprocess.run([sys.executable, "-c", _MANY_NODES, str(n)], check=True, capture_output=True, text=True)
    assert int(completed.stdout) / n <= 400


def test_root_is_never_forgotten() -> None:
    nodes = table()
    assert not nodes.drop_unused(nodes.root)
    assert nodes.get(ROOT) is nodes.root


def test_reused_inode_number_gets_another_nodeid_while_the_first_is_known() -> None:
    nodes = table()
    old, new = known(nodes, 12, 0), known(nodes, 12, 1)
    assert old is not new
    assert (old.nodeid, new.nodeid >= 1 << 62) == (12, True)
    forget(nodes, old, 1)
    assert nodes.get(new.nodeid) is new
    assert known(nodes, 12, 2).nodeid == 12


def test_inode_number_of_another_device_is_not_the_nodeid() -> None:
    nodes = table()
    node = nodes.learn(source(12, dev=9), seen(12, dev=9), nodes.root, b"mounted")
    assert node.nodeid >= 1 << 62


def test_file_with_the_inode_number_one_is_not_the_root() -> None:
    assert known(table(), 1).nodeid >= 1 << 62


def names_of(nodes: Tables, node: Node) -> list[bytes]:
    """Take away the names by which a node in the root is found, one after the other."""
    names = []
    while node.parent is nodes.root:
        names.append(node.name)
        nodes.forget_name(node, nodes.root, node.name)
    assert node.parent is None
    return names


def test_hard_links_share_a_node_and_it_is_found_by_either_name() -> None:
    nodes = table()
    node = nodes.learn(source(12), seen(12, nlink=2), nodes.root, b"a")
    assert nodes.learn(source(12), seen(12, nlink=2), nodes.root, b"b") is node
    assert names_of(nodes, node) == [b"b", b"a"]


def test_what_has_one_link_has_one_name() -> None:
    nodes = table()
    node = known(nodes, 12, name=b"a")
    assert known(nodes, 12, name=b"b") is node
    assert names_of(nodes, node) == [b"b"]


def test_names_of_a_file_with_very_many_are_not_all_remembered() -> None:
    nodes = table()
    for number in range(1000):
        node = nodes.learn(source(12), seen(12, nlink=1000), nodes.root, b"%d" % number)
    names = names_of(nodes, node)
    assert names[0] == b"999"
    assert len(names) < 20


def test_detached_node_tells_what_it_was_and_its_number_is_not_given_away() -> None:
    nodes = table()
    node = known(nodes, 12)
    nodes.detach(node, seen(12))
    assert node.final_stat is not None
    assert node.final_stat.nlink == 0
    assert nodes.get(NodeId(12)) is node
    assert known(nodes, 12).nodeid != 12, "the same inode number, even the same handle, is somebody else by now"


class Incarnations(RuleBasedStateMachine):
    """Files come, go and get old numbers again; the kernel looks, opens and forgets as it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes = table()
        self.generation = dict.fromkeys(range(10, 14), 0)
        self.meant: dict[NodeId, tuple[int, int]] = {}

    @rule(ino=st.integers(10, 13), name=st.sampled_from([b"a", b"b"]))
    def look(self, ino: int, name: bytes) -> None:
        node = known(self.nodes, ino, self.generation[ino], name)
        incarnation = (ino, self.generation[ino])
        assert self.meant.setdefault(node.nodeid, incarnation) == incarnation

    @rule(ino=st.integers(10, 13))
    def delete_behind(self, ino: int) -> None:
        self.generation[ino] += 1

    @rule(ino=st.integers(10, 13))
    def delete_through(self, ino: int) -> None:
        node = self.nodes.find(source(ino, self.generation[ino]))
        if node is not None and not node.n_open:
            self.nodes.detach(node, seen(ino))
        self.generation[ino] += 1

    @precondition(lambda self: self.meant)
    @rule(data=st.data(), n_open=st.sampled_from([-1, 1]))
    def open_or_close(self, data: st.DataObject, n_open: int) -> None:
        node = self.nodes.get(data.draw(st.sampled_from(sorted(self.meant))))
        assert node is not None
        node.n_open = max(node.n_open + n_open, 0)
        if self.nodes.drop_unused(node):
            del self.meant[node.nodeid]

    @precondition(lambda self: self.meant)
    @rule(data=st.data(), n=st.integers(1, 3))
    def forget(self, data: st.DataObject, n: int) -> None:
        node = self.nodes.get(data.draw(st.sampled_from(sorted(self.meant))))
        assert node is not None
        if forget(self.nodes, node, min(n, node.nlookup)):
            del self.meant[node.nodeid]

    @invariant()
    def nodes_are_those_that_somebody_knows(self) -> None:
        assert len(self.nodes) == len(self.meant) + 1
        for nodeid in self.meant:
            node = self.nodes.get(nodeid)
            assert node is not None
            assert node.nlookup > 0 or node.n_open > 0


TestIncarnations = Incarnations.TestCase


_DIRECTORY = Attributes(8, 1, stat.S_IFDIR | 0o755, 2, 0, 0, 0, 0, 0, 4096, 0, 0, 0, 7)
_HOLD_TRASH = frozenset([DROP, *(state.value.encode() for state in State)])
_NAMES = st.sampled_from([b"a", b"b", STORE, b".trashd-1000", b".trashdx", DROP, b"orphans"])


def zone_in(above: NodeZone, name: bytes) -> NodeZone:
    """Where lies what has a name in a directory that lies there.

    A store further down counts as well: a volume has one where the highest can't take a directory.
    """
    if above is NodeZone.OUTSIDE:
        return NodeZone.STORE if name.startswith(STORE) and is_store_name(name) else above
    return NodeZone.TRASH if name in _HOLD_TRASH else above


@pytest.mark.parametrize("above", NodeZone)
@pytest.mark.parametrize(
    "name", [*sorted(_HOLD_TRASH), b"a", b".trash", STORE, b".trashd-0", b".trashd-01", b".trashd.x"]
)
def test_the_zone_of_a_name(above: NodeZone, name: bytes) -> None:
    nodes = Tables((8, b"1"), _DIRECTORY)
    parent = nodes.root
    for number, part in enumerate([b"", STORE, STORE + b"/orphans"][above].split(b"/") if above else []):
        parent = learn(nodes, 20 + number, parent, part)
    assert nodes.zone_of(parent) == above
    assert nodes.zone_of(learn(nodes, 9, parent, name)) == zone_in(above, name)


def learn(nodes: Tables, ino: int, parent: Node, name: bytes, *, nlink: int = 2, is_file: bool = False) -> Node:
    mode = stat.S_IFREG if is_file else stat.S_IFDIR
    return nodes.learn((8, b"%d" % ino), _DIRECTORY._replace(ino=ino, mode=mode, nlink=nlink), parent, name)


def chain(nodes: Tables, parent: Node, depth: int, ino: int = 10) -> list[Node]:
    """Directories one in the other."""
    found = [parent]
    for number in range(depth):
        found.append(learn(nodes, ino + number, found[-1], b"d"))
    return found[1:]


def cost(nodes: Tables, several: Sequence[Node]) -> int:
    """Names that are looked at to find where these lie."""
    before = nodes.n_zoned
    for node in several:
        nodes.zone_of(node)
    return nodes.n_zoned - before


def test_where_a_node_lies_is_found_out_once() -> None:
    nodes = Tables((8, b"1"), _DIRECTORY)
    deep = chain(nodes, nodes.root, 20_000)
    assert cost(nodes, deep[::-1]) == len(deep)
    assert cost(nodes, deep) == 0
    learn(nodes, 9, deep[-1], b"new")
    assert cost(nodes, [learn(nodes, 9, deep[-1], b"new")]) == 1


def test_renaming_a_directory_outside_of_stores_makes_nobody_find_out_anew() -> None:
    nodes = Tables((8, b"1"), _DIRECTORY)
    deep = chain(nodes, nodes.root, 1000)
    cost(nodes, deep)
    nodes.move(deep[500], (deep[499], b"d"), (nodes.root, b"top"))
    assert cost(nodes, deep) == 0


def test_removing_a_deep_tree_in_a_store_costs_each_level_the_same() -> None:
    nodes = Tables((8, b"1"), _DIRECTORY)
    deep = chain(nodes, learn(nodes, 6, learn(nodes, 5, nodes.root, STORE), DROP), 1000)
    cost(nodes, deep)
    before = nodes.n_zoned
    for node, parent in zip(deep[:0:-1], deep[-2::-1], strict=True):
        nodes.forget_name(node, parent, b"d")
        nodes.detach(node, _DIRECTORY)
        assert nodes.zone_of(node) == nodes.zone_of(parent) == NodeZone.TRASH
    assert nodes.n_zoned == before


class Moves(RuleBasedStateMachine):
    """Directories and a file with two names are looked up, moved, swapped and removed, through the mount and behind."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes = Tables((8, b"1"), _DIRECTORY)
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
            self.nodes.forget_name(node, node.parent, node.name)
            if is_last:
                self.nodes.detach(node, _DIRECTORY)
                self.known.remove(node)

    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        """Of one alone: of the others it is not known where they lie, until they are asked."""
        node = self.one(data)
        assert self.nodes.zone_of(node) == self.walked(node)

    @rule()
    def ask_all(self) -> None:
        for node in self.known:
            assert self.nodes.zone_of(node) == self.walked(node)

    @invariant()
    def nothing_lies_in_itself(self) -> None:
        for node in self.known:
            assert node.parent is None or not self.is_above(node, node.parent)


TestMoves = Moves.TestCase
