"""The requests that the C core does not answer.

A thread that has such a request replies itself, or has a worker of the pool do it: that depends on how long the thread
may take. Where the backing filesystem is slow, what is cached is replied to at once.

Source  docs/decisions/0060-how-requests-travel.md
"""

from __future__ import annotations

import errno
import logging
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from functools import partial
from time import perf_counter_ns
from typing import Final, NamedTuple

from fusefs.core import fuse_protocol as wire
from fusefs.core.fuse_protocol import REQUEST_HEAD_SIZE, Opcode
from fusefs.linux.fd import Fd
from fusefs.linux.fuse_caller import is_killed
from fusefs.mount.native._core import Node
from fusefs.mount.requests.failures import NotCached, NotYet, attempt, attempt_step
from fusefs.mount.requests.fuse_operations import FuseOperations, OpcodeHandler, Reply, ReplyInSteps, WaitClass
from fusefs.mount.requests.thread_pool import Key, PoolTask, ThreadPool
from fusefs.mount.tables.tables_lock import WouldWait
from fusefs.mount.tree.vfs import Vfs

GONE: Final = (errno.ENOENT, errno.ENODEV)
"""The process that waits for a reply; the connection."""
_UNANSWERED = (Opcode.FORGET, Opcode.BATCH_FORGET, Opcode.INTERRUPT)
_OF_NOBODY = (Opcode.RELEASE, Opcode.RELEASEDIR)
"""A handle is released: no client waits for that, and none may be refused it."""

_log = logging.getLogger(__name__)

SendReply = Callable[[wire.Answer, int], None]
"""Sends a reply to the kernel; with the number of the request, and the tables' lock."""


class Patience(IntEnum):
    """How long a thread may take for a request; as in native/core.h."""

    NO_CALLS = 0
    """It makes no call to the backing filesystem, as other requests wait for it."""
    NO_WAITING = 1
    """It leaves what takes long to a worker, as it reads the next request."""
    ANY_TIME = 2


class _Unfinished(NamedTuple):
    """A request that takes several steps."""

    steps: ReplyInSteps
    unique: int
    pid: int
    cell: int
    begun_ns: int
    send: SendReply


