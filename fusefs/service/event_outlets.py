"""Outlets of events and figures: log, audit log, hooks and metrics, as the configuration says, which may change.

The audit log has for years which user took, restored and reaped what, and how much; one JSON object a line. Beside it
the service's log has the same events, for people, with journald's fields.

Hooks run as a user without rights, in a session of their own, for a limited time, a few at once; what they do or fail
to do is logged and changes nothing in the service. Each user's events wait in a queue of their own, and the queues have
turns: a user with thousands of events delays nobody else's hook by more than one of their own.

Of one user so many events are reported in a span of time, and the number of the others.

Metrics are amounts and their sums, no rates: Prometheus makes those itself, over the time that is asked for. Over HTTP
they are for a Prometheus on this host: no thread, and no wake-up without a request. prometheus_client has a server of
its own, which wakes twice a second.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import pwd
import signal
import stat
import subprocess
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import trio
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fusefs.core.config import Config, HooksConfig
from fusefs.core.config import MetricsConfig as Wanted
from fusefs.core.events import ERRORS, TAKEN, WARNINGS, Event, EventKind, describe, encode, variables
from fusefs.core.printable_names import printable, show
from fusefs.core.service_status import Status, VolumePhase, VolumeStatus
from fusefs.linux.children import person
from fusefs.linux.fd import Fd, closed_on_error
from fusefs.linux.kernel import OTHERS_WRITE
from fusefs.linux.runtime_directories import make_dir, replace_file
from fusefs.linux.user_ids import read_subordinates
from fusefs.service import timers

_REQUEST_MAX = 8192
_SCRAPES_AT_ONCE = 64
"""Connections; with more, the oldest is closed. A scrape is over in milliseconds, so the oldest is a silent one."""
_PATHS = (b"/", b"/metrics")
_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""prometheus_client has a name for it since 0.22 (Debian 13 has 0.21)."""


class _Row(NamedTuple):
    """A metric of each volume; it is absent where its value is not known.

    adds  the sum of a user's own stores is told as the user's: which they are, and how many, stays private
    """

    name: str
    help: str
    value: Callable[[VolumeStatus], float | None]
    adds: bool = False


_GAUGES = (
    _Row("trashd_users", "Users who have a folder in the volume's store.", lambda v: v.n_users),
    _Row("trashd_orphans", "Orphans in the store, those being reaped among them.", lambda v: v.n_orphans, adds=True),
    _Row("trashd_due_orphans", "Orphans that may go now.", lambda v: v.n_due, adds=True),
    _Row(
        "trashd_held_bytes",
        "Bytes that orphans take whose size is known.",
        lambda v: sum(one.n_bytes for one in v.held),
    ),
    _Row("trashd_unsized_orphans", "Orphans whose size is not known.", lambda v: sum(one.n_unknown for one in v.held)),
    _Row(
        "trashd_quarantined_orphans",
        "Orphans of which something could not be removed.",
        lambda v: v.n_quarantined,
        adds=True,
    ),
    _Row(
        "trashd_tempo_entries_per_second",
        "Entries a second that the reaper allows itself; +Inf: as fast as the kernel.",
        lambda v: math.inf if v.tempo_entries_per_s is None else v.tempo_entries_per_s,
    ),
    _Row("trashd_probe_seconds", "Time that a small durable write took lately.", lambda v: _divided(v.probe_ms, 1e3)),
    _Row("trashd_unlink_seconds", "Time that one unlink took lately.", lambda v: _divided(v.unlink_us, 1e6)),
    _Row("trashd_eta_seconds", "Time until all that is due is gone.", lambda v: v.eta_s),
    _Row("trashd_overdue_seconds", "How long the oldest orphan could have been gone.", lambda v: v.oldest_overdue_s),
    _Row("trashd_free_bytes", "Free space of the volume.", lambda v: v.free_bytes),
    _Row("trashd_size_bytes", "Size of the volume.", lambda v: v.total_bytes),
    _Row("trashd_free_inodes", "Free inodes of the volume.", lambda v: v.free_inodes),
    _Row("trashd_inodes", "Inodes that the volume can have.", lambda v: v.total_inodes),
    _Row(
        "trashd_nodes",
        "Nodes that serve the volume, as far as this one sees; absent where there can be but one.",
        lambda v: sum(bool(one.is_alive) for one in v.nodes) or None,
    ),
)
_COUNTERS = (
    _Row("trashd_removed_entries_total", "Entries removed.", lambda v: v.removed_entries, adds=True),
    _Row(
        "trashd_freed_bytes_total",
        "Bytes that they took, where they were looked at.",
        lambda v: v.freed_bytes,
        adds=True,
    ),
    _Row("trashd_reaped_orphans_total", "Orphans that are gone for good.", lambda v: v.n_reaped, adds=True),
)
_HOOKS: tuple[tuple[str, str, Callable[[HookCounts], int]], ...] = (
    ("trashd_hooks_total", "Hooks that ran.", lambda t: t.n_run),
    ("trashd_failed_hooks_total", "Hooks that failed, or were killed at their time limit.", lambda t: t.n_failed),
    ("trashd_dropped_hooks_total", "Hooks that did not run as too many waited.", lambda t: t.n_dropped),
)


