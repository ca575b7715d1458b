"""Servers that make nobody of root (NFS with root_squash), and security modules that refuse root."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from fusefs.core.errors import RootSquashed
from fusefs.core.names import Name
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.store.layout import LOCK

SQUASHED = RootSquashed.problem
_TRIAL = b".trashd-squash-"


def refuse_squashed(kernel: Kernel, store_fd: Fd, base_path: bytes) -> None:
    """Of an opened `.trashd`, whichever of root's or anybody's.

    Raises  RootSquashed if we are root, and what a store's owner and root alone may open is refused to us
    """
    if os.geteuid() == 0 and not kernel.is_local(store_fd) and _refuses_root(kernel, store_fd):
        raise RootSquashed(base_path)


def _overrides_modes() -> bool:
    """Whether this process may open what its mode denies it, as root may that kept the capability."""
    from fusefs.linux.credentials import Capability, may_use  # late: needed only where a server may refuse root

    return may_use(Capability.DAC_OVERRIDE)


def _refuses_root(kernel: Kernel, store_fd: Fd) -> bool:
    """Whether an opened `.trashd` refuses root. Nothing is changed, and a file that is missing tells nothing.

    A service may have given up the capability that opens what is another user's; root's own he opens by its mode.
    """
    with suppress(FileNotFoundError):
        if kernel.stat(store_fd, LOCK).st_uid != 0 and not _overrides_modes():
            return False
        try:
            kernel.open_beneath(store_fd, LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK).close()
        except PermissionError:
            return True
    return False


def _makes_anothers(kernel: Kernel, base: Fd) -> bool:
    """Whether what root makes in a directory is somebody else's, or root may make nothing where modes can't forbid it.

    Tried with an empty directory, which goes again.
    """
    name = Name(_TRIAL + os.urandom(6).hex().encode())
    try:
        kernel.mkdir(base, name)
    except PermissionError:
        return True
    try:
        return kernel.stat(base, name).st_uid != 0
    finally:
        with suppress(OSError):
            kernel.rmdir(base, name)


@contextmanager
def squash_told(kernel: Kernel, base_path: bytes) -> Iterator[None]:
    """For what root does in a directory.

    Raises  RootSquashed instead of a PermissionError that comes of it; whatever else the block raises
    """
    try:
        yield
    except PermissionError as error:
        with suppress(OSError), kernel.open_path(base_path, os.O_PATH | os.O_DIRECTORY) as base:
            may_make = os.geteuid() == 0 and _overrides_modes()
            if may_make and not kernel.is_local(base) and _makes_anothers(kernel, base):
                raise RootSquashed(base_path) from error
        raise
