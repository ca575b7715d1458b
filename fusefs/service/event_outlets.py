"""Send events and figures to the log, the audit log, hooks and metrics, as the current configuration requires.

The audit log, which may be kept for years, has a line of JSON for each swap, restore and reap: the user, the tree and
its size. The service's log contains the same events as text, with fields for journald.

Hooks run as an unprivileged user, in a session of their own, for a limited time, and only a few at once. Their output
and failures are logged, and do not affect the service. Each user has a queue of events, and the queues take turns:
a user with thousands of events delays another user's next hook by a single hook.

A rate limit applies to each user's events; the number of dropped events is logged.
"""

from __future__ import annotations

import errno
import logging
import os
import pwd
import signal
import stat
import subprocess
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

import trio

from fusefs.core.config import Config, HooksConfig
from fusefs.core.config import MetricsConfig as Wanted
from fusefs.core.events import ERRORS, TAKEN, WARNINGS, Event, EventKind, describe_event, encode_event, to_variables
from fusefs.core.printable_names import printable_text
from fusefs.core.service_status import HookCounts, Status
from fusefs.linux.children import user_credentials
from fusefs.linux.fd import Fd
from fusefs.linux.runtime_directories import make_dir
from fusefs.linux.user_ids import read_subordinates
from fusefs.service import timers
from fusefs.service.metrics import PrometheusMetrics, serve_metrics

_HOOKS_AT_ONCE = 4
_QUEUE_MAX = 1000
"""Maximum number of queued events for one user, including the user's subordinate uids."""
_OUTPUT_MAX_BYTES = 2000
"""Limit on a hook's output in the log."""
_CHUNK = 1 << 16
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class _HookAccount(NamedTuple):
    """The account that a hook runs as; the ids are None if it is the service's own."""

    name: str
    home: str
    uid: int | None = None
    gid: int | None = None
    groups: tuple[int, ...] | None = None


class HookRunner:
    """Queues events and runs their hooks; queueing never waits for a hook."""

    def __init__(self, hooks: HooksConfig) -> None:
        self.hooks = hooks
        self._holder_of = read_subordinates().holder_of
        self._queues: dict[int | None, deque[Event]] = {}  # the next user first; None: events without a user
        self._n_waiting = trio.Semaphore(0)
        self.tally = HookCounts()
        self._n_dropped_unlogged: Counter[int | None] = Counter()

    def __call__(self, event: Event) -> None:
        """Queue an event if it has a hook. If its user's queue is full, the event is dropped, logged and counted."""
        if not _argv(self.hooks, event.kind):
            return
        user = None if event.uid is None else self._holder_of(event.uid)
        queue = self._queues.setdefault(user, deque())
        if len(queue) < _QUEUE_MAX:
            queue.append(event)
            self._n_waiting.release()
            return
        self.tally = self.tally._replace(n_dropped=self.tally.n_dropped + 1)
        if not self._n_dropped_unlogged[user]:
            _LOG.warning("hooks%s: %d events are waiting, so new events are dropped", _for_user(user), _QUEUE_MAX)
        self._n_dropped_unlogged[user] += 1

    async def run_hooks(self) -> None:
        """Run hooks until cancelled; cancellation kills the hooks that are running."""
        async with trio.open_nursery() as nursery:
            for _ in range(_HOOKS_AT_ONCE):
                nursery.start_soon(self._work)

    async def _work(self) -> None:
        while True:
            await self._n_waiting.acquire()
            event = self._next()
            if argv := _argv(self.hooks, event.kind):
                is_well = await _run_hook(argv, event, self.hooks.user, self.hooks.timeout_s)
                n_run, n_failed, n_dropped = self.tally
                self.tally = HookCounts(n_run + 1, n_failed + (not is_well), n_dropped)

    def _next(self) -> Event:
        user = next(iter(self._queues))
        queue = self._queues.pop(user)
        event = queue.popleft()
        if queue:
            self._queues[user] = queue
        elif n_dropped := self._n_dropped_unlogged.pop(user, 0):
            _LOG.warning("hooks%s: no more events are waiting; %d events were dropped", _for_user(user), n_dropped)
        return event


def _for_user(user: int | None) -> str:
    return "" if user is None else f" for uid {user}"


def _argv(hooks: HooksConfig, kind: EventKind) -> tuple[str, ...] | None:
    """Return the command line of the hook for a kind of event, or None if no hook is configured."""
    if kind in TAKEN:
        return hooks.on_swap
    others = {
        EventKind.REAPED: hooks.on_reaped,
        EventKind.QUARANTINED: hooks.on_quarantine,
        EventKind.EXPIRES_SOON: hooks.on_expires_soon,
        EventKind.LOW_SPACE: hooks.on_low_space,
    }
    return others.get(kind)


