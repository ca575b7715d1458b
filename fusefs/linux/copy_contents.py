"""What is in a file, given to another one: as shared blocks where the filesystem can, else copied, holes kept; and
both read back to see that they hold the same.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable

from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel

GoesOn = Callable[[], bool]
"""Asked between pieces of something long."""

_FICLONE = 0x40049409
_COPIED_AT_ONCE = 16 << 20
_READ_AT_ONCE = 1 << 20
_NOT_BY_KERNEL = frozenset(
    {
        errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS, errno.EBADF, errno.EPERM,
        errno.ETXTBSY, errno.EISDIR, errno.EOVERFLOW,
    }
)  # fmt: skip
"""Of FICLONE and copy_file_range: not between these two. What it means for the data, reading and writing will say."""


def copy_contents(kernel: Kernel, source: Fd, target: Fd, size: int, goes_on: GoesOn) -> bool:
    """Make an empty file hold the first `size` bytes of another.

    Returns whether they share their blocks
    Raises  OSError: ECANCELED if it was not to go on, EBUSY if the source was cut meanwhile
    """
    if _is_cloned(kernel, source, target):
        return True
    at = _next_data(kernel, source, 0, size)
    while at < size:
        end = min(_end_of_data(kernel, source, at), size)
        _copy_range(kernel, source, target, at, end, goes_on)
        at = _next_data(kernel, source, end, size)
    kernel.truncate(target, size)
    return False


def is_same_content(kernel: Kernel, a: Fd, b: Fd, size: int, goes_on: GoesOn) -> bool:
    """Whether the first `size` bytes of two files are the same; what is a hole in both is not read.

    Raises  OSError: ECANCELED if it was not to go on
    """
    at = 0
    while True:
        at = min(_next_data(kernel, a, at, size), _next_data(kernel, b, at, size))
        if at >= size:
            return True
        _look_up(goes_on)
        length = min(_READ_AT_ONCE, size - at)
        if _read(kernel, a, at, length) != _read(kernel, b, at, length):
            return False
        at += length


def forget_pages(kernel: Kernel, fd: Fd) -> None:
    """Let what is on disk already be read from there, not from memory."""
    kernel.reach("fadvise")
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _is_cloned(kernel: Kernel, source: Fd, target: Fd) -> bool:
    try:
        kernel.reach("ficlone")
        fcntl.ioctl(target, _FICLONE, int(source))
    except OSError as error:
        if error.errno not in _NOT_BY_KERNEL:
            raise
        return False
    return True


def _copy_range(kernel: Kernel, source: Fd, target: Fd, at: int, end: int, goes_on: GoesOn) -> None:
    by_kernel = True
    while at < end:
        _look_up(goes_on)
        n_bytes = 0
        if by_kernel:
            n_bytes = _copied_by_kernel(kernel, source, target, at, min(end - at, _COPIED_AT_ONCE))
            by_kernel = n_bytes > 0
        if not n_bytes:
            n_bytes = _copied_by_hand(kernel, source, target, at, min(end - at, _READ_AT_ONCE))
        at += n_bytes


def _copied_by_kernel(kernel: Kernel, source: Fd, target: Fd, at: int, length: int) -> int:
    """How many bytes copy_file_range copied; 0 where it can't, which some filesystems say by no error."""
    try:
        kernel.reach("copy_file_range")
        return os.copy_file_range(source, target, length, at, at)
    except OSError as error:
        if error.errno not in _NOT_BY_KERNEL:
            raise
        return 0


def _copied_by_hand(kernel: Kernel, source: Fd, target: Fd, at: int, length: int) -> int:
    piece = _read(kernel, source, at, length)
    if not piece:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))  # it was cut meanwhile
    kernel.reach("write")
    return os.pwrite(target, piece, at)


def _read(kernel: Kernel, fd: Fd, at: int, length: int) -> bytes:
    """As many bytes as asked for; fewer only at the end."""
    pieces = []
    while length:
        kernel.reach("read")
        piece = os.pread(fd, length, at)
        if not piece:
            break
        pieces.append(piece)
        at, length = at + len(piece), length - len(piece)
    return b"".join(pieces)


def _next_data(kernel: Kernel, fd: Fd, at: int, size: int) -> int:
    """Where the next data begins, from an offset on; `size` if there is none any more."""
    if at >= size:
        return size
    try:
        kernel.reach("lseek")
        return os.lseek(fd, at, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return size
        if error.errno != errno.EINVAL:
            raise
        return at  # a filesystem that knows nothing of holes


def _end_of_data(kernel: Kernel, fd: Fd, at: int) -> int:
    """Where the next hole begins; every file has one at its end."""
    try:
        kernel.reach("lseek")
        return os.lseek(fd, at, os.SEEK_HOLE)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY)) from error  # it was cut meanwhile
        if error.errno != errno.EINVAL:
            raise
        return 1 << 63


def _look_up(goes_on: GoesOn) -> None:
    if not goes_on():
        raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
