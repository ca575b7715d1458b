"""What differs between a directory of an orphan and the one that is where it came from."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from typing import NamedTuple

from fusefs.core.names import join
from fusefs.linux.archived_files import may_be_archived
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel

_CHUNK = 1 << 18
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Difference(NamedTuple):
    """Something that is not in an orphan as it is where that came from. how: `gone`, `new`, `changed`, `unreadable`"""

    path: bytes
    how: str


def differences(kernel: Kernel, tree: Fd, now: Fd, prefix: bytes, *, tells_new: bool) -> Iterator[Difference]:
    """What differs between a directory of an orphan and the one that is there now: type, size, link, and content where
    the times differ. What is on one side alone is one difference, whatever it holds.

    prefix     the path of both
    tells_new  what is there now alone, too
    """
    device = kernel.fstat(now).st_dev
    left = [b""]
    while left:
        upper = left.pop()
        try:
            with _directory(kernel, tree, upper) as one, _directory(kernel, now, upper) as other:
                for name in sorted({*map(os.fsencode, os.listdir(one)), *map(os.fsencode, os.listdir(other))}):
                    path = join(upper, name)
                    before, after = _look(one, name), _look(other, name)
                    if before is None or after is None:
                        if before is not None or tells_new:
                            yield Difference(join(prefix, path), "new" if before is None else "gone")
                    elif stat.S_ISDIR(before.st_mode) and stat.S_ISDIR(after.st_mode) and after.st_dev == device:
                        left.append(path)
                    elif (how := _how(kernel, one, other, name, before, after)) is not None:
                        yield Difference(join(prefix, path), how)
        except OSError:
            yield Difference(join(prefix, upper) or b".", "unreadable")


def _directory(kernel: Kernel, top: Fd, path: bytes) -> Fd:
    return kernel.open_beneath(top, path or b".", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _look(directory: Fd, name: bytes) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _how(kernel: Kernel, one: Fd, other: Fd, name: bytes, before: os.stat_result, after: os.stat_result) -> str | None:
    """How two entries of one name differ; None: they don't."""
    if stat.S_IFMT(before.st_mode) != stat.S_IFMT(after.st_mode) or before.st_rdev != after.st_rdev:
        return "changed"
    try:
        if stat.S_ISLNK(before.st_mode):
            is_same = os.readlink(name, dir_fd=one) == os.readlink(name, dir_fd=other)
        elif stat.S_ISREG(before.st_mode):
            is_same = before.st_size == after.st_size and (
                before.st_mtime_ns == after.st_mtime_ns or _have_same_content(kernel, one, other, name)
            )
        else:
            is_same = not stat.S_ISDIR(before.st_mode)  # something is mounted there now
    except OSError:
        return "unreadable"
    return None if is_same else "changed"


def _have_same_content(kernel: Kernel, one: Fd, other: Fd, name: bytes) -> bool:
    """Raises  OSError, also for what would have to come back from an archive"""
    with (
        Fd(os.open(name, _READ, dir_fd=one)) as before,
        Fd(os.open(name, _READ, dir_fd=other)) as after,
    ):
        if may_be_archived(kernel, before) or may_be_archived(kernel, after):
            raise OSError(errno.ENODATA, "its data may be in an archive only")
        while True:
            part = os.read(before, _CHUNK)
            if part != _read_whole(after, len(part) or 1):
                return False
            if not part:
                return True


def _read_whole(fd: Fd, n: int) -> bytes:
    parts = []
    while n and (part := os.read(fd, n)):
        parts.append(part)
        n -= len(part)
    return b"".join(parts)
