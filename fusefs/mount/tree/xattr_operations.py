"""Extended attributes, and ACLs, which are such: by nodeid, on the backing filesystem."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass

from fusefs.core.common_xattrs import ACLS, CAPABILITY, LABEL, NAMES, UNSUPPORTED, is_asked_of_all
from fusefs.core.inode_attributes import Attributes
from fusefs.linux.capabilities import Capability
from fusefs.linux.fuse_caller import Caller, is_capable
from fusefs.linux.statx import look_at
from fusefs.linux.thread_credentials import ITSELF, NO_ID, call_as
from fusefs.linux.xattrs import get_at, get_of, is_selinux_enabled
from fusefs.mount.native._core import Node, Tables
from fusefs.mount.tables.daemon_cache import CacheFill, DaemonCache
from fusefs.mount.tables.directory_fds import DirectoryFds
from fusefs.mount.tables.prefetch import Prefetch
from fusefs.mount.tables.prefetch_xattrs import PrefetchXattrs
from fusefs.mount.tables.tables_lock import TablesLock
from fusefs.mount.tree import setid_bits, trashd_dir
from fusefs.mount.tree.act_as import AsCaller, NeededCapability, by_mode, by_owner_alone, identity_to_read_as
from fusefs.mount.tree.node_access import NodeAccess
from fusefs.mount.tree.validity import AttrTimeouts

_TRUSTED, _USERS = b"trusted.", b"user."
_ACL = b"system.posix_acl_"


@dataclass(eq=False, repr=False)
class XattrOperations:
    """The extended attributes of a mount. All methods raise OSError only.

    SELinux labels are not among them: with SELinux the kernel gives one label to all of a mount and asks no daemon;
    without it `ls -l` asks for each entry's, unless it is told once that there are none.

    are_shown    if not, the kernel is told at its first question that there are none, and asks no more
    are_for_all  the filesystem below tells every user the same; else each is asked for as the caller,
                 and what that user is told is remembered for that user alone
    is_shared    names may change behind the mount at any time
    """

    _lock: TablesLock
    _nodes: Tables
    _cache: DaemonCache
    _directories: DirectoryFds
    _prefetch: Prefetch
    _wanted: PrefetchXattrs
    _timeouts: AttrTimeouts
    _access: NodeAccess
    _: KW_ONLY
    are_shown: bool
    are_for_all: bool
    is_shared: bool

    def __post_init__(self) -> None:
        self._are_ours = self.are_for_all or os.geteuid() != 0
        """Whether the daemon is told what any caller would be: a user's own does all as that user, and asks so, too."""
        self._hides_labels = not is_selinux_enabled()

    @property
    def are_told_alike(self) -> bool:
        """Whether there are any, and each user is told the same."""
        return self.are_shown and self.are_for_all

    def get(self, nodeid: int, name: bytes, caller: Caller) -> bytes:
        """The value of one."""
        return value_of(self.find(nodeid, name, caller))

    def find(self, nodeid: int, name: bytes, caller: Caller) -> bytes | int:
        """The value of one, or an errno where there is none: `ls -l` asks for each file's ACL, and exceptions are slow.

        Raises  OSError
        """
        self._require(name)
        node = self._access.node(nodeid)
        uid = self._told_as(caller)
        with self._cache.looking() as look:
            answer = self._ask(node, name, caller, uid)
            self._learn(look, node, name, answer, uid)
        if answer in UNSUPPORTED:
            self._note_refusal(node, name)
            return errno.EOPNOTSUPP  # the other one would mean all that there are
        return answer

    def _told_as(self, caller: Caller) -> int:
        """The uid that a value is asked for and remembered as: 0, the daemon's, for every user, or the caller's own."""
        return 0 if self._are_ours else caller.uid

    def _ask(self, node: Node, name: bytes, caller: Caller, uid: int) -> bytes | int:
        answer = None if uid else self._find_by_name(node, name)
        if answer is None:
            who = identity_to_read_as(self._lock, caller) if uid else ITSELF
            with self._access.hold(node) as fd:
                answer = self._lock.call(call_as, who, get_of, fd, name)
        self._keep_from_kernel(node, name)
        return answer

    def _learn(self, look: CacheFill, node: Node, name: bytes, answer: bytes | int, uid: int) -> None:
        if not trashd_dir.is_below(self._nodes, node):
            look.learn_xattrs(node.source, {name: answer}, uid)
            if isinstance(answer, bytes) or answer == errno.ENODATA:
                self._ask_on(node, name, uid)

    def _keep_from_kernel(self, node: Node, name: bytes) -> None:
        """An ACL that not every user is told: the kernel would tell the next one, unless it hears meanwhile that it has
        changed."""
        if not self.are_for_all and name in ACLS:
            self._timeouts.renew(node)

    def _note_refusal(self, node: Node, name: bytes) -> None:
        with suppress(OSError), self._access.hold(node) as fd:
            self._wanted.answered(self._lock.call(look_at, fd), [(name, errno.EOPNOTSUPP)])

    def _find_by_name(self, node: Node, name: bytes) -> bytes | int | None:
        """The value of one by the node's name in its directory, in a third of the calls; None: that is not certain."""
        directory, n_changes = node.parent, self._nodes.n_changes
        if directory is None or node.n_open or self.is_shared:
            return None
        dir_fd, own_name = self._directories.fd_of(directory), node.name
        value = self._lock.call(get_at, dir_fd, own_name, name)
        try:
            is_it = node.is_seen_in(self._lock.look(look_at, dir_fd, own_name))
        except OSError:
            return None  # moved behind the mount
        return value if is_it and not directory.has_changed(n_changes) else None

    def recall(self, nodeid: int, name: bytes, caller: Caller) -> bytes | int | None:
        """The value of one, or an errno, from memory; None: not known."""
        if not self.are_shown or not self._shows(name):
            return None
        node = self._nodes.get(nodeid)
        if node is None:
            return None
        if self._wanted.refuses(node.dev, name, is_directory=node.is_directory):
            return errno.EOPNOTSUPP
        if not is_asked_of_all(name):
            return None
        uid = self._told_as(caller)
        answer = self._cache.xattr(node, name, uid)
        if answer is not None or self._wanted.has(name, is_directory=node.is_directory):
            self._ask_on(node, name, uid)
        if answer is not None:
            self._keep_from_kernel(node, name)
        return answer

    def _ask_on(self, node: Node, name: bytes, uid: int) -> None:
        """Have one fetched with those of what is listed beside it, which is asked for next, as the daemon is told."""
        if self._lock.is_slow and self._cache.is_kept and not uid:
            fd = None if node.parent is None else self._nodes.directory_fd(node.parent)
            self._prefetch.asked_xattr(name, node, fd)

    def recall_names(self, nodeid: int, caller: Caller) -> list[bytes] | None:
        """Their names from memory; None: look."""
        listed = self.recall(nodeid, NAMES, caller)
        return None if listed is None else self._seen_by(caller, value_of(listed))

    def names(self, nodeid: int, caller: Caller) -> list[bytes]:
        """Their names; trusted ones for callers that may see them."""
        return self._seen_by(caller, self.get(nodeid, NAMES, caller))

    def _seen_by(self, caller: Caller, listed: bytes) -> list[bytes]:
        names = listed.split(b"\0")[:-1]
        shown = [name for name in names if self._shows(name)]
        if any(name.startswith(_TRUSTED) for name in shown) and not is_capable(caller, Capability.SYS_ADMIN):
            return [name for name in shown if not name.startswith(_TRUSTED)]
        return shown

    def set(self, nodeid: int, name: bytes, value: bytes, caller: Caller, flags: int = 0) -> None:
        """Set one, or an ACL: by a caller that is not in the file's group, that takes its set-group-ID bit.

        flags  of setxattr(2)
        """
        self._require(name)
        node = self._access.node(nodeid)
        with self._cache.changes(node.source), self._access.hold(node) as fd:
            seen = self._lock.call(look_at, fd)
            gid = setid_bits.group_for(seen, caller) if name.startswith(_ACL) else None
            self._acting(node, seen, name, caller, gid).call(os.setxattr, fd.path(), name, value, flags)
        self._timeouts.renew(node)  # an ACL is part of the mode
        self._wanted.supported(name, is_directory=node.is_directory)

    def remove(self, nodeid: int, name: bytes, caller: Caller) -> None:
        """Remove one."""
        self._require(name)
        node = self._access.node(nodeid)
        with self._cache.changes(node.source), self._access.hold(node) as fd:
            if name == CAPABILITY:  # asked for by the kernel, before a write, or by a caller with the capability
                self._lock.call(os.removexattr, fd.path(), name)
            else:
                self._acting(node, self._lock.call(look_at, fd), name, caller).call(os.removexattr, fd.path(), name)
        self._timeouts.renew(node)

    def _acting(self, node: Node, seen: Attributes, name: bytes, caller: Caller, gid: int | None = None) -> AsCaller:
        """The credentials to change one with. Source  xattr(7); capabilities(7)"""
        if name.startswith(_USERS):
            needs = [by_mode(seen), by_owner_alone(seen)]  # of a sticky directory
        elif name.startswith(_ACL):
            needs = [by_owner_alone(seen)]
        elif name == CAPABILITY:
            needs = [NeededCapability(Capability.SETFCAP, seen.uid, seen.gid)]
        else:  # by which no other user namespace counts
            needs = [NeededCapability(Capability.SYS_ADMIN, NO_ID, None)]
        return self._access.as_caller(caller, needs, (node,), gid=gid)

    def _require(self, name: bytes) -> None:
        if not self.are_shown:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        if not self._shows(name):
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    def _shows(self, name: bytes) -> bool:
        return name != LABEL or not self._hides_labels


def value_of(answer: bytes | int) -> bytes:
    """What was answered. Raises  OSError: an errno was"""
    if isinstance(answer, int):
        raise OSError(answer, os.strerror(answer))
    return answer
