"""What other nodes did in users' folders, as inotify doesn't tell it: by times first, by names where those moved.

Nothing is read that a user wrote: names of orphans, and when directories were changed. Blocking.
"""

from __future__ import annotations

from typing import NamedTuple

from fusefs.core.lifecycle import State
from fusefs.core.names import Name, is_container_id
from fusefs.linux.kernel import Kernel
from fusefs.linux.statx import look_anew
from fusefs.service.folder_watch import open_part
from fusefs.store.backing_and_mount import DIRECTORY, READABLE
from fusefs.store.layout import DROP, Store

Stamp = tuple[int, ...]
_ORPHANS, _REAPING = (Name(state.value.encode()) for state in (State.ORPHANS, State.REAPING))


class AskedPart(NamedTuple):
    """A user's folder in one store, and how many names of it may be remembered."""

    uid: int
    base: bytes
    most: int


class FolderLook(NamedTuple):
    """A folder as it was seen.

    orphans, drop  when these directories were changed, as far as their filesystem tells
    names      the orphans by their ids; None: too many to remember
    n_orphans  those in reaping/ among them
    is_settled whether the times were the same at the look before: two changes may have one time
    """

    orphans: Stamp
    drop: Stamp
    names: frozenset[str] | None
    n_orphans: int
    is_settled: bool


def look_at_areas(store: Store) -> tuple[Stamp, ...]:
    """When users' folders came or went. Raises  OSError"""
    return tuple(_stamp(fd) for _name, fd in store.areas.all())


def look_at_folder(store: Store, asked: AskedPart, before: FolderLook | None) -> FolderLook:
    """A folder as it is now; the same look if nothing changed. Raises  OSError"""
    kernel = store.kernel
    with open_part(store, asked.base, asked.uid) as folder:
        orphans = _stamp_of(kernel, folder, _ORPHANS) + _stamp_of(kernel, folder, _REAPING)
        drop = _stamp_of(kernel, folder, DROP)
        is_same = before is not None and (before.orphans, before.drop) == (orphans, drop)
        if before is not None and is_same and before.is_settled:
            return before
        n_reaping = len(_ids(kernel, folder, _REAPING))
        names = _ids(kernel, folder, _ORPHANS)
        known = frozenset(names) if len(names) <= asked.most else None
        return FolderLook(orphans, drop, known, len(names) + n_reaping, is_same)


def _stamp_of(kernel: Kernel, folder: int, name: Name) -> Stamp:
    with kernel.open_beneath(folder, name, DIRECTORY) as fd:
        return _stamp(fd)


def _stamp(fd: int) -> Stamp:
    seen = look_anew(fd)
    return seen.ino, seen.mtime_ns, seen.nlink, seen.size


def _ids(kernel: Kernel, folder: int, name: Name) -> list[str]:
    with kernel.open_beneath(folder, name, READABLE) as fd:
        told = (one.decode("ascii", "replace") for one in kernel.list(fd))
        return [one for one in told if is_container_id(one)]
