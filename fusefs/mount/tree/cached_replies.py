"""Requests answered from memory, on the loop's own thread: nothing here asks the backing filesystem.

None everywhere: it is not remembered, and has to be asked.
"""

from __future__ import annotations

from fusefs.core.inode_table import Node, NodeId
from fusefs.mount.tree import trashd_dir
from fusefs.mount.tree.validity import NOTHING, EntryParam
from fusefs.mount.tree.vfs import Vfs
from fusefs.store.layout import is_stores_own


def lookup(vfs: Vfs, parent: int, name: bytes, pid: int) -> EntryParam | None:
    """What a name means to a thread of a client's; one more reference for the kernel."""
    directory = vfs.nodes.get(parent)
    if directory is None or directory.last is not None or pid in vfs.retries:
        return None
    known = remembered(vfs, directory, name)
    if known is not None and known.nodeid:
        vfs.prefetch.asked(directory, vfs.directories.fd_if_open(directory))
        vfs.counted(known)
    return known


def remembered(vfs: Vfs, directory: Node, name: bytes) -> EntryParam | None:
    """What a name means, not counted yet: `counted` or `not_taken` must follow."""
    if is_stores_own(name) or trashd_dir.is_below(vfs.nodes, directory):
        return None
    found = vfs.cache.name(directory, name)
    if found is None:
        return None
    source, left_s = found
    if source is None:
        return EntryParam(NodeId(0), NOTHING, left_s)
    attributes = vfs.cache.attributes(source)
    if attributes is None:
        return None
    seen, also_left_s = attributes
    return EntryParam(vfs.nodes.learn(source, seen, directory, name).nodeid, seen, min(left_s, also_left_s))


def getattr_(vfs: Vfs, nodeid: int) -> EntryParam | None:
    """What a node is."""
    node = vfs.nodes.get(nodeid)
    if node is None or node.last is not None or trashd_dir.is_below(vfs.nodes, node):
        return None
    attributes = vfs.cache.attributes(node.source)
    if attributes is None:
        return None
    node.is_told = True
    return EntryParam(node.nodeid, *attributes)


def readlink(vfs: Vfs, nodeid: int) -> bytes | None:
    """Where a link leads."""
    node = vfs.nodes.get(nodeid)
    return None if node is None else vfs.cache.target(node)
