"""Extended attributes, and ACLs, which are such: by nodeid, on the backing filesystem."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress

from fusefs.core.inodes import Node
from fusefs.linux import selinux
from fusefs.linux.attributes import look_at
from fusefs.linux.caller import Caller, written_by
from fusefs.linux.capabilities import Capability
from fusefs.linux.fd import Fd
from fusefs.linux.xattrs import get_at
from fusefs.mount import privileges
from fusefs.mount.acting import as_caller
from fusefs.mount.reserved import NOBODY
from fusefs.mount.vfs import Vfs

_LABEL = b"security.selinux"
_TRUSTED, _USERS = b"trusted.", b"user."
_ACL = b"system.posix_acl_"
_MODES_ACL = b"system.posix_acl_access"
_N_REFUSED_MAX = 16
_FILE_CAPABILITY = b"security.capability"
_LISTED = (_MODES_ACL, b"system.posix_acl_default", _FILE_CAPABILITY)
"""Who has them lists them. Others may be there unlisted: ceph.dir.rbytes, system.cifs_acl, user.mergerfs.branches."""


class Xattrs:
    """The extended attributes of a mount. All methods raise OSError only.

    SELinux labels are not among them: with SELinux the kernel gives one label to all of a mount and asks nobody;
    without it `ls -l` asks for each entry's, unless it is told once that there are none.
    """

    def __init__(self, vfs: Vfs, *, are_shown: bool) -> None:
        """are_shown: if not, the kernel is told at its first question that there are none, and asks no more."""
        self._vfs = vfs
        self._are_shown = are_shown
        self._refused: set[tuple[bytes, bool]] = set()  # names, of directories or of files
        self._hides_labels = not selinux.is_enabled()

    def get(self, nodeid: int, name: bytes) -> bytes:
        """The value of one."""
        value = self.find(nodeid, name)
        if isinstance(value, int):
            raise OSError(value, os.strerror(value))
        return value

    def find(self, nodeid: int, name: bytes) -> bytes | int:
        """The same, or an errno where there is none: `ls -l` asks for each file's ACL, and an exception takes as long.

        Raises  OSError
        """
        self._require(name)
        node = self._vfs.node(nodeid)
        value = self._find_by_name(node, name)
        if value is None:
            with self._vfs.hold(node) as fd:
                value = self._vfs.gate.call(_get, fd, name)
        if value == errno.EOPNOTSUPP:
            self._note_refusal(node, name)
        return value

    def _note_refusal(self, node: Node, name: bytes) -> None:
        """What this filesystem has not at all, it need not be asked for again: `ls -l` asks for each file's."""
        with suppress(OSError), self._vfs.hold(node) as fd:
            mode = self._vfs.gate.call(look_at, fd).mode
            if node.dev == self._vfs.nodes.root.dev and (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                if len(self._refused) == _N_REFUSED_MAX:
                    self._refused.clear()
                self._refused.add((name, node.is_directory))
                if name in _LISTED:
                    self._vfs.ahead.has_no_xattrs()

    def _find_by_name(self, node: Node, name: bytes) -> bytes | int | None:
        """The same by the name in its directory, in a third of the calls; None: that is not certain."""
        if node.parent is None or node.n_open or self._vfs.is_shared:
            return None
        dir_fd, own_name = self._vfs.directories.fd_of(node.parent), node.name
        value = self._vfs.gate.call(get_at, dir_fd, own_name, name)
        try:
            is_it = node.is_seen_in(self._vfs.gate.look(look_at, dir_fd, own_name))
        except OSError:
            return None  # moved behind the mount
        return value if is_it else None

    def recall(self, nodeid: int, name: bytes) -> bytes | None:
        """None: look. Raises  OSError EOPNOTSUPP, ENODATA: it is remembered not to be there"""
        node = self._vfs.nodes.get(nodeid)
        if node is None or not self._are_shown:
            return None
        if (name, node.is_directory) in self._refused and node.dev == self._vfs.nodes.root.dev:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        if name in _LISTED and (names := self._recalled(node)) is not None and name not in names:
            raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))
        return None

    def _recalled(self, node: Node) -> Sequence[bytes] | None:
        """Their names from memory; None: they are fetched now, with those of what is listed beside it."""
        names, directory = self._vfs.memory.xattrs(node), node.parent
        fd = self._vfs.directories.fd_if_open(directory) if names is None and directory is not None else None
        self._vfs.ahead.asked_xattr(directory, fd)
        return names

    def recall_names(self, nodeid: int, caller: Caller) -> list[bytes] | None:
        """Their names from memory; None: look."""
        node = self._vfs.nodes.get(nodeid)
        if node is None or not self._are_shown:
            return None
        names = self._recalled(node)
        return None if names is None else self._seen_by(caller, names)

    def names(self, nodeid: int, caller: Caller) -> list[bytes]:
        """Their names; trusted ones are root's to see."""
        self._require(b"")
        with self._vfs.hold(self._vfs.node(nodeid)) as fd:
            names = [os.fsencode(name) for name in self._vfs.gate.call(os.listxattr, _path(fd))]
        return self._seen_by(caller, names)

    def _seen_by(self, caller: Caller, names: Iterable[bytes]) -> list[bytes]:
        return [name for name in names if self._shows(name) and (caller.uid == 0 or not name.startswith(_TRUSTED))]

    def set(self, nodeid: int, name: bytes, value: bytes, caller: Caller) -> None:
        """Set one, or an ACL: by whoever is not in the file's group, that takes its set-group-ID bit."""
        self._require(name)
        vfs, node = self._vfs, self._vfs.node(nodeid)
        with vfs.memory.changes(node.source), vfs.hold(node) as fd:

            def set_() -> None:
                vfs.gate.call(os.setxattr, _path(fd), name, value)

            def set_as_root() -> None:
                with written_by(0 if writer == NOBODY else writer):  # who owns it not may not change its ACL
                    set_()

            gid = privileges.group_for(vfs, fd, caller) if name.startswith(_ACL) else None
            writer = vfs.passthrough.writer_of(node, fd)
            as_caller(vfs, node, fd, caller, _needed(name), set_, gid=gid, as_root=set_as_root)
        self._vfs.lasting.renew(node)  # an ACL is part of the mode
        self._refused.discard((name, node.is_directory))

    def remove(self, nodeid: int, name: bytes, caller: Caller) -> None:
        """Remove one."""
        self._require(name)
        vfs, node = self._vfs, self._vfs.node(nodeid)
        with vfs.memory.changes(node.source), vfs.hold(node) as fd:

            def remove() -> None:
                vfs.gate.call(os.removexattr, _path(fd), name)

            if name == _FILE_CAPABILITY:  # asked for by the kernel, before a write, or by who has the capability
                remove()
            else:
                as_caller(vfs, node, fd, caller, _needed(name), remove)
        vfs.lasting.renew(node)

    def _require(self, name: bytes) -> None:
        if not self._are_shown:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        if not self._shows(name):
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    def _shows(self, name: bytes) -> bool:
        return name != _LABEL or not self._hides_labels


def _needed(name: bytes) -> Capability:
    """The capability by which anybody may set or remove one. Source  xattr(7); capabilities(7)"""
    if name.startswith(_USERS):
        return Capability.DAC_OVERRIDE
    if name.startswith(_ACL):
        return Capability.FOWNER
    return Capability.SETFCAP if name == _FILE_CAPABILITY else Capability.SYS_ADMIN


def _get(fd: Fd, name: bytes) -> bytes | int:
    try:
        return os.getxattr(_path(fd), name)
    except OSError as error:
        return error.errno or errno.EIO


def _path(fd: Fd) -> bytes:
    return b"/proc/self/fd/%d" % fd
