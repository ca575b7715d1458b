"""A directory opened on both sides: on the backing filesystem, and as a mount of ours shows it.

What is looked at is looked at on the backing filesystem. Names that others see are changed on the mounted side, so
that the kernel and the daemon, which remember names, attributes and listings for long, learn of it by doing it.
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
from fusefs.linux.fd import Fd, closed_on_error
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import FilesystemPath, Mount, place_below

T = TypeVar("T")

DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW
READABLE = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
"""How a directory is opened: to look things up in it; to be listed too."""
FILE_TO_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
FILE_TO_LOCK = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
"""How a file is opened that others may have replaced: through no link, and no FIFO is waited for; to write, too."""
ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV)
"""What such a look beneath a directory says where no such thing is: gone, something else, a link, mounted over."""
OUT_OF_REACH = (*ABSENT, errno.EACCES)
"""Errors of what is absent, or not ours to see."""
FULL = (errno.ENOSPC, errno.EDQUOT)
"""What says that there is no room."""


class suppress_errno(suppress):  # noqa: N801 - as its base
    """A block that an OSError with one of these numbers ends as if it were done; any other error goes on."""

    def __init__(self, *numbers: int) -> None:
        self._numbers = numbers

    def __exit__(self, _kind: object, error: object, _trace: object) -> bool:
        return isinstance(error, OSError) and error.errno in self._numbers


_ROOT_INO, _PRIVATE_INOS = 1, 1 << 62
_STALE_PATIENCE, _STALE_PAUSE_S = 500, 0.001


class BackingAndMount(NamedTuple):
    """One directory.

    fd       on the backing filesystem (O_PATH)
    mounted  in the mount (O_PATH); None where none of ours shows it
    """

    fd: Fd
    mounted: Fd | None = None

    def __enter__(self) -> Self:
        """Own its fds for the block."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Close them."""
        self.fd.close()
        if self.mounted is not None:
            self.mounted.close()

    def close_mounted(self) -> None:
        """Close its fd in the mount, if it has one; that on the backing filesystem stays open."""
        if self.mounted is not None:
            self.mounted.close()

    def names(self) -> Fd:
        """Where its names are to be changed."""
        return self.fd if self.mounted is None else self.mounted

    def again(self, kernel: Kernel) -> BackingAndMount:
        """This directory, opened once more. Raises  OSError"""
        with closed_on_error(kernel.open_beneath(self.fd, b".", DIRECTORY)) as fd:
            return BackingAndMount(fd, self.mounted and kernel.open_beneath(self.mounted, b".", DIRECTORY))

    def beneath(self, kernel: Kernel, path: bytes, flags: int = DIRECTORY) -> BackingAndMount:
        """A directory beneath it; without a mounted side if the mount shows another one there, or none now.

        flags   of its backing side
        Raises  OSError
        """
        with closed_on_error(kernel.open_beneath(self.fd, path or b".", flags)) as fd:
            return BackingAndMount(fd, open_shown_as(kernel, self.mounted, path, fd))


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

    root: BackingAndMount
    root_path: bytes
    root_place: FilesystemPath
    relative: RelPath
    sides: BackingAndMount
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

    def place(self) -> FilesystemPath:
        """Where it is in its filesystem, whatever namespace one looks from."""
        return place_below(self.root_place, self.relative)


def wholly_beneath(kernel: Kernel, sides: BackingAndMount, path: bytes) -> BackingAndMount:
    """A directory beneath it that is on both sides if this one is: what is done there is seen at once, or not done.

    Raises  OSError: ESTALE if the mount shows another one there, or none now
    """
    return check_wholly(sides, sides.beneath(kernel, path), path)


def check_wholly(sides: BackingAndMount, lower: BackingAndMount, path: bytes) -> BackingAndMount:
    """A directory that was opened beneath another one, which is closed if it is on one side alone and that is not.

    Raises  OSError: ESTALE
    """
    if sides.mounted is not None and lower.mounted is None:
        lower.fd.close()
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
    return lower


