"""Upgrade of a store of the first format: its `u/`, where any user made names, is `new/` from then on.

Each step leaves a store that readers understand (layout.open_areas goes by modes, not by the number), and volume.json
says the new format last, when root has looked at what was there. Nothing in a folder is changed.
"""

from __future__ import annotations

import os
import stat
from contextlib import ExitStack, suppress

from fusefs.linux.fd import Fd, closed_on_error
from fusefs.linux.kernel import Kernel
from fusefs.store.backing_and_mount import DIRECTORY, FULL, suppress_errno
from fusefs.store.layout import (
    FIRST_FORMAT,
    FORMAT,
    NEW,
    REGISTRY,
    USERS,
    Areas,
    Store,
    Volume,
    open_areas,
    read_volume,
)
from fusefs.store.make_folder import take_registry
from fusefs.store.set_aside import discard_emptied
from fusefs.store.store_registry import vouch
from fusefs.store.user_folders import plain_name, why_not_deep
from fusefs.store.verify_folders import look_at_new, look_first

SHARED, OWNERS = 0o1777, 0o755


def tidied(store: Store) -> Store:
    """A store as its owner is to use it: of today's format, and, of root's, what users made looked at.

    It takes the place of the one that was given.
    Raises  OSError; the store is closed then
    """
    with closed_on_error(store):
        current = renewed(store)
    with closed_on_error(current):
        look_over(current)
    return current


def renewed(store: Store) -> Store:
    """A store of ours in today's format, in the place of the one that was given; that one, where there is no writing.

    Raises  OSError; the one that was given is as it was then
    """
    if store.owner != os.geteuid() or is_current(store) or store.kernel.is_read_only(store.fd):
        return store
    if store.is_unknown() and not is_first(store.kernel, store.fd, store.volume):
        return store
    with suppress_errno(*FULL):  # then it has come as far as there was room
        bring_up_to_date(store)
    return _reread(store)


def look_over(store: Store) -> None:
    """See to what users made in a store of root's since the last look, and to what they emptied; needs root.

    On a full volume that is done later, on one that is read-only not at all.
    Raises  OSError
    """
    if store.is_roots_to_keep() and not store.is_unknown() and not store.kernel.is_read_only(store.fd):
        look_first(store)
        discard_emptied(store)


def _reread(store: Store) -> Store:
    """The store as it is now; what is no more of it is closed."""
    judged = store._replace(volume=read_volume(store.kernel, store.fd, store.base_path)).judged()
    areas = open_areas(store.kernel, store.fd)
    store.areas.__exit__()
    return judged._replace(areas=areas)


def bring_up_to_date(store: Store) -> None:
    """Make today's format of a store of ours, as far as that may be. The fds of processes that have it open stay good.

    Raises  OSError
    """
    from fusefs.store.make_store import make_area, prove, take_store, write_volume  # most stores have today's format

    if store.owner != 0:
        _close_own(store)
        return
    kernel, fd = store.kernel, store.fd
    if store.is_unknown() and not (is_first(store.kernel, store.fd, store.volume) and vouch(store)):
        return
    make_area(kernel, fd, REGISTRY, OWNERS)
    with ExitStack() as owned:
        registry_fd = owned.enter_context(kernel.open_dir(fd, REGISTRY))
        if not take_registry(kernel, registry_fd, owned) or not take_store(kernel, fd, owned):
            return  # another process of root's does it
        with open_areas(kernel, fd) as before:
            _divide(kernel, fd, before)
        volume = prove(kernel, fd, store.volume.id)
        with open_areas(kernel, fd) as areas:
            if volume.strangers_refused:
                look_at_new(kernel, fd, areas, roots_too=True)
        write_volume(kernel, fd, volume)


def is_current(store: Store) -> bool:
    """Whether a store has today's format, all of it."""
    areas = store.areas
    if store.volume.format != FORMAT or areas.u_fd is None:
        return False
    return store.owner != 0 or (areas.new_fd is not None and areas.registry_fd is not None)


def is_first(kernel: Kernel, fd: Fd, volume: Volume) -> bool:
    """Whether an opened `.trashd` is just as the first format had it: its maker is noted nowhere, and nothing
    is registered, so that all that counts is what root sees in the folders. Raises  OSError
    """
    names = set(kernel.list_anew(fd)) if volume.format == FIRST_FORMAT else set()
    return USERS in names and not {NEW, REGISTRY} & names and bool(kernel.stat(fd, USERS).st_mode & stat.S_IWOTH)


def _divide(kernel: Kernel, fd: Fd, areas: Areas) -> None:
    """`u/` gets the name `new`, and root's own the name `u`: by one exchange, where there is one."""
    from fusefs.store.make_store import make_area

    if areas.u_fd is not None:
        make_area(kernel, fd, NEW, SHARED)
        return
    if areas.new_name != USERS:
        make_area(kernel, fd, USERS, OWNERS)  # killed between two renames
        return
    make_area(kernel, fd, NEW, OWNERS)
    try:
        kernel.exchange(fd, NEW, fd, USERS)
    except OSError:
        kernel.rmdir(fd, NEW)
        kernel.rename_free(fd, USERS, fd, NEW)
        make_area(kernel, fd, USERS, OWNERS)
    kernel.fsync(fd)


def _close_own(store: Store) -> None:
    """Let no other user make names in the `u/` of a user's own store any more, if the folder is the user's alone."""
    from fusefs.store.make_store import prove, take_store, write_volume

    kernel, fd = store.kernel, store.fd
    with kernel.open_dir(fd, USERS) as users:
        with suppress(FileNotFoundError), kernel.open_beneath(users, plain_name(store.owner), DIRECTORY) as folder:
            if why_not_deep(kernel, folder, store.owner, kernel.fstat(fd).st_dev):
                return
        if stat.S_IMODE(kernel.fstat(users).st_mode) != OWNERS:
            kernel.chmod(users, OWNERS)
    with ExitStack() as owned:
        if take_store(kernel, fd, owned):
            write_volume(kernel, fd, prove(kernel, fd, store.volume.id))
