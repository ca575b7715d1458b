"""One volume as the service opens it: what must be true before anything is claimed there. Blocking: for threads."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from typing import NamedTuple, Self

from fusefs.core.errors import Busy, NoStore, NotPermitted, TrashdError
from fusefs.core.printable_names import printable, shell_word
from fusefs.core.service_status import VolumePhase, VolumeStatus
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.mount_claims import is_claimed
from fusefs.linux.mountinfo import Mount, MountView, find_mount, find_place, read_mounts, views
from fusefs.linux.runtime_directories import SYSTEM_RUNTIME
from fusefs.service.node_files import HeldBeat, hold_beat
from fusefs.service.open_own_store import open_base, open_folder, open_vouched, seen_by_all, take_own_census
from fusefs.service.status_file import served_volumes
from fusefs.store.discover import mount_points
from fusefs.store.layout import REAPER_LOCK, Store, UserFolder, open_store, trusted_owners
from fusefs.store.make_folder import look_first
from fusefs.store.mounted_paths import open_shown, refuse_mounted
from fusefs.store.registry_lines import RegistryLine
from fusefs.store.registry_targets import LineOf
from fusefs.store.root_squash import refuse_squashed
from fusefs.store.store_maker import way_out
from fusefs.store.store_registry import is_remembered
from fusefs.store.swap_path import own_folder
from fusefs.store.tidy_folder import look_over
from fusefs.store.user_folders import NOT_MADE, FolderCensus, open_user, take_census

_LET_GO = (VolumePhase.ELSEWHERE, VolumePhase.GONE)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class Elsewhere(Busy):
    """Another reaper works on this volume"""


class Unproven(NotPermitted):
    """Nobody vouches for this store, so nothing of it is reaped"""


class VolumeSpace(NamedTuple):
    """What a volume has, and what of it ordinary users may take; no total of inodes where they are not counted."""

    free_bytes: int
    total_bytes: int
    free_inodes: int | None
    total_inodes: int | None

    def free_share(self) -> float | None:
        """Of the blocks, 0 to 1."""
        return self.free_bytes / self.total_bytes if self.total_bytes else None

    def free_inode_share(self) -> float | None:
        """Of the inodes, 0 to 1; None where they are not counted."""
        if not self.total_inodes or self.free_inodes is None:
            return None
        return self.free_inodes / self.total_inodes


class OpenVolume(NamedTuple):
    """A volume that is ours to work on for as long as this is open.

    filesystem  its type
    hold        a directory of ours on it, which the probe writes to: the store, or the user's own folder
    lock_fd     None on a volume without room for a lock file: claims alone keep two reapers apart there (I5)
    beat        where several machines may have the filesystem mounted: ours, which is the lock of this machine there
    own         what its owner vouches for, of a user's own store that root's service works on: there root makes
                nothing, neither a lock nor what a probe writes, and takes nothing over
    told_path   so much of such a store's path as every user may see
    """

    store: Store
    filesystem: str
    hold: Fd
    lock_fd: Fd | None
    owned: ExitStack
    own: LineOf | None = None
    told_path: bytes = b""
    beat: HeldBeat | None = None

    def is_shared(self) -> bool:
        """Whether other machines may have it mounted: what they do no inotify tells."""
        return not self.store.kernel.is_local(self.store.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        """Let go of it, so that it can be unmounted."""
        self.owned.close()

    def users(self) -> FolderCensus:
        """Those who have a folder there, as far as they are ours to serve, and what is refused of theirs."""
        if self.own is not None:
            return take_own_census(self.store, self.own.uid)
        if self.store.is_roots_to_keep():
            look_first(self.store)
        return take_census(self.store, os.geteuid() or None)

    def folder(self, uid: int) -> UserFolder | None:
        """A user's folder; None if it is gone."""
        return open_user(self.store, uid) if self.own is None else open_folder(self.store, uid)

    def space(self) -> VolumeSpace:
        """What it has now. Raises  OSError"""
        return space_at(self.store.base.fd)


def space_at(where: int | bytes) -> VolumeSpace:
    """What the filesystem of an fd or path has now. Raises  OSError"""
    st = os.statvfs(where)
    inodes = (st.f_favail, st.f_files) if st.f_files else (None, None)
    return VolumeSpace(st.f_bavail * st.f_frsize, st.f_blocks * st.f_frsize, *inodes)


def open_volume(kernel: Kernel, path: bytes) -> OpenVolume:
    """The volume whose store is in a directory, locked.

    Raises  NoStore; Untrusted; NoBacking if only a mount of ours is seen there; Elsewhere; RootSquashed; OSError
    """
    mounts = read_mounts()
    with ExitStack() as owned:
        _let_sleep(path, mounts)
        shown = open_shown(kernel, path, mounts)
        store = open_store(kernel, shown, path)
        if store is None:
            raise NoStore(path)
        owned.enter_context(store)
        refuse_mounted(kernel, store.fd)
        _leave_to_root(store)
        refuse_squashed(store)
        _refuse_unproven(store)
        look_over(store)
        hold = owned.enter_context(_open_hold(kernel, store))
        beat = lock_fd = None
        if kernel.is_local(store.fd):
            lock_fd = _lock(kernel, hold, path)
            if lock_fd is not None:
                owned.enter_context(lock_fd)
        else:
            beat = _beat(kernel, hold, path, owned)
        mount = find_mount(kernel, store.fd, mounts)
        return OpenVolume(store, _type_of(mount), hold, lock_fd, owned.pop_all(), beat=beat)


