"""Removing a store that was made for one victim and turned out not to be able to take it."""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from fusefs.core.names import STORE, Name
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.store.ballast import discard_ballast
from fusefs.store.folders import open_user
from fusefs.store.layout import FOLDERS, NEW_PREFIX, Areas, UserFolder, open_areas, open_store
from fusefs.store.reserve import discard_reserve
from fusefs.store.sides import Sides
from fusefs.store.volume import discard_unfinished, make_area


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
        with kernel.open_dir(base.fd, hidden) as fd, open_areas(kernel, fd) as areas:
            _remove_areas(kernel, fd, areas)
    except OSError:
        kernel.rename_free(names, hidden, names, STORE)
        return
    discard_unfinished(kernel, base, hidden)


def _remove_areas(kernel: Kernel, fd: Fd, areas: Areas) -> None:
    """Remove them if they are empty, or none. Raises  OSError"""
    removed: list[tuple[Name, int]] = []
    try:
        for name, area in areas.all():
            mode = stat.S_IMODE(kernel.fstat(area).st_mode)
            kernel.rmdir(fd, name)
            removed.append((name, mode))
    except OSError:
        for name, mode in removed:
            make_area(kernel, fd, name, mode)
        raise


def _is_emptied(kernel: Kernel, base_fd: Fd, base_path: bytes) -> bool:
    """Remove our own folder, if there is nothing in it; whether nobody has one now."""
    store = open_store(kernel, kernel.open_beneath(base_fd, b".", os.O_PATH | os.O_DIRECTORY), base_path)
    if store is None:
        return False
    with store:
        with suppress(OSError):
            folder = open_user(store, os.geteuid())
            if folder is not None:
                with folder:
                    remove_folder(folder, dict(store.areas.all())[folder.area])
        return all(kernel.is_empty(area) for _name, area in store.areas.all())


def remove_folder(folder: UserFolder, area_fd: Fd) -> None:
    """Remove a folder of ours, if nothing is in it. Raises  OSError"""
    kernel = folder.store.kernel
    discard_reserve(folder)
    discard_ballast(folder)
    for part in FOLDERS:
        with suppress(FileNotFoundError):
            kernel.rmdir(folder.fd, part)
    kernel.rmdir(area_fd, folder.name)
