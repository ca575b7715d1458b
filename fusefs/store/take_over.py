"""Takeover off local filesystems: what lies in another's container is moved into a new one, and that removed.

Whoever had it may be frozen or cut off, and go on with the fds that it has open, or a call of it arrive that it sent
before: they find nothing (docs/decisions/0042-shared-filesystems.md). A restore takes over what it gives back, and who
keeps an orphan what is kept, since a late call may be on its way to that as well.

Whether another node still works on a container is watched for long, by our own clock. What was seen, and when, is noted
beside the record, so that any later command of this boot goes on with the watch. It only shows who may be alive: what
keeps live files, should a silent one wake after all, is how it is taken over.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import NamedTuple

from fusefs.core.container_states import State
from fusefs.core.errors import BadConfig, BadRecord
from fusefs.core.names import Name, successor
from fusefs.core.record import Record
from fusefs.linux.fd import Fd, closed_on_error
from fusefs.linux.kernel import Kernel
from fusefs.linux.machine_identity import boot_id, host_id
from fusefs.linux.mountinfo import Mount, find_mount, find_rule_path, read_mounts, views
from fusefs.store.container import (
    ClaimLost,
    HeldContainer,
    create_record,
    dissolve,
    make_directory,
    open_record,
    read_record,
    rewrite,
    superblock_in,
)
from fusefs.store.gate import empty_into, end_gates, move_parts
from fusefs.store.layout import (
    ANNOUNCED_PREFIX,
    OLD_CONTAINER,
    TREE,
    WATCH_PREFIXES,
    WATCHED_PREFIX,
    Store,
    read_small,
    trusted_owners,
    write_small,
)
from fusefs.store.stage import ATTEMPTS, discard_unmade
from fusefs.store.victim_rename import lend, loan


def take_over(
    old: HeldContainer, to: State, change: Callable[[Record], Record] = lambda record: record
) -> HeldContainer | ClaimLost:
    """All that a container has, in a new one that is ours; one of several who want it gets it. Closes the old one then.

    to      the state that it goes on in
    change  what its record is to say from now on
    Raises  OSError: what was not done is done by who takes over the new one
    """
    kernel, folder = old.folder.store.kernel, old.folder
    lent = None
    with suppress(FileNotFoundError), kernel.open_beneath(old.fd, TREE) as tree:
        lent = loan(kernel.fstat(tree))  # to move it changes it, as its `..` changes
    new = _made(old, to, _ours(kernel, old.fd, change(old.record), lent))
    with closed_on_error(new):
        with folder.open(old.state) as source:
            try:
                kernel.rename(source, old.name(), new.fd, OLD_CONTAINER)
            except OSError as error:
                # What is said proves nothing: a server that started again may say so of a rename that it did.
                if not kernel.is_named(old.fd, new.fd, OLD_CONTAINER):
                    dissolve(new)
                    if isinstance(error, FileNotFoundError):
                        return ClaimLost.GONE
                    raise
        now = _record_in(new, OLD_CONTAINER) or old.record
        if now != old.record:  # somebody changed it meanwhile, whose lock we don't see
            new = rewrite(new, _ours(kernel, old.fd, change(now), lent))
        old.owned.close()  # NFS and libfuse keep a record that is open
        end_old(new)
    return new


def _ours(kernel: Kernel, fd: Fd, record: Record, lent: int | None) -> Record:
    """The record with us as its maker, who are alive: or another recovery would take us for the dead one."""
    lent = record.lent_mode if lent is None else lent
    return record._replace(
        host=host_id(), boot=boot_id(), boot_ns=None, superblock=superblock_in(kernel.fstat(fd)), lent_mode=lent
    )


def _made(old: HeldContainer, to: State, record: Record) -> HeldContainer:
    """A new container for what another one has."""
    folder = old.folder
    for attempt in range(ATTEMPTS):
        called = successor(old.id, os.urandom(6))
        with ExitStack() as owned:
            try:
                fd = owned.enter_context(make_directory(folder, to, called))
                owned.enter_context(create_record(folder.store, fd, record))
            except OSError as error:
                discard_unmade(folder, to, called)
                if isinstance(error, FileNotFoundError) and attempt < ATTEMPTS - 1:
                    continue  # recovery swept it away while it had no record
                raise
            return HeldContainer(folder, old.id, to, fd, record, owned.pop_all(), called)
    raise AssertionError("unreachable: the last attempt returns or raises")


def _record_in(held: HeldContainer, name: bytes) -> Record | None:
    """The record of a container in a container; None if there is none that could be read."""
    kernel = held.folder.store.kernel
    with (
        suppress(FileNotFoundError, BadRecord),
        kernel.open_dir(held.fd, name) as fd,
        open_record(kernel, fd, held.folder.uid) as record_fd,
    ):
        return read_record(kernel, record_fd, held.folder, held.id)
    return None


def end_old(held: HeldContainer) -> None:
    """Move all that lies in older containers, and in gates, into a container of ours, and remove these.

    Who took over and was killed left its own with the one before in it. Raises  OSError
    """
    kernel = held.folder.store.kernel
    with ExitStack() as opened:
        chain = [held.fd]
        while OLD_CONTAINER in kernel.list_anew(chain[-1]):
            chain.append(opened.enter_context(kernel.open_dir(chain[-1], OLD_CONTAINER)))
        for lower in chain[1:]:  # the newer first: what it has was moved out of the older one
            with suppress(FileNotFoundError), kernel.open_beneath(lower, TREE) as tree:
                lend(held, tree, held.record.lent_mode)  # who was killed may have had no time for it
            move_parts(kernel, lower, held.fd)
        for upper, lower in zip(reversed(chain[:-1]), reversed(chain[1:]), strict=True):
            empty_into(kernel, lower, upper, OLD_CONTAINER, held.fd)
    end_gates(kernel, held.fd, held.fd)


UNKNOWN_S = 180
"""Three times as long as NFS caches attributes (acregmax, acdirmax), the longest of the defaults that we know."""
_KNOWN_S = {
    b"ceph": 90,
    b"fuse.ceph-fuse": 90,
    b"fuse.glusterfs": 90,
    b"fuse.juicefs": 90,
    b"fuse.mfs": 90,
    b"fuse.sshfs": 90,
}
"""By the type of the filesystem: the nodes of these saw each other's changes within seconds (docs/performance.md)."""
_CACHE_TIMES = 3
_ANNOUNCED_PART = 1 / 3
"""Of that time: so long nothing is said of it, or every check would stop every swap; and so long it is announced."""
_NOTE_MAX_BYTES = 200
_NS = 1_000_000_000