class PrometheusMetrics(Collector):
    """All metrics of a service; `registry` holds them."""

    def __init__(self, textfile: bytes | None = None) -> None:
        """textfile: for node_exporter's textfile collector; its name must end in `.prom`."""
        self.registry = CollectorRegistry(auto_describe=False)
        self._textfile = textfile
        self._status: Status | None = None
        self._hooks = HookCounts()
        self._events: Counter[tuple[str, str]] = Counter()
        self._is_broken = False
        self.registry.register(self)

    def __call__(self, event: Event, *, is_own: bool = False) -> None:
        """Count an event. is_own: in a store of its user's own"""
        name = _own(event.uid) if is_own else printable(event.volume or b"")
        self._events[name, event.kind.value] += 1

    def publish(self, status: Status, hooks: HookCounts) -> None:
        """From now on these are the values; the text file is written."""
        self._status, self._hooks = status, hooks
        if self._textfile is None:
            return
        try:
            directory, name = os.path.split(self._textfile)
            with _open_unshared(directory) as fd:
                replace_file(name, generate_latest(self.registry), 0o644, whatever_umask=True, dir_fd=fd)
            self._is_broken = False
        except OSError as error:
            if not self._is_broken:
                _LOG.warning("metrics: %s can't be written: %s", printable(self._textfile), error.strerror)
            self._is_broken = True

    def close(self) -> None:
        """Take the text file away: values of a service that is not there would be taken for its last word."""
        if self._textfile is not None:
            directory, name = os.path.split(self._textfile)
            with suppress(OSError), _open_unshared(directory) as fd:
                os.unlink(name, dir_fd=fd)

    def collect(self) -> Iterator[Metric]:
        """All metrics with their values of now."""
        if self._status is not None:
            info = GaugeMetricFamily("trashd_info", "The service that runs.", labels=["version", "host"])
            info.add_metric([self._status.version, self._status.host], 1)
            yield info
            for name, explained, at_ns in (
                ("trashd_start_time_seconds", "When the service started.", self._status.started_ns),
                ("trashd_update_time_seconds", "When these values were true.", self._status.updated_ns),
            ):
                yield GaugeMetricFamily(name, explained, value=at_ns / 1e9)
            for row in _GAUGES:
                yield _filled(GaugeMetricFamily(row.name, row.help, labels=["volume"]), row, self._status)
            for row in _COUNTERS:
                yield _filled(CounterMetricFamily(row.name, row.help, labels=["volume"]), row, self._status)
            yield from _shares(self._status)
        for name, explained, count in _HOOKS:
            yield CounterMetricFamily(name, explained, value=count(self._hooks))
        events = CounterMetricFamily("trashd_events_total", "What happened, by kind.", labels=["volume", "event"])
        for labels, n in sorted(self._events.items()):
            events.add_metric(labels, n)
        yield events


def _open_unshared(path: bytes) -> Fd:
    """A directory in which nobody but root and we can make, replace or take away a file. Raises  OSError"""
    with closed_on_error(Fd(os.open(path or b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))) as fd:
        st = os.fstat(fd)
        if st.st_uid not in (0, os.geteuid()) or st.st_mode & OTHERS_WRITE:
            raise PermissionError(errno.EACCES, "others can write in its directory: chown it to root, chmod go-w")
        return fd


