"""`trashd check`: what a swap would do, told without doing it."""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

from fusefs.core.errors import NotKept, TrashdError, from_os
from fusefs.linux.kernel import Kernel
from fusefs.linux.likeness import project_of
from fusefs.linux.mountinfo import Mount
from fusefs.store.holders import holders_of
from fusefs.store.keeping import choose, hindrances
from fusefs.store.locate import Victim, find_victim
from fusefs.store.refuse import refusals
from fusefs.store.trial import first_store, told, try_stores


class Preflight(NamedTuple):
    """What `trashd check` says.

    store      where the orphan would go; None if nowhere
    exists     whether that store is there already
    method     exchange, two-rename, or unknown where nothing could be tried
    project    project id, whose quota goes on counting the orphan; None where there are none
    refusals   why swap would refuse, each with its hint
    unlike     what of the likeness the caller could not give to the fresh directory, in words
    n_holders  processes that have it open (of those that the caller may see)
    kept       top entries that would stay in view
    exit_code  the one that swap would have
    """

    path: bytes
    filesystem: str
    mount_point: bytes
    store: bytes | None
    exists: bool
    method: str
    project: int | None
    refusals: tuple[tuple[str, str], ...]
    unlike: tuple[str, ...]
    n_holders: int
    kept: tuple[bytes, ...] = ()
    exit_code: int = 0


def preflight(kernel: Kernel, path: bytes, keep: tuple[str, ...] = (), *, unlike: bool = False) -> Preflight:
    """Look at a directory as a swap would, and try what only trying tells; nothing is left of that.

    keep    globs of what would stay in view
    unlike  accept a fresh directory that is not quite like it
    Raises  TrashdError if there is nothing to look at
    """
    with find_victim(kernel, path) as victim:
        reasons = list(refusals(kernel, victim, directory=True))
        kept: tuple[bytes, ...] = ()
        if keep and victim.is_directory():
            kept, more = _kept(kernel, victim, keep)
            reasons += more
        found = first_store(kernel, victim) if reasons else try_stores(kernel, victim, unlike=unlike)
        if found.error is not None:
            reasons.append(found.error)
        holders = {holder.pid for held in holders_of([victim.path()]) for holder in held.holders}
        return Preflight(
            path=victim.path(),
            filesystem=_type(victim.parent.mount),
            mount_point=victim.parent.mount.point,
            store=found.path,
            exists=found.exists,
            method="unknown" if found.volume is None else "exchange" if found.volume.exchange else "two-rename",
            project=_project(kernel, victim),
            refusals=tuple((reason.message(), reason.hint) for reason in reasons),
            unlike=tuple(told(found.unlike)),
            n_holders=len(holders),
            kept=kept,
            exit_code=reasons[0].exit_code if reasons else 0,
        )


def _type(mount: Mount) -> str:
    return mount.fstype.decode("ascii", "replace")


def _kept(kernel: Kernel, victim: Victim, keep: tuple[str, ...]) -> tuple[tuple[bytes, ...], list[TrashdError]]:
    try:
        staying = choose(kernel, victim, keep)
    except NotKept as error:
        return (), [error]
    except OSError as error:
        return (), [from_os(error, victim.path())]
    return staying.names(), list(hindrances(kernel, victim, staying))


def _project(kernel: Kernel, victim: Victim) -> int | None:
    with suppress(OSError), kernel.open_dir(victim.fd) as readable:
        return project_of(kernel, readable)
    return None
