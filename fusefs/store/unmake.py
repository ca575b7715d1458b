"""Removing a store that was made for one victim and turned out not to be able to take it."""

from __future__ import annotations

import os
from contextlib import suppress

from fusefs.core.names import STORE, Name
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.store.layout import FOLDERS, NEW_PREFIX, USERS, open_store, open_user
from fusefs.store.reserve import discard_reserve
from fusefs.store.volume import discard_unfinished


def unmake_store(kernel: Kernel, base_fd: Fd, base_path: bytes) -> None:
    """Remove a store of ours that nobody uses; one that somebody uses by now stays as it is.

    It gets the name of an unfinished one first, so that nobody comes to it meanwhile; rmdir alone removes
    directories, so that a folder or container which appeared all the same is kept, and the store with it.
    """
    _empty_own_folder(kernel, base_fd, base_path)
    hidden = Name(NEW_PREFIX + os.urandom(6).hex().encode())
    kernel.rename_free(base_fd, STORE, base_fd, hidden)
    try:
        with kernel.open_dir(base_fd, hidden) as fd:
            kernel.rmdir(fd, USERS)
    except OSError:
        kernel.rename_free(base_fd, hidden, base_fd, STORE)
        return
    discard_unfinished(kernel, base_fd, hidden)


def _empty_own_folder(kernel: Kernel, base_fd: Fd, base_path: bytes) -> None:
    store = open_store(kernel, kernel.open_beneath(base_fd, b".", os.O_PATH | os.O_DIRECTORY), base_path)
    if store is None:
        return
    with store, suppress(OSError):
        folder = open_user(store, os.geteuid())
        if folder is None:
            return
        with folder:
            discard_reserve(folder)
            for part in FOLDERS:
                with suppress(FileNotFoundError):
                    kernel.rmdir(folder.fd, part)
            kernel.rmdir(store.u_fd, folder.name)
