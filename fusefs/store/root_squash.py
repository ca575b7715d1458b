"""Detects servers that map root to an unprivileged user (NFS with root_squash), and security modules that refuse root.

Root can do nothing on such a filesystem, so this is reported. NFS maps root by default; Lustre does if a nodemap has
no `admin`. A security module may refuse root, too, so the message names both. On local filesystems, only a security
module can refuse root.
"""

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
    """Check whether the server treats us as root, using an opened `.trashd` of any owner.

    Raises  RootSquashed if we are root, but can't open a file that only the store's owner and root can open
    """
    if os.geteuid() == 0 and not kernel.is_local(store_fd) and _refuses_root(kernel, store_fd):
        raise RootSquashed(base_path)


def _overrides_modes() -> bool:
    """Return whether this process may open files regardless of their mode, as root may with the right capability."""
    from fusefs.linux.credentials import Capability, may_use  # late: needed only where a server may refuse root

    return may_use(Capability.DAC_OVERRIDE)


def _refuses_root(kernel: Kernel, store_fd: Fd) -> bool:
    """Return whether the server refuses root's access to an opened `.trashd`, or False if its lock file is missing.

    This changes nothing. A service without the capability to open other users' files tries only a lock file of root's.
    """
    with suppress(FileNotFoundError):
        if kernel.stat(store_fd, LOCK).st_uid != 0 and not _overrides_modes():
            return False
        try:
            kernel.open_beneath(store_fd, LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK).close()
        except PermissionError:
            return True
    return False


def _creates_as_other_user(kernel: Kernel, base: Fd) -> bool:
    """Return whether entries that root makes in a directory belong to another user, or root can't make any.

    This is tried with an empty directory, which is removed again.
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
def convert_squash_errors(kernel: Kernel, base_path: bytes) -> Iterator[None]:
    """Convert a PermissionError that is due to root squash, for a block in which root acts in a directory.

    Raises  RootSquashed instead of such an error; other errors unchanged
    """
    try:
        yield
    except PermissionError as error:
        with suppress(OSError), kernel.open_path(base_path, os.O_PATH | os.O_DIRECTORY) as base:
            may_make = os.geteuid() == 0 and _overrides_modes()
            if may_make and not kernel.is_local(base) and _creates_as_other_user(kernel, base):
                raise RootSquashed(base_path) from error
        raise
