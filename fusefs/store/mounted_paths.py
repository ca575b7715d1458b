"""Finds the backing directory of a directory in a trashd mount, and the mounted view of a backing directory.

All work on a store is done in the backing directory. Only renames that others see are made in the mount, so that the
kernel moves its own dentries. So even a command that is given the backing path of a mounted tree uses the mount.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache

from fusefs.core.errors import NoBacking, NotFound, TrashdError, from_os
from fusefs.core.names import STORE, RelPath
from fusefs.core.printable_names import printable
from fusefs.linux.fd import Fd, close_on_error
from fusefs.linux.kernel import FUSE_MAGIC, Kernel
from fusefs.linux.mountinfo import (
    DAEMON_GONE,
    FilesystemPath,
    Mount,
    find_mount,
    is_inside,
    place_of,
    read_mounts,
    relative_to,
    trashd_views,
)
from fusefs.linux.runtime_directories import MOUNTS_RUNTIME
from fusefs.store.backing_and_mount import (
    DIRECTORY,
    FILE_TO_READ,
    UNREACHABLE_ERRNOS,
    BackingAndMount,
    Scope,
    is_same_directory,
    is_same_in_mount,
    suppress_errno,
)
from fusefs.store.layout import VOLUME, VOLUME_MAX_BYTES, Store, trusted_owners


def open_both_sides(kernel: Kernel, path: bytes, mounts: list[Mount] | None = None) -> BackingAndMount:
    """Open a directory that the user named, on both sides if one of our mounts shows it. Raises  OSError; NoBacking"""
    mounts = read_mounts() if mounts is None else mounts
    return sides_of_fd(kernel, kernel.open_path(path), mounts)


def sides_of_fd(kernel: Kernel, fd: Fd, mounts: list[Mount]) -> BackingAndMount:
    """Add the mounted side, if any, to an open directory; takes ownership of `fd`. Raises  OSError; NoBacking"""
    with ExitStack() as owned:
        owned.enter_context(fd)
        mount = find_mount(kernel, fd, mounts) if any(one.is_trashd() for one in mounts) else None
        if mount is not None:
            real = os.readlink(b"/proc/self/fd/%d" % fd)
            root_and_path = _find_root(kernel, real, mount, mounts)
            if root_and_path is not None:
                root, root_path = root_and_path
                with root:
                    return _open_both(kernel, root, relative_to(real, root_path))
        owned.pop_all()
        return BackingAndMount(fd)


@contextmanager
def shown_in_mount(store: Store) -> Iterator[Store]:
    """Yield a store with the mounted side of its directory, if one of our mounts shows it, for the block only.

    While that side is open, the mount can't be unmounted.
    """
    with ExitStack() as owned:
        with suppress(OSError, TrashdError):
            sides = owned.enter_context(open_both_sides(store.kernel, store.base_path))
            if is_same_directory(store.kernel, sides.fd, store.base.fd):
                store = store._replace(base=store.base._replace(mounted=sides.mounted))
        yield store


def _open_both(kernel: Kernel, root: BackingAndMount, path: bytes) -> BackingAndMount:
    """Open a directory beneath a mount's root on both sides, whatever the mount shows there. Raises  OSError"""
    assert root.mounted is not None
    with close_on_error(kernel.open_beneath(root.fd, path or b".", DIRECTORY)) as fd:
        return BackingAndMount(fd, kernel.open_beneath(root.mounted, path or b".", DIRECTORY))


def _find_root(kernel: Kernel, path: bytes, mount: Mount, mounts: list[Mount]) -> tuple[BackingAndMount, bytes] | None:
    """Open, on both sides, the root of our mount that shows a directory; return the root and its path.

    path     the directory's absolute path, without links; it may be in the mount or in its backing tree
    Raises   NoBacking if the directory is in one of our mounts whose backing tree we can't use or don't trust
    Returns  None if none of our mounts is involved
    """
    if mount.is_trashd():
        try:
            return _open_root(kernel, mount, mounts), mount.point
        except OSError as error:
            is_dead = error.errno in DAEMON_GONE
            raise _no_backing(mount, error.strerror or "", from_os(error, path).hint if is_dead else "") from error
    place = place_of(path, mount)
    for view in trashd_views(mounts, trusted_owners(os.geteuid())):
        if not view.backing.holds(place):
            continue
        # If the mount's daemon is dead, or we may not enter the mount, it can't be used.
        with suppress(OSError, NoBacking):
            rest = relative_to(place.path, view.backing.path)
            root = path[: len(path) - len(rest)].rstrip(b"/") if rest else path
            return _open_root(kernel, view.mount, mounts), root or b"/"
    return None


def find_mounted_scope(
    kernel: Kernel, path: bytes, real: bytes, directory_fd: Fd, mount: Mount, mounts: list[Mount]
) -> Scope | None:
    """Return the scope of a directory that one of our mounts shows.

    Return None if no mount shows it, or if the path is a backing path and the mount can't be used.
    path, real  the path as typed, for errors, and the directory's real path
    directory_fd  the directory to which the path led
    Raises      TrashdError, OSError
    """
    shown = _find_root(kernel, real, mount, mounts)
    if shown is None:
        return None
    root, root_path = shown
    relative = RelPath(relative_to(real, root_path))
    with ExitStack() as owned:
        owned.enter_context(root)
        try:
            sides = owned.enter_context(_open_both(kernel, root, relative))
            assert sides.mounted is not None
            if not is_same_in_mount(kernel.fstat(sides.fd), kernel.fstat(sides.mounted)):
                raise _no_backing(mount, "the mount and its source have different directories at this path")
            st = kernel.fstat(directory_fd)  # all fds in a mount have the same superblock
            if not any(os.path.samestat(st, kernel.fstat(fd)) for fd in (sides.fd, sides.mounted)):
                raise NotFound(path, "the directory has been moved in the meantime")
            on, place = _place_of_root(kernel, root, root_path, mounts)
        except (OSError, NoBacking):
            if mount.is_trashd():
                raise
            return None
        owned.pop_all()
    return Scope(root, root_path, place, relative, sides, on, tuple(mounts))


