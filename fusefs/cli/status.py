"""trashd status: what the reaper does, and the mounts."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

import click
from msgspec.structs import replace

from fusefs.cli import output, status_text
from fusefs.cli.json_objects import MemoryUse, MountNumbers, MountsSeen, RequestTimes, ServiceLife
from fusefs.cli.options import Command, json_option
from fusefs.core.errors import DaemonGone, NotRunning, TrashdError, Unwell, UsageError, errors_about, from_os
from fusefs.core.human_units import format_duration, format_size
from fusefs.core.mount_counters import MountStats, Operation, SeenMount
from fusefs.core.printable_names import printable, show
from fusefs.core.service_status import SeenStatus, VolumePhase
from fusefs.core.uring_choice import FastPath
from fusefs.linux.runtime_directories import SYSTEM_RUNTIME, runtime_dir

_HEADS = ("mount", "requests", "errors", "mean", "p99", "max", "nodes", "cache", "daemon")
_UNITS = (("s", 1e9), ("ms", 1e6), ("µs", 1e3))


@click.command("status", cls=Command, short_help="Show what the reaper and the mounts do.")
@click.option("--watch", is_flag=True, help="Show the reaper live, until Ctrl-C.")
@click.option("--prometheus", is_flag=True, help="Print the numbers of the mounts in Prometheus' text format.")
@json_option
def command(watch: bool, prometheus: bool, as_json: bool) -> int:
    """Show what the reaper service does: backlog, rate, pressure, what it waits for, free space, last errors. Show the
    mounts of trashd: how many requests, how fast the answers, what their daemons hold.

    It reads files that the service and the daemons of mounts keep, so it is quick even if a mount hangs, and everybody
    may. What orphans take is shown of your own, and root sees everybody's, as far as it is known (trashd du counts).
    Root's service and mounts are shown, and your own. Exit code 5: no service runs, or the daemon of a mount is gone;
    14: a volume had too many errors and rests, its store is there and can't be used, or the service hangs.

    \b
    Examples:
      trashd status
      trashd status --watch
      trashd status --json | jq '.volumes[]? | {path, phase, n_due}'
      trashd status --json | jq '.mounts[]?.operations.lookup.p99_ns'
      trashd status --prometheus
    """
    if watch and as_json:
        raise UsageError("--watch with --json", "a program reads `trashd status --json` as often as it likes")
    if watch and not sys.stdout.isatty():
        raise UsageError("--watch needs a terminal", "leave it out, or use --json")
    if prometheus:
        if watch or as_json:
            raise UsageError("--prometheus with --watch or --json", "it is one or the other")
        from fusefs.mount.places.mount_metrics import prometheus_text

        mounts, errors = _find_mounts()
        print(prometheus_text(mounts), end="")
        return max((output.failed(error) for error in errors), default=0)
    if watch:
        from fusefs.cli.status_watch import watch_live

        watch_live(look)
        return 0
    mounts, errors = _find_mounts()
    try:
        services = look()
    except TrashdError as error:
        services, errors = [], [error, *errors]
    now_ns = time.time_ns()
    for index, (directory, seen) in enumerate(services):
        if as_json:
            life = ServiceLife(directory, seen.is_running, seen.is_stale(), round(seen.age_s, 3))
            # Paths as all of trashd's JSON has them, not quoted as in the file.
            volumes = tuple(replace(one, path=os.fsdecode(one.root())) for one in seen.status.volumes)
            output.as_json(life, replace(seen.status, volumes=volumes))
        else:
            print("\n".join([*[""] * bool(index), *status_text.lines(seen, now_ns)]))
        if seen.is_running:
            errors += unwell(seen)
        else:
            errors.append(NotRunning(f"the last one of {printable(directory)} had pid {seen.status.pid}"))
    if mounts and as_json:
        output.as_json(MountsSeen(tuple(map(_numbers, mounts))))
    elif mounts:
        print("\n".join([*[""] * bool(services), *mount_lines(mounts, now_ns)]))
    return max((output.failed(error, as_json=as_json) for error in errors), default=0)


def look() -> list[tuple[bytes, SeenStatus]]:
    """Each service that lives and its directory, root's first; if none does, what the dead left.

    Raises  NotRunning if none ever ran
    """
    from fusefs.service.state_files import read_held, read_status

    found = []
    for directory in dict.fromkeys((SYSTEM_RUNTIME, runtime_dir())):
        with errors_about(directory):
            seen = read_status(directory)
        if seen is not None:
            held = read_held(directory)  # the caller's own, for root everybody's
            volumes = tuple(replace(volume, held=held.get(volume.path, ())) for volume in seen.status.volumes)
            found.append((directory, seen._replace(status=replace(seen.status, volumes=volumes))))
    if not found:
        raise NotRunning
    return [(directory, seen) for directory, seen in found if seen.is_running] or found


def unwell(seen: SeenStatus) -> list[TrashdError]:
    """What is wrong with a service that lives, and with its volumes."""
    found: list[TrashdError] = []
    if seen.is_stale():
        found.append(Unwell(f"pid {seen.status.pid} hangs", "its log says more: journalctl -u trashd-reaper"))
    # A user's own store that user can break at any time.
    broken = [one for one in seen.status.volumes if one.phase is VolumePhase.BROKEN and one.owner is None]
    return found + [Unwell(volume.root()) for volume in broken]


def _find_mounts() -> tuple[list[SeenMount], list[TrashdError]]:
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


def mount_lines(mounts: Sequence[SeenMount], now_ns: int) -> list[str]:
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
    """Version and age of the daemon, or its end; its transport; and what it lacks."""
    stats = seen.stats
    if not seen.is_running:
        return f"gone; last asked: {status_text.moment(stats.updated_ns, now_ns) if stats.updated_ns else 'never'}"
    age_s = max(0, (now_ns - stats.table.started_ns) // 1_000_000_000)
    up = f"{show(stats.table.version)}, up {format_duration(age_s)}"
    is_on = {one.name: one.is_on for one in seen.fast_paths}
    if not is_on:
        return up
    if not is_on.get(FastPath.ENGINE.value):
        return f"{up}, in plain mode"
    up += ", over io_uring" if is_on.get(FastPath.URING.value) else ", over /dev/fuse"
    return up if is_on.get(FastPath.PASSTHROUGH.value) else f"{up}, without passthrough"


def _time_text(ns: float | None) -> str:
    """A short time with three digits: `12.3 µs`; a dash if there is none."""
    if not ns:
        return "-"
    unit, size = next(((unit, size) for unit, size in _UNITS if ns >= 0.9995 * size), _UNITS[-1])
    value = ns / size
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"
