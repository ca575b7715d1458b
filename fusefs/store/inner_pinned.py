"""What of a store within a directory that is to go is pinned: nothing deletes that from above."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator

from fusefs.core.errors import BadRecord
from fusefs.core.lifecycle import State
from fusefs.core.names import RelPath, join
from fusefs.core.record import RECORD_MAX_BYTES
from fusefs.core.wire import decode
from fusefs.linux.children import ChildLost
from fusefs.linux.credentials import call_as
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.store.claim import open_record
from fusefs.store.sides import READABLE
from fusefs.store.stores_inside import Thing, things_in

_MAY_BE_PINNED = (State.ORPHANS, State.STAGE, State.RESTORING)


def pinned_in(kernel: Kernel, dir_fd: int, name: bytes, owners: Collection[int]) -> Iterator[Thing]:
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
                found = b"\1"  # its user stopped it: nobody knows
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
