"""Detect what other machines do on a volume, from their heartbeats and from changes in users' folders.

A volume that only this machine uses needs no such checks, because inotify reports every change. In users' folders, the
times are checked first, and the names only if the times have changed. No data written by users is read, only the names
of orphans and the change times of directories.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import trio

from fusefs.core.container_states import State
from fusefs.core.errors import TrashdError
from fusefs.core.names import Name, is_container_id
from fusefs.core.node_heartbeats import Heartbeat, HeartbeatWatch, PollInterval
from fusefs.core.service_status import SeenNode
from fusefs.linux.kernel import Kernel
from fusefs.linux.statx import stat_from_server
from fusefs.service import timers
from fusefs.service.folder_watch import open_part
from fusefs.service.open_volume import Elsewhere, OpenVolume
from fusefs.service.shared_context import ServiceContext, boot_s, in_thread
from fusefs.service.user_state import FolderPart, UserState
from fusefs.store.backing_and_mount import DIRECTORY, READABLE
from fusefs.store.layout import DROP, Store

_AGAIN_S = 0.05
"""Pause between attempts to remove our heartbeat when the service ends, since the volume may still be closing."""
_Key = tuple[int, bytes]
Stamp = tuple[int, ...]
_ORPHANS, _REAPING = (Name(state.value.encode()) for state in (State.ORPHANS, State.REAPING))


class _CheckResult(NamedTuple):
    """The result of a check.

    beats    all heartbeats by name; None if our heartbeat could not be written
    wrote_s  how long it took to write our heartbeat
    areas    times that change when users' folders are created or removed
    """

    beats: dict[bytes, Heartbeat | None] | None
    wrote_s: float
    areas: tuple[Stamp, ...] | None
    parts: dict[_Key, FolderState]


class OtherNodes:
    """The other nodes that serve one volume, and their changes."""

    def __init__(
        self, context: ServiceContext, limiter: trio.CapacityLimiter, on_new_users: Callable[[], None]
    ) -> None:
        """Start without checks.

        limiter      limits the threads that use this volume
        on_new_users  called when there may be new users
        """
        self._context = context
        self._limiter = limiter
        self._on_new_users = on_new_users
        self._watch = HeartbeatWatch()
        self._is_shared = False
        self._own_beat: bytes | None = None
        self._n_beats = 0
        self._wrote_ms: float | None = None
        self._beat_at_s = self._poll_at_s = math.inf
        self._interval = PollInterval(timers.current.node_poll_pause_s)
        self._areas: tuple[Stamp, ...] | None = None
        self._folder_states: dict[_Key, FolderState] = {}

    def begin(self, opened: OpenVolume) -> None:
        """Schedule an immediate check for changes by other nodes. Call this after the volume was opened."""
        if opened.is_shared() and not self._is_shared:
            self._is_shared = True
            self._beat_at_s = self._poll_at_s = 0.0

    def at_s(self) -> float:
        """Return when the next check is due; infinity for never."""
        return min(self._beat_at_s, self._poll_at_s)

    def is_due(self) -> bool:
        return boot_s() >= self.at_s()

    def list_nodes(self) -> tuple[SeenNode, ...]:
        """Return the nodes that have been seen to serve the volume."""
        return self._watch.list_nodes(self._own_beat)

    def forget(self) -> None:
        """Forget everything except the count of our heartbeats, because the volume is gone or is a different one."""
        self._is_shared = False
        self._own_beat = None
        self._beat_at_s = self._poll_at_s = math.inf
        self._interval = PollInterval(timers.current.node_poll_pause_s)
        self._watch = HeartbeatWatch()
        self._areas = None
        self._folder_states.clear()

    async def check(
        self, opened: OpenVolume, users: Mapping[int, UserState], phase: str, probe_ms: float | None = None
    ) -> None:
        """Write our heartbeat, read those of others, and check users' folders, each if it is due. Checkpoint

        phase, probe_ms  written to our heartbeat; without a probe, the duration of the last heartbeat's write is used
        """
        now_s, most_s = boot_s(), float(self._context.config.poll_s)
        beats, polls = now_s >= self._beat_at_s, now_s >= self._poll_at_s
        if not (beats or polls):
            return
        beat = Heartbeat(
            started_ns=self._context.started_ns,
            n=self._n_beats,
            version=self._context.version,
            phase=phase,
            probe_ms=self._wrote_ms if probe_ms is None else round(probe_ms, 3),
        )
        folders = [(user.uid, base, user.most_remembered()) for user in users.values() for base in user.parts]
        forgotten = [name for name in self._watch.expired_names() if name != self._own_beat]
        looking = partial(
            _check, opened, beat if beats else None, forgotten, folders if polls else None, dict(self._folder_states)
        )
        result = await in_thread(self._limiter, looking)
        took_s, now_s = boot_s() - now_s, boot_s()
        if beats:
            pause_s = min(timers.current.node_beat_pause_s, most_s)
            self._beat_at_s = now_s + pause_s if opened.beat is not None else math.inf
        if result.beats is not None:
            self._n_beats += 1
            self._wrote_ms = round(result.wrote_s * 1e3, 3)
            self._own_beat = None if opened.beat is None else opened.beat.name
            if self._watch.update(result.beats, time.monotonic()) - {self._own_beat}:
                for user in users.values():
                    user.rescan()  # a node that is gone may have left unfinished work for us
            self._context.changed()
        if polls:
            changed = self._update_folders(result, users)
            others = self._watch.alive_nodes() - {self._own_beat}
            self._poll_at_s = now_s + self._interval.next_wait_s(took_s, most_s, is_lively=changed or bool(others))

    def _update_folders(self, result: _CheckResult, users: Mapping[int, UserState]) -> bool:
        """Handle changes by other nodes in users' folders, and return whether there were any."""
        has_changed = self._areas is not None and result.areas is not None and result.areas != self._areas
        if has_changed:
            self._on_new_users()
        self._areas = result.areas or self._areas
        for (uid, base), folder_state in result.parts.items():
            user = users.get(uid)
            if user is None or base not in user.parts:
                continue
            before, part = self._folder_states.get((uid, base)), user.parts[base]
            if before is None and not part.is_unread:
                part.rescan()  # arrivals since the folder was read are unknown
            elif before is not None and folder_state is not before:
                has_changed |= _apply_changes(user, part, before, folder_state)
        # A folder that could not be checked now keeps its last state.
        keys = {(uid, base) for uid, user in users.items() for base in user.parts}
        self._folder_states = {
            key: folder_state for key, folder_state in {**self._folder_states, **result.parts}.items() if key in keys
        }
        return has_changed

    async def remove_own_beat(self, opening: Callable[[], Awaitable[OpenVolume]]) -> None:
        """Remove our heartbeat file, if that is quick, so that other nodes do not wait for this one. Checkpoint"""
        if self._own_beat is None:
            return
        with trio.move_on_after(timers.current.farewell_limit_s, shield=True), suppress(TrashdError, OSError):
            while True:
                try:
                    opened = await opening()
                    break
                except Elsewhere:
                    await trio.sleep(_AGAIN_S)
            with opened:
                if opened.beat is not None:
                    await in_thread(self._limiter, partial(opened.beat.remove, opened.beat.name))


