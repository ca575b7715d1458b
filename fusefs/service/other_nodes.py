"""Changes on one volume by other machines: their heartbeats, and changes in users' folders.

A volume of this machine only needs no such checks: inotify reports every change. In users' folders the times are
checked first, and names only after a change of the times. No data written by users is read, only names of orphans and
change times of directories.
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
from fusefs.core.node_beats import BeatWatch, NodeBeat, PollInterval
from fusefs.core.service_status import SeenNode
from fusefs.linux.kernel import Kernel
from fusefs.linux.statx import look_anew
from fusefs.service import timers
from fusefs.service.folder_watch import open_part
from fusefs.service.open_volume import Elsewhere, OpenVolume
from fusefs.service.shared_context import ServiceContext, boot_s, in_thread
from fusefs.service.user_state import FolderPart, UserState
from fusefs.store.backing_and_mount import DIRECTORY, READABLE
from fusefs.store.layout import DROP, Store

_AGAIN_S = 0.05
"""Pause while the end of the service waits to remove its heartbeats; a volume that was open may be closing just now."""
_Key = tuple[int, bytes]
Stamp = tuple[int, ...]
_ORPHANS, _REAPING = (Name(state.value.encode()) for state in (State.ORPHANS, State.REAPING))


class _Seen(NamedTuple):
    """The result of a check.

    beats    None if ours could not be written
    wrote_s  how long writing it took
    areas    times at which users' folders were created or removed
    """

    beats: dict[bytes, NodeBeat | None] | None
    wrote_s: float
    areas: tuple[Stamp, ...] | None
    parts: dict[_Key, FolderLook]


class OtherNodes:
    """The other nodes that serve one volume, and their changes."""

    def __init__(self, context: ServiceContext, limiter: trio.CapacityLimiter, found_users: Callable[[], None]) -> None:
        """Start with no checks.

        limiter      of the threads that touch this volume
        found_users  called when there may be new users
        """
        self._context = context
        self._limiter = limiter
        self._found_users = found_users
        self._watch = BeatWatch()
        self._is_shared = False
        self._own: bytes | None = None
        self._n_beats = 0
        self._wrote_ms: float | None = None
        self._beat_at_s = self._poll_at_s = math.inf
        self._interval = PollInterval(timers.current.node_poll_pause_s)
        self._areas: tuple[Stamp, ...] | None = None
        self._looks: dict[_Key, FolderLook] = {}

    def begin(self, opened: OpenVolume) -> None:
        """After the volume was opened: have changes by others checked at once."""
        if opened.is_shared() and not self._is_shared:
            self._is_shared = True
            self._beat_at_s = self._poll_at_s = 0.0

    def at_s(self) -> float:
        """When the next check is due; infinity for never."""
        return min(self._beat_at_s, self._poll_at_s)

    def is_due(self) -> bool:
        """Whether a check is due now."""
        return boot_s() >= self.at_s()

    def told(self) -> tuple[SeenNode, ...]:
        """The nodes that were seen to serve the volume."""
        return self._watch.told(self._own)

    def forget(self) -> None:
        """Forget everything: the volume is gone or another one. The count of our heartbeats goes on."""
        self._is_shared = False
        self._own = None
        self._beat_at_s = self._poll_at_s = math.inf
        self._interval = PollInterval(timers.current.node_poll_pause_s)
        self._watch = BeatWatch()
        self._areas = None
        self._looks.clear()

    async def look(
        self, opened: OpenVolume, users: Mapping[int, UserState], phase: str, probe_ms: float | None = None
    ) -> None:
        """Write our heartbeat, read those of others, and check users' folders, each if it is due. Checkpoint

        phase, probe_ms  for our heartbeat; without a probe it has the duration of the last heartbeat's write
        """
        now_s, most_s = boot_s(), float(self._context.config.poll_s)
        beats, polls = now_s >= self._beat_at_s, now_s >= self._poll_at_s
        if not (beats or polls):
            return
        beat = NodeBeat(
            started_ns=self._context.started_ns,
            n=self._n_beats,
            version=self._context.version,
            phase=phase,
            probe_ms=self._wrote_ms if probe_ms is None else round(probe_ms, 3),
        )
        asked = [(user.uid, base, user.most_remembered()) for user in users.values() for base in user.parts]
        forgotten = [name for name in self._watch.forgotten() if name != self._own]
        looking = partial(
            _look, opened, beat if beats else None, forgotten, asked if polls else None, dict(self._looks)
        )
        found = await in_thread(self._limiter, looking)
        took_s, now_s = boot_s() - now_s, boot_s()
        if beats:
            pause_s = min(timers.current.node_beat_pause_s, most_s)
            self._beat_at_s = now_s + pause_s if opened.beat is not None else math.inf
        if found.beats is not None:
            self._n_beats += 1
            self._wrote_ms = round(found.wrote_s * 1e3, 3)
            self._own = None if opened.beat is None else opened.beat.name
            if self._watch.look(found.beats, time.monotonic()) - {self._own}:
                for user in users.values():
                    user.look_again()  # a node that is gone may have left unfinished work for us
            self._context.changed()
        if polls:
            changed = self._take_folders(found, users)
            others = self._watch.alive() - {self._own}
            self._poll_at_s = now_s + self._interval.after(took_s, most_s, is_lively=changed or bool(others))

    def _take_folders(self, found: _Seen, users: Mapping[int, UserState]) -> bool:
        """Handle the changes by others in users' folders; returns whether there were any."""
        has_changed = self._areas is not None and found.areas is not None and found.areas != self._areas
        if has_changed:
            self._found_users()
        self._areas = found.areas or self._areas
        for (uid, base), look in found.parts.items():
            user = users.get(uid)
            if user is None or base not in user.parts:
                continue
            before, part = self._looks.get((uid, base)), user.parts[base]
            if before is None and not part.is_unread:
                part.look_again()  # arrivals since it was read are unknown
            elif before is not None and look is not before:
                has_changed |= _take(user, part, before, look)
        # A folder that could not be checked now keeps its last state.
        known = {(uid, base) for uid, user in users.items() for base in user.parts}
        self._looks = {key: look for key, look in {**self._looks, **found.parts}.items() if key in known}
        return has_changed

    async def say_farewell(self, opening: Callable[[], Awaitable[OpenVolume]]) -> None:
        """Remove our heartbeat file, if that is quick, so that the others do not wait for this node. Checkpoint"""
        if self._own is None:
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


