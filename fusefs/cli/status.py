"""trashd status: show the reaper service and the mounts."""

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
from fusefs.core.mount_counters import MountStats, ObservedMount, Operation
from fusefs.core.printable_names import printable, printable_text
from fusefs.core.service_status import ObservedStatus, VolumePhase
from fusefs.core.uring_choice import FastPath
from fusefs.linux.runtime_directories import SYSTEM_RUNTIME, runtime_dir

_HEADS = ("mount", "requests", "errors", "mean", "p99", "max", "nodes", "cache", "daemon")
_UNITS = (("s", 1e9), ("ms", 1e6), ("µs", 1e3))


@click.command("status", cls=Command, short_help="Show what the reaper service and the mounts are doing.")
@click.option("--watch", is_flag=True, help="Show the reaper service live, until Ctrl-C.")
@click.option("--prometheus", is_flag=True, help="Print the metrics of the mounts in the Prometheus text format.")
@json_option
def command(watch: bool, prometheus: bool, as_json: bool) -> int:
    """Show what the reaper service and the mounts are doing.

    For each volume, status shows the backlog, rate, pressure, free space and recent errors. For each mount, it shows
    request counts, latencies and the state of the daemon. It reads only status files, so it is fast even if a mount
    hangs. All users can see root's service and mounts, as well as their own. Sizes include only your own orphans; for
    root, they include the orphans of all users.

    \b
    Examples:
      trashd status
      trashd status --watch
      trashd status --json | jq '.volumes[]? | {path, phase, n_due}'
      trashd status --json | jq '.mounts[]?.operations.lookup.p99_ns'
      trashd status --prometheus
    """
    if watch and as_json:
        raise UsageError("--watch can't be combined with --json")
    if watch and not sys.stdout.isatty():
        raise UsageError("--watch needs a terminal")
    if prometheus:
        if watch or as_json:
            raise UsageError(f"--prometheus can't be combined with {'--watch' if watch else '--json'}")
        from fusefs.mount.places.mount_metrics import prometheus_text

        mounts, errors = _find_mounts()
        print(prometheus_text(mounts), end="")
        return max((output.print_error(error) for error in errors), default=0)
    if watch:
        from fusefs.cli.status_watch import watch_live

        watch_live(find_services)
        return 0
    mounts, errors = _find_mounts()
    try:
        services = find_services()
    except TrashdError as error:
        services, errors = [], [error, *errors]
    now_ns = time.time_ns()
    for index, (directory, service) in enumerate(services):
        if as_json:
            life = ServiceLife(directory, service.is_running, service.is_stale(), round(service.age_s, 3))
            # Unlike in the file, paths are unquoted in JSON.
            volumes = tuple(replace(one, path=os.fsdecode(one.root_path())) for one in service.status.volumes)
            output.as_json(life, replace(service.status, volumes=volumes))
        else:
            print("\n".join([*[""] * bool(index), *status_text.lines(service, now_ns)]))
        if service.is_running:
            errors += unwell(service)
        else:
            errors.append(NotRunning(f"{printable(directory)} (last pid {service.status.pid})"))
    if mounts and as_json:
        output.as_json(MountsSeen(tuple(map(_numbers, mounts))))
    elif mounts:
        print("\n".join([*[""] * bool(services), *mount_lines(mounts, now_ns)]))
    return max((output.print_error(error, as_json=as_json) for error in errors), default=0)


def find_services() -> list[tuple[bytes, ObservedStatus]]:
    """Return the running services with their directories, root's first; if none is running, those that have ended.

    Raises  NotRunning if no service has ever run
    """
    from fusefs.service.state_files import read_held, read_status

    services = []
    for directory in dict.fromkeys((SYSTEM_RUNTIME, runtime_dir())):
        with errors_about(directory):
            service = read_status(directory)
        if service is not None:
            held = read_held(directory)  # sizes of the caller's own orphans; for root, of everyone's
            volumes = tuple(replace(volume, held=held.get(volume.path, ())) for volume in service.status.volumes)
            services.append((directory, service._replace(status=replace(service.status, volumes=volumes))))
    if not services:
        raise NotRunning
    return [(directory, service) for directory, service in services if service.is_running] or services


