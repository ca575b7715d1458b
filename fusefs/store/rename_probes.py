"""Whether renames with flags do what they say, tried on throw-away names: volume.json says what was seen."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from enum import Enum
from typing import NamedTuple

from fusefs.core.names import Name
from fusefs.linux import syscalls
from fusefs.linux.fd import Fd
from fusefs.linux.filesystem_probes import discard_trial_directory, trial, trial_directory
from fusefs.linux.kernel import Kernel
from fusefs.store.victim_rename import NO_EXCHANGE

_PAIR = (Name(b"probe-a"), Name(b"probe-b"))
_NOREPLACE = Name(b"probe-noreplace")
_UNKNOWN_FLAG = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_FULL, _EMPTY, _FREE, _MARK = (trial(name) for name in ("full", "empty", "free", "mark"))
_FILE, _OTHER, _FREE_FILE = (trial(name) for name in ("file", "other", "free-file"))
_CONTENT, _OTHERS = b"one", b"the other"


class RenameFlags(NamedTuple):
    """What renameat2 was seen to do: to exchange; to refuse a name that is taken, and take one that is free."""

    exchange: bool
    noreplace: bool


class FlagAnswer(Enum):
    """What a filesystem makes of a flag."""

    KEPT = "it does what the flag says"
    REFUSED = "it says that it has no such flag"
    IGNORED = "it makes a plain rename, or nothing, and may even say that it is done"


def probe_renames(kernel: Kernel, dir_fd: Fd) -> RenameFlags:
    """Try both flags in a directory of ours.

    A taken name that this kernel knows it refuses by itself, before the filesystem sees the flag: one that ignores a
    flag is not believed to read the other.
    Raises  OSError
    Source  fs/namei.c, do_renameat2
    """
    exchange = probe_exchange(kernel, dir_fd)
    noreplace = exchange is not FlagAnswer.IGNORED and _probe_noreplace(kernel, dir_fd)
    return RenameFlags(exchange is FlagAnswer.KEPT, noreplace)


def probe_exchange(kernel: Kernel, dir_fd: Fd) -> FlagAnswer:
    """What RENAME_EXCHANGE does here, tried on a throw-away pair.

    Each of the two holds a directory of its own name: a filesystem that ignores the flag can't replace them
    (ENOTEMPTY), and one that does nothing, or something else, and says 0, shows by where the marks are. After a
    0 the kernel has exchanged its own dentries, so that looking by name may show what the liar did not do: the
    directory's listing, which comes from the filesystem, decides too.
    Source  s3fs-fuse PR 2933 and cryfs PR 568: a plain rename, and 0; measured with a FUSE filesystem that says 0
            and does nothing
    """
    a, b = _PAIR
    for name in _PAIR:
        _discard_marked(kernel, dir_fd, name)  # a killed one's
    try:
        for name in _PAIR:
            kernel.mkdir(dir_fd, name)
            with kernel.open_dir(dir_fd, name) as fd:
                kernel.mkdir(fd, name)
        before = kernel.list_inos(dir_fd)
        try:
            kernel.exchange(dir_fd, a, dir_fd, b)
        except OSError as error:
            if error.errno not in NO_EXCHANGE:
                raise
            return FlagAnswer.REFUSED if error.errno in _UNKNOWN_FLAG else FlagAnswer.IGNORED
        after = kernel.list_inos(dir_fd)
        listed = (after.get(a), after.get(b)) == (before.get(b), before.get(a))
        is_kept = listed and _marks(kernel, dir_fd, a) == [b] and _marks(kernel, dir_fd, b) == [a]
        return FlagAnswer.KEPT if is_kept else FlagAnswer.IGNORED
    finally:
        for name in _PAIR:
            _discard_marked(kernel, dir_fd, name)


def _marks(kernel: Kernel, dir_fd: Fd, name: Name) -> list[bytes]:
    try:
        with kernel.open_dir(dir_fd, name) as fd:
            return kernel.list(fd)
    except FileNotFoundError:
        return []


def _probe_noreplace(kernel: Kernel, dir_fd: Fd) -> bool:
    """Whether RENAME_NOREPLACE refuses and takes as it should, with directories and files, looked at afterwards."""
    with trial_directory(kernel, dir_fd, _NOREPLACE) as fd:
        for name in (_FULL, _EMPTY):
            kernel.mkdir(fd, name)
        for name, content in ((_FILE, _CONTENT), (_OTHER, _OTHERS)):
            with kernel.create(fd, name) as file:
                kernel.write(file, content)
        with kernel.open_dir(fd, _FULL) as full:
            kernel.mkdir(full, _MARK)
        refused = _refuses(kernel, fd, _FULL, _EMPTY) and _refuses(kernel, fd, _FILE, _OTHER)
        kept = _marks(kernel, fd, _FULL) == [_MARK] and _marks(kernel, fd, _EMPTY) == []
        if not refused or not kept or (_read(kernel, fd, _FILE), _read(kernel, fd, _OTHER)) != (_CONTENT, _OTHERS):
            return False
        took = _takes(kernel, fd, _FULL, _FREE) and _takes(kernel, fd, _FILE, _FREE_FILE)
        listed = set(kernel.list_anew(fd))
        moved = _marks(kernel, fd, _FREE) == [_MARK] and _read(kernel, fd, _FREE_FILE) == _CONTENT
        return took and moved and listed == {_FREE, _EMPTY, _FREE_FILE, _OTHER}


def rename_noreplace(kernel: Kernel, dir_fd: int, old: Name, new: Name) -> None:
    """renameat2 with RENAME_NOREPLACE and nothing in its place. Raises  OSError"""
    kernel.reach("renameat2")
    syscalls.renameat2(dir_fd, old, dir_fd, new, syscalls.RENAME_NOREPLACE)


def _refuses(kernel: Kernel, fd: Fd, old: Name, taken: Name) -> bool:
    try:
        rename_noreplace(kernel, fd, old, taken)
    except FileExistsError:
        return True
    except OSError as error:
        if error.errno not in NO_EXCHANGE:
            raise
    return False


def _takes(kernel: Kernel, fd: Fd, old: Name, free: Name) -> bool:
    try:
        rename_noreplace(kernel, fd, old, free)
    except OSError as error:
        if error.errno not in NO_EXCHANGE:
            raise
        return False
    return True


def _read(kernel: Kernel, fd: Fd, name: Name) -> bytes | None:
    with suppress(FileNotFoundError), kernel.open_beneath(fd, name, os.O_RDONLY | os.O_NOFOLLOW) as file:
        return kernel.read(file, len(_OTHERS) + 1)
    return None


def discard_rename_trials(kernel: Kernel, dir_fd: Fd) -> None:
    """Remove what a killed `probe_renames` left. Raises  OSError"""
    for name in _PAIR:
        _discard_marked(kernel, dir_fd, name)
    discard_trial_directory(kernel, dir_fd, _NOREPLACE)


def _discard_marked(kernel: Kernel, parent: Fd, name: Name) -> None:
    """Remove a directory of ours with at most the probe's marks in it."""
    try:
        fd = kernel.open_dir(parent, name)
    except FileNotFoundError:
        return
    with fd:
        for mark in kernel.list(fd):
            if mark in _PAIR:
                kernel.rmdir(fd, mark)
    kernel.rmdir(parent, name)
