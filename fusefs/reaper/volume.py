"""One volume as the service opens it: what must be true before anything is claimed there. Blocking: for threads."""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack, suppress
from typing import NamedTuple, Self

from fusefs.core.errors import Busy, NoStore, TrashdError
from fusefs.core.names import Name, printable
from fusefs.core.status import Phase
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import Mount, find_place, read_mounts, views
from fusefs.linux.places import SYSTEM_RUNTIME
from fusefs.reaper.status import read_status
from fusefs.store.discover import mount_points
from fusefs.store.folders import Census, open_user, take_census
from fusefs.store.layout import Store, UserFolder, open_store, trusted_owners
from fusefs.store.mounted import open_shown, refuse_mounted
from fusefs.store.scope import find_mount
from fusefs.store.verbs import own_folder

LOCK = Name(b"reaper.lock")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class Elsewhere(Busy):
    """Another reaper works on this volume"""


class Space(NamedTuple):
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


class Opened(NamedTuple):
    """A volume that is ours to work on for as long as this is open.

    filesystem  its type
    hold        a directory of ours on it, which the probe writes to: the store, or the user's own folder
    lock_fd     None on a volume without room for a lock file: claims alone keep two reapers apart there (I5)
    """

    store: Store
    filesystem: str
    hold: Fd
    lock_fd: Fd | None
    owned: ExitStack

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        """Let go of it, so that it can be unmounted."""
        self.owned.close()

    def users(self) -> Census:
        """Those who have a folder there, as far as they are ours to serve, and what is refused of theirs."""
        return take_census(self.store, os.geteuid() or None)

    def folder(self, uid: int) -> UserFolder | None:
        """A user's folder; None if it is gone."""
        return open_user(self.store, uid)

    def space(self) -> Space:
        """What it has now. Raises  OSError"""
        return space_at(self.store.base_fd)


def space_at(where: int | bytes) -> Space:
    """What the filesystem of an fd or path has now. Raises  OSError"""
    st = os.statvfs(where)
    inodes = (st.f_favail, st.f_files) if st.f_files else (None, None)
    return Space(st.f_bavail * st.f_frsize, st.f_blocks * st.f_frsize, *inodes)


def open_volume(kernel: Kernel, path: bytes) -> Opened:
    """The volume whose store is in a directory, locked.

    Raises  NoStore; Untrusted; NoBacking if only a mount of ours is seen there; Elsewhere; OSError
    """
    mounts = read_mounts()
    with ExitStack() as owned:
        _let_sleep(path, mounts)
        shown = open_shown(kernel, path, mounts)
        store = open_store(kernel, shown.fd, path, shown.mounted)
        if store is None:
            raise NoStore(path)
        owned.enter_context(store)
        refuse_mounted(kernel, store.fd)
        _leave_to_root(store)
        hold = owned.enter_context(_open_hold(kernel, store))
        lock_fd = _lock(kernel, hold, path)
        if lock_fd is not None:
            owned.enter_context(lock_fd)
        mount = find_mount(kernel, store.fd, mounts)
        filesystem = "" if mount is None else printable(mount.fstype)
        return Opened(store, filesystem, hold, lock_fd, owned.pop_all())


def _let_sleep(path: bytes, mounts: list[Mount]) -> None:
    """An automount that rests is not woken by us. Raises  NoStore"""
    top = next((mount for mount in reversed(mounts) if mount.point == path), None)
    if top is not None and top.fstype == b"autofs":
        raise NoStore(path, "its automount rests; name the directory behind it in the configuration")


def _leave_to_root(store: Store) -> None:
    """A user's own service leaves alone what root's serves: two would tell everything twice. Raises  Elsewhere"""
    if os.geteuid() == 0:
        return
    seen = None
    with suppress(TrashdError, OSError):  # of another version: then claims keep the two apart
        seen = read_status(SYSTEM_RUNTIME)
    served = seen.status.volumes if seen is not None and seen.is_running else ()
    if any(one.id == store.volume.id and one.phase not in (Phase.ELSEWHERE, Phase.GONE) for one in served):
        raise Elsewhere(store.base_path)


def _open_hold(kernel: Kernel, store: Store) -> Fd:
    if os.geteuid() == 0:
        return kernel.open_dir(store.fd)
    with own_folder(store) as folder:  # made if missing: what comes into it is to be seen
        return kernel.open_dir(folder.fd)


def _lock(kernel: Kernel, hold: Fd, path: bytes) -> Fd | None:
    """The lock of a volume. Nobody else may open its file: whoever can, can hold it and keep the reaper out."""
    with suppress(FileExistsError):
        try:
            kernel.create(hold, LOCK).close()
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            return None
    fd = kernel.open_beneath(hold, LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not kernel.lock(fd):
        fd.close()
        raise Elsewhere(path)
    return fd


def volume_paths(mounts: list[Mount]) -> list[bytes]:
    """The mount points where there may be a store to serve, each by the path that rules know it by.

    What a mount of ours shows is known by that mount's path, be its daemon dead or hung: by the backing one it would be
    another volume, for which neither its rules nor its pauses hold. Who wants that path served names it.
    """
    shown = {view.backing for view in views(mounts, trusted_owners(os.geteuid()))}
    return [path for path in mount_points(mounts) if find_place(path, mounts) not in shown]


def find_store(kernel: Kernel, path: bytes, mounts: list[Mount]) -> tuple[int, int] | None:
    """What tells the store in a directory from others (its device and inode now); None if there is none for us."""
    try:
        _let_sleep(path, mounts)
        shown = open_shown(kernel, path, mounts)
        store = open_store(kernel, shown.fd, path, shown.mounted)
    except (OSError, TrashdError):
        return None  # `trashd doctor PATH` says why
    if store is None:
        return None
    with store:
        st = kernel.fstat(store.fd)
        return st.st_dev, st.st_ino