def _check(
    opened: OpenVolume,
    beat: Heartbeat | None,
    forgotten: list[bytes],
    folders: list[tuple[int, bytes, int]] | None,
    before: Mapping[_Key, FolderState],
) -> _CheckResult:
    """Run a check; called in a thread. Errors are ignored: the next poll, or the work itself, will report them.

    beat       our heartbeat, to be written; None: write none now
    forgotten  names of heartbeat files to be removed
    folders    the users and stores to check, and how many names may be remembered for each; None: no check now
    """
    beats, wrote_s = None, 0.0
    if beat is not None and opened.beat is not None:
        with suppress(OSError):  # possible even on a full volume
            for name in forgotten:
                opened.beat.remove(name)
        with suppress(OSError):
            began_s = time.monotonic()
            opened.beat.write(beat)
            wrote_s = time.monotonic() - began_s
            beats = opened.beat.read_all()
    parts: dict[_Key, FolderState] = {}
    areas = None
    if folders is not None:
        with suppress(OSError):
            areas = tuple(_stamp(fd) for _name, fd in opened.store.areas.all())
        for uid, base, most in folders:
            with suppress(OSError, TrashdError):
                parts[uid, base] = read_folder_state(opened.store, uid, base, most, before.get((uid, base)))
    return _CheckResult(beats, wrote_s, areas, parts)


def _apply_changes(user: UserState, part: FolderPart, before: FolderState, now: FolderState) -> bool:
    """Handle the changes between two states of a folder, and return whether there were any."""
    if now.drop != before.drop:
        user.tend_at_s = 0.0
    if now.names is None or before.names is None:
        if now.orphans != before.orphans:
            part.rescan()
    else:
        part.n_orphans = now.n_orphans
        for identifier in before.names - now.names:
            part.note_departed(identifier)
        for identifier in now.names - before.names:
            if identifier not in user.arrived_ids:  # else inotify has already reported it
                part.mark_unread(identifier)
    return (now.orphans, now.drop, now.names) != (before.orphans, before.drop, before.names)


class FolderState(NamedTuple):
    """The state of a folder at a check.

    orphans, drop  change times of these directories, as far as the filesystem records them
    names      the ids of the orphans; None if there are too many to remember
    n_orphans  their number, including those in reaping/
    is_settled whether the times were the same at the previous check; if not, a second change may have the same time
    """

    orphans: Stamp
    drop: Stamp
    names: frozenset[str] | None
    n_orphans: int
    is_settled: bool


def read_folder_state(store: Store, uid: int, base: bytes, most: int, before: FolderState | None) -> FolderState:
    """Read the current state of a user's folder in one store; return `before` if nothing changed. Raises  OSError

    most  how many names may be remembered
    """
    kernel = store.kernel
    with open_part(store, base, uid) as folder:
        orphans = _stamp_of(kernel, folder, _ORPHANS) + _stamp_of(kernel, folder, _REAPING)
        drop = _stamp_of(kernel, folder, DROP)
        is_same = before is not None and (before.orphans, before.drop) == (orphans, drop)
        if before is not None and is_same and before.is_settled:
            return before
        n_reaping = len(_ids(kernel, folder, _REAPING))
        names = _ids(kernel, folder, _ORPHANS)
        remembered_names = frozenset(names) if len(names) <= most else None
        return FolderState(orphans, drop, remembered_names, len(names) + n_reaping, is_same)


def _stamp_of(kernel: Kernel, folder: int, name: Name) -> Stamp:
    with kernel.open_beneath(folder, name, DIRECTORY) as fd:
        return _stamp(fd)


def _stamp(fd: int) -> Stamp:
    st = stat_from_server(fd)
    return st.ino, st.mtime_ns, st.nlink, st.size


def _ids(kernel: Kernel, folder: int, name: Name) -> list[str]:
    with kernel.open_beneath(folder, name, READABLE) as fd:
        names = (one.decode("ascii", "replace") for one in kernel.list(fd))
        return [one for one in names if is_container_id(one)]
