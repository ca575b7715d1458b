"""A directory opened on both sides: on the backing filesystem, and in one of our mounts that shows it.

Entries are inspected on the backing filesystem. Names that others see are changed through the mount, so that the kernel
and the mount's daemon, which cache names, attributes and listings for a long time, know of the change.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple, Self, TypeVar

from fusefs.core.names import Name, RelPath
from fusefs.linux.fd import Fd, close_on_error
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import FilesystemPath, Mount, place_below

T = TypeVar("T")

DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW
READABLE = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
"""Flags to open a directory: DIRECTORY for lookups in it, READABLE also for listing it."""
FILE_TO_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
FILE_TO_LOCK = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
"""Flags to open a file that others may have replaced: links are not followed, and a FIFO does not block."""
ABSENT_ERRNOS = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV)
"""Errors from a lookup of an entry that is absent, has another type, is a link, or is covered by a mount."""
UNREACHABLE_ERRNOS = (*ABSENT_ERRNOS, errno.EACCES)
"""ABSENT_ERRNOS, and the error from a lookup for which we have no permission."""
NO_SPACE_ERRNOS = (errno.ENOSPC, errno.EDQUOT)


class suppress_errno(suppress):  # noqa: N801 - as its base
    def __init__(self, *numbers: int) -> None:
        self._numbers = numbers

    def __exit__(self, _kind: object, error: object, _trace: object) -> bool:
        return isinstance(error, OSError) and error.errno in self._numbers


_ROOT_INO, _PRIVATE_INOS = 1, 1 << 62
_STALE_N_TRIES, _STALE_PAUSE_S = 500, 0.001


class BackingAndMount(NamedTuple):
    """A directory that is open on the backing filesystem and, if one of our mounts shows it, in that mount.

    fd       the directory on the backing filesystem (O_PATH)
    mounted  the directory in the mount (O_PATH); None if none of our mounts shows it
    """

    fd: Fd
    mounted: Fd | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.fd.close()
        if self.mounted is not None:
            self.mounted.close()

    def close_mounted(self) -> None:
        if self.mounted is not None:
            self.mounted.close()

    def names_fd(self) -> Fd:
        """Return the fd through which names in the directory must be changed."""
        return self.fd if self.mounted is None else self.mounted

    def reopen(self, kernel: Kernel) -> BackingAndMount:
        with close_on_error(kernel.open_beneath(self.fd, b".", DIRECTORY)) as fd:
            return BackingAndMount(fd, self.mounted and kernel.open_beneath(self.mounted, b".", DIRECTORY))

    def beneath(self, kernel: Kernel, path: bytes, flags: int = DIRECTORY) -> BackingAndMount:
        """Open a directory beneath this one; add the mounted side only if the mount shows the same directory there.

        flags   flags for the backing side
        Raises  OSError
        """
        with close_on_error(kernel.open_beneath(self.fd, path or b".", flags)) as fd:
            return BackingAndMount(fd, open_in_mount(kernel, self.mounted, path, fd))


class Scope(NamedTuple):
    """An open directory in which a command acts: on the backing filesystem, even if one of our mounts shows it.

    root        the highest directory on its mount that we can reach, or the root of our mount that shows the directory;
                nothing below it is opened by its full path
    root_path   path of `root`, for messages
    root_place  the place of `root` in its filesystem
    relative    path of the directory relative to `root`; empty if it is `root`
    sides       the directory itself
    mount       the mount that the directory is on
    mounts      all mounts at the time when the directory was opened
    """

    root: BackingAndMount
    root_path: bytes
    root_place: FilesystemPath
    relative: RelPath
    sides: BackingAndMount
    mount: Mount
    mounts: tuple[Mount, ...]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        with self.root, self.sides:
            pass

    def path(self) -> bytes:
        """Return the directory's path, with links resolved."""
        return os.path.join(self.root_path, self.relative) if self.relative else self.root_path

    def place(self) -> FilesystemPath:
        """Return the directory's place in its filesystem, which is the same in every mount namespace."""
        return place_below(self.root_place, self.relative)


def open_beneath_on_both(kernel: Kernel, sides: BackingAndMount, path: bytes) -> BackingAndMount:
    """Open a directory beneath `sides`: on both sides if `sides` has both, so that the mount shows changes immediately.

    Raises  OSError: ESTALE if the mount shows another directory there, or none
    """
    return require_both_sides(sides, sides.beneath(kernel, path), path)