async def _run_hook(argv: tuple[str, ...], event: Event, user: str, timeout_s: float) -> bool:
    """Run a hook to its end or its time limit, log any failure, and return whether its exit code was 0."""
    fields = {"fields": to_variables(event)}
    name = f"hook {argv[0]} for {event.kind.value}"
    try:
        account = await trio.to_thread.run_sync(_account, user, abandon_on_cancel=True)
        code, output = await _finish(argv, event, account, timeout_s)
    except (OSError, KeyError, subprocess.SubprocessError) as error:
        _LOG.warning("%s could not be started: %s", name, error, extra=fields)
        return False
    if code is None:
        _LOG.warning("%s was killed after %g s%s", name, timeout_s, output, extra=fields)
    elif code < 0:
        _LOG.warning(
            "%s was terminated by signal %d (%s)%s", name, -code, signal.strsignal(-code), output, extra=fields
        )
    elif code:
        _LOG.warning("%s ended with exit code %d%s", name, code, output, extra=fields)
    else:
        _LOG.info("%s succeeded%s", name, output, extra=fields)
    return code == 0


async def _finish(
    argv: tuple[str, ...], event: Event, account: _HookAccount, timeout_s: float
) -> tuple[int | None, str]:
    """Run a hook; return its exit code (None: killed at the time limit) and its output as text for the log."""
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
            nursery.cancel_scope.cancel()  # a process that the hook left running may keep the pipe open forever
        return code, output.format_output()
    finally:
        output.close()


async def _wait(process: trio.Process, timeout_s: float) -> int | None:
    """Wait for a hook, and return its exit code. At the time limit, kill its process group and return None."""
    try:
        with trio.move_on_after(timeout_s):
            return await process.wait()
        return None
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            # A process that changed its user, or hangs in a system call, must not delay the service or its shutdown.
            with trio.move_on_after(timers.current.hook_dying_limit_s, shield=True):
                await process.wait()


class _HookOutput:
    """The beginning of a hook's output. The rest is read and discarded, since the hook would block on a full pipe."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._output = bytearray()

    async def read(self) -> None:
        """Read until no process has the pipe open for writing."""
        while True:
            await trio.lowlevel.wait_readable(self._fd)
            with suppress(BlockingIOError):
                if not self._read_chunk():
                    return

    def format_output(self) -> str:
        """Return the output as one line that starts with a colon, or an empty string if there is none."""
        with suppress(BlockingIOError):
            while len(self._output) < _OUTPUT_MAX_BYTES and self._read_chunk():
                pass
        text = bytes(self._output[:_OUTPUT_MAX_BYTES]).decode("utf-8", "backslashreplace").strip()
        return f": {printable_text(text)}" if text else ""

    def close(self) -> None:
        os.close(self._fd)

    def _read_chunk(self) -> bool:
        part = os.read(self._fd, _CHUNK)
        self._output += part[: max(_OUTPUT_MAX_BYTES - len(self._output), 0)]
        return bool(part)


def _stdin(event: Event) -> Fd:
    """Return the event's JSON as a file in memory, so that a hook that does not read it blocks nothing."""
    fd = Fd(os.memfd_create("event", os.MFD_CLOEXEC))
    with open(fd, "wb", closefd=False) as file:
        file.write(encode_event(event) + b"\n")
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _account(user: str) -> _HookAccount:
    """Return the account that hooks run as: the given one in root's service, otherwise our own. Raises  KeyError"""
    if os.geteuid() != 0:
        own_entry = pwd.getpwuid(os.geteuid())
        return _HookAccount(own_entry.pw_name, own_entry.pw_dir)
    entry = pwd.getpwnam(user)
    credentials = user_credentials(entry.pw_uid)
    return _HookAccount(user, entry.pw_dir, credentials.uid, credentials.gid, tuple(credentials.groups))


def _environment(event: Event, account: _HookAccount) -> Mapping[str, str]:
    base = {"PATH": _PATH, "LANG": "C.UTF-8", "USER": account.name, "LOGNAME": account.name, "HOME": account.home}
    return {**base, **{name: os.fsdecode(value) for name, value in to_variables(event).items()}}


_LOG = logging.getLogger(__name__)
_SPAN_S = 10.0
_EVENTS_MAX = 1000
"""Maximum number of one user's events in _SPAN_S: users and their scripts rarely cause a hundred per second."""


class EventLimit:
    """A rate limit on events: without it, a user could rename containers all day, and each rename would be reported.

    Events are counted by user, including those of the user's subordinate uids. Events above the limit are dropped, and
    their number is logged.
    """

    def __init__(self) -> None:
        self._since_s = 0.0
        self._holder_of = read_subordinates().holder_of
        self._counts: dict[int, int] = {}

    def lets_pass(self, uid: int, now_s: float) -> bool:
        """Count one more event of a user, and return whether to report it."""
        if now_s >= self._since_s + _SPAN_S:
            for one, count in self._counts.items():
                if count > _EVENTS_MAX:
                    _LOG.warning("%d more events and faults caused by uid %d were not logged", count - _EVENTS_MAX, one)
            self._since_s, self._counts = now_s, {}
        holder = self._holder_of(uid)
        self._counts[holder] = self._counts.get(holder, 0) + 1
        return self._counts[holder] <= _EVENTS_MAX


