"""The mounts of trashd in `trashd status`: a line each for a person, all numbers for a program."""

from __future__ import annotations

from collections.abc import Sequence

from fusefs.cli.json_objects import MemoryUse, MountNumbers, MountsSeen, RequestTimes
from fusefs.cli.status_text import moment
from fusefs.core.durations import format_duration
from fusefs.core.errors import DaemonGone, TrashdError, from_os
from fusefs.core.fast_paths import FastPath
from fusefs.core.mount_counters import MountStats, Operation, SeenMount
from fusefs.core.printable_names import printable, show
from fusefs.core.sizes import format_size

_HEADS = ("mount", "requests", "errors", "mean", "p99", "max", "nodes", "cache", "daemon")
_BY_URING = (FastPath.URING.value, FastPath.NATIVE.value)
"""Both are off where uring=on does not ask for them; where it does the mount has the first, or fails."""
_UNITS = (("s", 1e9), ("ms", 1e6), ("µs", 1e3))


def find_mounts() -> tuple[list[SeenMount], list[TrashdError]]:
    """All mounts whose numbers the caller may read, and an error for each that is unknown or without a daemon."""
    from fusefs.mount.places.find_mounts import all_mounts, read_counters

    seen: list[SeenMount] = []
    errors: list[TrashdError] = []
    for mount in all_mounts():
        try:
            seen.append(read_counters(mount))
        except (TrashdError, OSError) as error:
            errors.append(from_os(error, mount.point))
    return seen, errors + [DaemonGone(one.point) for one in seen if not one.is_running]


def as_object(mounts: Sequence[SeenMount]) -> MountsSeen:
    """The mounts for programs."""
    return MountsSeen(tuple(map(_numbers, mounts)))


def _numbers(seen: SeenMount) -> MountNumbers:
    """What the file of a mount has, and what follows from it."""
    point, source, stats, is_running, fast_paths = seen
    remembered = {name: MemoryUse(one.n_hits, one.n_misses, one.rate()) for name, one in stats.remembered.items()}
    operations = {
        name: RequestTimes(
            n=one.n(), n_failed=one.n_failed, mean_ns=one.mean_ns(), p50_ns=one.percentile_ns(0.5),
            p99_ns=one.percentile_ns(0.99), max_ns=one.max_ns, total_ns=one.total_ns, counts=one.counts,
        )
        for name, one in stats.operations.items()
    }  # fmt: skip
    return MountNumbers(
        mount_point=point, source=source, is_running=is_running,
        version=stats.table.version, pid=stats.table.pid, started_ns=stats.table.started_ns,
        updated_ns=stats.updated_ns or None, gauges=stats.gauges, remembered=remembered,
        bounds_ns=stats.table.bounds_ns, operations=operations,
        fast_paths={one.name: one.is_on for one in fast_paths},
    )  # fmt: skip


def lines(mounts: Sequence[SeenMount], now_ns: int) -> list[str]:
    """A table of all mounts."""
    rows = [_HEADS, *(_row(one, now_ns) for one in mounts)]
    first, *numbers, last = zip(*rows, strict=True)
    widths = [max(map(len, column)) for column in (first, *numbers)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:-1], widths[1:]), text])
        for row, text in zip(rows, last, strict=True)
    ]


def _row(seen: SeenMount, now_ns: int) -> tuple[str, ...]:
    total, gauges = _all_requests(seen.stats), seen.stats.gauges
    return (
        printable(seen.point), f"{total.n():,}", f"{total.n_failed:,}", _time_text(total.mean_ns()),
        _time_text(total.percentile_ns(0.99)), _time_text(total.max_ns), f"{gauges.get('n_nodes', 0):,}",
        format_size(gauges.get("cache_bytes", 0)), _daemon(seen, now_ns),
    )  # fmt: skip


def _all_requests(stats: MountStats) -> Operation:
    each = stats.operations.values()
    return Operation(
        n_failed=sum(one.n_failed for one in each),
        total_ns=sum(one.total_ns for one in each),
        max_ns=max((one.max_ns for one in each), default=0),
        counts=tuple(map(sum, zip(*(one.counts for one in each), strict=True))),
        bounds_ns=stats.table.bounds_ns,
    )


def _daemon(seen: SeenMount, now_ns: int) -> str:
    """Version and age of the daemon, or its end; and the fast paths that are off although they could be on."""
    stats = seen.stats
    if not seen.is_running:
        return f"gone; last asked: {moment(stats.updated_ns, now_ns) if stats.updated_ns else 'never'}"
    age_s = max(0, (now_ns - stats.table.started_ns) // 1_000_000_000)
    up = f"{show(stats.table.version)}, up {format_duration(age_s)}"
    off = [show(one.name) for one in seen.fast_paths if not one.is_on]
    if FastPath.URING.value in off:
        off = [name for name in off if name not in _BY_URING]
    return f"{up}, without {', '.join(off)}" if off else up


def _time_text(ns: float | None) -> str:
    """A short time with three digits: `12.3 µs`; a dash if there is none."""
    if not ns:
        return "-"
    unit, size = next(((unit, size) for unit, size in _UNITS if ns >= 0.9995 * size), _UNITS[-1])
    value = ns / size
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"
