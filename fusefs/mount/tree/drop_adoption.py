"""What is moved into a drop folder through the mount is an orphan at once (store/tidy_folder.py).

The container is made as the user whose drop folder it is; the rename is the caller's, as any. What can't become an
orphan here is left to a plain rename, and to the reaper.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import NamedTuple

from fusefs.core.errors import TrashdError
from fusefs.core.metadata_cache import Attributes
from fusefs.core.names import Name, RelPath, join
from fusefs.linux.credentials import NO_ID, Capability, ThreadCredentials, are_ours, call_as
from fusefs.linux.fd import Fd, closed_on_error
from fusefs.linux.fuse_caller import Caller, Rights, knows, rights_of
from fusefs.linux.kernel import Kernel
from fusefs.linux.machine_identity import invocation_of
from fusefs.mount.native._core import Node, Tables
from fusefs.mount.tables.daemon_cache import NameIn
from fusefs.mount.tree.mount_state import MountState
from fusefs.mount.tree.trashd_dir import is_below, is_drop_folder
from fusefs.store.layout import TREE
from fusefs.store.tidy_folder import ReadyContainer, finish, make_ready, open_folder_of, record_moved

_PRIVATE = 0o077
_NOBODY = 65_534
_BY_MODE = 1 << Capability.DAC_OVERRIDE | 1 << Capability.DAC_READ_SEARCH


class _NeededCapability(NamedTuple):
    """A capability by which a process that is not the owner's may do something, and whose inode that is."""

    capability: Capability
    uid: int
    gid: int


class _Prepared(NamedTuple):
    """What waits for the rename.

    item   what is to be moved
    owner  the container's user
    owned  closes all else
    """

    ready: ReadyContainer
    item: Fd
    owner: ThreadCredentials
    owned: ExitStack