def _shares(status: Status) -> Iterator[Metric]:
    """What has one more label."""
    stalls = GaugeMetricFamily(
        "trashd_stall_ratio", "Share of the time in which somebody waited (PSI).", labels=["volume", "resource"]
    )
    phases = GaugeMetricFamily(
        "trashd_phase", "What the volume's reaper does: 1 for that, 0 for all else.", labels=["volume", "phase"]
    )
    silence = GaugeMetricFamily(
        "trashd_node_silent_seconds",
        "How long this node has seen the beat of another one unchanged, by its own clock.",
        labels=["volume", "host"],
    )
    for volume in status.volumes:
        if volume.owner is not None:
            continue
        name = printable(volume.root())
        for resource, share in (("io", volume.io), ("memory", volume.memory), ("cpu", volume.cpu)):
            if share is not None:
                stalls.add_metric([name, resource], share)
        for phase in VolumePhase:
            phases.add_metric([name, phase.value], float(volume.phase is phase))
        by_host: dict[str, float] = {}  # of several boots of one host the latest word counts
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
            family.add_metric([printable(volume.root())], value)
    for owner, total in sorted(sums.items()) if row.adds else ():
        family.add_metric([_own(owner)], total)
    return family


def _own(uid: int | None) -> str:
    """The label of all stores of a user's own."""
    return f"uid {uid}"


def _divided(value: float | None, parts: float) -> float | None:
    return None if value is None else value / parts