class FuseRequests:
    """One mount's requests."""

    def __init__(self, vfs: Vfs, device: int, pool: ThreadPool) -> None:
        """Begin.

        device  /dev/fuse
        pool    the threads that do what may wait
        """
        self._nodes = vfs.nodes
        self._listings = vfs.listings
        self._retries = vfs.retries
        self._lock = vfs.lock
        self._stats = vfs.stats
        self._pool = pool
        self.device = device
        os.set_blocking(self.device, False)  # the request that is there may be gone when we read
        self._answers = FuseOperations(vfs)
        self._acts, self._recalls = self._answers.acts(), self._answers.recalls()
        self._unfinished: deque[_Unfinished] = deque()
        self.wake = Fd(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        """Has the thread that reads /dev/fuse call `go_on`."""

    def answer(self, request: bytes, send: SendReply, patience: int) -> None:
        """Reply to a request, or have that done. patience: of this thread"""
        lock = self._lock
        if wire.is_cut_off(request):
            self._refuse_cut_off(request, send)
            return
        opcode, nodeid = wire.read_head(request)[1:4:2]
        act = self._acts.get(opcode)
        if act is None:
            self._refuse(opcode, request, send)
            return
        cached = self._recalls.get(opcode) if lock.is_slow else None
        if cached is not None:
            with suppress(NotCached), lock:
                self._answer(cached, request, send)
                return
        is_for_worker = patience == Patience.NO_CALLS or lock.is_slow or act.sort is WaitClass.LONG
        if act.sort and patience < Patience.ANY_TIME and is_for_worker:
            self._have_done(act, request, self._kind_of(act, opcode, nodeid, request), send)
            return
        try:
            if patience == Patience.ANY_TIME:
                self._stats.changed()
                lock.run_patiently(self._answer, act, request, send)
                return
            with lock:
                self._answer(act, request, send)
        except WouldWait:
            self._have_done(act, request, WaitClass.OTHERS, send)

    # What takes several steps.

    def answer_later(
        self, node: Node, body: bytes, unique: int, pid: int, opcode: int, begun_ns: int, send: SendReply
    ) -> None:
        """Reply to what has made a node when that has its own number; by any thread."""
        steps = self._answers.number(node, body)
        with self._lock:
            self._begin_steps(_Unfinished(steps, unique, pid, self._acts[opcode].cell, begun_ns, send))

    def _begin_steps(self, unfinished: _Unfinished) -> None:
        if not self._step(unfinished, None):
            self._unfinished.append(unfinished)
            os.eventfd_write(self.wake, 1)

    @property
    def n_unfinished(self) -> int:
        """How many requests take several steps, of which some are left."""
        return len(self._unfinished)

    def go_on(self, *, is_idle: bool) -> None:
        """Make a step of all that takes several. is_idle: no request waits in /dev/fuse"""
        for _ in range(len(self._unfinished)):
            with suppress(IndexError):  # another thread reads by now, and goes on with it
                unfinished = self._unfinished.popleft()
                with self._lock:
                    is_done = self._step(unfinished, is_idle)
                if not is_done:
                    self._unfinished.append(unfinished)

    def _step(self, unfinished: _Unfinished, is_idle: bool | None) -> bool:
        """One step, and the reply if it is the last; whether it is."""
        steps, unique, pid, cell, begun_ns, send = unfinished
        answer: Reply | NotYet = attempt_step(steps, is_idle)
        if isinstance(answer, NotYet):
            return False
        self._reply(answer, unique, pid, cell, begun_ns, send)
        return True

    # What is refused.

    def _refuse(self, opcode: int, request: bytes, send: SendReply) -> None:
        """Reply to an unknown request as libfuse does."""
        if opcode == Opcode.INTERRUPT:
            self._interrupt(request)
        else:
            self._send(errno.ENOSYS, request, send)

    def _refuse_cut_off(self, request: bytes, send: SendReply) -> None:
        """Reply to a request that lacks a part, if it can be seen whose reply that is and somebody waits for it."""
        _log.error("the kernel has sent a request of %d bytes that is cut off", len(request))
        if len(request) >= REQUEST_HEAD_SIZE and wire.read_head(request)[1] not in _UNANSWERED:
            self._send(errno.EINVAL, request, send)

    def _interrupt(self, request: bytes) -> None:
        """A killed client's request need not wait for its turn; all others go on, as natively."""
        (unique,) = wire.INTERRUPT_IN.unpack_from(request, REQUEST_HEAD_SIZE)
        task = self._pool.parked(unique)
        if task is not None and is_killed(task.pid) and self._pool.remove(unique):
            with self._lock:
                (task.send or self.write)(errno.EINTR, unique)

    def _send(self, error: int, request: bytes, send: SendReply) -> None:
        with self._lock:
            send(error, wire.read_head(request)[2])

    # In workers.

    def _have_done(self, act: OpcodeHandler, request: bytes, sort: WaitClass, send: SendReply) -> None:
        """Have a worker do a request."""
        _size, opcode, unique, _nodeid, _uid, _gid, pid = wire.read_head(request)
        if opcode == Opcode.RELEASE:  # the next writer may be quicker than the worker that lets it go
            with self._lock:
                self._nodes.runs_no_more(*wire.HANDLE_IN.unpack_from(request, REQUEST_HEAD_SIZE))
        self._stats.changed()
        do = partial(self._do, act, request, sort, send)
        if not self._pool.do(PoolTask(_key_of(request, sort), do, unique, pid, len(request), send)):
            self._send(errno.EAGAIN, request, send)

    def _do(self, act: OpcodeHandler, request: bytes, sort: WaitClass, send: SendReply, has_waited: bool) -> None:
        _size, opcode, _unique, _nodeid, _uid, _gid, pid = wire.read_head(request)
        if has_waited and opcode not in _OF_NOBODY and is_killed(pid):
            self._send(errno.EINTR, request, send)
            return
        # A request that waits for another process must not hold up those of this kind.
        run = self._lock.run if sort < WaitClass.LONG else self._lock.run_patiently
        try:
            run(self._answer, act, request, send)
        except WouldWait:
            self._have_done(act, request, WaitClass.OTHERS, send)

    def _kind_of(self, act: OpcodeHandler, opcode: int, nodeid: int, request: bytes) -> WaitClass:
        """With which of its user's requests it is queued."""
        submounts = self._lock.submounts
        with self._lock:
            node = self._nodes.get(nodeid)
            if node is not None and (node.dev in submounts.devices or node.name in submounts.names):
                return WaitClass.OTHERS
        if submounts.names and not submounts.names.isdisjoint(request[REQUEST_HEAD_SIZE:].split(b"\0")):
            return WaitClass.OTHERS
        if opcode == Opcode.OPEN and wire.OPEN_IN.unpack_from(request, REQUEST_HEAD_SIZE)[0] & os.O_TRUNC:
            return WaitClass.CHANGE
        return act.sort

    # With the tables' lock.

    def _answer(self, act: OpcodeHandler, request: bytes, send: SendReply) -> None:
        """Do a request, and reply. Raises  NotCached, WouldWait"""
        begun_ns = perf_counter_ns()
        _size, _opcode, unique, nodeid, *ids = wire.read_head(request)
        caller = wire.CallerIds(*ids)
        answer = attempt(act.act, nodeid, request, caller)
        self._reply(answer, unique, caller.pid, act.cell, begun_ns, send)

    def _reply(self, answer: Reply, unique: int, pid: int, cell: int, begun_ns: int, send: SendReply) -> None:
        self._stats.count(cell, perf_counter_ns() - begun_ns, has_failed=type(answer) is int)
        if answer is None:
            return
        if answer == errno.ESTALE and type(answer) is int:
            self._retries.add(pid)
        send(answer, unique)

    def write(self, answer: wire.Answer, unique: int) -> None:
        """A SendReply: to /dev/fuse."""
        try:
            if type(answer) is bytearray:
                wire.put_number(answer, wire.NUMBER_AT, unique)
                os.write(self.device, answer)
            elif type(answer) is bytes:
                os.writev(self.device, (wire.head(unique, len(answer)), answer))
            elif type(answer) is int:
                os.write(self.device, wire.refusal(unique, answer))
        except OSError as error:
            self.lose_answer(error.errno, self._answers.handle_in(answer))

    def lose_answer(self, error: int | None, fh: int | None) -> None:
        """The kernel has not taken a reply. error: an errno; fh: a handle that it has opened"""
        if error not in GONE:  # the client has got an error, too
            _log.error("the kernel takes a reply for wrong: %s", os.strerror(error or 0))
        if fh:  # no client releases what none has heard of
            self._pool.do(PoolTask((None, WaitClass.SHORT), partial(self._release, fh)))

    def _release(self, fh: int, _has_waited: bool) -> None:
        self._lock.run(self._listings.release, fh)


def _key_of(request: bytes, sort: WaitClass) -> Key:
    """The uid that a request comes from, and its sort."""
    _size, opcode, _unique, _nodeid, uid, _gid, _pid = wire.read_head(request)
    return None if opcode in _OF_NOBODY else uid, sort
