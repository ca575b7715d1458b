"""Provide the service's figures to Prometheus, in a file for node_exporter's textfile collector or through HTTP.

Metrics are amounts and sums, not rates: Prometheus computes rates itself, over any range. The HTTP server is intended
for a Prometheus on this host. It needs no thread, and wakes up only for requests; the server in prometheus_client wakes
up twice a second.
"""

from __future__ import annotations

import errno
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import trio

from fusefs.core.events import Event
from fusefs.core.printable_names import printable
from fusefs.core.service_status import HookCounts, Status, VolumePhase, VolumeStatus
from fusefs.linux.fd import Fd, close_on_error
from fusefs.linux.kernel import OTHERS_WRITE
from fusefs.linux.runtime_directories import replace_file
from fusefs.service import timers

if TYPE_CHECKING:  # prometheus_client takes 2 MiB per process, and few services export metrics
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

_LOG = logging.getLogger(__name__)
_REQUEST_MAX = 8192
_SCRAPES_AT_ONCE = 64
"""Maximum number of connections; beyond it, the oldest is closed. A scrape takes milliseconds, so that one is idle."""
_PATHS = (b"/", b"/metrics")
_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Since version 0.22, prometheus_client has a constant for this (Debian 13 has 0.21)."""


class _Row(NamedTuple):
    """A metric of each volume, omitted if its value is not known.

    adds  whether to report one sum for all of a user's own stores, so that their names and number stay private
    """

    name: str
    help: str
    value: Callable[[VolumeStatus], float | None]
    adds: bool = False


_GAUGES = (
    _Row("trashd_users", "Users who have orphans in the store.", lambda v: v.n_users),
    _Row("trashd_orphans", "Orphans in the store, including those being reaped.", lambda v: v.n_orphans, adds=True),
    _Row("trashd_due_orphans", "Orphans that may be deleted now.", lambda v: v.n_due, adds=True),
    _Row(
        "trashd_held_bytes",
        "Bytes in orphans whose size is known.",
        lambda v: sum(one.n_bytes for one in v.held),
    ),
    _Row("trashd_unsized_orphans", "Orphans whose size is not known.", lambda v: sum(one.n_unknown for one in v.held)),
    _Row(
        "trashd_quarantined_orphans",
        "Orphans that could not be deleted completely.",
        lambda v: v.n_quarantined,
        adds=True,
    ),
    _Row(
        "trashd_tempo_entries_per_second",
        "The limit that the reaper sets for itself, in entries per second; +Inf: no limit.",
        lambda v: math.inf if v.tempo_entries_per_s is None else v.tempo_entries_per_s,
    ),
    _Row("trashd_probe_seconds", "Recent duration of a small synchronous write.", lambda v: _divided(v.probe_ms, 1e3)),
    _Row("trashd_unlink_seconds", "Recent duration of one unlink.", lambda v: _divided(v.unlink_us, 1e6)),
    _Row(
        "trashd_eta_seconds", "Estimated time until all orphans that may be deleted now are deleted.", lambda v: v.eta_s
    ),
    _Row(
        "trashd_overdue_seconds",
        "Time for which the oldest due orphan has been overdue.",
        lambda v: v.oldest_overdue_s,
    ),
    _Row("trashd_free_bytes", "Free space of the volume.", lambda v: v.free_bytes),
    _Row("trashd_size_bytes", "Size of the volume.", lambda v: v.total_bytes),
    _Row("trashd_free_inodes", "Free inodes of the volume.", lambda v: v.free_inodes),
    _Row("trashd_inodes", "Total inodes of the volume.", lambda v: v.total_inodes),
    _Row(
        "trashd_nodes",
        "Nodes that serve the volume, as seen by this node; absent if there can be only one.",
        lambda v: sum(bool(one.is_alive) for one in v.nodes) or None,
    ),
)
_COUNTERS = (
    _Row("trashd_removed_entries_total", "Entries deleted.", lambda v: v.removed_entries, adds=True),
    _Row(
        "trashd_freed_bytes_total",
        "Bytes freed by the deletion of entries, as far as they were measured.",
        lambda v: v.freed_bytes,
        adds=True,
    ),
    _Row("trashd_reaped_orphans_total", "Orphans that were deleted.", lambda v: v.n_reaped, adds=True),
)
_HOOKS: tuple[tuple[str, str, Callable[[HookCounts], int]], ...] = (
    ("trashd_hooks_total", "Hooks that ran.", lambda t: t.n_run),
    ("trashd_failed_hooks_total", "Hooks that failed, or exceeded the time limit.", lambda t: t.n_failed),
    ("trashd_dropped_hooks_total", "Hooks that did not run because too many were waiting.", lambda t: t.n_dropped),
)


class PrometheusMetrics:
    """All metrics of a service: a collector for prometheus_client."""

    def __init__(self, textfile: bytes | None = None) -> None:
        """textfile: for node_exporter's textfile collector; its name must end in `.prom`."""
        self._textfile = textfile
        self._status: Status | None = None
        self._hooks = HookCounts()
        self._events: Counter[tuple[str, str]] = Counter()
        self._is_broken = False

    def __call__(self, event: Event, *, is_own: bool = False) -> None:
        """Count an event. is_own: whether it happened in a user's own store"""
        name = _own_label(event.uid) if is_own else printable(event.volume or b"")
        self._events[name, event.kind.value] += 1

    def publish(self, status: Status, hooks: HookCounts) -> None:
        """Set the current values, and write the text file."""
        self._status, self._hooks = status, hooks
        if self._textfile is None:
            return
        try:
            directory, name = os.path.split(self._textfile)
            with _open_unshared(directory) as fd:
                replace_file(name, self.text(), 0o644, ignores_umask=True, dir_fd=fd)
            self._is_broken = False
        except OSError as error:
            if not self._is_broken:
                _LOG.warning("metrics: %s can't be written: %s", printable(self._textfile), error.strerror)
            self._is_broken = True

    def close(self) -> None:
        """Remove the text file: otherwise, the last values of a service that has ended would look current."""
        if self._textfile is not None:
            directory, name = os.path.split(self._textfile)
            with suppress(OSError), _open_unshared(directory) as fd:
                os.unlink(name, dir_fd=fd)

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        from prometheus_client import generate_latest

        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        if self._status is not None:
            info = GaugeMetricFamily("trashd_info", "The running service.", labels=["version", "host"])
            info.add_metric([self._status.version, self._status.host], 1)
            yield info
            for name, explained, at_ns in (
                ("trashd_start_time_seconds", "When the service started.", self._status.started_ns),
                ("trashd_update_time_seconds", "When these values were updated.", self._status.updated_ns),
            ):
                yield GaugeMetricFamily(name, explained, value=at_ns / 1e9)
            for row in _GAUGES:
                yield _filled(GaugeMetricFamily(row.name, row.help, labels=["volume"]), row, self._status)
            for row in _COUNTERS:
                yield _filled(CounterMetricFamily(row.name, row.help, labels=["volume"]), row, self._status)
            yield from _shares(self._status)
        for name, explained, count in _HOOKS:
            yield CounterMetricFamily(name, explained, value=count(self._hooks))
        events = CounterMetricFamily("trashd_events_total", "Events, by kind.", labels=["volume", "event"])
        for labels, n in sorted(self._events.items()):
            events.add_metric(labels, n)
        yield events


