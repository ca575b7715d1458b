"""Removing a store that was made for one victim and turned out not to be able to take it."""

from __future__ import annotations

import os
from contextlib import suppress

from fusefs.core.names import STORE, Name
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.store.ballast import discard_ballast
from fusefs.store.folders import open_user
from fusefs.store.layout import FOLDERS, NEW_PREFIX, USERS, UserFolder, open_store
from fusefs.store.reserve import discard_reserve
from fusefs.store.sides import Sides
from fusefs.store.volume import discard_unfinished


def unmake_store(kernel: Kernel, base: Sides, base_path: bytes) -> None:
    """Remove a store of ours that nobody uses; one that somebody uses by now stays as it is.

    Where all folders are gone it gets the name of an unfinished one, so that nobody comes to it meanwhile; rmdir
    alone removes directories, so that a folder which appeared all the same is kept, and the store with it.
    """
    if not _is_emptied(kernel, base.fd, base_path):
        return
    hidden = Name(NEW_PREFIX + os.urandom(6).hex().encode())
    names = base.names()
    kernel.rename_free(names, STORE, names, hidden)
    try:
        with kernel.open_dir(base.fd, hidden) as fd:
            kernel.rmdir(fd, USERS)
    except OSError:
        kernel.rename_free(names, hidden, names, STORE)
        return
    discard_unfinished(kernel, base, hidden)


def _is_emptied(kernel: Kernel, base_fd: Fd, base_path: bytes) -> bool:
    """Remove our own folder, if there is nothing in it; whether nobody has one now."""
    store = open_store(kernel, kernel.open_beneath(base_fd, b".", os.O_PATH | os.O_DIRECTORY), base_path)
    if store is None:
        return False
    with store:
        with suppress(OSError):
            folder = open_user(store, os.geteuid())
            if folder is not None:
                _remove_own(folder)
        return kernel.is_empty(store.u_fd)


def _remove_own(folder: UserFolder) -> None:
    kernel = folder.store.kernel
    with folder:
        discard_reserve(folder)
        discard_ballast(folder)
        for part in FOLDERS:
            with suppress(FileNotFoundError):
                kernel.rmdir(folder.fd, part)
        kernel.rmdir(folder.store.u_fd, folder.name)
