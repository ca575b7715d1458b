"""Whether a directory is a store that holds something: there the remover stops, as its owner may not know of it.

A store that holds nothing, and what a third user made to look like one, is removed like everything else: no user can
make another's orphan last for ever.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import NamedTuple

from fusefs.core.errors import BadRecord
from fusefs.core.lifecycle import State
from fusefs.core.names import RelPath, join
from fusefs.core.record import RECORD_MAX_BYTES
from fusefs.core.record_decoding import decode
from fusefs.core.report import PINNED, STORE
from fusefs.linux.act_as_user import call_as
from fusefs.linux.child_channel import ChildLost
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.store.backing_and_mount import READABLE
from fusefs.store.claim import open_record
from fusefs.store.layout import TREE, is_stores_own
from fusefs.store.stores_inside import Thing, things_in

_BEGINS = ".trashd"
"""What the names of stores begin with: cheaper to ask, for each directory, than `is_stores_own`."""
_MAY_BE_PINNED = (State.ORPHANS, State.STAGE, State.RESTORING)


class InnerStoreStop(NamedTuple):
    """Why a directory is not entered: what of it stands against that, below the directory that it is in."""

    way: RelPath
    why: str


class InnerStores:
    """Says of directories whether they are such stores, in one container's removal."""

    def __init__(self, kernel: Kernel, container: Fd, *, with_stores: bool = False) -> None:
        """with_stores: a person said that they go too; what is pinned in them stays all the same."""
        self._kernel = kernel
        self._with_stores = with_stores
        self._owners = {0, os.geteuid()}
        if os.geteuid() == 0:
            # Root, taking over another's tree, takes that user's stores with it.
            with suppress(OSError):  # gone, or mounted over: the remover says so
                self._owners.add(kernel.stat(container, TREE).st_uid)

    def stop_at(self, dir_fd: Fd, path: bytes, name: str) -> InnerStoreStop | None:
        """Why a directory is not entered; None if it is none of that kind.

        path    of the directory that it is in, below the container
        Raises  OSError that says nothing of it
        """
        if not (name.startswith(_BEGINS) or not path):
            return None
        raw = os.fsencode(name)
        if path and not is_stores_own(raw):
            return None
        if self._with_stores:
            pinned = next(_pinned_in(self._kernel, dir_fd, raw, self._owners), None)
            return None if pinned is None else InnerStoreStop(join(raw, pinned.way()), PINNED)
        if next(things_in(self._kernel, dir_fd, raw, self._owners), None) is None:
            return None
        return InnerStoreStop(RelPath(raw), STORE)


def _pinned_in(kernel: Kernel, dir_fd: int, name: bytes, owners: Collection[int]) -> Iterator[Thing]:
    """What of `things_in` has no term, or may have none, as its record can't be read; its owner's process reads it."""
    by_folder: dict[tuple[int, RelPath], list[Thing]] = {}
    for thing in things_in(kernel, dir_fd, name, owners):
        if not thing.name:
            yield thing
        elif thing.state in _MAY_BE_PINNED:
            by_folder.setdefault((thing.uid, thing.folder), []).append(thing)
    for (uid, _folder), things in by_folder.items():
        yield from _pinned_of(kernel, dir_fd, name, uid, things)


def _pinned_of(kernel: Kernel, dir_fd: int, name: bytes, uid: int, things: list[Thing]) -> list[Thing]:
    with kernel.open_beneath(dir_fd, join(name, things[0].folder), READABLE) as folder:

        def flags() -> bytes:
            return bytes(_may_be_pinned(kernel, folder, thing) for thing in things)

        if uid == os.geteuid():
            found = flags()
        else:
            try:
                found = call_as(uid, lambda _ask: flags(), lambda _question: b"")
            except ChildLost:
                found = b"\1"  # its user stopped it: unknown
    if len(found) != len(things):
        return things
    return [thing for thing, is_pinned in zip(things, found, strict=True) if is_pinned]


def _may_be_pinned(kernel: Kernel, folder: Fd, thing: Thing) -> bool:
    assert thing.state is not None
    try:
        with (
            kernel.open_dir(folder, join(thing.state.value.encode(), thing.name)) as container,
            open_record(kernel, container, thing.uid) as record,
        ):
            return decode(kernel.read(record, RECORD_MAX_BYTES + 1)).expires_ns() is None
    except (OSError, BadRecord):
        return True
