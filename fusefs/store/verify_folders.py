"""Root's first look at what users made themselves: what is whole then becomes proven; what is not never will.

Until root has looked, a folder serves its user alone. If it meets the conditions down to every container, root
registers it and moves it to where only root makes names. If it does not, root remembers just that: giving it the
right modes later makes no folder of it. Nothing is taken out of any user's reach.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from typing import NamedTuple

from fusefs.core.names import Name
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.subuid import read_subordinates
from fusefs.store.backing_and_mount import DIRECTORY, FULL, OUT_OF_REACH, suppress_errno
from fusefs.store.folder_registry import RegisteredFolder, read_registered, write_registered
from fusefs.store.layout import Store
from fusefs.store.make_folder import free_name, take_registry
from fusefs.store.user_folders import MOUNTED, names_in, why_not, why_not_deep

_MOST_A_LOOK = 300
"""Entries of the registry that one look writes: some are durable in a millisecond. Subordinate uids beyond them
wait for the next look, and delay no other user's."""


class _StoreSeen(NamedTuple):
    """A store of root's, in which root registers. dev: of it (st_dev)"""

    kernel: Kernel
    u_fd: Fd
    new_fd: Fd
    registry_fd: Fd
    dev: int


def look_first(store: Store) -> None:
    """Register what users made in a store of root's since the last look; needs root.

    If another process of root's is at it, that one does it; on a full volume it is done later, on one that is
    read-only not at all.
    Raises  OSError
    """
    kernel, areas = store.kernel, store.areas
    if areas.new_fd is None or areas.registry_fd is None or store.is_unknown():
        return
    if store.volume.strangers_refused is not True or kernel.is_empty(areas.new_fd) or kernel.is_read_only(store.fd):
        return
    with suppress_errno(*FULL), ExitStack() as owned:
        if take_registry(kernel, areas.registry_fd, owned):
            dev = kernel.fstat(store.fd).st_dev
            _register_new(_StoreSeen(kernel, areas.u_fd, areas.new_fd, areas.registry_fd, dev))


def _register_new(here: _StoreSeen) -> None:
    """Register new folders while the caller has the registry's lock; if there are very many, the first of them."""
    kernel, n_left = here.kernel, _MOST_A_LOOK
    for uid, names in _in_order(names_in(kernel, here.new_fd)):
        if uid == 0:
            continue  # root makes its own in `u/`
        entry = read_registered(kernel, here.registry_fd, uid)
        for name in names:
            if entry.is_closed() or _has_folder(here, entry):
                break
            if n_left == 0:
                return
            with suppress(_NotAFolder):
                entry = _look_at(here, entry, name)
                n_left -= 1


def _in_order(named: dict[int, list[Name]]) -> list[tuple[int, list[Name]]]:
    """Of more than one look has time for, first those of users, then those of subordinate uids."""
    if len(named) <= _MOST_A_LOOK:
        return list(named.items())
    holder_of = read_subordinates().holder_of
    return sorted(named.items(), key=lambda one: holder_of(one[0]) != one[0])


class _NotAFolder(Exception):
    """It is no user's folder, or can't be looked at; nothing needs to be remembered."""


def _has_folder(here: _StoreSeen, entry: RegisteredFolder) -> bool:
    """Whether a user's registered folder is there, and is one."""
    if not entry.name:
        return False
    kernel = here.kernel
    with suppress_errno(*OUT_OF_REACH), kernel.open_beneath(here.u_fd, entry.name, DIRECTORY) as fd:
        return entry.proves(kernel.identify(fd)) and not why_not(kernel, fd, kernel.fstat(fd), entry.uid, here.dev)
    return False


def _look_at(here: _StoreSeen, entry: RegisteredFolder, name: Name) -> RegisteredFolder:
    """What root knows of a user after a look at one of that user's names. Raises  _NotAFolder; OSError"""
    kernel = here.kernel
    try:
        fd = kernel.open_beneath(here.new_fd, name, DIRECTORY)
    except OSError as error:
        if error.errno not in OUT_OF_REACH:
            raise
        raise _NotAFolder from error
    with fd:
        if kernel.fstat(fd).st_uid != entry.uid:
            raise _NotAFolder  # this uid could not have made it; and its maker can make thousands
        found = kernel.identify(fd)
        if not entry.is_same(found):
            if entry.has_refused(found):
                raise _NotAFolder
            try:
                why = why_not_deep(kernel, fd, entry.uid, here.dev)
            except PermissionError as error:
                raise _NotAFolder from error  # root of another host
            if why.endswith(MOUNTED):
                raise _NotAFolder  # what lies below it can't be seen now
            if why:
                entry = entry._replace(refused=(*entry.refused, found))
                write_registered(kernel, here.registry_fd, entry)
                return entry
        return _register(here, entry, name, fd)


def _register(here: _StoreSeen, entry: RegisteredFolder, name: Name, fd: Fd) -> RegisteredFolder:
    """Note a folder, then move it to where only root makes names. Raises  _NotAFolder if it has gone; OSError"""
    kernel = here.kernel
    place = free_name(kernel, here.u_fd, entry.uid)
    entry = entry._replace(name=place, identity=kernel.identify(fd))
    write_registered(kernel, here.registry_fd, entry)
    try:
        kernel.rename_free(here.new_fd, name, here.u_fd, place)
    except FileNotFoundError as error:
        raise _NotAFolder from error
    if not kernel.is_named(fd, here.u_fd, place):
        # Its owner put something else there at that moment: it is not what is registered, and goes back.
        aside = Name(b"%d.%b" % (entry.uid, os.urandom(6).hex().encode()))
        kernel.rename_free(here.u_fd, place, here.new_fd, aside)
        raise _NotAFolder
    return entry


def register_again(store: Store) -> list[str]:
    """Register what lies where only root makes names and is not registered: of a store that was copied or restored.

    Only `trashd init` does, by which root vouches for it; what was done, in words.
    Raises  OSError
    """
    kernel, areas = store.kernel, store.areas
    if areas.new_fd is None or areas.registry_fd is None or kernel.is_read_only(store.fd):
        return []
    here = _StoreSeen(kernel, areas.u_fd, areas.new_fd, areas.registry_fd, kernel.fstat(store.fd).st_dev)
    told: list[str] = []
    with ExitStack() as owned:
        if not take_registry(kernel, here.registry_fd, owned):
            return []
        for uid, names in names_in(kernel, here.u_fd).items():
            entry = read_registered(kernel, here.registry_fd, uid)
            for name in sorted(names, key=entry.name.__ne__):
                if _has_folder(here, entry):
                    break
                with suppress(OSError), kernel.open_beneath(here.u_fd, name, DIRECTORY) as fd:
                    if not why_not_deep(kernel, fd, uid, here.dev):
                        entry = entry._replace(name=name, identity=kernel.identify(fd))
                        write_registered(kernel, here.registry_fd, entry)
                        told.append(f"registered u/{name.decode()}, which root or a copy of the store put there")
    return told