def open_own(kernel: Kernel, wanted: LineOf) -> OpenVolume:
    """A user's own store as root's service works on it, without a lock.

    Raises  NoStore; Untrusted; OSError
    """
    mounts = read_mounts()
    with ExitStack() as owned:
        store = owned.enter_context(open_vouched(kernel, open_base(kernel, wanted, mounts), wanted))
        hold = owned.enter_context(kernel.open_dir(store.fd))
        told, filesystem = seen_by_all(store.base.fd, wanted), _type_of(find_mount(kernel, store.fd, mounts))
        return OpenVolume(store, filesystem, hold, None, owned.pop_all(), wanted, told)


def own_space(kernel: Kernel, wanted: LineOf) -> VolumeSpace:
    """What the filesystem of a user's own store has now. Raises  NoStore; OSError"""
    with open_base(kernel, wanted, read_mounts()) as base:
        return space_at(base)


def _type_of(mount: Mount | None) -> str:
    return "" if mount is None else printable(mount.fstype)


def _let_sleep(path: bytes, mounts: list[Mount]) -> None:
    """An automount that rests is not woken by us. Raises  NoStore"""
    top = next((mount for mount in reversed(mounts) if mount.point == path), None)
    if top is not None and top.fstype == b"autofs":
        raise NoStore(path, "its automount rests; name the directory behind it in the configuration")


def _leave_to_root(store: Store) -> None:
    """A user's own service leaves alone what root's serves: two would tell everything twice. Raises  Elsewhere"""
    if os.geteuid() == 0:
        return
    served: tuple[VolumeStatus, ...] = ()
    with suppress(TrashdError, OSError):  # of another version: then claims keep the two apart
        served = served_volumes(SYSTEM_RUNTIME)
    # An id is no secret: another user's own store may have the same.
    ours = (one for one in served if one.id == store.volume.id and (one.owner or 0) == store.owner)
    if any(one.phase not in _LET_GO for one in ours):
        raise Elsewhere(store.base_path)


def _refuse_unproven(store: Store) -> None:
    """A user's own store may be a copy or a backup, unless that user's registry names it; root's, another user's work.

    Raises  Unproven
    """
    if store.is_roots_to_keep() and store.is_unknown():
        raise Unproven(f"{printable(store.base_path)}: {NOT_MADE}", way_out(store.base_path))
    if store.owner == os.geteuid() != 0 and not is_remembered(store):
        raise Unproven(store.base_path, f"if it is no copy: trashd init {shell_word(store.base_path)}")


def _open_hold(kernel: Kernel, store: Store) -> Fd:
    if os.geteuid() == 0:
        return kernel.open_dir(store.fd)
    with own_folder(store) as folder:  # made if missing: what comes into it is to be seen
        return kernel.open_dir(folder.fd)


def _lock(kernel: Kernel, hold: Fd, path: bytes) -> Fd | None:
    """The lock of a volume. No other user may open its file: who can, can hold it and keep the reaper out."""
    with suppress(FileExistsError):
        try:
            kernel.create(hold, REAPER_LOCK).close()
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            return None
    fd = kernel.open_beneath(hold, REAPER_LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not kernel.lock(fd):
        fd.close()
        raise Elsewhere(path)
    return fd


def _beat(kernel: Kernel, hold: Fd, path: bytes, owned: ExitStack) -> HeldBeat | None:
    """Our beat, locked: other machines have their own. None without room for one. Raises  Elsewhere; OSError"""
    try:
        beat = hold_beat(kernel, hold)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        return None
    if beat is None:
        raise Elsewhere(path)
    return owned.enter_context(beat)


def all_views(mounts: list[Mount], earlier: Iterable[MountView]) -> list[MountView]:
    """What mounts of ours show, the latest first; and what one showed that is to stand there again in a moment.

    `trashd mount --replace` detaches the dead mount before the new one stands. What it shows is no other volume
    meanwhile, and has no other rules: the mount point is its daemon's all the time.
    earlier  what this returned the last time
    """
    now = views(mounts, trusted_owners(os.geteuid()))
    points = {view.mount.point for view in now}
    return now + [view for view in earlier if view.mount.point not in points and is_claimed(view.mount.point)]


def volume_paths(mounts: list[Mount], seen: Iterable[MountView]) -> list[bytes]:
    """The mount points where there may be a store to serve, each by the path that rules know it by.

    What a mount of ours shows is known by that mount's path, be its daemon dead or hung: by the backing one it would be
    another volume, for which neither its rules nor its pauses hold. To have that path served, name it.
    """
    shown = {view.backing for view in seen}
    return [path for path in mount_points(mounts) if find_place(path, mounts) not in shown]


def registered_paths(lines: Iterable[RegistryLine], mounts: list[Mount], seen: Iterable[MountView]) -> list[bytes]:
    """Where our own registry says that there is a store to serve: as above not within what a mount of ours shows."""
    shown = [view.backing for view in seen]
    places = ((line.path, find_place(line.path, mounts)) for line in lines)
    return [path for path, place in places if place is not None and not any(one.holds(place) for one in shown)]


def find_store(kernel: Kernel, path: bytes, mounts: list[Mount]) -> tuple[int, int] | None:
    """What tells the store in a directory from others (its device and inode now); None if there is none for us."""
    try:
        _let_sleep(path, mounts)
        shown = open_shown(kernel, path, mounts)
        store = open_store(kernel, shown, path)
    except (OSError, TrashdError):
        return None  # `trashd doctor PATH` says why
    if store is None:
        return None
    with store:
        st = kernel.fstat(store.fd)
        return st.st_dev, st.st_ino