Waits = Callable[[float], bool]
"""Waits for so many seconds; False if that was stopped before."""


class _Note(NamedTuple):
    """When something was seen, by the clock of this boot that can't be set, and what."""

    at_s: float
    sight: str


def takeover_s(store: Store) -> float:
    """For how many seconds another node's command must be silent before it is taken over, if its lock can be had.

    A node that is silent for less may be busy; and other nodes see what it writes only when their caches expire.
    Raises  OSError
    """
    mounts = read_mounts()
    seconds = _configured_s(store, mounts) if store.takeover_s is None else store.takeover_s
    if not seconds:
        mount = find_mount(store.kernel, store.fd, mounts)
        seconds = UNKNOWN_S if mount is None else _KNOWN_S.get(mount.fstype, UNKNOWN_S)
    return max(float(seconds), _CACHE_TIMES * (store.volume.cache_s or 0.0))


def _configured_s(store: Store, mounts: list[Mount]) -> int:
    """The longer one of what the system's configuration and the caller's own state for a volume; 0 if neither does.

    One that has an error, or that the caller may not read, states nothing.
    """
    from fusefs.linux.config_files import load_config, load_system_config  # few commands meet another boot's leftovers

    rule = find_rule_path(store.base_path, mounts, views(mounts, trusted_owners(os.geteuid())))
    stated = [0]
    for load in (load_system_config, load_config):
        with suppress(BadConfig):
            stated.append(load().config.inside(*rule).takeover_s or 0)
    return max(stated)


def left_to_wait_s(store: Store, fd: Fd) -> float:
    """For how many seconds a container must be silent still, as far as this boot has watched it; 0: take it over.

    A live owner who sees that it is announced withdraws. Raises  OSError
    """
    kernel = store.kernel
    needed_s, now_s, sight = takeover_s(store), kernel.boot_ns() / _NS, _sight(kernel, fd)
    announced_s = needed_s * _ANNOUNCED_PART
    watched = _noted(kernel, fd, WATCHED_PREFIX)
    if watched is None or watched.sight != sight:
        _note(kernel, fd, WATCHED_PREFIX, _Note(now_s, sight))
        with suppress(FileNotFoundError):
            kernel.unlink(fd, _name(ANNOUNCED_PREFIX))
        return announced_s
    silent_s = now_s - watched.at_s
    if silent_s < announced_s:
        return announced_s - silent_s
    announced = _noted(kernel, fd, ANNOUNCED_PREFIX)
    if announced is None:
        _note(kernel, fd, ANNOUNCED_PREFIX, announced := _Note(now_s, sight))
    return max(0.0, needed_s - silent_s, announced.at_s + announced_s - now_s)


def _name(prefix: bytes) -> Name:
    """Each boot has a note of its own: another's clock proves nothing."""
    return Name(prefix + boot_id().encode())


def _sight(kernel: Kernel, fd: Fd) -> str:
    """What a container looks like: its names, and when its record and all else in it were changed."""
    from hashlib import sha256  # few commands meet what another boot left

    digest = sha256()
    for name in kernel.list_anew(fd):
        if not name.startswith(WATCH_PREFIXES):
            with suppress(FileNotFoundError):
                st = kernel.stat(fd, name)
                digest.update(repr((name, st.st_size, st.st_mtime_ns, st.st_ctime_ns)).encode())
    return digest.hexdigest()


def _noted(kernel: Kernel, fd: Fd, prefix: bytes) -> _Note | None:
    """This boot's note; None if there is none that makes sense."""
    with suppress(FileNotFoundError, ValueError):
        at_s, sight = (read_small(kernel, fd, _name(prefix), _NOTE_MAX_BYTES) or b"").decode("ascii").split()
        return _Note(float(at_s), sight)
    return None


def _note(kernel: Kernel, fd: Fd, prefix: bytes, note: _Note) -> None:
    text = f"{note.at_s} {note.sight}".encode()
    write_small(kernel, fd, _name(prefix), text, new=prefix + os.urandom(6).hex().encode())
