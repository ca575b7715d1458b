"""Serve one volume: open it when there is work, and close it when there is none."""

from __future__ import annotations

import logging
import math
import os
import time
from contextlib import nullcontext, suppress
from functools import partial
from typing import NamedTuple

import trio

from fusefs.core.errors import NoBacking, NoStore, NotADirectory, NotFound, RootSquashed, TrashdError, from_os
from fusefs.core.events import EventKind
from fusefs.core.names import parse_uid_name
from fusefs.core.policy import VolumePolicy
from fusefs.core.printable_names import printable
from fusefs.core.record import quote_path
from fusefs.core.service_status import CurrentReap, HeldByUser, PassedOver, VolumePhase, VolumeStatus
from fusefs.linux.inotify import InotifyEvent, InotifyMask
from fusefs.linux.mountinfo import RulePath
from fusefs.service import timers
from fusefs.service.folder_watch import FolderWatches
from fusefs.service.forker import ForkerLost
from fusefs.service.open_volume import (
    Elsewhere,
    OpenVolume,
    Unproven,
    VolumeSpace,
    open_own,
    open_volume,
    own_space,
    placeholder_path,
    space_at,
    split_place,
)
from fusefs.service.orphan_schedule import TROUBLE, Trouble
from fusefs.service.other_nodes import OtherNodes
from fusefs.service.remembered_volumes import ServedVolume
from fusefs.service.served_stores import Key, OwnStoreLimit
from fusefs.service.shared_context import ServiceContext, boot_s, in_thread, in_time
from fusefs.service.state_files import Pause
from fusefs.service.user_state import UnreadUsers, UserState
from fusefs.service.volume_figures import VolumeFigures
from fusefs.service.work_session import WorkSession
from fusefs.store.layout import Store
from fusefs.store.store_registry import UserLine
from fusefs.store.tidy_folder import to_findings
from fusefs.store.user_folders import FolderCensus

_LOG = logging.getLogger(__name__)
_MOST_REMEMBERED, _LEAST_REMEMBERED = 20_000, 100
"""Maximum number of a volume's orphans whose due time is remembered (some megabytes); and the minimum for one user."""
UNSERVED = (VolumePhase.GONE, VolumePhase.BROKEN, VolumePhase.ELSEWHERE, VolumePhase.UNPROVEN)
_GONE_FOR_GOOD = 3
"""Number of failed checks after which a volume that the configuration does not name is forgotten."""
_NEVER_S = 10 * 365 * 86_400.0
_MOST_CURRENT = 5
"""Maximum number of orphans being reaped that a status lists, each with the last _ID_END characters of its id."""
_ID_END = 12


class OwnStore(NamedTuple):
    """A user's own store, and the path that selects the configuration's rules for it."""

    line_of: UserLine
    by_rules: RulePath