def _open_unshared(path: bytes) -> Fd:
    """Open a directory in which only root and our user can create, replace or remove files. Raises  OSError"""
    with close_on_error(Fd(os.open(path or b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))) as fd:
        st = os.fstat(fd)
        if st.st_uid not in (0, os.geteuid()) or st.st_mode & OTHERS_WRITE:
            raise PermissionError(
                errno.EACCES, "other users can write to its directory: run chown root and chmod go-w on it"
            )
        return fd


def _shares(status: Status) -> Iterator[Metric]:
    """Yield the metrics that have a second label."""
    from prometheus_client.core import GaugeMetricFamily

    stalls = GaugeMetricFamily(
        "trashd_stall_ratio", "Share of the time that processes spent waiting (PSI).", labels=["volume", "resource"]
    )
    phases = GaugeMetricFamily(
        "trashd_phase",
        "What the volume's reaper is doing: 1 for the current phase, 0 for others.",
        labels=["volume", "phase"],
    )
    silence = GaugeMetricFamily(
        "trashd_node_silent_seconds",
        "Time since the heartbeat of another node last changed, according to this node's clock.",
        labels=["volume", "host"],
    )
    for volume in status.volumes:
        if volume.owner is not None:
            continue
        name = printable(volume.root_path())
        for resource, share in (("io", volume.io), ("memory", volume.memory), ("cpu", volume.cpu)):
            if share is not None:
                stalls.add_metric([name, resource], share)
        for phase in VolumePhase:
            phases.add_metric([name, phase.value], float(volume.phase is phase))
        by_host: dict[str, float] = {}  # if a host has several boots, the latest heartbeat counts
        for one in volume.nodes:
            if not one.is_here:
                by_host[one.host] = min(one.unchanged_s, by_host.get(one.host, math.inf))
        for host, silent_s in by_host.items():
            silence.add_metric([name, host], silent_s)
    yield stalls
    yield phases
    yield silence


