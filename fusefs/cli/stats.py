"""trashd stats."""

from __future__ import annotations

import time
from collections.abc import Sequence

import click

from fusefs.cli import output
from fusefs.cli.json_objects import MemoryUse, MountNumbers, RequestTimes
from fusefs.cli.options import PathBytes, json_option
from fusefs.cli.status_text import moment
from fusefs.core.durations import format_duration
from fusefs.core.errors import DaemonGone, NotFound, TrashdError, UsageError, from_os
from fusefs.core.fast_paths import FastPathState
from fusefs.core.mount_counters import Gauges, SeenMount
from fusefs.core.printable_names import printable, show
from fusefs.core.sizes import format_size

_HEADS = ("operation", "count", "errors", "mean", "p50", "p99", "max")
_UNITS = (("s", 1e9), ("ms", 1e6), ("µs", 1e3))


@click.command("stats", short_help="Show what a mount does, and how fast.")
@click.argument("mount_point", type=PathBytes(), required=False, metavar="[MNT]")
@click.option("--prometheus", is_flag=True, help="Print metrics in Prometheus' text format.")
@json_option
def command(mount_point: bytes | None, prometheus: bool, as_json: bool) -> int:
    """Show what was asked of the mount MNT and how long the answers took, what its daemon remembers, and what it holds.

    Without MNT: of each mount of trashd that is seen here. It reads a file that the daemon keeps, and never asks the
    mount, so it is quick even if that hangs. Everybody may look at root's mounts. Counters begin anew with the daemon.
    Exit code 5: nothing is mounted there, or the daemon is gone; its last numbers are shown then.

    \b
    Examples:
      trashd stats /scratch
      trashd stats --json | jq '.operations.lookup.p99_ns'
      trashd stats --prometheus
    """
    if prometheus and as_json:
        raise UsageError("--prometheus with --json", "it is one or the other")
    seen, errors = _look(mount_point)
    if prometheus:
        from fusefs.mount.places.mount_metrics import prometheus_text

        print(prometheus_text(seen), end="")
    elif as_json:
        for one in seen:
            output.as_json(_numbers(one))
    else:
        print("\n\n".join("\n".join(_lines(one)) for one in seen))
    gone: list[TrashdError] = [DaemonGone(one.point) for one in seen if not one.is_running]
    codes = [output.failed(error, as_json=as_json) for error in errors + gone]
    return output.exit_code(codes + [0] * (len(seen) - len(gone)))


def _look(mount_point: bytes | None) -> tuple[list[SeenMount], list[TrashdError]]:
    """What there is to show, and of which mounts nothing is known.

    Raises  what keeps all of it from being shown
    """
    from fusefs.mount.places.find_mounts import all_mounts, mount_at, read_counters

    mounts = all_mounts() if mount_point is None else [mount_at(mount_point)]
    if not mounts:
        raise NotFound("a mount of trashd", "make one: trashd mount SRC MNT")
    seen: list[SeenMount] = []
    errors: list[TrashdError] = []
    for mount in mounts:
        try:
            seen.append(read_counters(mount))
        except (TrashdError, OSError) as error:
            errors.append(from_os(error, mount.point))
    if not seen and len(errors) == 1:
        raise errors[0]
    return seen, errors


def _numbers(seen: SeenMount) -> MountNumbers:
    """A mount for programs: what the file has, and what follows from it."""
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


def _lines(seen: SeenMount) -> list[str]:
    """All of it for a person."""
    told = [printable(seen.point), *(f"  {name:<10} {text}" for name, text in _rows(seen))]
    remembered = [
        (show(name).replace("_", " "), f"{one.n_hits + one.n_misses:,}", f"{rate:.1%}")
        for name, one in seen.stats.remembered.items()
        if (rate := one.rate()) is not None
    ]
    operations = [
        (
            show(name), f"{one.n():,}", f"{one.n_failed:,}", _time_text(one.mean_ns()),
            _time_text(one.percentile_ns(0.5)), _time_text(one.percentile_ns(0.99)), _time_text(one.max_ns),
        )
        for name, one in seen.stats.operations.items()
        if one.n()
    ]  # fmt: skip
    for head, rows in ((("remembered", "asked", "hits"), remembered), (_HEADS, operations)):
        if rows:
            told += ["", *_table([head, *rows])]
    return told


def _rows(seen: SeenMount) -> list[tuple[str, str]]:
    stats, is_running = seen.stats, seen.is_running
    table, now_ns = stats.table, time.time_ns()
    since = format_duration(max(0, (now_ns - table.started_ns) // 1_000_000_000))
    last = moment(stats.updated_ns, now_ns) if stats.updated_ns else "never"
    daemon = f"trashd {show(table.version)}, pid {table.pid}"
    rows = [
        ("serves", printable(seen.source)),
        ("daemon", f"{daemon}, up {since}" if is_running else f"{daemon}, is gone; last asked: {last}"),
    ]
    known = Gauges(**{name: value for name, value in stats.gauges.items() if name in Gauges._fields})
    handles = f"{known.n_handles:,} open files and listings"
    rows += [
        ("nodes", f"{known.n_nodes:,}, {handles}, {known.n_directory_fds:,} directories held open"),
        ("cache", _cache(known)),
    ]
    if known.is_slow or known.n_threads or known.n_prefetches:
        backing = "slow" if known.is_slow else "local"
        rows.append(("backing", f"{backing}: {known.n_threads:,} threads at work, {known.n_prefetches:,} prefetches"))
    if seen.fast_paths:
        rows.append(("fast paths", _fast_paths(seen.fast_paths)))
    unknown = [(show(name), f"{value:,}") for name, value in stats.gauges.items() if name not in Gauges._fields]
    return rows + unknown


def _fast_paths(states: Sequence[FastPathState]) -> str:
    """Those that are off; `trashd mount --explain` has the reasons."""
    off = [show(one.name) for one in states if not one.is_on]
    return f"without {', '.join(off)}: trashd mount --explain" if off else "all on"


def _cache(known: Gauges) -> str:
    if not known.cache_size_bytes:
        return "off"
    return f"{known.n_cached:,} items, {format_size(known.cache_bytes)} of {format_size(known.cache_size_bytes)}"


def _time_text(ns: float | None) -> str:
    """A short time with three digits: `12.3 µs`; a dash if there is none."""
    if ns is None:
        return "-"
    unit, size = next(((unit, size) for unit, size in _UNITS if ns >= 0.9995 * size), _UNITS[-1])
    value = ns / size
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """The first column to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