async def serve(
    host: str,
    port: int,
    registry: CollectorRegistry,
    *,
    task_status: trio.TaskStatus[list[trio.SocketListener]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer GET /metrics until cancelled. An address that can't be had is logged, and nothing served."""
    try:
        listeners = await trio.open_tcp_listeners(port, host=host)
    except OSError as error:
        _LOG.error("metrics: can't listen on %s port %d: %s", host, port, error)
        task_status.started([])
        return
    open_ones: dict[trio.CancelScope, None] = {}
    await trio.serve_listeners(partial(_answer_scrape, registry, open_ones), listeners, task_status=task_status)


async def _answer_scrape(
    registry: CollectorRegistry, open_ones: dict[trio.CancelScope, None], stream: trio.SocketStream
) -> None:
    """One request, one answer; a slow client is disconnected, and the oldest if there are too many."""
    with trio.move_on_after(timers.current.metrics_limit_s) as scope:
        open_ones[scope] = None
        if len(open_ones) > _SCRAPES_AT_ONCE:
            next(iter(open_ones)).cancel()
        try:
            async with stream:
                await stream.send_all(_respond(registry, await _read(stream)))
        except trio.BrokenResourceError:
            return
        finally:
            del open_ones[scope]


async def _read(stream: trio.SocketStream) -> bytes:
    """A request's head; what came of it if it ends early."""
    head = b""
    while b"\r\n\r\n" not in head and len(head) < _REQUEST_MAX:
        part = await stream.receive_some(_REQUEST_MAX)
        if not part:
            break
        head += part
    return head


def _respond(registry: CollectorRegistry, head: bytes) -> bytes:
    words = head.partition(b"\r\n")[0].split(b" ")
    if len(words) != 3:
        return _response("400 Bad Request")
    method, path, _version = words
    if method not in (b"GET", b"HEAD"):
        return _response("405 Method Not Allowed")
    if path.partition(b"?")[0] not in _PATHS:
        return _response("404 Not Found")
    return _response("200 OK", generate_latest(registry), is_told=method == b"GET")


def _response(status: str, body: bytes = b"", *, is_told: bool = True) -> bytes:
    """All that is ever told has the oldest format, which every Prometheus knows: what it accepts needs no reading."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: {_CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\nConnection: close"
    return head.encode("ascii") + b"\r\n\r\n" + (body if is_told else b"")


_HOOKS_AT_ONCE = 4
_QUEUE_MAX = 1000
"""Events of one user and of their subordinate uids."""
_TOLD_BYTES = 2000
"""Of what a hook printed."""
_CHUNK = 1 << 16
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class HookCounts(NamedTuple):
    """Hooks since the service started: all that ran, of these those that failed or were killed, and those dropped."""

    n_run: int = 0
    n_failed: int = 0
    n_dropped: int = 0


class _HookAccount(NamedTuple):
    """Who a hook runs as; ids are None where they are ours anyway."""

    name: str
    home: str
    uid: int | None = None
    gid: int | None = None
    groups: tuple[int, ...] | None = None


class HookRunner:
    """Takes events at once, whatever the hooks do, and runs what belongs to them."""

    def __init__(self, hooks: HooksConfig) -> None:
        """hooks: which programs, as whom, for how long."""
        self.hooks = hooks
        self._holder_of = read_subordinates().holder_of
        self._queues: dict[int | None, deque[Event]] = {}  # whose turn is next, first; None: events of no user
        self._n_waiting = trio.Semaphore(0)
        self.tally = HookCounts()
        self._n_dropped_untold: Counter[int | None] = Counter()

    def __call__(self, event: Event) -> None:
        """Queue an event that has a hook. If its user's are far behind, it is dropped: that is logged and counted."""
        if not _argv(self.hooks, event.kind):
            return
        user = None if event.uid is None else self._holder_of(event.uid)
        queue = self._queues.setdefault(user, deque())
        if len(queue) < _QUEUE_MAX:
            queue.append(event)
            self._n_waiting.release()
            return
        self.tally = self.tally._replace(n_dropped=self.tally.n_dropped + 1)
        if not self._n_dropped_untold[user]:
            _LOG.warning("hooks%s are %d events behind: more are dropped", _for_user(user), _QUEUE_MAX)
        self._n_dropped_untold[user] += 1

    async def run(self) -> None:
        """Run hooks until cancelled; those that run then are killed."""
        async with trio.open_nursery() as nursery:
            for _ in range(_HOOKS_AT_ONCE):
                nursery.start_soon(self._work)

    async def _work(self) -> None:
        while True:
            await self._n_waiting.acquire()
            event = self._next()
            if argv := _argv(self.hooks, event.kind):
                is_well = await _run(argv, event, self.hooks.user, self.hooks.timeout_s)
                n_run, n_failed, n_dropped = self.tally
                self.tally = HookCounts(n_run + 1, n_failed + (not is_well), n_dropped)

    def _next(self) -> Event:
        """The next event of the user whose turn it is."""
        user = next(iter(self._queues))
        queue = self._queues.pop(user)
        event = queue.popleft()
        if queue:
            self._queues[user] = queue
        elif n_dropped := self._n_dropped_untold.pop(user, 0):
            _LOG.warning("hooks%s have caught up; %d events were dropped", _for_user(user), n_dropped)
        return event


def _for_user(user: int | None) -> str:
    return "" if user is None else f" for uid {user}"


def _argv(hooks: HooksConfig, kind: EventKind) -> tuple[str, ...] | None:
    """The program of a kind of event."""
    if kind in TAKEN:
        return hooks.on_swap
    others = {
        EventKind.REAPED: hooks.on_reaped,
        EventKind.QUARANTINED: hooks.on_quarantine,
        EventKind.EXPIRES_SOON: hooks.on_expires_soon,
        EventKind.LOW_SPACE: hooks.on_low_space,
    }
    return others.get(kind)


async def _run(argv: tuple[str, ...], event: Event, user: str, timeout_s: float) -> bool:
    """Run one to its end or its time limit; whether it ended well. All else is logged."""
    fields = {"fields": variables(event)}
    name = f"hook {argv[0]} for {event.kind.value}"
    try:
        account = await trio.to_thread.run_sync(_account, user, abandon_on_cancel=True)
        code, said = await _finish(argv, event, account, timeout_s)
    except (OSError, KeyError, subprocess.SubprocessError) as error:
        _LOG.warning("%s could not be started: %s", name, error, extra=fields)
        return False
    if code is None:
        _LOG.warning("%s was killed after %g s%s", name, timeout_s, said, extra=fields)
    elif code < 0:
        _LOG.warning("%s ended by signal %d (%s)%s", name, -code, signal.strsignal(-code), said, extra=fields)
    elif code:
        _LOG.warning("%s ended with exit code %d%s", name, code, said, extra=fields)
    else:
        _LOG.info("%s ended well%s", name, said, extra=fields)
    return code == 0


async def _finish(
    argv: tuple[str, ...], event: Event, account: _HookAccount, timeout_s: float
) -> tuple[int | None, str]:
    """Exit code (None: its time was over) and what it printed, for people."""
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    output = _HookOutput(read_fd)
    try:
        with Fd(write_fd) as into, _stdin(event) as stdin:
            process = await trio.lowlevel.open_process(
                argv,
                stdin=stdin,
                stdout=into,
                stderr=into,
                cwd="/",
                env=_environment(event, account),
                start_new_session=True,
                user=account.uid,
                group=account.gid,
                extra_groups=account.groups,
                umask=0o022,
            )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(output.read)
            code = await _wait(process, timeout_s)
            nursery.cancel_scope.cancel()  # what it left running may keep the pipe open for ever
        return code, output.told()
    finally:
        output.close()


async def _wait(process: trio.Process, timeout_s: float) -> int | None:
    """Its exit code; None if it had to be killed with all of its group, and was, as far as that is possible."""
    try:
        with trio.move_on_after(timeout_s):
            return await process.wait()
        return None
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            # One that turned into another user's, or hangs in a call, holds up neither the service nor its end.
            with trio.move_on_after(timers.current.hook_dying_limit_s, shield=True):
                await process.wait()


class _HookOutput:
    """The beginning of what a hook prints; all else is read too, or it would wait for a reader."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._said = bytearray()

    async def read(self) -> None:
        """Read until no process is left that could write."""
        while True:
            await trio.lowlevel.wait_readable(self._fd)
            with suppress(BlockingIOError):
                if not self._take():
                    return

    def told(self) -> str:
        """Its words on one line, after a colon; empty if it said nothing."""
        with suppress(BlockingIOError):
            while len(self._said) < _TOLD_BYTES and self._take():
                pass
        text = bytes(self._said[:_TOLD_BYTES]).decode("utf-8", "backslashreplace").strip()
        return f": {show(text)}" if text else ""

    def close(self) -> None:
        """Read nothing any more."""
        os.close(self._fd)

    def _take(self) -> bool:
        part = os.read(self._fd, _CHUNK)
        self._said += part[: max(_TOLD_BYTES - len(self._said), 0)]
        return bool(part)


def _stdin(event: Event) -> Fd:
    """The event's JSON as a file in memory: a hook that doesn't read it holds nothing up."""
    fd = Fd(os.memfd_create("event", os.MFD_CLOEXEC))
    with open(fd, "wb", closefd=False) as file:
        file.write(encode(event) + b"\n")
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _account(user: str) -> _HookAccount:
    """Who a hook runs as: the one that root's service was told, or else ourselves. Raises  KeyError"""
    if os.geteuid() != 0:
        ours = pwd.getpwuid(os.geteuid())
        return _HookAccount(ours.pw_name, ours.pw_dir)
    entry = pwd.getpwnam(user)
    known = person(entry.pw_uid)
    return _HookAccount(user, entry.pw_dir, known.uid, known.gid, tuple(known.groups))


def _environment(event: Event, account: _HookAccount) -> Mapping[str, str]:
    known = {"PATH": _PATH, "LANG": "C.UTF-8", "USER": account.name, "LOGNAME": account.name, "HOME": account.home}
    return {**known, **{name: os.fsdecode(value) for name, value in variables(event).items()}}


_LOG = logging.getLogger(__name__)
_SPAN_S = 10.0
_MOST_TOLD = 1000
"""Events of one user in such a span: a hundred a second are more than people and their scripts throw away."""


class EventLimit:
    """A rate limit on events: one user may rename containers all day, and each rename would be reported.

    Counts events by user, who has those of their subordinate uids; what is beyond is counted, and told as a number.
    """

    def __init__(self) -> None:
        self._since_s = 0.0
        self._holder_of = read_subordinates().holder_of
        self._counts: dict[int, int] = {}

    def lets_pass(self, uid: int, now_s: float) -> bool:
        """Whether one more event of a user is to be told now."""
        if now_s >= self._since_s + _SPAN_S:
            for one, count in self._counts.items():
                if count > _MOST_TOLD:
                    _LOG.warning("%d more events and faults of uid %d were not told", count - _MOST_TOLD, one)
            self._since_s, self._counts = now_s, {}
        holder = self._holder_of(uid)
        self._counts[holder] = self._counts.get(holder, 0) + 1
        return self._counts[holder] <= _MOST_TOLD


class EventOutlets:
    """All of them; events may come before they are run."""

    def __init__(self, config: Config) -> None:
        self._hooks = HookRunner(config.hooks)
        self._audit = _open_audit(config)
        self._audit_path = config.audit
        self._metrics: PrometheusMetrics | None = None
        self._wanted = Wanted()
        self._listening = trio.CancelScope()

    def tell(self, event: Event, *, is_own: bool) -> None:
        """Report an event to all outlets. is_own: it happened in a store of its user's own"""
        log_event(event)
        if self._audit is not None:
            self._audit(event)
        self._hooks(event)
        if self._metrics is not None:
            self._metrics(event, is_own=is_own)

    def publish(self, status: Status) -> None:
        """These are the figures now."""
        if self._metrics is not None:
            self._metrics.publish(status, self._hooks.tally)

    def run(self, config: Config, nursery: trio.Nursery) -> None:
        """Work in a nursery until that is cancelled."""
        nursery.start_soon(self._hooks.run)
        self._serve_metrics(config.metrics, nursery)

    def configure(self, config: Config, nursery: trio.Nursery) -> None:
        """Go on as another configuration says. The audit log is opened anew: it may have been renamed."""
        self._hooks.hooks = config.hooks  # from the next event on
        self._serve_metrics(config.metrics, nursery)
        if config.audit == self._audit_path and self._audit is not None:
            self._audit.reopen()
            return
        if self._audit is not None:
            self._audit.close()
        self._audit, self._audit_path = _open_audit(config), config.audit

    def close(self) -> None:
        """Nothing more is told."""
        if self._metrics is not None:
            self._metrics.close()
        if self._audit is not None:
            self._audit.close()

    def _serve_metrics(self, wanted: Wanted, nursery: trio.Nursery) -> None:
        if wanted == self._wanted:
            return
        self._wanted = wanted
        self._listening.cancel()
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        if wanted.textfile is None and wanted.http is None:
            return
        self._metrics = PrometheusMetrics(None if wanted.textfile is None else os.fsencode(wanted.textfile))
        if wanted.http is not None:
            self._listening = trio.CancelScope()
            nursery.start_soon(_answer, *wanted.http, self._metrics, self._listening)


async def _answer(host: str, port: int, metrics: PrometheusMetrics, listening: trio.CancelScope) -> None:
    with listening:
        await serve(host, port, metrics.registry)


def _open_audit(config: Config) -> Audit | None:
    if config.audit is None:
        return None
    try:
        return Audit(os.fsencode(config.audit))
    except OSError as error:
        _LOG.error("no audit log: %s: %s", config.audit, error.strerror)
        return None


def log_event(event: Event) -> None:
    """Tell an event in the service's log."""
    level = logging.ERROR if event.kind in ERRORS else logging.WARNING if event.kind in WARNINGS else logging.INFO
    _LOG.log(level, "%s", describe(event), extra={"fields": variables(event)})


class Audit:
    """A file that is only ever appended to; a disk that is full costs lines, not the service."""

    def __init__(self, path: bytes) -> None:
        """Open it, made 0640 if need be, its directory too. Raises  OSError"""
        self._path = path
        self._fd, self._is_cut = _open(path)
        self._n_lost = 0

    def __call__(self, event: Event) -> None:
        """Write one line. Of one that the disk had no place for, what was written stays; the next one begins anew."""
        line = b"\n" * self._is_cut + encode(event) + b"\n"
        try:
            n_written = os.write(self._fd, line)
        except OSError as error:
            self._lose(error.strerror)
            return
        if n_written == len(line):
            self._is_cut = False
            if self._n_lost:
                _LOG.warning("audit log: written again; it lacks %d events that are only in this log", self._n_lost)
                self._n_lost = 0
        else:
            self._is_cut = n_written != self._is_cut
            self._lose("cut short, there is no space left")

    def reopen(self) -> None:
        """Go on in the file that has the name now: after logrotate renamed the old one."""
        try:
            fd, is_cut = _open(self._path)
        except OSError as error:
            _LOG.error("audit log: can't be opened anew, the old file is used on: %s", error.strerror)
            return
        self._fd.close()
        self._fd, self._is_cut = fd, is_cut

    def close(self) -> None:
        """Write nothing any more."""
        self._fd.close()

    def _lose(self, why: str | None) -> None:
        self._n_lost += 1
        if self._n_lost == 1:
            _LOG.error("audit log: can't be written, events are only in this log until it can: %s", why)


def _open(path: bytes) -> tuple[Fd, bool]:
    """The file, and whether its last line has no end."""
    make_dir(os.path.dirname(os.path.abspath(path)))
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    fd = Fd(os.open(path, flags, 0o640))
    try:
        st = os.fstat(fd)
        if not stat.S_ISREG(st.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        return fd, st.st_size > 0 and os.pread(fd, 1, st.st_size - 1) != b"\n"
    except BaseException:
        fd.close()
        raise