def _filled(family: GaugeMetricFamily | CounterMetricFamily, row: _Row, status: Status) -> Metric:
    sums: Counter[int] = Counter()
    for volume in status.volumes:
        value = row.value(volume)
        if volume.owner is not None:
            sums[volume.owner] += int(value or 0) if row.adds else 0
        elif value is not None:
            family.add_metric([printable(volume.root_path())], value)
    for owner, total in sorted(sums.items()) if row.adds else ():
        family.add_metric([_own_label(owner)], total)
    return family


def _own_label(uid: int | None) -> str:
    """Return the label for all of a user's own stores."""
    return f"uid {uid}"


def _divided(value: float | None, parts: float) -> float | None:
    return None if value is None else value / parts


async def serve_metrics(
    host: str,
    port: int,
    text: Callable[[], bytes],
    *,
    task_status: trio.TaskStatus[list[trio.SocketListener]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve the metrics as text at GET /metrics until cancelled. If the address is unavailable, only log that."""
    try:
        listeners = await trio.open_tcp_listeners(port, host=host)
    except OSError as error:
        _LOG.error("metrics: can't listen on %s port %d: %s", host, port, error)
        task_status.started([])
        return
    open_ones: dict[trio.CancelScope, None] = {}
    await trio.serve_listeners(partial(_answer_scrape, text, open_ones), listeners, task_status=task_status)


async def _answer_scrape(
    text: Callable[[], bytes], open_ones: dict[trio.CancelScope, None], stream: trio.SocketStream
) -> None:
    """Answer one request. A slow client is disconnected, and the oldest client if there are too many."""
    with trio.move_on_after(timers.current.metrics_limit_s) as scope:
        open_ones[scope] = None
        if len(open_ones) > _SCRAPES_AT_ONCE:
            next(iter(open_ones)).cancel()
        try:
            async with stream:
                await stream.send_all(_respond(text, await _read(stream)))
        except trio.BrokenResourceError:
            return
        finally:
            del open_ones[scope]


async def _read(stream: trio.SocketStream) -> bytes:
    """Read the head of a request, which is incomplete if the connection ends early."""
    head = b""
    while b"\r\n\r\n" not in head and len(head) < _REQUEST_MAX:
        part = await stream.receive_some(_REQUEST_MAX)
        if not part:
            break
        head += part
    return head


def _respond(text: Callable[[], bytes], head: bytes) -> bytes:
    words = head.partition(b"\r\n")[0].split(b" ")
    if len(words) != 3:
        return _response("400 Bad Request")
    method, path, _version = words
    if method not in (b"GET", b"HEAD"):
        return _response("405 Method Not Allowed")
    if path.partition(b"?")[0] not in _PATHS:
        return _response("404 Not Found")
    return _response("200 OK", text(), has_body=method == b"GET")


def _response(status: str, body: bytes = b"", *, has_body: bool = True) -> bytes:
    """Return a response in the oldest text format: every Prometheus accepts it, so the Accept header is ignored."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: {_CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\nConnection: close"
    return head.encode("ascii") + b"\r\n\r\n" + (body if has_body else b"")