class DropAdoption:
    """That of one mount. To be used with the tables' lock."""

    def __init__(self, mount: MountState) -> None:
        self._mount, self._lock, self._nodes = mount, mount.lock, mount.nodes
        self.kernel = Kernel()

    def take_in(
        self, old_fd: Fd, old: NameIn, seen: Attributes, new_fd: Fd, new_directory: Node, caller: Caller
    ) -> Fd | None:
        """Make an orphan of what is to be moved to a directory, if that is a drop folder.

        old      its place
        seen     what it is
        Returns  an O_PATH fd of it, the caller's own. None: it is no drop folder, or that can't be; it is where it was,
                 and a plain rename works, or tells why not
        Raises   OSError: nothing was changed
        """
        store = _store_above(self._nodes, new_directory)
        # What lies in a store already, in a drop folder too, has no origin, and may be somebody's work.
        if store is None or store.parent is None or is_below(self._nodes, old[0]):
            return None
        origin = _way(store.parent, *old)
        with self._mount.fd_of(store.parent) as base_fd:
            try:
                prepared = self._lock.call(
                    self._prepare, base_fd, Name(store.name), new_fd, old_fd, Name(old[1]), origin, caller
                )
            except (OSError, TrashdError):
                return None
        is_moved = False
        try:
            with suppress(OSError):  # `finish` looks: a server that started again may say ENOENT of what it did
                self._move(old_fd, old, seen, prepared.ready, new_directory, caller)
                is_moved = True
            with suppress(OSError):  # nobody can tell now: the next recovery completes or undoes it
                is_moved = self._lock.call(call_as, prepared.owner, finish, prepared.ready, prepared.item)
        finally:
            if not is_moved:
                prepared.owned.enter_context(prepared.item)
            self._lock.call(prepared.owned.close)
        return prepared.item if is_moved else None

    def _prepare(
        self, base_fd: Fd, store: Name, drop: Fd, dir_fd: Fd, name: Name, origin: RelPath | None, caller: Caller
    ) -> _Prepared:
        """Raises  OSError, TrashdError; nothing is left behind then"""
        kernel = self.kernel
        with ExitStack() as owned, closed_on_error(kernel.open_beneath(dir_fd, name)) as item:
            folder = open_folder_of(kernel, base_fd, store, drop, owned)
            record = record_moved(folder, dir_fd, item, origin, invocation_of(caller.pid))
            st = kernel.fstat(folder.fd)
            root = os.geteuid() == 0
            owner = ThreadCredentials(st.st_uid if root else 0, st.st_gid if root else 0, umask=_PRIVATE)
            ready = call_as(owner, make_ready, folder, name, record)
            owned.enter_context(ready.held)
            return _Prepared(ready, item, owner, owned.pop_all())

    def _move(
        self, old_fd: Fd, old: NameIn, seen: Attributes, ready: ReadyContainer, drop: Node, caller: Caller
    ) -> None:
        """Rename as the caller, so that the filesystem below judges it now. A user's own mount acts as that user.

        The kernel has judged by the owners and modes that it was sent last. If these were changed behind the mount,
        a rename as root would let a former owner do it. First by the caller's ids alone where all is the caller's own,
        since groups can't matter there. Else, and if that is refused, with what /proc has of the caller's groups and
        capabilities: nothing of that is kept from one request to the next.
        """
        rename = partial(self.kernel.rename, old_fd, old[1], ready.place, TREE)
        if os.geteuid():
            self._lock.call(rename)
            return
        needs = [self._by_mode_of(old_fd), self._by_mode_of(ready.place)]
        needs.append(_NeededCapability(Capability.FOWNER, seen.uid, seen.gid))  # in a sticky directory
        if seen.is_directory():
            needs.append(_NeededCapability(Capability.DAC_OVERRIDE, seen.uid, seen.gid))  # its `..` is written
        uid, gid = _known(caller.uid), _known(caller.gid)
        if all(need.uid == uid for need in needs):
            try:
                self._lock.call(call_as, ThreadCredentials(uid, gid, (), None if uid else 0), rename)
            except PermissionError:
                pass
            else:
                return
        rights = self._lock.call(rights_of, caller)
        capabilities = self._capabilities(caller, rights, needs)
        whole = ThreadCredentials(uid, gid, rights.groups, capabilities)
        if not uid and are_ours(capabilities):
            whole = ThreadCredentials(0, gid)
        try:
            self._lock.call(call_as, whole, rename)
        except PermissionError:
            for node in (old[0], drop):  # they are not what the kernel took them for
                self._mount.cache.metadata.attributes_changed(node.source)
                self._mount.timeouts.renew(node)
            raise

    def _by_mode_of(self, fd: Fd) -> _NeededCapability:
        """For what the mode and ACL of what an fd holds allow."""
        st = self._lock.call(os.stat, fd)
        return _NeededCapability(Capability.DAC_OVERRIDE, st.st_uid, st.st_gid)

    def _capabilities(self, caller: Caller, rights: Rights, needs: Sequence[_NeededCapability]) -> int:
        """Those that the caller acts with, as bits: all, if they are of our user namespace; of another one's those that
        the rename needs, over what that namespace knows."""
        if rights.is_ours or not rights.capabilities:
            return rights.capabilities
        needed = unknown = 0
        for capability, uid, gid in needs:
            bits = _BY_MODE if capability == Capability.DAC_OVERRIDE else 1 << capability
            needed |= bits
            if not self._lock.call(knows, caller, uid, gid):
                unknown |= bits
        return rights.capabilities & needed & ~unknown


def _known(number: int) -> int:
    """An id to act with: that of nobody for one of another user namespace, or none (what the kernel writes back)."""
    return _NOBODY if number == NO_ID else number


def _store_above(nodes: Tables, directory: Node) -> Node | None:
    """The store in which a directory is a user's drop folder, STORE/AREA/FOLDER/drop; None: it is none."""
    if not is_drop_folder(nodes, directory):
        return None
    at: Node | None = directory
    for _ in range(3):
        at = None if at is None else at.parent
    return at


def _way(base: Node, directory: Node, name: bytes) -> RelPath | None:
    """The path of a name relative to a directory above it; None: that is not above it."""
    names, at = [name], directory
    while at is not base:
        if at.parent is None:
            return None
        names.append(at.name)
        at = at.parent
    return join(*reversed(names))
