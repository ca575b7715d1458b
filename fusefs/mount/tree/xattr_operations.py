"""Extended attributes, including ACLs. The native core handles the requests (native/xattr_operations.c).

This module caches the values of a slow filesystem. When a client reads an attribute of one file, the module prefetches
that attribute for all files in the same listing.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress

from fusefs.core import fuse_protocol as wire
from fusefs.core.fuse_protocol import Opcode, Request
from fusefs.core.metadata_cache import ACLS, LABEL, NAMES, UNSUPPORTED, is_cached_xattr
from fusefs.linux.credentials import Capability
from fusefs.linux.fuse_caller import is_capable
from fusefs.linux.statx import stat_at
from fusefs.linux.xattrs import is_selinux_enabled
from fusefs.mount.native._core import Node
from fusefs.mount.tables.daemon_cache import CacheFill
from fusefs.mount.tree.mount_state import MountState
from fusefs.mount.tree.trashd_dir import is_in_store

_TRUSTED = b"trusted."
_ROOM = 1 << 16


class XattrOperations:
    """The extended attributes of a mount. Methods raise nothing but OSError.

    If the mount does not show them, the kernel's first request fails with ENOSYS, and the kernel sends no more. If the
    backing filesystem does not show the same attributes to all users, each one is read as the caller, and cached only
    for that user.
    """

    def __init__(self, mount: MountState) -> None:
        self._mount, self._lock, self._nodes, self._cache = mount, mount.lock, mount.nodes, mount.cache
        self._prefetched = mount.prefetch.xattrs
        self._are_shown = mount.options.has_xattrs
        self._are_same_for_daemon = mount.has_common_xattrs or os.geteuid() != 0
        """Whether the daemon reads the same values as any caller. A user's own daemon does, since it always acts as
        that user."""
        self._hides_labels = not is_selinux_enabled()

    def answer(self, request: Request) -> bytes:
        _size, opcode, _unique, nodeid, *_caller = wire.read_head(request)
        node = self._nodes.get(nodeid)
        if node is None or not self._lock.is_slow or not self._are_shown:
            return self._mount.do(request)
        if opcode in (Opcode.GETXATTR, Opcode.LISTXATTR):
            name = _name_in(request)
            return (
                _reply_body(self._read_value(request, node, name), request)
                if self._shows(name)
                else self._mount.do(request)
            )
        self._mount.do(request)
        if opcode == Opcode.SETXATTR:
            name = bytes(request[wire.REQUEST_HEAD_SIZE + wire.SETXATTR_IN.size :]).partition(b"\0")[0]
            self._prefetched.note_supported(name, is_directory=node.is_directory)
        return b""

    def _shows(self, name: bytes) -> bool:
        return name != LABEL or not self._hides_labels

    def _read_value(self, request: Request, node: Node, name: bytes) -> bytes | int:
        """Read and cache the value of an attribute. Returns  the value, or an errno"""
        caller = wire.read_caller(request)
        uid = self._cache_uid(caller)
        with self._cache.fill_if_slow() as fill:
            answer = self._read_from_core(node, name, caller if uid else wire.CallerIds(0, 0, os.getpid()))
            self._cache_value(fill, node, name, answer, uid)
        if answer in UNSUPPORTED:
            self._note_refusal(node, name)
        return self._visible_names(answer, name, caller)

    def _cache_uid(self, caller: wire.CallerIds) -> int:
        """Return the uid for which a value is read and cached: 0, if the daemon reads it for all users; or the
        caller's."""
        return 0 if self._are_same_for_daemon else caller.uid

    def _read_from_core(self, node: Node, name: bytes, caller: wire.CallerIds) -> bytes | int:
        opcode = Opcode.LISTXATTR if name == NAMES else Opcode.GETXATTR
        own = wire.GETXATTR_IN.pack(_ROOM) + (b"" if name == NAMES else name + b"\0")
        try:
            return self._mount.do(wire.encode_request(opcode, node.nodeid, (caller.uid, caller.gid, caller.pid), own))
        except OSError as error:
            return error.errno or errno.EIO

    def _cache_value(self, fill: CacheFill | None, node: Node, name: bytes, answer: bytes | int, uid: int) -> None:
        if fill is not None and not is_in_store(self._nodes, node):
            fill.learn_xattrs(node.source, {name: answer}, uid)
            if isinstance(answer, bytes) or answer == errno.ENODATA:
                self._prefetch_beside(node, name, uid)

    def _note_refusal(self, node: Node, name: bytes) -> None:
        with suppress(OSError), self._mount.core.open_node(node) as fd:
            self._prefetched.note_answers(self._lock.call(stat_at, fd), [(name, errno.EOPNOTSUPP)])

    def answer_from_cache(self, request: Request) -> bytes | None:
        """Return the body of the reply from the cache; None if the value is not cached."""
        opcode, nodeid, caller = wire.read_head(request)[1], wire.read_head(request)[3], wire.read_caller(request)
        if not self._are_shown or opcode not in (Opcode.GETXATTR, Opcode.LISTXATTR):
            return None
        name = _name_in(request)
        if not self._shows(name):
            return None
        node = self._nodes.get(nodeid)
        if node is None:
            return None
        if self._prefetched.is_unsupported(node.dev, name, is_directory=node.is_directory):
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        if not is_cached_xattr(name):
            return None
        uid = self._cache_uid(caller)
        answer = self._cache.find_xattr(node, name, uid)
        if answer is not None or self._prefetched.has(name, is_directory=node.is_directory):
            self._prefetch_beside(node, name, uid)
        if answer is None:
            return None
        if not self._mount.has_common_xattrs and name in ACLS:
            self._mount.timeouts.invalidate(node)  # otherwise the kernel would cache it for the next user, too
        return _reply_body(self._visible_names(answer, name, caller), request)

    def _prefetch_beside(self, node: Node, name: bytes, uid: int) -> None:
        """Prefetch an attribute for the entries listed with this node: a client will probably read it from them next.
        Do this only for values that the daemon reads for all users."""
        if self._lock.is_slow and self._cache.is_enabled and not uid:
            fd = None if node.parent is None else self._nodes.directory_fd(node.parent)
            self._mount.prefetch.note_getxattr(name, node, fd)

    def _visible_names(self, answer: bytes | int, name: bytes, caller: wire.CallerIds) -> bytes | int:
        """Remove from a list of names those that the caller must not see."""
        if name != NAMES or isinstance(answer, int):
            return answer
        names = [one for one in answer.split(b"\0")[:-1] if self._shows(one)]
        if any(one.startswith(_TRUSTED) for one in names) and not is_capable(caller, Capability.SYS_ADMIN):
            names = [one for one in names if not one.startswith(_TRUSTED)]
        return b"".join(one + b"\0" for one in names)


def _name_in(request: Request) -> bytes:
    return NAMES if wire.read_head(request)[1] == Opcode.LISTXATTR else wire.read_strings(request, wire.GETXATTR_IN)[0]


def _reply_body(answer: bytes | int, request: Request) -> bytes:
    """Return the reply's body: the value, or its size if the client requests that. Raises  OSError: there is no value;
    ERANGE"""
    (room,) = wire.GETXATTR_IN.unpack_from(request, wire.REQUEST_HEAD_SIZE)
    if isinstance(answer, int) or (room and len(answer) > room):
        number = answer if isinstance(answer, int) else errno.ERANGE
        raise OSError(number, os.strerror(number))
    return answer if room else wire.GETXATTR_OUT.pack(len(answer))
