"""`trashd check`: what a swap would do, told without touching anything."""

from __future__ import annotations

import errno
import os
import stat
from typing import NamedTuple

from fusefs.core.errors import NotKept, NotPermitted, TrashdError, Untrusted, from_os
from fusefs.core.names import STORE
from fusefs.linux.kernel import Kernel
from fusefs.linux.likeness import Likeness, read_likeness
from fusefs.linux.mountinfo import Mount
from fusefs.store.holders import holders_of
from fusefs.store.keeping import choose, hindrances
from fusefs.store.locate import Victim, ancestors, existing_stores, find_victim
from fusefs.store.refuse import refusals

_WRITE_SEARCH = os.W_OK | os.X_OK


class Preflight(NamedTuple):
    """What `trashd check` says.

    store      where the orphan would go; None if nowhere
    exists     whether that store is there already
    method     exchange, two-rename, or unknown as long as there is no store to have tried it in
    project    project id, whose quota goes on counting the orphan; None where there are none
    refusals   why swap would refuse, each with its hint
    unlike     what of the likeness the caller could not give to the fresh directory
    n_holders  processes that have it open (of those that the caller may see)
    kept       top entries that would stay in view
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


def preflight(kernel: Kernel, path: bytes, keep: tuple[str, ...] = ()) -> Preflight:
    """Look at a directory as a swap would, changing nothing.

    keep    globs of what would stay in view
    Raises  TrashdError if there is nothing to look at
    """
    with find_victim(kernel, path) as victim:
        reasons = list(refusals(kernel, victim, directory=True))
        likeness = None
        if not reasons:
            likeness, more = _likeness(kernel, victim)
            reasons += more
            reasons += _permissions(victim)
        kept: tuple[bytes, ...] = ()
        if keep and victim.is_directory():
            kept, more = _kept(kernel, victim, keep)
            reasons += more
        store, exists, method, untrusted = _store(kernel, victim)
        if store is None:
            reasons.append(untrusted or NotPermitted(victim.path(), "no directory above it lets you make a store"))
        holders = {holder.pid for held in holders_of([victim.path()]) for holder in held.holders}
        return Preflight(
            path=victim.path(),
            filesystem=_type(victim.mount),
            mount_point=victim.mount.point,
            store=store,
            exists=exists,
            method=method,
            project=None if likeness is None or likeness.extended is None else likeness.extended.project,
            refusals=tuple((reason.message(), reason.hint) for reason in reasons),
            unlike=() if likeness is None else tuple(_unlike(likeness)),
            n_holders=len(holders),
            kept=kept,
        )


def _type(mount: Mount) -> str:
    return mount.fstype.decode("ascii", "replace")


def _likeness(kernel: Kernel, victim: Victim) -> tuple[Likeness | None, list[TrashdError]]:
    try:
        with kernel.open_dir(victim.fd) as readable:
            return read_likeness(kernel, readable), []
    except PermissionError:
        if victim.stat.st_uid == os.geteuid():
            return None, []  # swap lends its owner the permission
        return None, [NotPermitted(victim.path())]
    except OSError as error:
        return None, [from_os(error, victim.path())]


def _kept(kernel: Kernel, victim: Victim, keep: tuple[str, ...]) -> tuple[tuple[bytes, ...], list[TrashdError]]:
    try:
        staying = choose(kernel, victim, keep)
    except NotKept as error:
        return (), [error]
    except OSError as error:
        return (), [from_os(error, victim.path())]
    return staying.names(), list(hindrances(kernel, victim, staying))


def _permissions(victim: Victim) -> list[TrashdError]:
    uid = os.geteuid()
    parent = b"/proc/self/fd/%d" % victim.parent_fd
    if not os.access(parent, _WRITE_SEARCH, effective_ids=True):
        return [NotPermitted(victim.path(), "you may not write in its parent directory")]
    own = b"/proc/self/fd/%d" % victim.fd
    if victim.stat.st_uid != uid and not os.access(own, os.W_OK, effective_ids=True):
        return [NotPermitted(victim.path())]
    sticky = os.stat(parent)
    if uid and sticky.st_mode & stat.S_ISVTX and uid not in (sticky.st_uid, victim.stat.st_uid):
        return [NotPermitted(victim.path(), "its parent is sticky, and neither of the two is yours")]
    return []


def _unlike(likeness: Likeness) -> list[str]:
    """What an unprivileged caller can't set; found out for good only by trying."""
    uid = os.geteuid()
    if uid == 0:
        return []
    found = []
    if likeness.uid != uid:
        found.append(f"owner {likeness.uid}")
    if likeness.gid not in (os.getegid(), *os.getgroups()):
        found.append(f"group {likeness.gid}")
    return found


def _store(kernel: Kernel, victim: Victim) -> tuple[bytes | None, bool, str, TrashdError | None]:
    untrusted: list[Untrusted] = []
    for _relative, store in existing_stores(kernel, victim, untrusted):
        with store:
            method = "exchange" if store.volume.exchange else "two-rename"
            return os.path.join(store.base_path, STORE), True, method, None
    for relative, path in ancestors(victim):
        with kernel.open_beneath(victim.root_fd, relative or b".", os.O_PATH | os.O_DIRECTORY) as fd:
            if os.access(b"/proc/self/fd/%d" % fd, _WRITE_SEARCH, effective_ids=True) and not _has(kernel, fd):
                return os.path.join(path, STORE), False, "unknown", None
    return None, False, "unknown", untrusted[0] if untrusted else None


def _has(kernel: Kernel, fd: int) -> bool:
    try:
        kernel.stat(fd, STORE)
    except OSError as error:
        return error.errno != errno.ENOENT
    return True
