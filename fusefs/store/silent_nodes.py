"""Determines how long another node, or another boot, must be silent before its container is taken over.

To find out whether another node is still working on a container, we watch the container for some time, by our own
clock. The observed state and its time are recorded next to the container's record, so that any later command in this
boot continues the watch. The watch only shows which nodes may be alive. If a silent node wakes up after all, live files
are protected by the way in which a takeover is done.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from fusefs.core.errors import BadConfig
from fusefs.core.names import Name
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.machine_identity import boot_id
from fusefs.linux.mountinfo import Mount, find_mount, find_rule_path, read_mounts, trashd_views
from fusefs.store.layout import (
    ANNOUNCED_PREFIX,
    WATCH_PREFIXES,
    WATCHED_PREFIX,
    Store,
    read_small,
    trusted_owners,
    write_small,
)

DEFAULT_TAKEOVER_S = 180
"""Three times the longest time for which NFS caches attributes by default (acregmax, acdirmax); no known default is
longer."""
_TAKEOVER_S_BY_FSTYPE = {
    b"ceph": 90,
    b"fuse.ceph-fuse": 90,
    b"fuse.glusterfs": 90,
    b"fuse.juicefs": 90,
    b"fuse.mfs": 90,
    b"fuse.sshfs": 90,
}
"""Lower values for filesystem types whose nodes see each other's changes within seconds.

Source  docs/internals/benchmarks/2026-11.md
"""
_CACHE_TIMES = 3
_ANNOUNCED_PART = 1 / 3
"""The share of the takeover time that passes before the announcement, and the minimum share that passes after it.

If takeovers were announced immediately, every check would stop a swap.
"""
_NOTE_MAX_BYTES = 200
_NS_PER_S = 1_000_000_000


Wait = Callable[[float], bool]
"""Waits for a number of seconds; returns False if the wait was interrupted."""


class _Note(NamedTuple):
    """The observed state (a digest), and its time on this boot's clock, which can't be set."""

    at_s: float
    digest: str


def takeover_s(store: Store) -> float:
    """Return for how many seconds another node's command must be silent before its container is taken over.

    A node that is silent for less time may be busy, and other nodes see its changes only when their caches expire. The
    command's lock must also be free.
    Raises  OSError
    """
    mounts = read_mounts()
    seconds = _configured_s(store, mounts) if store.takeover_s is None else store.takeover_s
    if not seconds:
        mount = find_mount(store.kernel, store.fd, mounts)
        seconds = DEFAULT_TAKEOVER_S if mount is None else _TAKEOVER_S_BY_FSTYPE.get(mount.fstype, DEFAULT_TAKEOVER_S)
    return max(float(seconds), _CACHE_TIMES * (store.volume.cache_s or 0.0))


def _configured_s(store: Store, mounts: list[Mount]) -> int:
    """Return the larger of the values in the system's and the caller's configuration for a volume, or 0 if none is set.

    A configuration that has an error, or that the caller can't read, counts as having no value.
    """
    from fusefs.linux.config_files import load_config, load_system_config  # late: seldom needed

    rule = find_rule_path(store.base_path, mounts, trashd_views(mounts, trusted_owners(os.geteuid())))
    stated = [0]
    for load in (load_system_config, load_config):
        with suppress(BadConfig):
            stated.append(load().config.policy_inside(*rule).takeover_s or 0)
    return max(stated)


def remaining_wait_s(store: Store, fd: Fd) -> float:
    """Return for how many more seconds a container must be silent, given what this boot has observed; 0: take it over.

    A live owner gives up when it sees the announcement. Raises  OSError
    """
    kernel = store.kernel
    needed_s, now_s, digest = takeover_s(store), kernel.boot_ns() / _NS_PER_S, _digest_container(kernel, fd)
    announced_s = needed_s * _ANNOUNCED_PART
    watched = _read_note(kernel, fd, WATCHED_PREFIX)
    if watched is None or watched.digest != digest:
        _write_note(kernel, fd, WATCHED_PREFIX, _Note(now_s, digest))
        with suppress(FileNotFoundError):
            kernel.unlink(fd, _note_name(ANNOUNCED_PREFIX))
        return announced_s
    silent_s = now_s - watched.at_s
    if silent_s < announced_s:
        return announced_s - silent_s
    announced = _read_note(kernel, fd, ANNOUNCED_PREFIX)
    if announced is None:
        _write_note(kernel, fd, ANNOUNCED_PREFIX, announced := _Note(now_s, digest))
    return max(0.0, needed_s - silent_s, announced.at_s + announced_s - now_s)


def _note_name(prefix: bytes) -> Name:
    """Return the name of this boot's note. Times of another boot prove nothing."""
    return Name(prefix + boot_id().encode())


def _digest_container(kernel: Kernel, fd: Fd) -> str:
    """Return a digest of a container: the names of its entries, including the record, with their sizes and times."""
    from hashlib import sha256  # late: few commands find another boot's containers

    digest = sha256()
    for name in kernel.list_reopened(fd):
        if not name.startswith(WATCH_PREFIXES):
            with suppress(FileNotFoundError):
                st = kernel.stat(fd, name)
                digest.update(repr((name, st.st_size, st.st_mtime_ns, st.st_ctime_ns)).encode())
    return digest.hexdigest()


def _read_note(kernel: Kernel, fd: Fd, prefix: bytes) -> _Note | None:
    with suppress(FileNotFoundError, ValueError):
        at_s, sight = (read_small(kernel, fd, _note_name(prefix), _NOTE_MAX_BYTES) or b"").decode("ascii").split()
        return _Note(float(at_s), sight)
    return None


def _write_note(kernel: Kernel, fd: Fd, prefix: bytes, note: _Note) -> None:
    text = f"{note.at_s} {note.digest}".encode()
    write_small(kernel, fd, _note_name(prefix), text, new=prefix + os.urandom(6).hex().encode())
