"""Adoption of what is just being moved into a drop folder: a container with a durable record, one rename, an orphan.

The rename is made by whoever moves it, with that user's own rights, between `make_ready` and `finish`, which are the
folder's user's. Killed in between, it is where it was or in a container that recovery adopts, as for `trashd rm`.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from typing import NamedTuple

from fusefs.core.container_states import DEFAULT_RETENTION_S, State
from fusefs.core.errors import NoStore, TrashdError
from fusefs.core.names import Name, RelPath, whose_store
from fusefs.core.record import Invocation, Method, Record
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.store.backing_and_mount import DIRECTORY, BackingAndMount
from fusefs.store.container import HeldContainer, dissolve, move, rewrite
from fusefs.store.gate import gate
from fusefs.store.layout import DROP, TREE, UserFolder, open_store
from fusefs.store.recover import settle_late
from fusefs.store.stage import identify_at, record_now, stage_new
from fusefs.store.standing import open_user


class ReadyContainer(NamedTuple):
    """A container in stage/ that waits for its tree.

    place  where the tree is renamed to, as TREE: the container, or off local filesystems a gate of it
    gated  ends that gate
    """

    held: HeldContainer
    place: Fd
    gated: ExitStack


def open_folder_of(kernel: Kernel, base_fd: Fd, store_name: Name, drop: Fd, owned: ExitStack) -> UserFolder:
    """The user's folder whose drop folder a directory is; what is opened for that is owned by `owned`.

    base_fd  the directory that holds the store
    Raises   OSError; TrashdError: it is no drop folder of a store that we trust, or not that user's only
    """
    uid, whose = kernel.fstat(drop).st_uid, whose_store(store_name)
    base = BackingAndMount(kernel.open_beneath(base_fd, b".", DIRECTORY))
    store = open_store(kernel, base, b"", store_name, of=whose)
    if store is None:
        raise NoStore(store_name)
    owned.enter_context(store)
    folder = open_user(store, uid)
    if folder is None:
        raise NoStore(store_name)
    owned.enter_context(folder)
    if whose not in (None, uid) or os.geteuid() not in (0, uid) or not kernel.is_named(drop, folder.fd, DROP):
        raise NoStore(store_name)
    return folder


def record_moved(
    folder: UserFolder, dir_fd: Fd, item: Fd, origin: RelPath | None, invocation: Invocation | None
) -> Record:
    """The record of what is to be moved: without its container's id.

    dir_fd, item  where it is, and it
    origin        its path, relative to the directory that holds the store; None: it has none
    invocation    the process that moves it
    """
    kernel, method = folder.store.kernel, Method.DROPPED if origin is None else Method.REMOVED
    victim, parent = kernel.identify(item), kernel.identify(dir_fd)
    record = record_now(folder, method, origin, victim, parent)
    return record._replace(retention_s=DEFAULT_RETENTION_S, invocation=invocation)


def make_ready(folder: UserFolder, name: Name, record: Record) -> ReadyContainer:
    """A container with that record, durable; to be closed by its `held`. name: of what it is for

    Raises  OSError; nothing is left behind then
    """
    held = stage_new(folder, name, record).held
    gated, place = ExitStack(), held.fd
    if folder.store.is_shared():
        try:
            place = gated.enter_context(gate(folder.store.kernel, held.fd))
        except BaseException:
            with held:
                dissolve(held)
            raise
    return ReadyContainer(held, place, gated)


def finish(ready: ReadyContainer, item: Fd) -> bool:
    """Make an orphan of what came; False: nothing did, and the container is no more. item: what should have

    What can't be finished is left to recovery.
    Raises  OSError: nobody can tell what came
    """
    held = ready.held
    kernel = held.folder.store.kernel
    ready.gated.close()
    came = identify_at(kernel, held.fd, TREE)
    with suppress(OSError, TrashdError):
        if came is None:
            dissolve(held)
        else:
            if not kernel.is_named(item, held.fd, TREE):  # something else had the name: the user moved that
                held = rewrite(held, held.record._replace(victim=came))
            if held.folder.store.is_shared():
                settle_late(held)
            move(held, State.ORPHANS)
    return came is not None
