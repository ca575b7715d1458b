"""Immediately makes orphans of entries that are moved into a drop directory through the mount (store/tidy_folder.py).

The container is created as the user who owns the drop directory. The rename is done as the caller, like any other
rename. If no orphan can be made, the entry is renamed into the drop directory, and the reaper makes it an orphan.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import NamedTuple

from fusefs.core.errors import TrashdError
from fusefs.core.fuse_protocol import CallerIds
from fusefs.core.metadata_cache import Attributes
from fusefs.core.names import Name, RelPath, join_path
from fusefs.linux.credentials import NO_ID, Capability, ThreadCredentials, call_as, include_all_ours
from fusefs.linux.fd import Fd, close_on_error
from fusefs.linux.fuse_caller import Rights, maps_ids, read_rights
from fusefs.linux.kernel import Kernel
from fusefs.linux.machine_identity import invocation_of
from fusefs.mount.native._core import Node, Tables
from fusefs.mount.tables.daemon_cache import NameIn
from fusefs.mount.tree.mount_state import MountState
from fusefs.mount.tree.trashd_dir import is_drop_folder, is_in_store
from fusefs.store.layout import TREE
from fusefs.store.tidy_folder import ReadyContainer, finish_move, make_move_record, make_ready_container, open_folder_of

_PRIVATE = 0o077
_NOBODY = 65_534
_BY_MODE = 1 << Capability.DAC_OVERRIDE | 1 << Capability.DAC_READ_SEARCH


class _NeededCapability(NamedTuple):
    """A capability that is needed to act on another user's inode, and that inode's owner and group."""

    capability: Capability
    uid: int
    gid: int


class _PreparedMove(NamedTuple):
    """A container that is ready for the rename.

    item   an fd of the entry to be moved
    owner  credentials of the user who owns the container
    owned  closes all other fds
    """

    ready: ReadyContainer
    item: Fd
    owner: ThreadCredentials
    owned: ExitStack


class DropAdoption:
    """Adopts entries that are moved into drop directories of one mount. Callers must hold the tables lock."""

    def __init__(self, mount: MountState) -> None:
        self._mount, self._lock, self._nodes = mount, mount.lock, mount.nodes
        self.kernel = Kernel()

    def adopt(
        self, old_fd: Fd, old: NameIn, attributes: Attributes, new_fd: Fd, new_directory: Node, caller: CallerIds
    ) -> Fd | None:
        """Make an orphan of an entry that is to be moved into a directory, if that is a drop directory.

        old         the entry's directory and name
        attributes  of the entry
        Returns     an O_PATH fd of the entry, owned by the caller; None: it is not a drop directory, or no
                    orphan can be made. In both cases, nothing has moved, and the caller must try a plain rename
        Raises      OSError: nothing was changed
        """
        store = _store_above(self._nodes, new_directory)
        # An entry that is already in a store, even in a drop directory, has no original path, and another process may
        # be working on it.
        if store is None or store.parent is None or is_in_store(self._nodes, old[0]):
            return None
        origin = _path_below(store.parent, *old)
        with self._mount.directory_fd(store.parent) as base_fd:
            try:
                prepared = self._lock.call(
                    self._prepare, base_fd, Name(store.name), new_fd, old_fd, Name(old[1]), origin, caller
                )
            except (OSError, TrashdError):
                return None
        is_moved = False
        try:
            with suppress(OSError):  # finish_move checks: a restarted server may report ENOENT for a rename that it did
                self._move(old_fd, old, attributes, prepared.ready, new_directory, caller)
                is_moved = True
            with suppress(OSError):  # the outcome is unknown: the next recovery completes or undoes the move
                is_moved = self._lock.call(call_as, prepared.owner, finish_move, prepared.ready, prepared.item)
        finally:
            if not is_moved:
                prepared.owned.enter_context(prepared.item)
            self._lock.call(prepared.owned.close)
        return prepared.item if is_moved else None

    def _prepare(
        self, base_fd: Fd, store: Name, drop: Fd, dir_fd: Fd, name: Name, origin: RelPath | None, caller: CallerIds
    ) -> _PreparedMove:
        """Create a container for the entry. Raises  OSError, TrashdError: no part of the container remains"""
        kernel = self.kernel
        with ExitStack() as owned, close_on_error(kernel.open_beneath(dir_fd, name)) as item:
            folder = open_folder_of(kernel, base_fd, store, drop, owned)
            record = make_move_record(folder, dir_fd, item, origin, invocation_of(caller.pid))
            st = kernel.fstat(folder.fd)
            root = os.geteuid() == 0
            owner = ThreadCredentials(st.st_uid if root else 0, st.st_gid if root else 0, umask=_PRIVATE)
            ready = call_as(owner, make_ready_container, folder, name, record)
            owned.enter_context(ready.held)
            return _PreparedMove(ready, item, owner, owned.pop_all())

    def _move(
        self, old_fd: Fd, old: NameIn, attributes: Attributes, ready: ReadyContainer, drop: Node, caller: CallerIds
    ) -> None:
        """Rename as the caller, so that the backing filesystem checks permissions. A user's daemon renames as the user.

        The kernel has only checked the owners and modes that it was last sent. If they were changed behind the mount, a
        rename as root would still work for a former owner. If the caller owns all inodes involved, the first try uses
        only the caller's ids, since groups do not matter then. If that is refused, or other owners are involved, the
        caller's groups and capabilities in /proc are used, too. They are not kept for later requests.
        """
        rename = partial(self.kernel.rename, old_fd, old[1], ready.target_fd, TREE)
        if os.geteuid():
            self._lock.call(rename)
            return
        needs = [self._mode_override_of(old_fd), self._mode_override_of(ready.target_fd)]
        needs.append(
            _NeededCapability(Capability.FOWNER, attributes.uid, attributes.gid)
        )  # needed in a sticky directory
        if attributes.is_directory():
            needs.append(
                _NeededCapability(Capability.DAC_OVERRIDE, attributes.uid, attributes.gid)
            )  # the rename changes its `..`
        uid, gid = _mapped_id(caller.uid), _mapped_id(caller.gid)
        if all(need.uid == uid for need in needs):
            try:
                self._lock.call(call_as, ThreadCredentials(uid, gid, (), None if uid else 0), rename)
            except PermissionError:
                pass
            else:
                return
        rights = self._lock.call(read_rights, caller)
        capabilities = self._capabilities(caller, rights, needs)
        whole = ThreadCredentials(uid, gid, rights.groups, capabilities)
        if not uid and include_all_ours(capabilities):
            whole = ThreadCredentials(0, gid)
        try:
            self._lock.call(call_as, whole, rename)
        except PermissionError:
            for node in (old[0], drop):  # the kernel's attributes of these were outdated
                self._mount.cache.metadata.note_attributes_change(node.source)
                self._mount.timeouts.invalidate(node)
            raise

    def _mode_override_of(self, fd: Fd) -> _NeededCapability:
        """Return the capability that overrides the mode and ACL of an open inode, with the inode's owner."""
        st = self._lock.call(os.stat, fd)
        return _NeededCapability(Capability.DAC_OVERRIDE, st.st_uid, st.st_gid)

    def _capabilities(self, caller: CallerIds, rights: Rights, needs: Sequence[_NeededCapability]) -> int:
        """Return the capabilities with which the rename is made, as bits. For a caller in our user namespace, these are
        all of its capabilities. Otherwise, they are those that the rename needs on inodes whose ids are mapped in the
        caller's namespace."""
        if rights.is_in_our_namespace or not rights.capabilities:
            return rights.capabilities
        needed = unknown = 0
        for capability, uid, gid in needs:
            bits = _BY_MODE if capability == Capability.DAC_OVERRIDE else 1 << capability
            needed |= bits
            if not self._lock.call(maps_ids, caller, uid, gid):
                unknown |= bits
        return rights.capabilities & needed & ~unknown


def _mapped_id(number: int) -> int:
    """Return the id to act with: nobody's if this one is not mapped here, or absent (in the kernel's own writeback)."""
    return _NOBODY if number == NO_ID else number


def _store_above(nodes: Tables, directory: Node) -> Node | None:
    """Return the store of a user's drop directory, which is STORE/AREA/FOLDER/drop; None for any other directory."""
    if not is_drop_folder(nodes, directory):
        return None
    at: Node | None = directory
    for _ in range(3):
        at = None if at is None else at.parent
    return at


def _path_below(base: Node, directory: Node, name: bytes) -> RelPath | None:
    """Return the path of a name relative to a directory above it; None if that directory is not above it."""
    names, at = [name], directory
    while at is not base:
        if at.parent is None:
            return None
        names.append(at.name)
        at = at.parent
    return join_path(*reversed(names))
