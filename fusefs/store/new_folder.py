"""A user's folder is made whole, and one for each user, whoever else makes names below `u/` meanwhile."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from fusefs.core.errors import Busy, NoStore
from fusefs.core.names import Name
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.store.folders import N_HEX, not_private, open_user, plain_name, whose, why_not
from fusefs.store.layout import FOLDERS, NEW_PART, Store, UserFolder, make_private
from fusefs.store.sides import DIRECTORY

_ATTEMPTS = 8
_TURNS, _FIRST_TURN_S, _MOST_DOUBLED = 30, 0.01, 6
"""How often first commands of one user make way for each other, and for how long at most; longer each time."""


def make_user(store: Store, uid: int | None = None, *, waits: bool = True) -> UserFolder:
    """A folder for the caller, or the one that another command of his made meanwhile.

    It is made whole under another name and appears by one rename, with a random name where the plain one is planted.
    Beside a planted one two commands could make two: each looks for the other when its own can be seen, and for a
    folder after that, so that one of them at least makes way.
    uid     whose it shall be, if what this thread makes is another one's (setfsuid)
    Raises  OSError; NoStore where modes or owners mean nothing (FAT, an NFS that squashes); Busy if another command
            of his makes one beside a planted name, and we may not wait for it
    """
    uid = os.geteuid() if uid is None else uid
    kernel, u_fd, plain = store.kernel, store.u_fd, plain_name(uid)
    for turn in range(_TURNS if waits else 1):
        try:
            with _candidate(store, uid) as new:
                has_rivals = discard_dead(kernel, u_fd, uid, but=new)
                with suppress(FileExistsError):
                    kernel.rename_free(u_fd, new, u_fd, plain)
                    return _open(store, uid, plain)
                folder = open_user(store, uid)
                if folder is not None:
                    return folder
                if not has_rivals:
                    name = Name(b"%b.%b" % (plain, _random()))
                    kernel.rename_free(u_fd, new, u_fd, name)
                    return _open(store, uid, name)
        except FileNotFoundError:
            # Somebody took it for a killed maker's before it was locked; or the whole store is gone.
            if turn >= _ATTEMPTS:
                raise
            continue
        if waits:
            time.sleep(os.urandom(1)[0] / 256 * _FIRST_TURN_S * 2.0 ** min(turn, _MOST_DOUBLED))
    raise Busy(store.base_path)


@contextmanager
def _candidate(store: Store, uid: int) -> Iterator[Name]:
    """The name of a whole folder that is nobody's yet, locked as long as its maker lives; gone again if not renamed.

    Raises  OSError; NoStore; FileNotFoundError if another command took it for a killed maker's before it was locked
    """
    kernel, u_fd = store.kernel, store.u_fd
    new = Name(b"%b%d.%b" % (NEW_PART, uid, _random()))
    with make_private(kernel, u_fd, new) as fd:
        try:
            if kernel.is_local(fd) and not kernel.lock(fd):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), new)
            for part in FOLDERS:
                make_private(kernel, fd, part).close()
            why = why_not(kernel, fd, kernel.fstat(fd), uid)
            if why:
                raise NoStore(store.base_path, f"this filesystem can't keep a new directory to its maker: {why}")
            yield new
        finally:
            with suppress(OSError):  # nor does it hide how the block ended
                if kernel.is_named(fd, u_fd, new):
                    _discard(kernel, u_fd, new, fd)


def discard_dead(kernel: Kernel, u_fd: Fd, only: int | None, *, but: Name | None = None) -> bool:
    """Remove what killed makers of a user, or of all, left; whether others are at it now.

    Where locks tell nothing (network filesystems) those of other hosts are not waited for.
    """
    has_rivals = False
    for name in kernel.list(u_fd):
        uid = whose(name.removeprefix(NEW_PART))
        if uid is None or only not in (None, uid) or name == but or not name.startswith(NEW_PART):
            continue
        with suppress(OSError), kernel.open_dir(u_fd, name) as fd:
            if not_private(kernel.fstat(fd), uid) or not kernel.is_local(fd):
                continue
            if kernel.lock(fd):
                _discard(kernel, u_fd, name, fd)
            else:
                has_rivals = True
    return has_rivals


def _discard(kernel: Kernel, u_fd: Fd, name: bytes, fd: Fd) -> None:
    """Remove a folder that nobody used, by rmdir alone; what of it can't be removed is nobody's trouble."""
    for part in FOLDERS:
        with suppress(OSError):
            kernel.rmdir(fd, part)
    with suppress(OSError):
        kernel.rmdir(u_fd, name)


def _open(store: Store, uid: int, name: Name) -> UserFolder:
    return UserFolder(store, uid, name, store.kernel.open_beneath(store.u_fd, name, DIRECTORY))


def _random() -> bytes:
    return os.urandom(N_HEX // 2).hex().encode()