def _open_root(kernel: Kernel, mount: Mount, mounts: list[Mount]) -> BackingAndMount:
    """Open the root of one of our mounts on both sides. Raises  OSError; NoBacking"""
    if mount.owner not in trusted_owners(os.geteuid()):
        raise _no_backing(mount, f"uid {mount.owner} mounted it")
    with ExitStack() as owned:
        mounted = owned.enter_context(kernel.open_path(mount.point))
        if kernel.statx(mounted).mnt_id != mount.mnt_id:
            raise _no_backing(mount, "another mount covers it")
        try:
            backing = _open_backing(kernel, mount, mounted, mounts)
        except (OSError, NoBacking) as failure:
            if isinstance(failure, OSError) and failure.errno in DAEMON_GONE:
                raise
            # late: not needed if the source's path works
            from fusefs.linux.backing_fd_socket import request_backing_fd, socket_path

            path = socket_path(mount.source)
            if path is None:
                raise
            try:
                backing = request_backing_fd(path, mounted)
            except OSError as error:
                kernel.fstat(mounted)  # if the daemon is dead, this raises an error with the hint to restart it
                raise _no_backing(
                    mount, f"its daemon gives no access to the backing directory ({error.strerror})"
                ) from error
        owned.pop_all()
        return BackingAndMount(backing, mounted)


def _open_backing(kernel: Kernel, mount: Mount, mounted: Fd, mounts: list[Mount]) -> Fd:
    """Open the backing directory by the path of the mount's source. Raises  OSError; NoBacking"""
    with ExitStack() as owned:
        backing = owned.enter_context(kernel.open_path(mount.source))
        if mount.root != b"/":
            backing = owned.enter_context(kernel.open_beneath(backing, mount.root[1:], DIRECTORY))
        found = find_mount(kernel, backing, mounts)
        # In a container, the source's path may lead nowhere, to this very mount, or to another directory.
        is_shown = is_same_in_mount(kernel.fstat(backing), kernel.fstat(mounted))
        if (
            found is None
            or found.is_trashd()
            or not is_shown
            or _volume_text(kernel, backing) != _volume_text(kernel, mounted)
        ):
            raise _no_backing(mount, f"{printable(mount.source)} is a different directory here")
        return Fd(os.dup(backing))


def to_mount_path(path: bytes) -> bytes:
    """Convert a path in the private backing tree of a mount that covers its own source to the path that users know.

    Other paths are returned unchanged. While the mount's daemon is dead, commands use the private path of the store.
    """
    from fusefs.linux.backing_fd_socket import TREE

    home, tree, rest = path.partition(b"/" + TREE)
    if not tree or not is_inside(home, MOUNTS_RUNTIME):
        return path
    return _point_of(home + tree) + rest


@cache
def _point_of(tree: bytes) -> bytes:
    owners = trusted_owners(os.geteuid())
    ours = (mount for mount in read_mounts() if mount.is_trashd() and mount.owner in owners and mount.root == b"/")
    return next((mount.point for mount in ours if mount.source == tree), tree)


def _place_of_root(
    kernel: Kernel, root: BackingAndMount, root_path: bytes, mounts: list[Mount]
) -> tuple[Mount, FilesystemPath]:
    """Return the mount that holds the backing side of a mount's root, and the place of that root there.

    Raises  NotFound if the mount has been replaced
    """
    on = find_mount(kernel, root.fd, mounts)
    if on is not None:
        return on, place_of(os.readlink(b"/proc/self/fd/%d" % root.fd), on)
    assert root.mounted is not None
    mnt_id = kernel.statx(root.mounted).mnt_id
    for view in trashd_views(mounts, trusted_owners(os.geteuid())):
        if view.mount.mnt_id == mnt_id:
            return view.mount, view.backing  # the backing side is in a clone that is mounted nowhere
    raise NotFound(root_path, "the mount has been removed in the meantime")


def _no_backing(mount: Mount, why: str, hint: str = "") -> NoBacking:
    where = printable(mount.point)
    if not hint and mount.root == b"/":
        hint = f"mv DIR {where.rstrip('/')}/.trashd/drop/ trashes a directory through the mount"
    return NoBacking(f"{where} ({why})", hint)


def _volume_text(kernel: Kernel, base: Fd) -> bytes:
    """Read volume.json, which contains the volume's random ID; return b"" if there is no store. Raises  OSError"""
    with suppress_errno(*UNREACHABLE_ERRNOS), kernel.open_beneath(base, STORE + b"/" + VOLUME, FILE_TO_READ) as fd:
        return kernel.read(fd, VOLUME_MAX_BYTES)
    return b""


def refuse_mounted(kernel: Kernel, fd: Fd) -> None:
    """Raise NoBacking if an fd is in one of our mounts, since nothing is reaped through a mount."""
    if kernel.filesystem(fd) == FUSE_MAGIC:
        mount = find_mount(kernel, fd, read_mounts())
        if mount is not None and mount.is_trashd():
            raise _no_backing(mount, "orphans can't be reaped through a mount")
