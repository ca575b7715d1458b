"""The service's status in words, for the plain text and for the live view alike."""

from __future__ import annotations

import time

from fusefs.cli.output import counted
from fusefs.core.human_units import format_duration, format_size
from fusefs.core.printable_names import printable, show
from fusefs.core.service_status import SeenNode, SeenStatus, Status, VolumePhase, VolumeStatus

_DAY_S = 86_400
_HOUR_S = 3600
_TOLD_FAULTS = 3
_TOLD_NODES = 8


def title(status: Status, now_ns: int) -> str:
    """The service in a few words."""
    since = format_duration(max(0, (now_ns - status.started_ns) // 1_000_000_000))
    return f"trashd reaper {show(status.version)}, pid {status.pid}, up {since}"


def trouble(seen: SeenStatus) -> str | None:
    """What is wrong with the service itself; None if it works."""
    age = format_duration(round(seen.age_s))
    if not seen.is_running:
        return f"the service is dead; what follows was true {age} ago"
    if seen.is_stale():
        return f"the service has said nothing for {age}: it may hang"
    return None


def heading(volume: VolumeStatus) -> str:
    """Which volume."""
    about = [show(volume.filesystem)] if volume.filesystem else []
    if volume.owner is not None:
        about.append(f"uid {volume.owner}'s own")
    return printable(volume.root()) + (f" ({', '.join(about)})" if about else "")


def doing(volume: VolumeStatus) -> str:
    """The phase, and what it waits for."""
    phase, why = volume.phase.value, show(volume.why)
    if not why or why.startswith(phase):
        return why or phase
    return f"{phase}: {why}"


def backlog(volume: VolumeStatus, now_ns: int) -> str:
    """What there is to do."""
    if not volume.is_known:
        return "not known: the service has not looked yet (trashd list)"
    parts = [f"{counted(volume.n_orphans, 'orphan')} of {counted(volume.n_users, 'user')}", f"{volume.n_due:,} due"]
    if volume.oldest_overdue_s:
        parts[-1] += f" (the oldest for {format_duration(round(volume.oldest_overdue_s))})"
    elif not volume.n_due and volume.next_due_ns is not None:
        parts[-1] += f" (the next in {format_duration(max(0, (volume.next_due_ns - now_ns) // 1_000_000_000))})"
    if volume.n_unread:
        parts.append(f"{volume.n_unread:,} not looked at yet")
    if volume.n_quarantined:
        parts.append(f"{volume.n_quarantined:,} in quarantine")
    return ", ".join(parts)


def held(volume: VolumeStatus) -> str | None:
    """What orphans take, as far as the caller may know; None if there is nothing to tell."""
    if not volume.held:
        return None
    n_unknown = sum(one.n_unknown for one in volume.held)
    size = format_size(sum(one.n_bytes for one in volume.held))
    return f"at least {size} ({n_unknown:,} of unknown size: trashd du)" if n_unknown else size


def is_busy(volume: VolumeStatus) -> bool:
    """Whether something is being removed."""
    return bool(volume.current or volume.entries_per_s)


def rate(volume: VolumeStatus) -> str:
    """How fast it goes, and how fast it may."""
    parts = [f"{volume.entries_per_s:,.0f} entries/s"]
    if volume.bytes_per_s:
        parts.append(f"{format_size(int(volume.bytes_per_s))}/s")
    may = volume.tempo_entries_per_s
    if may is not None:
        parts.append("held" if may == 0 else f"may {may:,}/s")
    elif volume.phase is not VolumePhase.YIELDING:  # which has a share of the time, and no number
        parts.append("at full speed")
    return ", ".join(parts)


def now(volume: VolumeStatus) -> str:
    """The users whose orphans are being reaped."""
    each = (f"{one.n_removed:,} gone of uid {one.uid}'s {show(one.id_end)}" for one in volume.current)
    return ", ".join(each)


def time_left(volume: VolumeStatus) -> str | None:
    """How long until all that is due is gone; None if unknown."""
    return None if volume.eta_s is None else f"about {format_duration(round(volume.eta_s))} for all that is due"


def stalls(volume: VolumeStatus) -> list[tuple[str, float]]:
    """For how much of the time others waited, and for what."""
    shares = (("io", volume.io), ("memory", volume.memory), ("cpu", volume.cpu))
    return [(name, share) for name, share in shares if share is not None]


def latencies(volume: VolumeStatus) -> list[str]:
    """How quick the disk was lately."""
    told = [] if volume.probe_ms is None else [f"write {volume.probe_ms:.3g} ms"]
    return told + ([] if volume.unlink_us is None else [f"unlink {volume.unlink_us:.3g} µs"])


def share(part: int | None, of: int | None) -> float | None:
    """A part of a whole; None if one of them is not known, or nothing (btrfs has no number of inodes)."""
    return None if part is None or not of else part / of


def space(volume: VolumeStatus) -> str | None:
    """Free space, and how it goes."""
    if volume.free_bytes is None or not volume.total_bytes:
        return None
    text = f"{format_size(volume.free_bytes)} of {format_size(volume.total_bytes)}"
    text += f" ({volume.free_bytes / volume.total_bytes:.0%})"
    inodes = share(volume.free_inodes, volume.total_inodes)
    text += " free" if inodes is None else f" and {inodes:.0%} of inodes free"
    trend = (volume.free_trend_bytes_per_s or 0.0) * _HOUR_S
    return text + (f", {'+' if trend > 0 else ''}{format_size(int(trend))}/h" if round(trend) else "")


def done(volume: VolumeStatus) -> str | None:
    """What it did since the service started; None if nothing."""
    if not volume.removed_entries and not volume.n_reaped:
        return None
    parts = [counted(volume.n_reaped, "orphan"), counted(volume.removed_entries, "entry", "entries")]
    if volume.freed_bytes:
        parts.append(format_size(volume.freed_bytes))
    return ", ".join(parts)


def nodes(volume: VolumeStatus) -> str | None:
    """The machines that serve it, as far as their beats tell; None where there can be but this one."""
    told = [f"{show(one.host)} ({_node(one)})" for one in volume.nodes[:_TOLD_NODES]]
    if len(volume.nodes) > _TOLD_NODES:
        told.append(f"and {len(volume.nodes) - _TOLD_NODES:,} more (--json)")
    return ", ".join(told) or None


def _node(one: SeenNode) -> str:
    unchanged = format_duration(round(one.unchanged_s))
    if one.is_here:
        return "here"
    if one.is_alive is None:
        return "not seen to live yet"
    return f"{show(one.phase)}, seen {unchanged} ago" if one.is_alive else f"silent for {unchanged}"


def faults(volume: VolumeStatus, now_ns: int, most: int = _TOLD_FAULTS) -> list[str]:
    """The last errors, the newest first."""
    return [f"{moment(one.at_ns, now_ns)} {show(one.text)}" for one in volume.faults[: -most - 1 : -1]]


def moment(at_ns: int, now_ns: int) -> str:
    """A time of the last day as a clock shows it, an earlier one with its date."""
    is_near = abs(now_ns - at_ns) < _DAY_S * 1_000_000_000
    return time.strftime("%H:%M:%S" if is_near else "%Y-%m-%d %H:%M", time.localtime(at_ns // 1_000_000_000))


def lines(seen: SeenStatus, now_ns: int) -> list[str]:
    """The whole status for a person who does not watch."""
    told = [title(seen.status, now_ns)]
    if wrong := trouble(seen):
        told.append(f"  {wrong}")
    if not seen.status.volumes:
        told.append("  it serves no volume: none has a store, or none of its configuration is mounted")
    for volume in seen.status.volumes:
        told += ["", heading(volume), f"  {doing(volume)}"]
        told += [f"  {name:<9} {text}" for name, text in _rows(volume, now_ns) if text]
    if seen.status.passed_over:
        told.append("")
    told += [f"not served: {show(one.where)}: {show(one.what)} ({show(one.hint)})" for one in seen.status.passed_over]
    return told


def _rows(volume: VolumeStatus, now_ns: int) -> list[tuple[str, str | None]]:
    pressure = [f"{name} {share:.0%}" for name, share in stalls(volume)] + latencies(volume)
    return [
        ("backlog", backlog(volume, now_ns)),
        ("held", held(volume)),
        ("rate", rate(volume) if is_busy(volume) else None),
        ("now", now(volume)),
        ("left", time_left(volume)),
        ("pressure", ", ".join(pressure)),
        ("space", space(volume)),
        ("done", done(volume)),
        ("nodes", nodes(volume)),
        *(("error", text) for text in faults(volume, now_ns)),
        *(("refused", f"{show(one.where)}: {show(one.what)} ({show(one.hint)})") for one in volume.refused),
    ]
