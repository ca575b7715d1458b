"""For how long the kernel may believe what a name or nodeid means, and what it is told before that becomes wrong.

An answer may reach the kernel, or be taken in by it, after that to a later change. For the attributes of files it finds
that out itself: their changes are answered with new ones, or it counts them. A change in a directory is not, nor the
time of change of what gets another name: an older answer that comes later would be believed for as long as
it says. But a notice that the attributes are to be asked for again makes void whatever was asked before the notice. So
there is one before the answer to the first change in a directory of which the kernel was told something lasting; and
what it is told in the second after a change does not last, so that many changes in a row cost one notice. There is
one, too, if the directory's name was looked up since the last: in a mount of root's the kernel asks what a directory
is before it changes something there, and discards older answers to that question, but not to the other. What moves
is followed by one: a directory always, a file if the kernel was told of it since the last.

What a set-user-ID program is does not last at all. The kernel runs it as the owner that it was told last; behind the
mount it may have become another's, with other content, which would run as that owner then.

Source  fs/fuse/inode.c: fuse_change_attributes and fuse_reverse_inval_inode, by attr_version
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

from fusefs.core.metadata_cache import ROOTS, Attributes, NodeId
from fusefs.linux.fuse_device import forget_attributes
from fusefs.mount.native._core import Node, Tables

NOTHING = Attributes(*[0] * len(Attributes._fields))
"""Of a name that nothing has."""
_SHORT_S = 1.0
"""For attributes of a directory in which something has just changed. And of a file with more names: one of them may be
in an orphan, and be reaped behind the mount."""


class EntryParam(NamedTuple):
    """What a name or a nodeid means now.

    nodeid     0: nothing has this name
    timeout_s  for how long the kernel may believe it; 0: not at all
    is_steady  False: the attributes change without a message, and may not be believed; the name may
    """

    nodeid: NodeId
    attributes: Attributes
    timeout_s: float
    is_steady: bool = True


def shown_number(known: EntryParam) -> int:
    """The inode number that users see: the nodeid, but for the root's."""
    return known.attributes.ino if known.nodeid in ROOTS else known.nodeid


class AttrTimeouts:
    """For how long one mount's kernel believes attributes. To be used with the tables' lock.

    Nothing lasts before the tables have the device: /dev/fuse.
    """

    def __init__(self, nodes: Tables) -> None:
        self._nodes = nodes

    def lifetimes(self, known: EntryParam) -> tuple[float, float]:
        """For how long the kernel may believe what a name means, and what its attributes are, in the reply that is
        sent now; seconds."""
        _nodeid, attributes, timeout_s, is_steady = known
        if not is_steady or attributes.gives_rights():
            return timeout_s, 0
        if timeout_s > _SHORT_S:
            if attributes.is_directory():
                return timeout_s, timeout_s if self._lasts(known.nodeid) else _SHORT_S
            if attributes.nlink > 1:
                return timeout_s, _SHORT_S
        return timeout_s, timeout_s

    def _lasts(self, nodeid: int) -> bool:
        node = self._nodes.get(nodeid)
        if node is None:
            return False
        is_settled = not node.changed_s or time.monotonic() - node.changed_s >= _SHORT_S
        node.is_lasting = self._nodes.device >= 0 and is_settled
        return node.is_lasting

    def changed(self, directory: Node) -> None:
        """Something in a directory, or of itself, has changed; the reply to that must not have been sent yet."""
        directory.changed_s = time.monotonic()
        self.renew_those((directory,))

    def moved(self, node: Node) -> None:
        """A node has another name: its time of change is new, and its parent."""
        if node.is_directory:
            node.changed_s = time.monotonic()
        if node.is_directory or node.is_told:
            self.renew(node)

    def renew(self, node: Node) -> None:
        """What the kernel was sent of any node is void, and what is under way to it."""
        node.is_told, node.is_lasting, node.told_until_s = False, False, 0.0
        if self._nodes.device >= 0:
            forget_attributes(self._nodes.device, node.nodeid)

    def renew_those(self, nodes: Iterable[Node]) -> None:
        """What the kernel was sent of these is void, as far as they are directories whose attributes last."""
        for node in nodes:
            if node.is_lasting or node.is_told:
                self.renew(node)