def unwell(service: ObservedStatus) -> list[TrashdError]:
    """Find problems with a running service and its volumes."""
    errors: list[TrashdError] = []
    if service.is_stale():
        errors.append(Unwell(f"pid {service.status.pid}: the reaper service hangs", "journalctl -u trashd-reaper"))
    # Users' own stores are ignored, since their users can break them at any time.
    broken = [one for one in service.status.volumes if one.phase is VolumePhase.BROKEN and one.owner is None]
    return errors + [Unwell(f"{printable(one.root_path())}: the reaper can't work on this volume") for one in broken]


def _find_mounts() -> tuple[list[ObservedMount], list[TrashdError]]:
    """Find mounts whose counters the caller may read; add an error for each that is unreadable or has no daemon."""
    from fusefs.mount.places.find_mounts import all_mounts, read_counters
    from fusefs.mount.places.runtime_dir import base_directory

    mounts: list[ObservedMount] = []
    errors: list[TrashdError] = []
    for mount in all_mounts():
        if mount.owner and base_directory() is None:
            how = "set XDG_RUNTIME_DIR before trashd mount and trashd status"
            output.warn(f"{printable(mount.point)}: no counters, because you have no runtime directory; {how}")
            continue
        try:
            mounts.append(read_counters(mount))
        except (TrashdError, OSError) as error:
            errors.append(from_os(error, mount.point))
    return mounts, errors + [DaemonGone(one.point) for one in mounts if not one.is_running]


def _numbers(mount: ObservedMount) -> MountNumbers:
    point, source, stats, is_running, fast_paths = mount
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


def mount_lines(mounts: Sequence[ObservedMount], now_ns: int) -> list[str]:
    rows = [_HEADS, *(_row(one, now_ns) for one in mounts)]
    first, *numbers, last = zip(*rows, strict=True)
    widths = [max(map(len, column)) for column in (first, *numbers)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:-1], widths[1:]), text])
        for row, text in zip(rows, last, strict=True)
    ]


def _row(mount: ObservedMount, now_ns: int) -> tuple[str, ...]:
    total, gauges = _all_requests(mount.stats), mount.stats.gauges
    return (
        printable(mount.point), f"{total.n():,}", f"{total.n_failed:,}", _time_text(total.mean_ns()),
        _time_text(total.percentile_ns(0.99)), _time_text(total.max_ns), f"{gauges.get('n_nodes', 0):,}",
        format_size(gauges.get("cache_bytes", 0)), _daemon(mount, now_ns),
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


def _daemon(mount: ObservedMount, now_ns: int) -> str:
    """Format the daemon's version, age, transport and missing fast paths, or that the daemon is not running."""
    stats = mount.stats
    if not mount.is_running:
        last = status_text.moment(stats.updated_ns, now_ns) if stats.updated_ns else "never"
        return f"not running; last request: {last}"
    age_s = max(0, (now_ns - stats.table.started_ns) // 1_000_000_000)
    up = f"{printable_text(stats.table.version)}, up {format_duration(age_s)}"
    is_on = {one.name: one.is_on for one in mount.fast_paths}
    if not is_on:
        return up
    if not is_on.get(FastPath.ENGINE.value):
        return f"{up}, in plain mode"
    up += ", over io_uring" if is_on.get(FastPath.URING.value) else ", over /dev/fuse"
    return up if is_on.get(FastPath.PASSTHROUGH.value) else f"{up}, without passthrough"


def _time_text(ns: float | None) -> str:
    """Format a short duration with three digits: `12.3 µs`; a dash for None or 0."""
    if not ns:
        return "-"
    unit, size = next(((unit, size) for unit, size in _UNITS if ns >= 0.9995 * size), _UNITS[-1])
    value = ns / size
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"
