"""From a path that a person typed to a directory in which something is done, opened on both sides."""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack
from typing import NamedTuple, Self

from fusefs.core.errors import IsStore, NoStore, NotADirectory, NotFound, Refused, from_os
from fusefs.core.names import Name, RelPath
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import Mount, Place, below, place_below, place_of, read_mounts
from fusefs.store.layout import is_stores_own
from fusefs.store.sides import DIRECTORY, Sides


class Scope(NamedTuple):
    """A directory whose entries something is done to, opened; on the backing filesystem, if a mount of ours shows it.

    root        the highest directory of its mount that we reach, or what a mount of ours shows; nothing below it is
                opened by path
    root_path   that directory's path, for people
    root_place  where it is in its filesystem
    relative    the directory itself, relative to `root`; empty if it is that directory
    sides       the directory itself
    mount       what it is on
    mounts      all that we saw when it was opened
    """

    root: Sides
    root_path: bytes
    root_place: Place
    relative: RelPath
    sides: Sides
    mount: Mount
    mounts: tuple[Mount, ...]

    def __enter__(self) -> Self:
        """Own its fds for the block."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Close them."""
        with self.root, self.sides:
            pass

    def path(self) -> bytes:
        """Its path, links resolved."""
        return os.path.join(self.root_path, self.relative) if self.relative else self.root_path

    def place(self) -> Place:
        """Where it is in its filesystem, whatever namespace one looks from."""
        return place_below(self.root_place, self.relative)


def find_scope(kernel: Kernel, path: bytes) -> Scope:
    """The directory at a path; links in its parents are followed, as a person expects, its own name is not.

    Raises  NotADirectory if it is a link or no directory; Refused for `/`; IsStore if it lies in a trash store;
            NotFound, NoStore, or what the kernel said
    """
    directory, name = split_typed(path)
    try:
        with kernel.open_long(directory) as above, _open_named(above, name, path) as wanted:
            scope = scope_of(kernel, wanted, os.path.join(directory, name))
    except OSError as error:
        raise from_os(error, path) from error
    if any(is_stores_own(one) for one in scope.place().path.split(b"/")):
        with scope:
            raise IsStore(scope.path())
    return scope


def _open_named(above: Fd, name: Name, path: bytes) -> Fd:
    """A directory by its name in another one: what is mounted there, if anything is."""
    try:
        return Fd(os.open(name, DIRECTORY | os.O_CLOEXEC, dir_fd=above))
    except NotADirectoryError as error:
        raise NotADirectory(path, "name the directory itself") from error


def scope_of(kernel: Kernel, wanted: Fd, typed: bytes) -> Scope:
    """The scope of a directory that a path led to.

    wanted  the directory, on whichever side the path was; it stays the caller's
    Raises  OSError; NotFound, NoStore
    """
    mounts = read_mounts()
    mount = mount_of(kernel, wanted, mounts, typed)
    real = real_path(wanted, typed)
    if any(one.is_ours() for one in mounts):
        from fusefs.store.mounted import find_mounted_scope  # who has nothing mounted is spared it

        found = find_mounted_scope(kernel, typed, real, wanted, mount, mounts)
        if found is not None:
            return found
    return plain_scope(kernel, wanted, typed, real, mount, mounts)


def plain_scope(kernel: Kernel, wanted: Fd, typed: bytes, real: bytes, mount: Mount, mounts: list[Mount]) -> Scope:
    """The same, of what no mount of ours shows.

    real    its path without links
    Raises  as `scope_of`
    """
    with ExitStack() as owned:
        root_fd, root_path = _open_root(kernel, mount, real)
        owned.enter_context(root_fd)
        relative = RelPath(below(real, root_path))
        fd = owned.enter_context(kernel.open_beneath(root_fd, relative or b".", DIRECTORY))
        if not os.path.samestat(kernel.fstat(wanted), kernel.fstat(fd)):
            raise NotFound(typed, "its directory was moved meanwhile")
        owned.pop_all()
    root_place = place_of(root_path, mount)
    return Scope(Sides(root_fd), root_path, root_place, relative, Sides(fd), mount, tuple(mounts))


def split_typed(path: bytes) -> tuple[bytes, Name]:
    """Directory and last component; `.` and `..` are told by what they mean."""
    stripped = path.rstrip(b"/")
    directory, name = os.path.split(stripped)
    if name in (b"", b".", b".."):
        if not path:
            raise NotFound(path, "the path is empty")
        directory, name = os.path.split(os.path.realpath(path))
        if not name:
            raise Refused(path, "the root directory has no parent in which its name could stay")
    return directory or b".", Name(name)


def real_path(fd: Fd, typed: bytes) -> bytes:
    """Where an open directory is, without links."""
    try:
        return os.readlink(b"/proc/self/fd/%d" % fd)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
    return os.path.normpath(os.path.join(os.getcwdb(), typed))


def mount_of(kernel: Kernel, fd: Fd, mounts: list[Mount], path: bytes) -> Mount:
    """What an fd is on, which a path led to. Raises  NoStore if we don't see that mounted"""
    mount = find_mount(kernel, fd, mounts)
    if mount is None:
        raise NoStore(path, "its mount is not visible from here (a chroot?): run trashd outside of it")
    return mount


def find_mount(kernel: Kernel, fd: int, mounts: list[Mount]) -> Mount | None:
    """What an fd is on; None if we don't see that mounted (a chroot)."""
    mnt_id = kernel.statx(fd).mnt_id
    return next((mount for mount in mounts if mount.mnt_id == mnt_id), None)


def _open_root(kernel: Kernel, mount: Mount, path: bytes) -> tuple[Fd, bytes]:
    """The mount's root, or the highest directory on the way to `path` that is not mounted over or closed to us."""
    rest = below(path, mount.point).split(b"/")
    for count in range(len(rest) + 1):
        candidate = os.path.join(mount.point, *rest[:count])
        try:
            fd = kernel.open_path(candidate)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.ENOENT):
                continue
            raise
        with ExitStack() as owned:
            owned.enter_context(fd)
            if kernel.statx(fd).mnt_id == mount.mnt_id:
                owned.pop_all()
                return fd, candidate
    raise NoStore(path)