class EventOutlets:
    """All outlets; they accept events even before `start`."""

    def __init__(self, config: Config) -> None:
        self._hooks = HookRunner(config.hooks)
        self._audit = _open_audit(config)
        self._audit_path = config.audit
        self._metrics: PrometheusMetrics | None = None
        self._metrics_config = Wanted()
        self._listening = trio.CancelScope()

    def report(self, event: Event, *, is_own: bool) -> None:
        """Report an event to all outlets. is_own: whether it happened in a user's own store"""
        log_event(event)
        if self._audit is not None:
            self._audit(event)
        self._hooks(event)
        if self._metrics is not None:
            self._metrics(event, is_own=is_own)

    def publish(self, status: Status) -> None:
        if self._metrics is not None:
            self._metrics.publish(status, self._hooks.tally)

    def start(self, config: Config, nursery: trio.Nursery) -> None:
        nursery.start_soon(self._hooks.run_hooks)
        self._serve_metrics(config.metrics, nursery)

    def configure(self, config: Config, nursery: trio.Nursery) -> None:
        """Apply a changed configuration, and reopen the audit log, because its file may have been renamed."""
        self._hooks.hooks = config.hooks  # from the next event on
        self._serve_metrics(config.metrics, nursery)
        if config.audit == self._audit_path and self._audit is not None:
            self._audit.reopen()
            return
        if self._audit is not None:
            self._audit.close()
        self._audit, self._audit_path = _open_audit(config), config.audit

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
        if self._audit is not None:
            self._audit.close()

    def _serve_metrics(self, config: Wanted, nursery: trio.Nursery) -> None:
        if config == self._metrics_config:
            return
        self._metrics_config = config
        self._listening.cancel()
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        if config.textfile is None and config.http is None:
            return
        self._metrics = PrometheusMetrics(None if config.textfile is None else os.fsencode(config.textfile))
        if config.http is not None:
            self._listening = trio.CancelScope()
            nursery.start_soon(_answer, *config.http, self._metrics, self._listening)


async def _answer(host: str, port: int, metrics: PrometheusMetrics, listening: trio.CancelScope) -> None:
    with listening:
        await serve_metrics(host, port, metrics.text)


def _open_audit(config: Config) -> Audit | None:
    if config.audit is None:
        return None
    try:
        return Audit(os.fsencode(config.audit))
    except OSError as error:
        _LOG.error("the audit log can't be opened: %s: %s", config.audit, error.strerror)
        return None


def log_event(event: Event) -> None:
    level = logging.ERROR if event.kind in ERRORS else logging.WARNING if event.kind in WARNINGS else logging.INFO
    _LOG.log(level, "%s", describe_event(event), extra={"fields": to_variables(event)})


class Audit:
    """The audit log, an append-only file. If the disk is full, lines are lost, but the service continues."""

    def __init__(self, path: bytes) -> None:
        """Open the file. If it is missing, create it with mode 0640, and also its directory. Raises  OSError"""
        self._path = path
        self._fd, self._is_cut = _open(path)
        self._n_lost = 0

    def __call__(self, event: Event) -> None:
        """Write one line. If only a part of it fits, that part remains, and the next event starts a new line."""
        line = b"\n" * self._is_cut + encode_event(event) + b"\n"
        try:
            n_written = os.write(self._fd, line)
        except OSError as error:
            self._lose(error.strerror)
            return
        if n_written == len(line):
            self._is_cut = False
            if self._n_lost:
                _LOG.warning(
                    "the audit log can be written again; %d events are missing from it, and are only in this log",
                    self._n_lost,
                )
                self._n_lost = 0
        else:
            self._is_cut = n_written != self._is_cut
            self._lose("no space left on device, so a line was cut short")

    def reopen(self) -> None:
        """Open the file at the path again, after logrotate has renamed the old one."""
        try:
            fd, is_cut = _open(self._path)
        except OSError as error:
            _LOG.error("the audit log can't be reopened, so the old file remains in use: %s", error.strerror)
            return
        self._fd.close()
        self._fd, self._is_cut = fd, is_cut

    def close(self) -> None:
        self._fd.close()

    def _lose(self, why: str | None) -> None:
        self._n_lost += 1
        if self._n_lost == 1:
            _LOG.error("can't write to the audit log: %s; until this is fixed, events are recorded only here", why)


def _open(path: bytes) -> tuple[Fd, bool]:
    """Open the file, and return whether its last line lacks a newline."""
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
