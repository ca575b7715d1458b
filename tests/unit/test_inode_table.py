"""The table of nodes: a nodeid means one incarnation of one inode as long as it is known (I7, I9)."""

from __future__ import annotations

import stat
import tracemalloc

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fusefs.core.inode_attributes import Attributes
from fusefs.core.inode_table import ROOT, InodeTable, Node, NodeId, SourceKey

DEVICE = 8


def seen(ino: int, *, dev: int = DEVICE, mode: int = stat.S_IFREG | 0o644, nlink: int = 1) -> Attributes:
    return Attributes(dev, ino, mode, nlink, 0, 0, 0, 0, 0, 4096, 0, 0, 0, 7)


def source(ino: int, generation: int = 0, dev: int = DEVICE) -> SourceKey:
    return (dev, b"%d:%d" % (ino, generation))


def table() -> InodeTable:
    return InodeTable(source(2), seen(2, mode=stat.S_IFDIR | 0o755), lambda above, _name: above)


def known(nodes: InodeTable, ino: int, generation: int = 0, name: bytes = b"a") -> Node:
    """A node that the kernel was told of once."""
    node = nodes.learn(source(ino, generation), seen(ino), nodes.root, name)
    node.nlookup += 1
    return node


def test_nodeid_is_the_inode_number() -> None:
    assert known(table(), 12).nodeid == 12


def test_root_is_one_whatever_its_inode_number() -> None:
    nodes = table()
    assert nodes.root.nodeid == ROOT
    assert nodes.find(source(2)) is nodes.root


def test_a_node_is_seen_in_attributes_of_its_own_incarnation_alone() -> None:
    node = known(table(), 12)
    assert node.is_seen_in(seen(12, mode=stat.S_IFREG | 0o600, nlink=3))
    assert not node.is_seen_in(seen(13))
    assert not node.is_seen_in(seen(12, dev=DEVICE + 1))
    assert not node.is_seen_in(seen(12)._replace(btime_ns=8))


def bytes_of_a_node() -> float:
    """With its name, its handle and its places in the tables."""
    names = [b"file-%06d.txt" % number for number in range(10_000)]
    tracemalloc.start()
    try:
        nodes, n_before = table(), tracemalloc.get_traced_memory()[0]
        for ino, name in enumerate(names, 1 << 40):
            nodes.learn(
                (DEVICE, b"%020d" % ino), seen(ino)._replace(btime_ns=ino << 10), nodes.root, bytes(bytearray(name))
            )
        n_bytes = tracemalloc.get_traced_memory()[0] - n_before
    finally:
        tracemalloc.stop()
    return n_bytes / len(names)


def test_a_node_takes_few_bytes() -> None:
    """A million of them is what a listing may leave behind. Other threads allocate too, now and then: several tries."""
    assert any(bytes_of_a_node() <= 450 for _ in range(3))


def test_forget_to_zero_drops_the_node() -> None:
    nodes = table()
    node = known(nodes, 12)
    assert nodes.forget(node, 1)
    assert nodes.get(node.nodeid) is None
    assert nodes.find(source(12)) is None


def test_forget_of_less_than_all_keeps_it() -> None:
    nodes = table()
    node = known(nodes, 12)
    node.nlookup += 2
    assert not nodes.forget(node, 2)
    assert nodes.get(node.nodeid) is node


def test_open_handle_keeps_a_node_that_the_kernel_forgot() -> None:
    nodes = table()
    node = known(nodes, 12)
    node.n_open = 1
    assert not nodes.forget(node, 1)
    assert nodes.get(node.nodeid) is node


def test_root_is_never_forgotten() -> None:
    nodes = table()
    assert not nodes.forget(nodes.root, 5)
    assert nodes.get(ROOT) is nodes.root


def test_reused_inode_number_gets_another_nodeid_while_the_first_is_known() -> None:
    nodes = table()
    old, new = known(nodes, 12, 0), known(nodes, 12, 1)
    assert old is not new
    assert (old.nodeid, new.nodeid >= 1 << 62) == (12, True)
    nodes.forget(old, 1)
    assert nodes.get(new.nodeid) is new
    assert known(nodes, 12, 2).nodeid == 12


def test_inode_number_of_another_device_is_not_the_nodeid() -> None:
    nodes = table()
    node = nodes.learn(source(12, dev=9), seen(12, dev=9), nodes.root, b"mounted")
    assert node.nodeid >= 1 << 62


def test_file_with_the_inode_number_one_is_not_the_root() -> None:
    assert known(table(), 1).nodeid >= 1 << 62


def test_hard_links_share_a_node_and_it_is_found_by_either_name() -> None:
    nodes = table()
    node = nodes.learn(source(12), seen(12, nlink=2), nodes.root, b"a")
    assert nodes.learn(source(12), seen(12, nlink=2), nodes.root, b"b") is node
    assert list(node.places()) == [(nodes.root, b"b"), (nodes.root, b"a")]
    nodes.take_away(node, nodes.root, b"b")
    assert list(node.places()) == [(nodes.root, b"a")]
    nodes.take_away(node, nodes.root, b"a")
    assert list(node.places()) == []


def test_what_has_one_link_has_one_name() -> None:
    nodes = table()
    node = known(nodes, 12, name=b"a")
    assert known(nodes, 12, name=b"b") is node
    assert list(node.places()) == [(nodes.root, b"b")]


def test_names_of_a_file_with_very_many_are_not_all_remembered() -> None:
    nodes = table()
    for number in range(1000):
        node = nodes.learn(source(12), seen(12, nlink=1000), nodes.root, b"%d" % number)
    assert next(node.places()) == (nodes.root, b"999")
    assert len(list(node.places())) < 20


def test_detached_node_tells_what_it_was_and_its_number_is_not_given_away() -> None:
    nodes = table()
    node = known(nodes, 12)
    nodes.detach(node, seen(12))
    assert node.last is not None
    assert node.last.nlink == 0
    assert nodes.get(NodeId(12)) is node
    assert known(nodes, 12).nodeid != 12, "the same inode number, even the same handle, is somebody else by now"


def test_a_directory_is_never_seen_to_lie_in_itself() -> None:
    """What was moved behind the mount: `mv a/b b; mv a b/a`. A walk up must come to an end."""
    nodes = table()
    directory = stat.S_IFDIR | 0o755
    a = nodes.learn(source(12), seen(12, mode=directory), nodes.root, b"a")
    b = nodes.learn(source(13), seen(13, mode=directory), a, b"b")
    nodes.learn(source(12), seen(12, mode=directory), b, b"a")
    assert (a.parent, b.parent) == (b, None)
    nodes.learn(source(13), seen(13, mode=directory), nodes.root, b"b")
    assert (a.parent, b.parent) == (b, nodes.root)
    nodes.learn(source(13), seen(13, mode=directory), b, b"mounted in itself")
    assert b.parent is nodes.root


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
        if self.nodes.forget(node, min(n, node.nlookup)):
            del self.meant[node.nodeid]

    @invariant()
    def nodes_are_those_that_somebody_knows(self) -> None:
        assert len(self.nodes) == len(self.meant) + 1
        for nodeid in self.meant:
            node = self.nodes.get(nodeid)
            assert node is not None
            assert node.nlookup > 0 or node.n_open > 0


TestIncarnations = Incarnations.TestCase