def is_same(kernel: Kernel, one: int, other: int) -> bool:
    """Whether two fds are of one directory, as where it was moved meanwhile: nothing moves from there to there."""
    return os.path.samestat(kernel.fstat(one), kernel.fstat(other))


def between(one: BackingAndMount, other: BackingAndMount) -> tuple[Fd, Fd]:
    """Where a name is to be moved from the one directory to the other: in the mount that shows both, if one does."""
    if one.mounted is None or other.mounted is None:
        return one.fd, other.fd
    return one.mounted, other.mounted


def both_sides(kernel: Kernel, fd: Fd, above: Fd | None, path: bytes) -> BackingAndMount:
    """A directory that is open (O_PATH), with its mounted side if a mount of ours shows it; takes over the fd.

    above, path  where that is, from a directory in the mount
    """
    with closed_on_error(fd):
        return BackingAndMount(fd, open_shown_as(kernel, above, path, fd))


class with_mounted:  # noqa: N801 - it is read as a function that gives a block
    """An open directory as `both_sides` has it, for the block; the fd stays its owner's."""

    def __init__(self, kernel: Kernel, fd: Fd, above: Fd | None, path: bytes) -> None:
        self._sides = BackingAndMount(fd, open_shown_as(kernel, above, path, fd))

    def __enter__(self) -> BackingAndMount:
        return self._sides

    def __exit__(self, *_error: object) -> None:
        self._sides.close_mounted()


def is_taken(kernel: Kernel, dir_fd: Fd, name: Name) -> bool:
    """Whether anything has a name in a directory, be it that something is mounted over it. Raises  OSError"""
    try:
        with suppress_errno(errno.EXDEV):
            kernel.stat(dir_fd, name)
    except FileNotFoundError:
        return False
    return True


def open_shown_as(kernel: Kernel, above: Fd | None, path: bytes, fd: Fd) -> Fd | None:
    """What a mount of ours shows as a directory that is open (O_PATH); None if it shows another there, or none now.

    above, path  where that is, from a directory in the mount
    """
    if above is None:
        return None
    with suppress(OSError), ExitStack() as owned:
        mounted = owned.enter_context(patiently(lambda: kernel.open_beneath(above, path or b".", DIRECTORY)))
        if is_shown_as(kernel.fstat(fd), kernel.fstat(mounted)):
            owned.pop_all()
            return mounted
    return None


def refresh(kernel: Kernel, above: Fd, path: bytes) -> None:
    """Let a mount of ours look again at a directory whose attributes were changed behind it; whatever is there now.

    It changes nothing, so that it may fail, or meet another one: then that one is looked at.
    """
    with suppress(OSError), kernel.open_beneath(above, path, DIRECTORY) as mounted:
        kernel.refresh(mounted)


def patiently(look: Callable[[], T]) -> T:
    """The result of a look at something in a mount that may have moved behind it.

    The kernel has a directory in one place only. It moves it when it sees it in another, unless others rename
    something at that moment: then it says ESTALE, even at a second try.
    Source  fs/dcache.c, __d_unalias
    """
    for _ in range(_STALE_PATIENCE):
        try:
            return look()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            time.sleep(_STALE_PAUSE_S)
    return look()


def is_shown_as(backing: os.stat_result, mounted: os.stat_result) -> bool:
    """Whether a mount of ours may show the one as the other: it keeps inode numbers, but for a private range."""
    is_same_kind = stat.S_IFMT(backing.st_mode) == stat.S_IFMT(mounted.st_mode)
    return is_same_kind and (mounted.st_ino in (backing.st_ino, _ROOT_INO) or mounted.st_ino >= _PRIVATE_INOS)


@contextmanager
def same_times(kernel: Kernel, fd: Fd) -> Iterator[None]:
    """Give a directory back the times that it had, where that is ours to do: nothing is in it that was not before."""
    before = kernel.fstat(fd)
    try:
        yield
    finally:
        if kernel.fstat(fd).st_mtime_ns != before.st_mtime_ns:
            with suppress(OSError):
                os.utime(b"/proc/self/fd/%d" % fd, ns=(before.st_atime_ns, before.st_mtime_ns))
