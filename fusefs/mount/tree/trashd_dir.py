"""The directory `.trashd` in the mount, which is hidden from listings and never cached; and the link `.trashd/drop`.

`.trashd/drop` is a symbolic link that exists only in the mount, and leads each user to their own drop directory. So in
a container that sees nothing but the mount, `mv DIR .trashd/drop/` is enough. The nodeid of the link depends on the
user and on the target, so the kernel keeps one inode, with the target, for each pair. It looks up the link at each use,
since no name in this directory is cached.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from contextlib import suppress
from functools import cache
from zlib import crc32

from fusefs.core.errors import NoStore, TrashdError, Untrusted
from fusefs.core.fuse_protocol import CallerIds
from fusefs.core.metadata_cache import ROOTS, Attributes, NodeId, NodeZone
from fusefs.core.names import STORE, Name, RelPath, join_path, user_store_name
from fusefs.linux.credentials import ThreadCredentials, call_as
from fusefs.linux.fd import Fd, close_on_error
from fusefs.linux.kernel import Kernel
from fusefs.linux.statx import stat_at
from fusefs.mount.native._core import Node, Tables
from fusefs.store.backing_and_mount import BackingAndMount
from fusefs.store.layout import DROP, Store, UserFolder, open_own_store, open_store
from fusefs.store.make_folder import make_proven, make_user_folder
from fusefs.store.make_store import make_store, name_for_new
from fusefs.store.registry_lines import makes_root_store
from fusefs.store.user_folders import open_user_folder, register_store

_LINK_NODEIDS = 0x6000_0000_0000_0000
"""The lowest nodeid of a link, above any nodeid in the tables, whose private numbers count up from 1 << 62."""
_UID_BITS, _DIGEST_BITS = 32, 29
_LINK_NODEIDS_END = _LINK_NODEIDS + (1 << _UID_BITS + _DIGEST_BITS)
_PRIVATE = 0o077
_LINK = stat.S_IFLNK | 0o777


def is_in_store(nodes: Tables, node: Node) -> bool:
    """Return whether a node is a store, or is in one, where commands change entries behind the mount."""
    return nodes.zone_of(node) != NodeZone.OUTSIDE


def holds_trash(nodes: Tables, directory: Node) -> bool:
    """Return whether the entries of this directory are in a container or a drop directory, where the reaper deletes
    them behind the mount."""
    return nodes.zone_of(directory) == NodeZone.TRASH


def is_drop_folder(nodes: Tables, directory: Node) -> bool:
    """Return whether a directory is a user's drop directory, in any store."""
    above = directory.parent
    return directory.name == DROP and above is not None and nodes.zone_of(above) == NodeZone.STORE


def hides_stores(directory: Node, *, shows_trash: bool) -> bool:
    """Return whether a listing omits stores, as it does in the root: backups and `rm -rf *` must not find them."""
    return directory.nodeid in ROOTS and not shows_trash


def is_drop_link(directory: Node, name: bytes) -> bool:
    """Return whether a name is the drop link. Creating, renaming or removing such a name fails with EPERM."""
    above = directory.parent
    return name == DROP and directory.name in (STORE, _own_store_name()) and above is not None and above.nodeid in ROOTS


@cache
def _own_store_name() -> Name:
    """Return the name of the daemon's own store. It has drop directories only if root has no store."""
    return user_store_name(os.geteuid())


def drop_link_nodeid(uid: int, target: bytes) -> NodeId:
    """Return the nodeid of a user's drop link to this target. The tables have no node for it, and its references are
    not counted."""
    digest = crc32(target) >> 32 - _DIGEST_BITS
    return NodeId(_LINK_NODEIDS | digest << _UID_BITS | uid)


def drop_link_user(nodeid: int) -> int | None:
    """Return the user whose drop link has this nodeid; None if no link has it."""
    return nodeid & (1 << _UID_BITS) - 1 if _LINK_NODEIDS <= nodeid < _LINK_NODEIDS_END else None


