"""Outlets of events and figures: log, audit log, hooks and metrics, as the configuration says, which may change.

The audit log has for years which user took, restored and reaped what, and how much; one JSON object a line. Beside it
the service's log has the same events, for people, with journald's fields.

Hooks run as a user without rights, in a session of their own, for a limited time, a few at once; what they do or fail
to do is logged and changes nothing in the service. Each user's events wait in a queue of their own, and the queues have
turns: a user with thousands of events delays nobody else's hook by more than one of their own.

Of one user so many events are reported in a span of time, and the number of the others.
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
from fusefs.core.events import ERRORS, TAKEN, WARNINGS, Event, EventKind, describe, encode, variables
from fusefs.core.printable_names import show
from fusefs.core.service_status import HookCounts, Status
from fusefs.linux.children import person
from fusefs.linux.fd import Fd
from fusefs.linux.runtime_directories import make_dir
from fusefs.linux.user_ids import read_subordinates
from fusefs.service import timers
from fusefs.service.metrics import PrometheusMetrics, serve

_HOOKS_AT_ONCE = 4
_QUEUE_MAX = 1000
"""Events of one user and of their subordinate uids."""
_TOLD_BYTES = 2000
"""Of what a hook printed."""
_CHUNK = 1 << 16
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


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
            _LOG.warning("hooks%s: %d events are waiting, so further events are dropped", _for_user(user), _QUEUE_MAX)
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
            _LOG.warning("hooks%s: no event is waiting any more; %d events were dropped", _for_user(user), n_dropped)
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
        _LOG.warning("%s was ended by signal %d (%s)%s", name, -code, signal.strsignal(-code), said, extra=fields)
    elif code:
        _LOG.warning("%s ended with exit code %d%s", name, code, said, extra=fields)
    else:
        _LOG.info("%s succeeded%s", name, said, extra=fields)
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
                    _LOG.warning("%d more events and faults of uid %d were not logged", count - _MOST_TOLD, one)
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
        await serve(host, port, metrics.text)


def _open_audit(config: Config) -> Audit | None:
    if config.audit is None:
        return None
    try:
        return Audit(os.fsencode(config.audit))
    except OSError as error:
        _LOG.error("the audit log can't be opened: %s: %s", config.audit, error.strerror)
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
                _LOG.warning(
                    "audit log: writing works again; %d events are missing in it, and are only in this log",
                    self._n_lost,
                )
                self._n_lost = 0
        else:
            self._is_cut = n_written != self._is_cut
            self._lose("a line was cut short, no space left on device")

    def reopen(self) -> None:
        """Go on in the file that has the name now: after logrotate renamed the old one."""
        try:
            fd, is_cut = _open(self._path)
        except OSError as error:
            _LOG.error("audit log: can't be reopened, so the old file stays in use: %s", error.strerror)
            return
        self._fd.close()
        self._fd, self._is_cut = fd, is_cut

    def close(self) -> None:
        """Write nothing any more."""
        self._fd.close()

    def _lose(self, why: str | None) -> None:
        self._n_lost += 1
        if self._n_lost == 1:
            _LOG.error("audit log: can't be written; until it can, events are only in this log: %s", why)


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
