"""A mount's numbers in words and tables."""

from __future__ import annotations

import time
from collections.abc import Sequence

from fusefs.cli.statustext import moment
from fusefs.core.durations import format_duration
from fusefs.core.events import show
from fusefs.core.fastpaths import State
from fusefs.core.mountstats import Gauges, Seen
from fusefs.core.names import printable
from fusefs.core.sizes import format_size

_HEADS = ("operation", "count", "errors", "mean", "p50", "p99", "max")
_UNITS = (("s", 1e9), ("ms", 1e6), ("µs", 1e3))


def lines(seen: Seen) -> list[str]:
    """All of it for a person."""
    told = [printable(seen.point), *(f"  {name:<10} {text}" for name, text in _rows(seen))]
    remembered = [
        (show(name).replace("_", " "), f"{one.n_hits + one.n_misses:,}", f"{rate:.1%}")
        for name, one in seen.stats.remembered.items()
        if (rate := one.rate()) is not None
    ]
    operations = [
        (
            show(name), f"{one.n():,}", f"{one.n_failed:,}", time_text(one.mean_ns()),
            time_text(one.percentile_ns(0.5)), time_text(one.percentile_ns(0.99)), time_text(one.max_ns),
        )
        for name, one in seen.stats.operations.items()
        if one.n()
    ]  # fmt: skip
    for head, rows in ((("remembered", "asked", "hits"), remembered), (_HEADS, operations)):
        if rows:
            told += ["", *_table([head, *rows])]
    return told


def _rows(seen: Seen) -> list[tuple[str, str]]:
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


def _fast_paths(states: Sequence[State]) -> str:
    """Those that are off; `trashd mount --explain` has the reasons."""
    off = [show(one.name) for one in states if not one.is_on]
    return f"without {', '.join(off)}: trashd mount --explain" if off else "all on"


def _cache(known: Gauges) -> str:
    if not known.cache_size_bytes:
        return "off"
    return f"{known.n_cached:,} items, {format_size(known.cache_bytes)} of {format_size(known.cache_size_bytes)}"


def time_text(ns: float | None) -> str:
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