class VolumeLoop:
    """The loop of one volume, identified by the path of the directory that holds its store."""

    def __init__(
        self,
        context: ServiceContext,
        path: bytes,
        *,
        stays: bool,
        own: OwnStore | None = None,
        limit: OwnStoreLimit | None = None,
    ) -> None:
        """Start with the volume closed.

        stays  whether to wait for the volume while it is not mounted
        own    the user's own store, if root's service serves one
        limit  the limit for such a store; None for any other store
        """
        self.path = path
        self._base_path = split_place(path)[0] if own is None else path
        self._public_path = path if own is None else placeholder_path(own.line_of)
        self.owner = None if own is None else own.line_of.uid
        self._own = own
        self._limit = limit
        self._is_ended = False
        self._stays = stays
        self._n_gone = 0
        self._figures = VolumeFigures()
        self.users: dict[int, UserState] = {}
        self.session: WorkSession | None = None
        self._volume_id = ""
        self._store_path = path
        self._served = ServedVolume(context.volumes, self._base_path, self.owner)
        self._filesystem = ""
        self.phase = VolumePhase.LOOKING
        self._why = self._warned = ""
        self._context = context
        self._limiter = trio.CapacityLimiter(3) if limit is None else limit.threads
        self._nodes = OtherNodes(context, self._limiter, self._may_have_users)
        self._woken = trio.Event()
        self._pause: Pause | None = None
        self._must_find = True
        self._must_open = False
        self._watches = FolderWatches(context, path, self.wake)
        self._folders: dict[int, int] = {}
        self._refused: tuple[PassedOver, ...] = ()
        self._unread = UnreadUsers()
        self._n_breaks = 0
        self._n_fresh = 0
        self._rests_until_s = 0.0
        self._polled_at_s = 0.0
        self._checked_space_at_s = 0.0

    # Called from outside

    def wake(self) -> None:
        """Check for work, because something may have changed."""
        self._woken.set()
        if self.session is not None:
            self.session.wake()

    def reconfigure(self) -> None:
        """Stop, scan everything again, and continue: the policy has changed, or the volume may be back."""
        self._must_find = True
        self._rests_until_s = self._checked_space_at_s = 0.0
        for user in self.users.values():
            user.rescan()
        if self.session is not None:
            self.session.stop()
        self.wake()

    def check_mount(self) -> None:
        """Check whether a mount or unmount affects this volume; a running session is finished first."""
        self._must_open = True
        if self.session is None:
            self.wake()

    def copy_changed(self, is_mounted: bool) -> None:
        """Check which disk to serve, because a disk with the same volume id was mounted, or one is gone."""
        if not is_mounted or self.phase is not VolumePhase.UNPROVEN:
            if self.session is not None:
                self.session.stop()
            self.check_mount()

    def retry(self) -> None:
        """Check the store now, because it may have been repaired or created again."""
        self._rests_until_s = 0.0
        self.check_mount()

    def key(self) -> Key:
        assert self._own is not None
        return self._own.line_of.uid, self._own.line_of.line.store()

    def paths(self) -> tuple[bytes, ...]:
        """Return the paths by which users may refer to the volume."""
        return (self._base_path,) if self._own is None else (self.path, self._own.by_rules.path)

    def status(self) -> VolumeStatus:
        """Return the current status; this makes no system call on the volume."""
        now_s, now_ns = boot_s(), time.time_ns()
        session, figures, space = self.session, self._figures, self._figures.space
        users = list(self.users.values())
        parts = [part for user in users for part in user.parts.values()]
        entries_per_s, bytes_per_s = figures.rates()
        n_due = sum(user.n_due(now_s) for user in users)
        due_at_s = min((user.due_at_s() for user in users), default=math.inf)
        next_at_s = min([due_at_s, *(user.tend_at_s for user in users if user.tend_at_s)])
        phase, why = (self.phase, self._why) if session is None else self._session_phase(session)
        pressure = None if session is None else session.pressure()
        reaped = [] if session is None else session.current()[:_MOST_CURRENT]
        return VolumeStatus(
            path=quote_path(self._public_path),
            owner=self.owner,
            id=self._volume_id,
            filesystem=self._filesystem,
            phase=phase,
            why=why,
            is_known=bool(self._volume_id) and phase is not VolumePhase.GONE,
            n_unread=sum(len(part.unread_ids) for part in parts),
            n_users=sum(any(part.n_orphans for part in user.parts.values()) for user in users),
            n_orphans=sum(part.n_orphans for part in parts),
            n_due=n_due,
            n_quarantined=sum(part.n_quarantined for part in parts),
            entries_per_s=round(entries_per_s, 1),
            bytes_per_s=round(bytes_per_s, 1),
            tempo_entries_per_s=None if session is None else session.tempo.entries_per_s,
            io=pressure and pressure.io,
            memory=pressure and pressure.memory,
            cpu=pressure and pressure.cpu,
            probe_ms=pressure and pressure.probe_ms,
            unlink_us=pressure and pressure.unlink_us,
            eta_s=figures.eta_s(n_due, max((user.n_removed for user in users), default=0)),
            oldest_overdue_s=max(now_s - due_at_s, 0.0) if n_due else None,
            next_due_ns=None if next_at_s == math.inf else now_ns + int(max(next_at_s - now_s, 0.0) * 1e9),
            free_bytes=space and space.free_bytes,
            total_bytes=space and space.total_bytes,
            free_inodes=space and space.free_inodes,
            total_inodes=space and space.total_inodes,
            free_trend_bytes_per_s=figures.trend_bytes_per_s,
            removed_entries=figures.n_entries,
            freed_bytes=figures.n_bytes,
            n_reaped=figures.n_reaped,
            current=tuple(CurrentReap(one.uid, (one.current or "")[-_ID_END:], one.n_removed) for one in reaped),
            held=tuple(HeldByUser(user.uid, *user.held()) for user in users if any(user.held())),
            refused=self._refused,
            nodes=self._nodes.list_nodes(),
            faults=tuple(figures.faults),
        )

    def _session_phase(self, session: WorkSession) -> tuple[VolumePhase, str]:
        """Return the phase of a session, and a sentence about it."""
        if not session.current():
            now_s = boot_s()
            is_looking = any(user.is_urgent(now_s) for user in self.users.values()) or not self.users
            if is_looking:
                return VolumePhase.LOOKING, "checking which orphans have expired"
            return VolumePhase.IDLE, self._why_idle()
        if self._figures.hurries:
            return VolumePhase.HURRYING, session.why()
        return (VolumePhase.REAPING if session.tempo.is_alone else VolumePhase.YIELDING), session.why()

    def _why_idle(self) -> str:
        """Return why no orphan is deleted, if the user may expect it; otherwise an empty string."""
        return self._served.grace.why(boot_s()) or self._figures.why_kept

    def renew(self, own: OwnStore) -> None:
        """Apply a registry line that the owner has changed, or a changed mount."""
        assert self._own is not None
        if own != self._own:
            self._own = own
            self.reconfigure()

    def leave(self) -> None:
        """End the loop for good, because the store is served at another path, or no longer registered."""
        self._is_ended = True
        if self.session is not None:
            self.session.stop()
        self.wake()

    def set_pause(self, pause: Pause | None) -> None:
        """Pause the volume, or end the pause."""
        if pause == self._pause:
            return
        kind, detail = (EventKind.PAUSED, pause.why) if pause else (EventKind.RESUMED, "")
        self._context.report(kind, volume=self.path, uid=self.owner, detail=detail)
        self._pause = pause
        if pause and self.session is not None:
            self.session.stop()
        self.wake()

    # Main loop

    async def serve(self) -> None:
        """Serve the volume until cancelled, until `leave`, or until it is gone for good. Raises  ForkerLost. Checkpoint

        The loop waits for a volume that the configuration names; others are found again when they are mounted.
        """
        try:
            await self._run_loop()
        finally:
            if self.phase not in UNSERVED:
                self._served.note_served()
            self._served.note_unserved()
            await self._nodes.remove_own_beat(self._open)
        self._forget()
        self._served.note_unmounted()

    async def _run_loop(self) -> None:
        while not self._is_ended and (self._stays or self._n_gone < _GONE_FOR_GOOD):
            policy = self._policy()
            wait_s = await self._check_space(policy)
            held_s = self._held_back_s(policy)
            if held_s > 0:
                wait_s = min(wait_s, held_s)
                n_fresh = sum(len(part.unread_ids) for user in self.users.values() for part in user.parts.values())
                if n_fresh != self._n_fresh:  # the status contains the number of arrivals
                    self._n_fresh = n_fresh
                    self._context.changed()
            else:
                try:
                    await self._work(policy)
                    wait_s = min(wait_s, self._idle_s())
                except (Trouble, TrashdError, OSError) as error:
                    wait_s = self._handle_error(error)
            with trio.move_on_after(wait_s):
                await self._woken.wait()
            self._woken = trio.Event()

    def _policy(self) -> VolumePolicy:
        config = self._context.config
        if self._own is not None:
            return config.policy_inside(*self._own.by_rules)
        return config.policy_of(self._base_path, self._volume_id)

    async def _check_space(self, policy: VolumePolicy) -> float:
        """Check free space while the volume is closed, and return the seconds until the next check."""
        parts = [part for user in self.users.values() for part in user.parts.values()]
        # A volume outside its window may not have been scanned yet.
        is_unknown = not self._volume_id and policy.windows
        is_empty = not is_unknown and not any(part.n_orphans or part.unread_ids for part in parts)
        if is_empty or (policy.blocks is None and policy.inodes is None):
            return _NEVER_S
        now_s = boot_s()
        if now_s >= self._checked_space_at_s + timers.current.space_pause_s:
            self._checked_space_at_s = now_s  # even if the check fails, so that it is not repeated at once
            with suppress(OSError, TrashdError):
                looking, limit_s = partial(space_at, self._store_path), math.inf
                if self._own is not None:
                    looking = partial(own_space, self._context.kernel, self._own.line_of)
                    limit_s = timers.current.own_store_limit_s
                space = await in_time(self._limiter, limit_s, looking, lambda _late: None)
                if space is not None:
                    self._note_space(space)
            # Orphans that were too young may expire now.
            self._must_open |= self._figures.hurries or self._figures.is_over_quota
        return self._checked_space_at_s + timers.current.space_pause_s - now_s

    def _note_space(self, space: VolumeSpace) -> None:
        """Note the free space, and whether to hurry."""
        self._checked_space_at_s = boot_s()
        if not self._figures.note_space(space, self._policy(), self._checked_space_at_s):
            return
        if self._figures.hurries:
            share = space.free_share() or 0.0
            detail = f"only {share:.1%} is free, so the oldest orphans of the users with the most data are reaped early"
            self._context.report(EventKind.LOW_SPACE, volume=self.path, uid=self.owner, detail=detail)
        for user in self.users.values():
            for part in user.parts.values():
                part.rescan()

    def _held_back_s(self, policy: VolumePolicy) -> float:
        """Return for how many seconds no work is allowed; 0 if work is allowed. Sets the phase, with the reason."""
        now_s = boot_s()
        if self._pause is not None and self._pause.remaining_s(time.time()) <= 0.0:
            self.set_pause(None)
        if self._pause is not None:
            self._set_phase(VolumePhase.PAUSED, self._pause.why)
            return max(self._pause.remaining_s(time.time()), 0.1)
        is_unknown = self._own is None and (self._must_open or not self._volume_id)
        may_serve = is_unknown and self._context.config.may_serve(self._base_path)
        if not policy.is_served and not may_serve:
            self._set_phase(VolumePhase.PAUSED, "the configuration has serve = false")
            return _NEVER_S
        if now_s < self._rests_until_s:
            return self._rests_until_s - now_s
        local = time.localtime()
        second = local.tm_hour * 3600 + local.tm_min * 60 + local.tm_sec
        closed_s = policy.closed_s(second, hurries=self._figures.hurries)
        if closed_s:
            self._set_phase(VolumePhase.WINDOW, "reaping is allowed only during " + ", ".join(map(str, policy.windows)))
            return min(float(closed_s), timers.current.window_pause_s)
        return 0.0

    def _set_phase(self, phase: VolumePhase, why: str = "") -> None:
        if (phase, why) != (self.phase, self._why):
            self.phase, self._why = phase, why
            self._context.changed()

    async def _work(self, policy: VolumePolicy) -> None:
        """Open the volume and do all work that is due. Raises  Trouble; TrashdError; OSError; ForkerLost"""
        now_s = boot_s()
        is_poll = now_s >= self._polled_at_s + self._context.config.poll_s
        must_open = self._may_find() or self._must_open or is_poll or now_s >= self._watches.next_at_s
        if not must_open and self._nodes.is_due():
            must_open = not await self._check_other_nodes()
        if not must_open and not any(user.has_work(now_s) for user in self.users.values()):
            return
        self._set_phase(VolumePhase.LOOKING)
        if self._limit is None:
            await self._work_opened(policy, is_poll=is_poll)
            return
        async with self._limit.hold():
            if self._held_back_s(policy) <= 0 and not self._is_ended:  # the wait may have been long
                await self._work_opened(policy, is_poll=is_poll)

    async def _check_other_nodes(self) -> bool:
        """Without a session, check for changes by other nodes; return whether this is still the known volume."""
        async with nullcontext() if self._limit is None else self._limit.hold():
            with await self._open() as opened:
                if opened.store.volume.id != self._volume_id:
                    return False
                await self._nodes.check(opened, self.users, self.phase.value)
        return True

    async def _check_around(self, opened: OpenVolume) -> None:
        """During a session, find new users and changes by other nodes."""
        await self._find_users(opened)
        if self._nodes.is_due():
            status = self.status()
            await self._nodes.check(opened, self.users, status.phase.value, status.probe_ms)

    async def _open(self) -> OpenVolume:
        """Open the volume; for a user's own store, there is a time limit. Raises  TrashdError; OSError"""
        kernel = self._context.kernel
        opening, limit_s = partial(open_volume, kernel, self.path), math.inf
        if self._own is not None:
            opening, limit_s = partial(open_own, kernel, self._own.line_of), timers.current.own_store_limit_s
        opened = await in_time(self._limiter, limit_s, opening, lambda late: late.owned.close())
        if opened is None:
            raise NoStore(self.path, "its disk does not respond; the service tries again periodically")
        return opened

    async def _work_opened(self, policy: VolumePolicy, *, is_poll: bool) -> None:
        with await self._open() as opened:
            self._public_path = opened.public_path or self.path
            await self._begin(opened, is_poll=is_poll)
            policy = self._policy()  # now according to the id of the opened volume
            if self._held_back_s(policy) > 0:
                return
            self.session = WorkSession(
                self._context,
                opened,
                policy,
                self.users,
                self._figures,
                self._limiter,
                self._note_space,
                partial(self._watches.watch_users, opened.store, self.users),
                partial(self._check_around, opened),
                self._served.grace,
            )
            self._context.changed()
            try:
                await self._run_session(self.session, policy)
            finally:
                self.session = None
                self._figures.note_idle()
                self._context.changed()
        if self._n_breaks:
            self._n_breaks = 0
            self._context.report(EventKind.MENDED, volume=self.path, uid=self.owner)

    async def _run_session(self, session: WorkSession, policy: VolumePolicy) -> None:
        failed: Exception | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._close_in_time, session, policy)
            try:
                await session.work()
            except (Trouble, TrashdError, OSError, ForkerLost) as error:
                failed = error
            nursery.cancel_scope.cancel()
        if failed is not None:
            raise failed

    async def _close_in_time(self, session: WorkSession, policy: VolumePolicy) -> None:
        """Stop the session when its window ends, or when other stores wait and it has had its turn or has no work."""
        began_s = boot_s()
        while self._held_back_s(policy) <= 0:
            await trio.sleep(timers.current.session_pause_s)
            if self._limit is not None and self._limit.has_waiters():
                now_s = boot_s()
                had_turn = now_s >= began_s + timers.current.own_turn_s
                if had_turn or not any(user.has_work(now_s) for user in self.users.values()):
                    break
        session.stop()

    async def _begin(self, opened: OpenVolume, *, is_poll: bool) -> None:
        """Check that this is the known volume, and find its users."""
        store = opened.store
        self._must_open = False
        self._n_gone = 0
        if store.volume.id != self._volume_id:
            if self._volume_id:
                # The owner could cause this log message at will.
                if self.owner is None or self._context.allows_report(self.owner):
                    _LOG.warning("%s is a different volume now, and is scanned again", printable(self.path))
                self._forget()
            self._volume_id = store.volume.id
            self._filesystem = opened.filesystem
            self._store_path = store.path()  # its space is that of the volume, even if the volume was just unmounted
        self._served.recognise(self._volume_id, opened.disk, self._context.config, self.copy_changed)
        self._nodes.begin(opened)
        if is_poll:
            self._polled_at_s = boot_s()
            for uid, user in self.users.items():
                # inotify reports neither changes by other hosts nor those in folders that could not be watched.
                if not store.kernel.is_local(store.fd) or not self._watches.is_complete(uid):
                    user.rescan()
        self._must_find |= is_poll
        if self._may_find():
            await self._find_users(opened)
        else:
            self._watches.watch_users(store, self.users)  # replaces lost watches
        await self._nodes.check(opened, self.users, VolumePhase.LOOKING.value)

    def _may_find(self) -> bool:
        """Return whether there may be new users, or an unreadable folder must be checked again."""
        return self._must_find or boot_s() >= self._unread.next_at_s()

    async def _find_users(self, opened: OpenVolume) -> None:
        """Find the users of the volume, if there may be new ones."""
        if not self._may_find():
            return
        self._must_find = False
        self._watches.watch_areas(opened.store, self._on_users)
        try:
            resting = self._unread.resting(boot_s())
            census = await in_thread(self._limiter, partial(opened.users, resting))
        except BaseException:
            self._must_find = True  # the session has ended, so the next one must find them
            raise
        self._unread.note(census.unread, resting, boot_s())
        self._report_refused(census, opened.store)
        for uid in self.users.keys() - census.inos.keys():
            if uid not in self._unread:
                del self.users[uid]
                self._leave(uid)
        for uid, ino in census.inos.items():
            if uid not in self.users:
                self.users[uid] = UserState(uid, opened.store.path(), self._most_remembered, self._context.since_ns)
            elif self._folders.get(uid, ino) != ino:
                self.users[uid].rescan()  # it is another folder, so the known state is invalid
                self._leave(uid)
        self._folders = census.inos
        self._watches.watch_users(opened.store, self.users)

    def _report_refused(self, census: FolderCensus, store: Store) -> None:
        """Report entries that have the name of a user's folder, but are refused or unreadable, and so not served."""
        where = os.path.join(split_place(self._public_path)[0], store.name)
        every = census.refused + self._unread.refused()
        refused = tuple(PassedOver(*problem) for problem in to_findings(where, every))
        if refused == self._refused:
            return
        self._refused = refused
        self._context.changed()
        if refused and self._context.allows_report(every[0].owner or 0):
            text = "; ".join(f"{one.where}: {one.what}" for one in refused)
            _LOG.warning("%s", text)

    def _on_users(self, event: InotifyEvent) -> None:
        """Handle an event in a directory for users' folders, where anyone can create names: there may be a new user."""
        if event.kinds & (InotifyMask.IGNORED | InotifyMask.UNMOUNT):
            self._watches.unwatch_areas()
        elif not event.kinds & InotifyMask.OVERFLOW and parse_uid_name(event.name) is None:
            return
        self._may_have_users()

    def _may_have_users(self) -> None:
        self._must_find = True
        if self.session is None:
            self.wake()
        else:
            self.session.request_check()

    def _most_remembered(self) -> int:
        if self._limit is not None:
            return self._limit.most_remembered()
        return max(_MOST_REMEMBERED // max(len(self.users), 1), _LEAST_REMEMBERED)

    def _idle_s(self) -> float:
        """Note that all work is done, and return the seconds until more is due."""
        self._served.note_served()
        if self._held_back_s(self._policy()) > 0:
            return 0.0
        self._set_phase(VolumePhase.IDLE, self._why_idle())
        if self._must_find or self._must_open:
            return 0.0
        now_s = boot_s()
        poll_s = self._polled_at_s + self._context.config.poll_s
        own_times = [poll_s, self._watches.next_at_s, self._unread.next_at_s(), self._nodes.at_s()]
        return max(min([*own_times, *(user.next_at_s() for user in self.users.values())]) - now_s, 0.0)

    def _handle_error(self, error: Exception) -> float:
        """Handle an error, and return the seconds to wait."""
        problem = from_os(error, self.path) if isinstance(error, OSError) else error
        why = problem.message() if isinstance(problem, TrashdError) else str(problem)
        why = why.replace(printable(self.path), printable(self._public_path))  # every user may read this
        self._must_find = True
        if isinstance(problem, Elsewhere):
            self._set_phase(VolumePhase.ELSEWHERE, "another reaper serves this volume")
            return timers.current.elsewhere_pause_s
        if isinstance(problem, Unproven | RootSquashed):
            self._forget()
            # With root squash, users run their own services, which do not serve what root's service serves.
            phase = VolumePhase.UNPROVEN if isinstance(problem, Unproven) else VolumePhase.GONE
            self._set_phase(phase, f"{why} ({problem.hint})")
            if self._why != self._warned and self.owner is None:
                _LOG.warning("%s", self._why)
            self._warned = self._why
            return float(self._context.config.poll_s)
        if self._is_gone(problem):
            self._forget()
            self._served.note_unmounted()
            self._n_gone += 1
            self._set_phase(VolumePhase.GONE, why)
            return float(self._context.config.poll_s)
        if isinstance(problem, TrashdError) and problem.errno not in TROUBLE:
            self._served.note_unserved()  # a repair may take long: orphans that expire until then get a grace period
        return self.note_broken(why)

    def _is_gone(self, error: Exception) -> bool:
        """Return whether an error means that there is no store, rather than a store that needs a repair.

        For a user's own store, this is assumed for every error except a broken disk: its owner can cause errors.
        """
        if self._own is not None:
            return isinstance(error, TrashdError) and (isinstance(error, NoStore) or error.errno not in TROUBLE)
        return type(error) in (NoStore, NoBacking, NotFound, NotADirectory)

    def note_broken(self, why: str) -> float:
        """Stop work on the volume for an interval that grows with each failure, and return the interval in seconds."""
        rest_s = min(timers.current.rest_pause_s * 2.0**self._n_breaks, timers.current.last_rest_pause_s)
        self._n_breaks += 1
        self._rests_until_s = boot_s() + rest_s
        self._set_phase(VolumePhase.BROKEN, f"{why}; the service tries again periodically")
        self._figures.fault(time.time_ns(), why)
        detail = f"{why}; the service tries again in {rest_s:.0f} s"
        self._context.report(EventKind.BROKEN, volume=self.path, uid=self.owner, detail=detail)
        return rest_s

    def _forget(self) -> None:
        self._served.note_unserved()
        self._refused = ()
        self._unread = UnreadUsers()
        self._nodes.forget()
        self._figures.forget_space()
        for uid in list(self.users):
            del self.users[uid]
            self._leave(uid)
        self._watches.unwatch_areas()
        self._must_find = True

    def _leave(self, uid: int) -> None:
        """End all watches and work in a user's former folder; the user may create a new one at once."""
        self._watches.unwatch_user(uid)
        if self.session is not None:
            self.session.renew(uid)
