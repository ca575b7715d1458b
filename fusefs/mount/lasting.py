"""For how long the kernel may believe what it is told; and what it is told before that is wrong.

An answer may reach the kernel, or be taken in by it, after that to a later change. For the attributes of files it finds
that out itself: their changes are answered with new ones, or it counts them. A change in a directory is not, nor the
time of change of what gets another name: whoever gets an answer from before it, later, would believe it for as long as
it says. But a notice that the attributes are to be asked for again makes void whatever was asked before the notice. So
there is one before the answer to the first change in a directory of which the kernel was told something lasting; and
what it is told in the second after a change does not last, so that many changes in a row cost one notice. A file is
followed by one when it moves, if the kernel was told of it since the last.

What a set-user-ID program is does not last at all. The kernel runs it as the owner that it was told last; behind the
mount it may have become another's, with other content, who would be that owner then.

Source  fs/fuse/inode.c: fuse_change_attributes and fuse_reverse_inval_inode, by attr_version
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from fusefs.core.inodes import InodeTable, Node, Zone
from fusefs.linux.backing import forget_attributes
from fusefs.mount.known import Known

_SHORT_S = 1.0
"""For attributes of a directory in which something has just changed. And of a file with more names: one of them may be
in an orphan, and be reaped behind the mount."""
_MOMENT_S = 0.01
"""For attributes of a directory whose name is not believed: the kernel asks for them again after each look at a name,
and before each step of a renameat2 that checks permissions."""


class Lasting:
    """What one mount's kernel was told of directories. Touched on any thread."""

    def __init__(self) -> None:
        self._device = -1
        # What either of `lifetimes` and `changed` does first, the other one sees: no lock is needed.
        self._told: set[int] = set()
        self._changed_s: dict[int, float] = {}

    def connect(self, device: int) -> None:
        """Have the session: /dev/fuse, which stays its owner's. Before that nothing lasts."""
        self._device = device

    def lifetimes(self, known: Known) -> tuple[float, float]:
        """For how long the kernel may believe what a name means, and what its attributes are, in the answer that
        goes out now; seconds."""
        _nodeid, attributes, timeout_s, _proof, is_steady, is_fickle = known
        if not is_steady or attributes.gives_rights():
            return timeout_s, 0
        if is_fickle and attributes.is_directory():
            return 0, _MOMENT_S
        if timeout_s > _SHORT_S:
            if attributes.is_directory():
                return timeout_s, timeout_s if self._lasts(known.nodeid) else _SHORT_S
            if attributes.nlink > 1:
                return timeout_s, _SHORT_S
        return timeout_s, timeout_s

    def _lasts(self, nodeid: int) -> bool:
        self._told.add(nodeid)
        changed_s = self._changed_s.get(nodeid)
        if self._device >= 0 and (changed_s is None or time.monotonic() - changed_s >= _SHORT_S):
            return True
        self._told.discard(nodeid)
        return False

    def changed(self, directory: Node) -> None:
        """Something in a directory, or of itself, has changed; the answer to that must not have gone out yet."""
        nodeid = directory.nodeid
        self._changed_s[nodeid] = time.monotonic()
        self.renew_those((nodeid,))

    def moved(self, node: Node) -> None:
        """A node has another name: its time of change is new, and who is above it."""
        if node.is_directory:
            self.changed(node)
        elif node.is_told:
            self.renew(node)

    def renew(self, node: Node) -> None:
        """What was told of any node is void, and what it is told while this is under way."""
        node.is_told = False
        if self._device >= 0:
            forget_attributes(self._device, node.nodeid)

    def renew_all(self) -> None:
        """The same of all directories."""
        self.renew_those(list(self._told))

    def renew_in_trash(self, nodes: InodeTable) -> None:
        """The same of those in which a reaper may have worked behind the mount."""
        known = [(nodeid, nodes.get(nodeid)) for nodeid in list(self._told)]
        self.renew_those([nodeid for nodeid, node in known if node and nodes.zone_of(node) is Zone.TRASH])

    def renew_those(self, nodeids: Iterable[int]) -> None:
        """The same of such of these as are directories of which something lasting was told."""
        for nodeid in nodeids:
            if nodeid in self._told:
                self._told.discard(nodeid)
                forget_attributes(self._device, nodeid)

    def drop(self, node: Node) -> None:
        """A node has ended."""
        self._told.discard(node.nodeid)
        self._changed_s.pop(node.nodeid, None)
