"""A volume as the status tells it."""

from __future__ import annotations

import math
import time

from fusefs.core.record import quote
from fusefs.core.service_status import Current, Phase, VolumeStatus
from fusefs.service.shared_context import boot_s
from fusefs.service.volume_loop import Keeper
from fusefs.service.work_session import Session

_MOST_CURRENT = 5
_ID_END = 12


def portray(keeper: Keeper) -> VolumeStatus:
    """What one volume's keeper knows now; costs no system call."""
    now_s, now_ns = boot_s(), time.time_ns()
    users = list(keeper.users.values())
    parts = [part for user in users for part in user.parts.values()]
    session, space = keeper.session, keeper.room.space
    entries_per_s, bytes_per_s = keeper.tally.rates()
    n_due = sum(user.n_due(now_s) for user in users)
    due_at_s = min((user.due_at_s() for user in users), default=math.inf)
    next_at_s = min([due_at_s, *(user.tend_at_s for user in users if user.tend_at_s)])
    phase, why = _mood(keeper, session)
    pressure = None if session is None else session.pacer.pressure()
    return VolumeStatus(
        path=quote(keeper.told_path),
        owner=keeper.owner,
        id=keeper.volume_id,
        filesystem=keeper.filesystem,
        phase=phase,
        why=why,
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
        eta_s=_eta_s(keeper, n_due, entries_per_s),
        oldest_overdue_s=max(now_s - due_at_s, 0.0) if n_due else None,
        next_due_ns=None if next_at_s == math.inf else now_ns + int(max(next_at_s - now_s, 0.0) * 1e9),
        free_bytes=space and space.free_bytes,
        total_bytes=space and space.total_bytes,
        free_inodes=space and space.free_inodes,
        total_inodes=space and space.total_inodes,
        free_trend_bytes_per_s=keeper.room.trend_bytes_per_s,
        removed_entries=keeper.tally.n_entries,
        freed_bytes=keeper.tally.n_bytes,
        n_reaped=keeper.tally.n_reaped,
        current=_current(session),
        faults=tuple(keeper.tally.faults),
        refused=keeper.refused,
    )


def _eta_s(keeper: Keeper, n_due: int, entries_per_s: float) -> float | None:
    """As long as orphans are as large as those before were; they are not counted."""
    usual = keeper.tally.usual_entries
    n_current = max((user.n_removed for user in keeper.users.values()), default=0)
    if not n_due or entries_per_s <= 0 or n_current > 2 * usual or not keeper.tally.n_reaped:
        return None
    return max(n_due * usual - n_current, 0.0) / entries_per_s


def _mood(keeper: Keeper, session: Session | None) -> tuple[Phase, str]:
    """What it does, and a sentence about it."""
    if session is None:
        return keeper.phase, keeper.why
    current = session.current()
    if not current:
        now_s = boot_s()
        is_looking = any(user.wants(now_s) for user in keeper.users.values()) or not keeper.users
        return (Phase.LOOKING, "finding out what is due") if is_looking else (Phase.IDLE, "")
    if keeper.room.hurries:
        return Phase.HURRYING, session.pacer.why()
    return (Phase.REAPING if session.tempo.is_alone else Phase.YIELDING), session.pacer.why()


def _current(session: Session | None) -> tuple[Current, ...]:
    if session is None:
        return ()
    users = [(user.uid, user.current, user.n_removed) for user in session.current()]
    return tuple(Current(uid, (one or "")[-_ID_END:], n_removed) for uid, one, n_removed in users[:_MOST_CURRENT])
