"""Inner stores: the reaper keeps a trash store inside an orphan if the store has content.

The reaper removes an inner store that is empty. It also removes a directory that looks like a store but belongs neither
to root nor to the orphan's user. Otherwise users could keep each other's orphans from being deleted.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import NamedTuple

from fusefs.core.container_states import State
from fusefs.core.errors import BadRecord
from fusefs.core.names import RelPath, join_path
from fusefs.core.record import RECORD_MAX_BYTES
from fusefs.core.record_decoding import decode_record
from fusefs.core.results import PINNED, STORE
from fusefs.linux.children import ChildLost, call_in_child_as
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.store.backing_and_mount import READABLE
from fusefs.store.container import open_record
from fusefs.store.layout import TREE, is_store_name
from fusefs.store.victim import StoreItem, list_items

_BEGINS = ".trashd"
"""The prefix of all store names. Checking it is cheaper than calling `is_store_name` for each directory."""
_MAY_BE_PINNED = (State.ORPHANS, State.STAGE, State.RESTORING)


class InnerStoreStop(NamedTuple):
    """Why a directory must not be entered. path: the store or pinned orphan, relative to the directory's parent"""

    path: RelPath
    why: str


class InnerStores:
    """Checks whether directories in a container are inner stores with content."""

    def __init__(self, kernel: Kernel, container: Fd, *, with_stores: bool = False) -> None:
        """with_stores: whether the user requested the removal of inner stores; their pinned orphans are kept anyway"""
        self._kernel = kernel
        self._with_stores = with_stores
        self._owners = {0, os.geteuid()}
        if os.geteuid() == 0:
            # If root takes over another user's tree, root also takes over that user's stores in the tree.
            with suppress(OSError):  # the tree is gone or covered by a mount; the remover reports this
                self._owners.add(kernel.stat(container, TREE).st_uid)

    def stop_at(self, dir_fd: Fd, path: bytes, name: str) -> InnerStoreStop | None:
        """Return the reason why a directory must not be entered; None if the reaper may remove it.

        path    the path of the parent directory, relative to the container
        Raises  OSError if the contents can't be read
        """
        if not (name.startswith(_BEGINS) or not path):
            return None
        raw = os.fsencode(name)
        if path and not is_store_name(raw):
            return None
        if self._with_stores:
            pinned = next(_pinned_in(self._kernel, dir_fd, raw, self._owners), None)
            return None if pinned is None else InnerStoreStop(join_path(raw, pinned.relative_path()), PINNED)
        if next(list_items(self._kernel, dir_fd, raw, self._owners), None) is None:
            return None
        return InnerStoreStop(RelPath(raw), STORE)


def _pinned_in(kernel: Kernel, dir_fd: int, name: bytes, owners: Collection[int]) -> Iterator[StoreItem]:
    """Yield an inner store's orphans that are pinned or have unreadable records.

    A process that runs as the orphans' owner reads the records.
    """
    by_folder: dict[tuple[int, RelPath], list[StoreItem]] = {}
    for thing in list_items(kernel, dir_fd, name, owners):
        if not thing.name:
            yield thing
        elif thing.state in _MAY_BE_PINNED:
            by_folder.setdefault((thing.uid, thing.folder), []).append(thing)
    for (uid, _folder), things in by_folder.items():
        yield from _pinned_of(kernel, dir_fd, name, uid, things)


def _pinned_of(kernel: Kernel, dir_fd: int, name: bytes, uid: int, things: list[StoreItem]) -> list[StoreItem]:
    with kernel.open_beneath(dir_fd, join_path(name, things[0].folder), READABLE) as folder:

        def flags() -> bytes:
            return bytes(_may_be_pinned(kernel, folder, thing) for thing in things)

        if uid == os.geteuid():
            pinned_flags = flags()
        else:
            try:
                pinned_flags = call_in_child_as(uid, lambda _ask: flags())
            except ChildLost:
                pinned_flags = b"\1"  # the user stopped the child: nothing is known, so all count as pinned
    if len(pinned_flags) != len(things):
        return things
    return [thing for thing, is_pinned in zip(things, pinned_flags, strict=True) if is_pinned]


def _may_be_pinned(kernel: Kernel, folder: Fd, thing: StoreItem) -> bool:
    assert thing.state is not None
    try:
        with (
            kernel.open_dir(folder, join_path(thing.state.value.encode(), thing.name)) as container,
            open_record(kernel, container, thing.uid) as record,
        ):
            return decode_record(kernel.read(record, RECORD_MAX_BYTES + 1)).expires_ns() is None
    except (OSError, BadRecord):
        return True