class DropLinks:
    """The drop links of all users. Methods raise nothing but OSError."""

    def __init__(self, kernel: Kernel, root: Fd) -> None:
        """root: the backing tree's directory, owned by the caller"""
        self._kernel = kernel
        self._root = root
        self._make_lock = threading.Lock()
        """Held while a drop directory is created: if two threads created one at the same time, neither would be
        trusted."""

    def stat_link(self, uid: int, caller: CallerIds) -> Attributes:
        """Return the attributes of a user's link. If that user is the caller, create the target if it is missing.

        Raises  OSError ENOENT: no store, or another user's target is missing; or the error from creating the target
        """
        with self._open(uid, caller) as folder:
            folder_stat, target = stat_at(folder.fd), _target(folder)
        return folder_stat._replace(
            ino=drop_link_nodeid(uid, target), mode=_LINK, nlink=1, size=len(target), blocks=0, rdev=0
        )

    def readlink(self, uid: int, caller: CallerIds) -> bytes:
        """Return the link's target, relative to `.trashd`. Raises  OSError as `stat_link` does"""
        with self._open(uid, caller) as folder:
            return _target(folder)

    def _open(self, uid: int, caller: CallerIds) -> UserFolder:
        with self._open_store() as store:
            folder = open_user_folder(store, uid)
            if folder is None:
                if caller.uid != uid:
                    raise _no_entry()
                # The caller's umask is ignored: the folder is private to the user, who must be able to enter it.
                uid_gid = (0, 0) if os.geteuid() else (caller.uid, caller.gid)
                credentials = ThreadCredentials(*uid_gid, umask=_PRIVATE)
                try:
                    with self._make_lock:
                        folder = _make_by_root(store, uid) or call_as(
                            credentials, make_user_folder, store, uid, waits=False
                        )
                except TrashdError as error:
                    raise OSError(error.errno, os.strerror(error.errno)) from error
        return folder

    def _open_store(self) -> Store:
        """Raises  OSError ENOENT: there is no store that we trust"""
        try:
            store = _open_drop_store(self._kernel, self._root, b"")
        except TrashdError as error:
            raise OSError(error.errno, os.strerror(error.errno)) from error
        if store is None:
            raise _no_entry()
        return store


def _make_by_root(store: Store, uid: int) -> UserFolder | None:
    """Create a user's folder as root, so that it is trusted immediately; return None if the user has to create it."""
    if not store.is_ours_as_root():
        return None
    with suppress(OSError, NoStore):
        return make_proven(store, uid)
    return None


def _target(folder: UserFolder) -> RelPath:
    return join_path(folder.area, folder.name, DROP)


def _no_entry() -> OSError:
    return OSError(errno.ENOENT, os.strerror(errno.ENOENT))


def _open_drop_store(kernel: Kernel, root: Fd, path: bytes) -> Store | None:
    """Open the store with a mount's drop directories: root's, or else the daemon's own; None if there is neither.

    Raises  OSError; Untrusted: another user owns the name of root's store, and the daemon has none; BrokenStore
    """
    untrusted: Untrusted | None = None
    for opener in (open_store, open_own_store):
        base = BackingAndMount(kernel.open_beneath(root, b".", os.O_PATH | os.O_DIRECTORY))
        try:
            store = opener(kernel, base, path)
        except Untrusted as error:
            untrusted = error
            continue
        if store is not None:
            return store
    if untrusted is not None and makes_root_store():
        raise untrusted
    return None


def prepare_store(kernel: Kernel, root: Fd, path: bytes) -> TrashdError | OSError | None:
    """Create and register a store before mounting, because clients that see only the mount can't do that.

    root     the backing tree's directory, owned by the caller
    path     for messages
    Returns  an error to be logged; the mount works nevertheless
    """
    flags = os.O_PATH | os.O_DIRECTORY
    try:
        store = _open_drop_store(kernel, root, path)
        if store is None:
            base = BackingAndMount(kernel.open_beneath(root, b".", flags))
            with close_on_error(base):
                name = name_for_new(kernel, base) or STORE
            store = make_store(kernel, base, path, name)
        with store:
            register_store(store.with_maker())  # after the unmount, the service finds the store by this
    except (TrashdError, OSError) as error:
        return error
    return None
