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

from fusefs.core.inode_attributes import Attributes
from fusefs.core.names import STORE
from fusefs.core.nodeids import ROOTS, NodeId
from fusefs.linux.casefold import case_folding
from fusefs.linux.fd import Fd
from fusefs.linux.fuse_device import forget_attributes
from fusefs.mount.native._core import Node, Tables
from fusefs.mount.tables.tables_lock import TablesLock
from fusefs.mount.tree.trashd_dir import is_below
from fusefs.store.layout import is_stores_own

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


class NameValidity:
    """Which names must not be remembered.

    The store's names change behind the mount; and where letter case does not matter, one name is many.
    """

    def __init__(self, nodes: Tables, lock: TablesLock) -> None:
        """Begin with nothing known."""
        self._nodes = nodes
        self._lock = lock

    def is_fickle(self, directory: Node, fd: Fd, name: bytes) -> bool:
        """Whether a name must not be remembered. fd: the directory's"""
        return (name.startswith(STORE) and is_stores_own(name)) or self.are_fickle_in(directory, fd)

    def are_fickle_in(self, directory: Node, fd: Fd) -> bool:
        """Whether no name in a directory may be remembered. fd: of it"""
        return is_below(self._nodes, directory) or self._may_fold(directory, fd)

    def may_fold(self, directory: Node, fd: int) -> bool:
        """Whether a name in a directory may have other spellings. fd: of it. Without the lock"""
        with self._lock:
            return self._may_fold(directory, fd)

    def _may_fold(self, directory: Node, fd: int) -> bool:
        known, device = self._lock.submounts.folding, directory.source[0]
        if directory.is_case_sensitive:
            return False
        if device in known:
            directory.is_case_sensitive = not known[device]
            return known[device]
        folds, is_common = self._lock.call(case_folding, fd)
        if folds is not None and is_common:
            known[device] = folds
            if device == self._nodes.root.dev:
                self._nodes.is_case_sensitive = not folds
        directory.is_case_sensitive = folds is False
        return folds is not False


class AttrTimeouts:
    """For how long one mount's kernel believes attributes. To be used with the tables' lock."""

    def __init__(self, nodes: Tables) -> None:
        self._nodes = nodes

    def connect(self, device: int) -> None:
        """Have the session: /dev/fuse, which stays its owner's. Before that nothing lasts."""
        self._nodes.device = device

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