def require_both_sides(sides: BackingAndMount, lower: BackingAndMount, path: bytes) -> BackingAndMount:
    """Return `lower`, opened beneath `sides`. If only `lower` lacks a mounted side, close it and raise ESTALE."""
    if sides.mounted is not None and lower.mounted is None:
        lower.fd.close()
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
    return lower


def is_same_directory(kernel: Kernel, one: int, other: int) -> bool:
    return os.path.samestat(kernel.fstat(one), kernel.fstat(other))


def choose_rename_fds(one: BackingAndMount, other: BackingAndMount) -> tuple[Fd, Fd]:
    """Choose the two fds between which to move a name: those in the mount if both directories have a mounted side."""
    if one.mounted is None or other.mounted is None:
        return one.fd, other.fd
    return one.mounted, other.mounted


def add_mounted_side(kernel: Kernel, fd: Fd, above: Fd | None, path: bytes) -> BackingAndMount:
    """Add the mounted side to an open directory (O_PATH), if one of our mounts shows it; takes ownership of the fd.

    above, path  a directory in the mount, and the path from there to `fd`
    """
    with close_on_error(fd):
        return BackingAndMount(fd, open_in_mount(kernel, above, path, fd))


class borrow_both_sides:  # noqa: N801 - used like a context manager function
    """Like `add_mounted_side`, for the duration of a block; `fd` still belongs to the caller."""

    def __init__(self, kernel: Kernel, fd: Fd, above: Fd | None, path: bytes) -> None:
        self._sides = BackingAndMount(fd, open_in_mount(kernel, above, path, fd))

    def __enter__(self) -> BackingAndMount:
        return self._sides

    def __exit__(self, *_error: object) -> None:
        self._sides.close_mounted()


def is_taken(kernel: Kernel, dir_fd: Fd, name: Name) -> bool:
    """Return whether a name exists in a directory, even if a mount covers the entry. Raises  OSError"""
    try:
        with suppress_errno(errno.EXDEV):
            kernel.stat(dir_fd, name)
    except FileNotFoundError:
        return False
    return True


def open_in_mount(kernel: Kernel, above: Fd | None, path: bytes, fd: Fd) -> Fd | None:
    """Open the mounted side of the directory `fd` (O_PATH), or return None if the mount does not show this directory.

    above, path  a directory in the mount, and the path from there to `fd`
    """
    if above is None:
        return None
    with suppress(OSError), ExitStack() as owned:
        mounted = owned.enter_context(retry_stale(lambda: kernel.open_beneath(above, path or b".", DIRECTORY)))
        if is_same_in_mount(kernel.fstat(fd), kernel.fstat(mounted)):
            owned.pop_all()
            return mounted
    return None


def refresh_in_mount(kernel: Kernel, above: Fd, path: bytes) -> None:
    """Make our mount refresh a directory whose attributes were changed on the backing filesystem.

    Nothing on disk changes, so a failure does no harm, nor does a refresh of another directory with this path.
    """
    with suppress(OSError), kernel.open_beneath(above, path, DIRECTORY) as mounted:
        kernel.invalidate_attributes(mounted)


def retry_stale(lookup: Callable[[], T]) -> T:
    """Repeat a lookup in a mount while it fails with ESTALE, which may happen after a move on the backing filesystem.

    The kernel keeps a directory's dentry in one place. If it finds the directory in another place, it moves the dentry.
    But while another process makes a rename, it returns ESTALE instead, even at a second attempt.
    Source  fs/dcache.c, __d_unalias
    """
    for _ in range(_STALE_N_TRIES):
        try:
            return lookup()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            time.sleep(_STALE_PAUSE_S)
    return lookup()


def is_same_in_mount(backing: os.stat_result, mounted: os.stat_result) -> bool:
    """Return whether `mounted` can be our mount's view of `backing`, judging by the types and inode numbers."""
    is_same_kind = stat.S_IFMT(backing.st_mode) == stat.S_IFMT(mounted.st_mode)
    return is_same_kind and (mounted.st_ino in (backing.st_ino, _ROOT_INO) or mounted.st_ino >= _PRIVATE_INOS)


@contextmanager
def preserved_times(kernel: Kernel, fd: Fd) -> Iterator[None]:
    """After a block that leaves a directory's contents unchanged, restore the directory's times, if permitted."""
    before = kernel.fstat(fd)
    try:
        yield
    finally:
        if kernel.fstat(fd).st_mtime_ns != before.st_mtime_ns:
            with suppress(OSError):
                os.utime(b"/proc/self/fd/%d" % fd, ns=(before.st_atime_ns, before.st_mtime_ns))
