"""Formats the service's status as text, for the plain output and the live view."""

from __future__ import annotations

import time

from fusefs.cli.output import counted
from fusefs.core.human_units import format_duration, format_size
from fusefs.core.printable_names import printable, printable_text
from fusefs.core.service_status import ObservedStatus, SeenNode, Status, VolumePhase, VolumeStatus

_DAY_S = 86_400
_HOUR_S = 3600
_SHOWN_FAULTS = 3
_SHOWN_NODES = 8


def title(status: Status, now_ns: int) -> str:
    """Format the version, PID and uptime of the service."""
    since = format_duration(max(0, (now_ns - status.started_ns) // 1_000_000_000))
    return f"trashd reaper {printable_text(status.version)}, pid {status.pid}, up {since}"


def trouble(service: ObservedStatus) -> str | None:
    """Describe a problem with the service itself; return None if the service works."""
    age = format_duration(round(service.age_s))
    if not service.is_running:
        return f"the service is not running; its last status is {age} old"
    if service.is_stale():
        return f"no status from the service for {age}: it may be hanging"
    return None


def heading(volume: VolumeStatus) -> str:
    """Format the volume's path, filesystem and owner."""
    about = [printable_text(volume.filesystem)] if volume.filesystem else []
    if volume.owner is not None:
        about.append(f"own store of uid {volume.owner}")
    return printable(volume.root_path()) + (f" ({', '.join(about)})" if about else "")


def doing(volume: VolumeStatus) -> str:
    """Format the phase and its reason."""
    phase, why = volume.phase.value, printable_text(volume.why)
    if not why or why.startswith(phase):
        return why or phase
    return f"{phase}: {why}"


def backlog(volume: VolumeStatus, now_ns: int) -> str:
    """Format how many orphans there are, and how many have expired."""
    if volume.phase is VolumePhase.GONE:
        return "unknown"
    if not volume.is_known:
        return "unknown: the service has not read the store yet (trashd list shows the orphans)"
    parts = [counted(volume.n_orphans, "orphan"), counted(volume.n_users, "user"), f"{volume.n_due:,} expired"]
    if volume.oldest_overdue_s:
        parts[-1] += f" (oldest {format_duration(round(volume.oldest_overdue_s))} ago)"
    elif not volume.n_due and volume.next_due_ns is not None:
        parts[-1] += f" (next in {format_duration(max(0, (volume.next_due_ns - now_ns) // 1_000_000_000))})"
    if volume.n_unread:
        parts.append(f"{volume.n_unread:,} not read yet")
    if volume.n_quarantined:
        parts.append(f"{volume.n_quarantined:,} in quarantine")
    return ", ".join(parts)


def held(volume: VolumeStatus) -> str | None:
    """Format the total size of the orphans whose sizes the caller is allowed to know; None if there are none."""
    if not volume.held:
        return None
    n_unknown = sum(one.n_unknown for one in volume.held)
    size = format_size(sum(one.n_bytes for one in volume.held))
    return f"at least {size} ({n_unknown:,} of unknown size; trashd du measures them)" if n_unknown else size


def is_busy(volume: VolumeStatus) -> bool:
    return bool(volume.current or volume.entries_per_s)


def rate(volume: VolumeStatus) -> str:
    parts = [f"{volume.entries_per_s:,.0f} entries/s"]
    if volume.bytes_per_s:
        parts.append(f"{format_size(int(volume.bytes_per_s))}/s")
    limit = volume.tempo_entries_per_s
    if limit is not None:
        parts.append("on hold" if limit == 0 else f"max {limit:,}/s")
    elif volume.phase is not VolumePhase.YIELDING:  # in that phase, the share of time is limited instead
        parts.append("at full speed")
    return ", ".join(parts)


def now(volume: VolumeStatus) -> str:
    """Format the orphans that are being reaped."""
    each = (f"{printable_text(one.id_end)} of uid {one.uid} ({one.n_removed:,} removed)" for one in volume.current)
    return ", ".join(each)


def eta(volume: VolumeStatus) -> str | None:
    """Format the time until all expired orphans are deleted; None if that is unknown."""
    return None if volume.eta_s is None else f"about {format_duration(round(volume.eta_s))} for all expired orphans"


def stalls(volume: VolumeStatus) -> list[tuple[str, float]]:
    """Return the shares of time in which other processes waited for I/O, memory and the CPU."""
    shares = (("io", volume.io), ("memory", volume.memory), ("cpu", volume.cpu))
    return [(name, share) for name, share in shares if share is not None]


def latencies(volume: VolumeStatus) -> list[str]:
    parts = [] if volume.probe_ms is None else [f"write {volume.probe_ms:.3g} ms"]
    return parts + ([] if volume.unlink_us is None else [f"unlink {volume.unlink_us:.3g} µs"])


def share(part: int | None, of: int | None) -> float | None:
    """Return a fraction; None if a number is unknown, or if the whole is 0 (btrfs does not count inodes)."""
    return None if part is None or not of else part / of


def space(volume: VolumeStatus) -> str | None:
    """Format the free space and its trend per hour."""
    if volume.free_bytes is None or not volume.total_bytes:
        return None
    text = f"{format_size(volume.free_bytes)} of {format_size(volume.total_bytes)}"
    text += f" ({volume.free_bytes / volume.total_bytes:.0%})"
    inodes = share(volume.free_inodes, volume.total_inodes)
    text += " free" if inodes is None else f" and {inodes:.0%} of inodes free"
    trend = (volume.free_trend_bytes_per_s or 0.0) * _HOUR_S
    return text + (f", {'+' if trend > 0 else ''}{format_size(int(trend))}/h" if round(trend) else "")


def format_deleted(volume: VolumeStatus) -> str | None:
    """Format what the reaper has deleted since the service started; None if it has deleted nothing."""
    if not volume.removed_entries and not volume.n_reaped:
        return None
    parts = [counted(volume.n_reaped, "orphan"), counted(volume.removed_entries, "entry", "entries")]
    if volume.freed_bytes:
        parts.append(format_size(volume.freed_bytes))
    return ", ".join(parts)


def nodes(volume: VolumeStatus) -> str | None:
    """Format the machines that serve the volume, and their heartbeats; None if only this machine can serve it."""
    parts = [f"{printable_text(one.host)} ({_node(one)})" for one in volume.nodes[:_SHOWN_NODES]]
    if len(volume.nodes) > _SHOWN_NODES:
        parts.append(f"and {len(volume.nodes) - _SHOWN_NODES:,} more (--json)")
    return ", ".join(parts) or None


def _node(one: SeenNode) -> str:
    unchanged = format_duration(round(one.unchanged_s))
    if one.is_here:
        return "here"
    if one.is_alive is None:
        return "no heartbeat yet"
    return (
        f"{printable_text(one.phase)}, heartbeat {unchanged} ago" if one.is_alive else f"no heartbeat for {unchanged}"
    )


def faults(volume: VolumeStatus, now_ns: int, most: int = _SHOWN_FAULTS) -> list[str]:
    """Format the last errors, the newest first."""
    return [f"{moment(one.at_ns, now_ns)} {printable_text(one.text)}" for one in volume.faults[: -most - 1 : -1]]


def moment(at_ns: int, now_ns: int) -> str:
    """Format a time: as the time of day if it is less than a day away, otherwise with the date."""
    is_near = abs(now_ns - at_ns) < _DAY_S * 1_000_000_000
    return time.strftime("%H:%M:%S" if is_near else "%Y-%m-%d %H:%M", time.localtime(at_ns // 1_000_000_000))


def lines(service: ObservedStatus, now_ns: int) -> list[str]:
    text_lines = [title(service.status, now_ns)]
    if problem := trouble(service):
        text_lines.append(f"  {problem}")
    if not service.status.volumes:
        text_lines.append(
            "  no volume is served: no mounted volume has a trash store, or no configured volume is mounted"
        )
    for volume in service.status.volumes:
        text_lines += ["", heading(volume), f"  {doing(volume)}"]
        text_lines += [f"  {name:<9} {text}" for name, text in _rows(volume, now_ns) if text]
    if service.status.passed_over:
        text_lines.append("")
    for one in service.status.passed_over:
        text_lines.append(
            f"not served: {printable_text(one.where)}: {printable_text(one.what)} ({printable_text(one.hint)})"
        )
    return text_lines


def _rows(volume: VolumeStatus, now_ns: int) -> list[tuple[str, str | None]]:
    pressure = [f"{name} {share:.0%}" for name, share in stalls(volume)] + latencies(volume)
    return [
        ("backlog", backlog(volume, now_ns)),
        ("size", held(volume)),
        ("rate", rate(volume) if is_busy(volume) else None),
        ("now", now(volume)),
        ("eta", eta(volume)),
        ("pressure", ", ".join(pressure)),
        ("space", space(volume)),
        ("done", format_deleted(volume)),
        ("nodes", nodes(volume)),
        *(("error", text) for text in faults(volume, now_ns)),
        *(
            ("refused", f"{printable_text(one.where)}: {printable_text(one.what)} ({printable_text(one.hint)})")
            for one in volume.refused
        ),
    ]