def _look(
    opened: OpenVolume,
    beat: NodeBeat | None,
    forgotten: list[bytes],
    asked: list[tuple[int, bytes, int]] | None,
    before: Mapping[_Key, FolderLook],
) -> _Seen:
    """Do a check, in a thread. Errors are ignored: the next poll, or the work itself, will report them.

    beat       to be written
    forgotten  heartbeats to be removed
    asked      the users and stores to check, and how many names of each may be remembered; None: none
    """
    beats, wrote_s = None, 0.0
    if beat is not None and opened.beat is not None:
        with suppress(OSError):  # on a full volume, too
            for name in forgotten:
                opened.beat.remove(name)
        with suppress(OSError):
            began_s = time.monotonic()
            opened.beat.write(beat)
            wrote_s = time.monotonic() - began_s
            beats = opened.beat.all()
    parts: dict[_Key, FolderLook] = {}
    areas = None
    if asked is not None:
        with suppress(OSError):
            areas = tuple(_stamp(fd) for _name, fd in opened.store.areas.all())
        for uid, base, most in asked:
            with suppress(OSError, TrashdError):
                parts[uid, base] = look_at_folder(opened.store, uid, base, most, before.get((uid, base)))
    return _Seen(beats, wrote_s, areas, parts)


def _take(user: UserState, part: FolderPart, before: FolderLook, now: FolderLook) -> bool:
    """Handle the changes between two states of a folder; returns whether there were any."""
    if now.drop != before.drop:
        user.tend_at_s = 0.0
    if now.names is None or before.names is None:
        if now.orphans != before.orphans:
            part.look_again()
    else:
        part.n_orphans = now.n_orphans
        for identifier in before.names - now.names:
            part.leaves(identifier)
        for identifier in now.names - before.names:
            if identifier not in user.came:  # inotify has reported it already
                part.look_at(identifier)
    return (now.orphans, now.drop, now.names) != (before.orphans, before.drop, before.names)


class FolderLook(NamedTuple):
    """The state of a folder at a check.

    orphans, drop  change times of these directories, as far as their filesystem keeps them
    names      the ids of the orphans; None: too many to remember
    n_orphans  their number, including those in reaping/
    is_settled whether the times were the same at the previous check: two changes may have one time
    """

    orphans: Stamp
    drop: Stamp
    names: frozenset[str] | None
    n_orphans: int
    is_settled: bool


def look_at_folder(store: Store, uid: int, base: bytes, most: int, before: FolderLook | None) -> FolderLook:
    """The current state of a user's folder in one store; the same object if nothing changed. Raises  OSError

    most  names that may be remembered
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
        known = frozenset(names) if len(names) <= most else None
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
