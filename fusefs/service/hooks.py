"""Programs that an administrator wants to run when something happened, such as a log writer's reload.

They run as a user without rights, in a session of their own, for a limited time, a few at once; what they do or fail
to do is logged and changes nothing in the service. Each user's events wait in a queue of their own, and the queues have
turns: a user with thousands of events delays nobody else's hook by more than one of their own.
"""

from __future__ import annotations

import logging
import os
import pwd
import signal
import subprocess
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

import trio

from fusefs.core.config import HooksConfig
from fusefs.core.events import TAKEN, Event, EventKind, encode, variables
from fusefs.core.printable_names import show
from fusefs.linux.children import person
from fusefs.linux.fd import Fd
from fusefs.linux.user_ids import read_subordinates
from fusefs.service import timers

_LOG = logging.getLogger(__name__)
_AT_ONCE = 4
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
            _LOG.warning("hooks%s are %d events behind: more are dropped", _of(user), _QUEUE_MAX)
        self._n_dropped_untold[user] += 1

    async def run(self) -> None:
        """Run hooks until cancelled; those that run then are killed."""
        async with trio.open_nursery() as nursery:
            for _ in range(_AT_ONCE):
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
            _LOG.warning("hooks%s have caught up; %d events were dropped", _of(user), n_dropped)
        return event


def _of(user: int | None) -> str:
    return "" if user is None else f" for uid {user}"


def _argv(hooks: HooksConfig, kind: EventKind) -> tuple[str, ...] | None:
    """The program of a kind of event."""
    if kind in TAKEN:
        return hooks.on_swap
    match kind:
        case EventKind.REAPED:
            return hooks.on_reaped
        case EventKind.QUARANTINED:
            return hooks.on_quarantine
        case EventKind.EXPIRES_SOON:
            return hooks.on_expires_soon
        case EventKind.LOW_SPACE:
            return hooks.on_low_space
        case _:
            return None


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
