"""Entry and attribute timeouts: how long the kernel may cache names and attributes, and what invalidates them early.

The kernel may process a reply after the reply to a later change. For the attributes of files, it detects this itself:
replies to changes bring new attributes, or the kernel counts the changes. It does not detect this for a change in a
directory, or for the ctime of an inode that gets another name. There, an older reply that arrives late would be cached
until its timeout. But a notification that invalidates attributes also voids every reply to a request sent before it.

So the daemon sends a notification before it replies to the first change in a directory whose attributes have a long
timeout. In the second after a change, it sends attributes with a short timeout, so that many changes in a row cost one
notification. A directory that was looked up since its last notification gets one, too. In root's mounts, the kernel
sends GETATTR for a directory before it changes something there; it discards older replies to GETATTR, but not to
LOOKUP. After a rename, a directory always gets a notification, and a file gets one if its attributes were sent since
its last one.

The attributes of a set-user-ID program are never cached. The kernel runs the program as the owner that it was last
sent. So if the file got a new owner and new content behind the mount, that content would run as the former owner.

Source  fs/fuse/inode.c: fuse_change_attributes and fuse_reverse_inval_inode, by attr_version
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

from fusefs.core.metadata_cache import ROOTS, Attributes, NodeId
from fusefs.linux.fuse_device import forget_attributes
from fusefs.mount.native._core import Node, Tables

NO_ATTRIBUTES = Attributes(*[0] * len(Attributes._fields))
"""The attributes in a negative entry."""
_SHORT_S = 1.0
"""Attribute timeout of a directory in which something has just changed, and of a file with several names. One of these
names may be in an orphan, where the reaper may delete it behind the mount."""


class EntryParam(NamedTuple):
    """The current state of a name or nodeid, like libfuse's fuse_entry_param.

    nodeid     0: no such name
    timeout_s  how long the kernel may cache this state; 0: not at all
    is_steady  False: the attributes may change without a request, so that only the name may be cached
    """

    nodeid: NodeId
    attributes: Attributes
    timeout_s: float
    is_steady: bool = True


def shown_number(entry: EntryParam) -> int:
    """Return the inode number that users see: the nodeid, except for the root."""
    return entry.attributes.ino if entry.nodeid in ROOTS else entry.nodeid


class AttrTimeouts:
    """The attribute timeouts of one mount. Callers must hold the tables lock.

    Directories get no long timeout until the tables have been given the device, /dev/fuse.
    """

    def __init__(self, nodes: Tables) -> None:
        self._nodes = nodes

    def timeouts_of(self, entry: EntryParam) -> tuple[float, float]:
        """Return the entry timeout and the attribute timeout for a reply that is sent now, in seconds."""
        _nodeid, attributes, timeout_s, is_steady = entry
        if not is_steady or attributes.gives_rights():
            return timeout_s, 0
        if timeout_s > _SHORT_S:
            if attributes.is_directory():
                return timeout_s, timeout_s if self._has_long_timeout(entry.nodeid) else _SHORT_S
            if attributes.nlink > 1:
                return timeout_s, _SHORT_S
        return timeout_s, timeout_s

    def _has_long_timeout(self, nodeid: int) -> bool:
        node = self._nodes.get(nodeid)
        if node is None:
            return False
        is_settled = not node.changed_s or time.monotonic() - node.changed_s >= _SHORT_S
        node.has_long_timeout = self._nodes.device >= 0 and is_settled
        return node.has_long_timeout

    def note_change(self, directory: Node) -> None:
        """Record a change in a directory, or of its attributes. Must be called before the reply to that change."""
        directory.changed_s = time.monotonic()
        self.invalidate_sent((directory,))

    def note_move(self, node: Node) -> None:
        """Record that a node was renamed: it has a new ctime and perhaps another parent."""
        if node.is_directory:
            node.changed_s = time.monotonic()
        if node.is_directory or node.was_sent:
            self.invalidate(node)

    def invalidate(self, node: Node) -> None:
        """Invalidate a node's attributes that the kernel was sent, even in replies that have not reached it yet."""
        node.was_sent, node.has_long_timeout, node.cached_until_s = False, False, 0.0
        if self._nodes.device >= 0:
            forget_attributes(self._nodes.device, node.nodeid)

    def invalidate_sent(self, nodes: Iterable[Node]) -> None:
        """Invalidate those of the nodes whose attributes the kernel was sent since their last invalidation."""
        for node in nodes:
            if node.has_long_timeout or node.was_sent:
                self.invalidate(node)
