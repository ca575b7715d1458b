"""Transfer directories (`gate.*`): on shared filesystems, a visible rename passes through one, which is then removed.

The server may execute a call from a disconnected client late, when the caller is long gone, or twice. Once the transfer
directory is removed, such a call always fails. So decisions are based only on the state after its removal
(docs/internals/decisions/0042-shared-filesystems.md).
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from fusefs.core.names import Name
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.store.layout import (
    HIDDEN_PREFIXES,
    LATE_PREFIX,
    OLD_CONTAINER,
    TRANSFER_PREFIX,
    is_container_file,
    make_unique,
)

_N_TRIES, _PAUSE_S = 100, 0.01


@contextmanager
def transfer_directory(kernel: Kernel, container: Fd) -> Iterator[Fd]:
    """Make a transfer directory for one rename; then move its contents into the container, and remove it.

    Raises  OSError if it could not be made or removed; then the next recovery removes it
    """
    name = Name(TRANSFER_PREFIX + os.urandom(6).hex().encode())
    make_unique(kernel, container, name)
    with kernel.open_dir(container, name) as fd:
        uid = kernel.fstat(container).st_uid
        if kernel.fstat(fd).st_uid != uid:
            kernel.chown(fd, uid, -1)  # root made it for the container's user, who must remove it if root can't
        try:
            yield fd
        finally:
            empty_into(kernel, fd, container, name, container)


def remove_transfer_directories(kernel: Kernel, lower: Fd, container: Fd) -> None:
    """Remove transfer directories that a killed process left in a container, or in one it took over. Raises  OSError"""
    for name, fd in _open_transfer_directories(kernel, lower):
        empty_into(kernel, fd, lower, name, container)


def _open_transfer_directories(kernel: Kernel, lower: Fd) -> Iterator[tuple[Name, Fd]]:
    for name in kernel.list_reopened(lower):
        if name.startswith(TRANSFER_PREFIX):
            with suppress(FileNotFoundError), kernel.open_dir(lower, name) as fd:
                yield Name(name), fd


def empty_into(kernel: Kernel, lower: Fd, upper: Fd, name: Name, container: Fd) -> None:
    """Move the contents of a directory into a container and remove the directory, so that late calls fail.

    lower   the directory, which has this name in `upper`. Transfer directories in it are emptied after it, because
            their contents arrived later
    Raises  OSError; the entries that have been moved stay moved
    """
    failed: OSError | None = None
    for _ in range(_N_TRIES):
        try:
            _empty(kernel, lower, upper, name, container)
        except OSError as error:
            # Another process moves the same entry, the server is restarting, or a file is open (.nfs…, .fuse_hidden…).
            failed = error
        else:
            return
        time.sleep(_PAUSE_S)
    assert failed is not None
    raise failed


def _empty(kernel: Kernel, lower: Fd, upper: Fd, name: Name, container: Fd) -> None:
    try:
        move_parts(kernel, lower, container)
        for inner, fd in _open_transfer_directories(kernel, lower):
            _empty(kernel, fd, lower, inner, container)
        if not name.startswith(TRANSFER_PREFIX):
            for own in filter(is_container_file, kernel.list_reopened(lower)):
                with suppress(FileNotFoundError):
                    kernel.unlink(lower, own)
        kernel.rmdir(upper, name)
    except FileNotFoundError:
        if kernel.is_named(lower, upper, name):
            raise


def late_name() -> Name:
    """Make up a name in a container for an entry that recovery is to turn into a separate orphan."""
    return Name(LATE_PREFIX + os.urandom(6).hex().encode())


def move_parts(kernel: Kernel, lower: Fd, container: Fd) -> None:
    """Move the contents of a directory into a container, except transfer directories and an older container.

    An entry whose name is taken in the container gets a late name: it arrived late or twice, and may be a user's data.
    """
    for name in kernel.list_reopened(lower):
        if is_container_file(name) or name == OLD_CONTAINER or name.startswith((TRANSFER_PREFIX, *HIDDEN_PREFIXES)):
            continue
        for to in (Name(name), late_name()):
            try:
                kernel.rename_free(lower, name, container, to)
                break
            except FileNotFoundError:
                break  # another process is moving the same entry
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
