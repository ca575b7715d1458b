"""The status of one volume, made of what the service knows of it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import msgspec

from fusefs.core.service_status import CurrentReap, HeldByUser, VolumePhase, VolumeStatus
from fusefs.service.shared_context import boot_s
from fusefs.service.user_state import UserState
from fusefs.service.volume_figures import SpaceTrend, WorkTotals
from fusefs.service.work_session import WorkSession

_MOST_CURRENT = 5
_ID_END = 12


def status_of(
    kept: VolumeStatus, users: Sequence[UserState], session: WorkSession | None, tally: WorkTotals, room: SpaceTrend
) -> VolumeStatus:
    """What one volume's loop knows now; costs no system call.

    kept  the volume as the service keeps it, open or not: its phase and why are those of one that is not open
    """
    now_s, now_ns = boot_s(), time.time_ns()
    parts = [part for user in users for part in user.parts.values()]
    space = room.space
    entries_per_s, bytes_per_s = tally.rates()
    n_due = sum(user.n_due(now_s) for user in users)
    due_at_s = min((user.due_at_s() for user in users), default=math.inf)
    next_at_s = min([due_at_s, *(user.tend_at_s for user in users if user.tend_at_s)])
    phase, why = (kept.phase, kept.why) if session is None else _mood(session, users, hurries=room.hurries)
    pressure = None if session is None else session.pressure()
    return msgspec.structs.replace(
        kept,
        phase=phase,
        why=why,
        is_known=bool(kept.id),
        n_unread=sum(len(part.fresh) for part in parts),
        n_users=len(users),
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
        eta_s=_eta_s(tally, users, n_due, entries_per_s),
        oldest_overdue_s=max(now_s - due_at_s, 0.0) if n_due else None,
        next_due_ns=None if next_at_s == math.inf else now_ns + int(max(next_at_s - now_s, 0.0) * 1e9),
        free_bytes=space and space.free_bytes,
        total_bytes=space and space.total_bytes,
        free_inodes=space and space.free_inodes,
        total_inodes=space and space.total_inodes,
        free_trend_bytes_per_s=room.trend_bytes_per_s,
        removed_entries=tally.n_entries,
        freed_bytes=tally.n_bytes,
        n_reaped=tally.n_reaped,
        current=_current(session),
        held=tuple(HeldByUser(user.uid, *user.held()) for user in users if any(user.held())),
        faults=tuple(tally.faults),
    )


def _eta_s(tally: WorkTotals, users: Sequence[UserState], n_due: int, entries_per_s: float) -> float | None:
    """As long as orphans are as large as those before were; they are not counted."""
    usual = tally.usual_entries
    n_current = max((user.n_removed for user in users), default=0)
    if not n_due or entries_per_s <= 0 or n_current > 2 * usual or not tally.n_reaped:
        return None
    return max(n_due * usual - n_current, 0.0) / entries_per_s


def _mood(session: WorkSession, users: Sequence[UserState], *, hurries: bool) -> tuple[VolumePhase, str]:
    """What it does, and a sentence about it."""
    if not session.current():
        now_s = boot_s()
        is_looking = any(user.wants(now_s) for user in users) or not users
        return (VolumePhase.LOOKING, "finding out what is due") if is_looking else (VolumePhase.IDLE, "")
    if hurries:
        return VolumePhase.HURRYING, session.why()
    return (VolumePhase.REAPING if session.tempo.is_alone else VolumePhase.YIELDING), session.why()


def _current(session: WorkSession | None) -> tuple[CurrentReap, ...]:
    if session is None:
        return ()
    users = [(user.uid, user.current, user.n_removed) for user in session.current()]
    return tuple(CurrentReap(uid, (one or "")[-_ID_END:], n_removed) for uid, one, n_removed in users[:_MOST_CURRENT])
