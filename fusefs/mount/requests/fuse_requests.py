"""The requests that the C core does not answer.

What has to wait goes to a thread, which answers it; where the backing filesystem is slow, what is cached is answered at
once.

Source  docs/decisions/0014-direct-requests.md, 0061-one-mutex.md
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial
from time import perf_counter_ns
from typing import Final, NamedTuple

from fusefs.core import fuse_protocol as wire
from fusefs.core.fuse_protocol import REQUEST_HEAD_SIZE, Opcode, Request
from fusefs.linux.fuse_caller import is_killed
from fusefs.mount.native._core import Node
from fusefs.mount.requests.failures import NotCached, NotYet, attempt, attempt_step
from fusefs.mount.requests.fuse_operations import FuseOperations, OpcodeHandler, Reply, ReplyInSteps, WaitClass
from fusefs.mount.requests.thread_pool import Key, PoolTask, ThreadPool
from fusefs.mount.tables.tables_lock import WouldWait
from fusefs.mount.tree.act_as import RequestCaller
from fusefs.mount.tree.vfs import Vfs

GONE: Final = (errno.ENOENT, errno.ENODEV)
"""The process that waits for an answer; the connection."""
_SHORT_BYTES = 1 << 13
_STEP_S = 0.001
_NOT_THERE = (errno.EAGAIN, errno.ENOENT, errno.ENODEV)
"""Nothing more, or not any more."""
_UNANSWERED = (Opcode.FORGET, Opcode.BATCH_FORGET, Opcode.INTERRUPT)
_OF_NOBODY = (Opcode.RELEASE, Opcode.RELEASEDIR)
"""A handle is released: no client waits for that, and none may be refused it."""

_log = logging.getLogger(__name__)


class RequestReader:
    """A thread that reads requests."""

    __slots__ = ("caller", "room", "to")

    def __init__(self) -> None:
        self.to = memoryview(mmap.mmap(-1, wire.REQUEST_BYTES_MAX))  # no more of it is in memory than is needed
        self.room = (self.to,)
        self.caller = RequestCaller()

    def request(self, size: int) -> Request:
        """What was read: a write is not copied; all others are short."""
        return self.to[:size] if size > _SHORT_BYTES else self.to[:size].tobytes()


Give = Callable[[wire.Answer, int], None]
"""The way of an answer to the kernel; with the number of the request, and the tables' lock."""


class _Unfinished(NamedTuple):
    """A request that takes several steps."""

    steps: ReplyInSteps
    unique: int
    pid: int
    cell: int
    begun_ns: int
    give: Give


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

    @property
    def number(self) -> Callable[[Node, bytes], ReplyInSteps]:
        """What replies to what has made a node when that has its own number."""
        return self._answers.number

    def answer_read(self, reader: RequestReader, size: int, *, hands_out: bool) -> None:
        """Answer a request that a thread has read from /dev/fuse, or have that done.

        size       of the request, which is in the reader's memory
        hands_out  what may take long is done by others
        """
        unfinished = self._answer_or_help(reader.request(size), reader.caller, self._write, hands_out=hands_out)
        if unfinished is not None:
            self._unfinished.append(unfinished)

    @property
    def n_unfinished(self) -> int:
        """How many requests that were read take several steps, of which some are left."""
        return len(self._unfinished)

    def go_on(self, *, is_idle: bool) -> None:
        """Make a step of all that takes several. is_idle: no request waits"""
        for _ in range(len(self._unfinished)):
            with suppress(IndexError):  # another thread reads by now, and goes on with it
                unfinished = self._unfinished.popleft()
                with self._lock:
                    is_done = self._step(unfinished, is_idle)
                if not is_done:
                    self._unfinished.append(unfinished)

    def answer_later(self, _token: int, steps: ReplyInSteps, unique: int, pid: int, opcode: int, begun_ns: int) -> None:
        """Answer a request that was read from /dev/fuse and has been done, but whose answer takes several steps."""
        unfinished = _Unfinished(steps, unique, pid, self._acts[opcode].cell, begun_ns, self._write)
        with self._lock:
            is_done = self._step(unfinished, None)
        if not is_done:
            self._unfinished.append(unfinished)

    def answer_here(self, request: Request, reader: RequestReader, give: Give, *, hands_out: bool) -> None:
        """Answer a request that has come by io_uring, in the thread that has got it, or have that done.

        reader     of that thread, for what comes otherwise
        hands_out  what may take long is done by others
        """
        unfinished = self._answer_or_help(request, reader.caller, give, hands_out=hands_out)
        if unfinished is not None:
            self._finish_soon(unfinished, reader)

    def _answer_or_help(
        self, request: Request, caller: RequestCaller, give: Give, *, hands_out: bool
    ) -> _Unfinished | None:
        lock = self._lock
        if wire.is_cut_off(request):
            self._refuse_cut_off(request, give)
            return None
        _size, opcode, unique, nodeid, caller.uid, caller.gid, caller.pid = wire.read_head(request)
        known = act = self._acts.get(opcode)
        if lock.is_slow:
            act = self._recalls.get(opcode, act)
        if act is None or known is None:
            self._refuse(opcode, request, give)
            return None
        if act.sort and (hands_out or lock.is_slow or act.sort is WaitClass.LONG):
            self._help(act, request, self._kind_of(act, opcode, nodeid, request), give)
            return None
        begun_ns = perf_counter_ns()
        try:
            with lock:
                return self._answer(act, nodeid, request, unique, caller, begun_ns, give)
        except NotCached:
            self._help(known, request, self._kind_of(known, opcode, nodeid, request), give)
        except WouldWait:
            self._help(known, request, WaitClass.OTHERS, give)
        return None

    def finish_soon(
        self,
        steps: ReplyInSteps,
        unique: int,
        pid: int,
        opcode: int,
        begun_ns: int,
        give: Give,
        reader: RequestReader,
    ) -> None:
        """Have answered what has come by io_uring and been done, but takes several steps to be told."""
        unfinished = _Unfinished(steps, unique, pid, self._acts[opcode].cell, begun_ns, give)
        with self._lock:
            is_done = self._step(unfinished, None)
        if not is_done:
            self._finish_soon(unfinished, reader)

    def _finish_soon(self, unfinished: _Unfinished, reader: RequestReader) -> None:
        """Go on with what takes several steps, when all has been read that it waits for."""
        self._read_forgotten(reader)
        with self._lock:
            is_done = self._step(unfinished, is_idle=False)
        if not is_done:
            self._finish_elsewhere(unfinished)

    def _read_forgotten(self, reader: RequestReader) -> None:
        """Read what there is beside the requests that come by io_uring: what the kernel forgets."""
        while True:
            try:
                request = reader.request(os.readv(self.device, reader.room))
            except OSError as error:
                if error.errno not in _NOT_THERE:
                    raise
                return
            opcode = wire.read_head(request)[1]
            act = self._acts.get(opcode)
            if act is None:
                self._refuse(opcode, request, self._write)
                continue
            with self._lock:
                unfinished = self._answer_as_read(act, request, reader.caller, self._write)
            if unfinished is not None:
                self._finish_elsewhere(unfinished)

    def _kind_of(self, act: OpcodeHandler, opcode: int, nodeid: int, request: Request) -> WaitClass:
        """With which of its user's requests it is queued."""
        submounts = self._lock.submounts
        with self._lock:
            node = self._nodes.get(nodeid)
            if node is not None and (node.dev in submounts.devices or node.name in submounts.names):
                return WaitClass.OTHERS
        if submounts.names and not submounts.names.isdisjoint(bytes(request[REQUEST_HEAD_SIZE:]).split(b"\0")):
            return WaitClass.OTHERS
        return _sort(act, opcode, request)

    def _refuse(self, opcode: int, request: Request, give: Give) -> None:
        """Answer an unknown request as libfuse does."""
        if opcode == Opcode.INTERRUPT:
            self._interrupt(request)
        else:
            _size, _opcode, unique, _nodeid, _uid, _gid, pid = wire.read_head(request)
            with self._lock:
                self._give(errno.ENOSYS, unique, pid, give)

    def _refuse_cut_off(self, request: Request, give: Give) -> None:
        """Answer a request that lacks a part, if it can be seen whose answer that is and somebody waits for it."""
        _log.error("the kernel has sent a request of %d bytes that is cut off", len(request))
        if len(request) >= REQUEST_HEAD_SIZE:
            _size, opcode, unique, _nodeid, _uid, _gid, pid = wire.read_head(request)
            if opcode not in _UNANSWERED:
                with self._lock:
                    self._give(errno.EINVAL, unique, pid, give)

    def _interrupt(self, request: Request) -> None:
        """A killed client's request need not wait for its turn; all others go on, as natively."""
        (unique,) = wire.INTERRUPT_IN.unpack_from(request, REQUEST_HEAD_SIZE)
        task = self._pool.parked(unique)
        if task is not None and is_killed(task.pid) and self._pool.remove(unique):
            with self._lock:
                self._give(errno.EINTR, unique, task.pid, task.give or self._write)

    # In threads.

    def _help(self, act: OpcodeHandler, request: Request, sort: WaitClass, give: Give) -> None:
        """Have a request done in a thread."""
        _size, opcode, unique, _nodeid, _uid, _gid, pid = wire.read_head(request)
        if opcode == Opcode.RELEASE:  # the next writer may be quicker than the thread that lets it go
            with self._lock:
                self._nodes.runs_no_more(*wire.HANDLE_IN.unpack_from(request, REQUEST_HEAD_SIZE))
        self._stats.changed()
        copy = bytes(request)
        do = partial(self._do, act, copy, sort, give)
        if not self._pool.do(PoolTask(_key_of(request, sort), do, unique, pid, len(copy), give)):
            with self._lock:
                self._give(errno.EAGAIN, unique, pid, give)

    def _do(self, act: OpcodeHandler, request: bytes, sort: WaitClass, give: Give, has_waited: bool) -> None:
        _size, opcode, unique, _nodeid, _uid, _gid, pid = wire.read_head(request)
        if has_waited and opcode not in _OF_NOBODY and is_killed(pid):
            with self._lock:
                self._give(errno.EINTR, unique, pid, give)
        else:
            run = self._lock.run_patiently
            if sort < WaitClass.LONG:  # a request that waits for another process must not hold up those of this kind
                run = self._lock.run
            try:
                run(self._answer_wholly, act, request, give)
            except WouldWait:
                self._help(act, request, WaitClass.OTHERS, give)

    def _answer_wholly(self, act: OpcodeHandler, request: bytes, give: Give) -> None:
        unfinished = self._answer_as_read(act, request, RequestCaller(), give)
        if unfinished is not None:
            self._finish(unfinished)

    def _finish(self, unfinished: _Unfinished) -> None:
        is_done = False
        while not is_done:
            self._lock.call(time.sleep, _STEP_S)
            is_done = self._step(unfinished, is_idle=False)

    def _finish_elsewhere(self, unfinished: _Unfinished) -> None:
        def act(_has_waited: bool) -> None:
            self._lock.run(self._finish, unfinished)

        self._pool.do(PoolTask((None, WaitClass.SHORT), act))

    # With the tables' lock.

    def _answer_as_read(
        self, act: OpcodeHandler, request: Request, caller: RequestCaller, give: Give
    ) -> _Unfinished | None:
        _size, _opcode, unique, nodeid, caller.uid, caller.gid, caller.pid = wire.read_head(request)
        return self._answer(act, nodeid, request, unique, caller, perf_counter_ns(), give)

    def _answer(
        self,
        act: OpcodeHandler,
        nodeid: int,
        request: Request,
        unique: int,
        caller: RequestCaller,
        begun_ns: int,
        give: Give,
    ) -> _Unfinished | None:
        """Do it, and answer; or what remains to be done. Raises  NotCached"""
        answer = attempt(act.act, nodeid, request, caller)
        if isinstance(answer, Generator):
            unfinished = _Unfinished(answer, unique, caller.pid, act.cell, begun_ns, give)
            return None if self._step(unfinished, None) else unfinished
        self._tell(answer, unique, caller.pid, act.cell, begun_ns, give)
        return None

    def _step(self, unfinished: _Unfinished, is_idle: bool | None) -> bool:
        """One step, and the answer if it is the last; whether it is."""
        steps, unique, pid, cell, begun_ns, give = unfinished
        answer: Reply | NotYet = attempt_step(steps, is_idle)
        if isinstance(answer, NotYet):
            return False
        self._tell(answer, unique, pid, cell, begun_ns, give)
        return True

    def _tell(self, answer: Reply, unique: int, pid: int, cell: int, begun_ns: int, give: Give) -> None:
        self._stats.count(cell, perf_counter_ns() - begun_ns, has_failed=type(answer) is int)
        if answer is not None:
            self._give(answer, unique, pid, give)

    def _give(self, answer: wire.Answer, unique: int, pid: int, give: Give) -> None:
        if answer == errno.ESTALE and type(answer) is int:
            self._retries.add(pid)
        give(answer, unique)

    def _write(self, answer: wire.Answer, unique: int) -> None:
        """A Give: to /dev/fuse."""
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
        """The kernel has not taken an answer. error: an errno; fh: a handle that it has opened"""
        if error not in GONE:  # the client has got an error, too
            _log.error("the kernel takes an answer for wrong: %s", os.strerror(error or 0))
        if fh:  # no client releases what none was told of
            self._pool.do(PoolTask((None, WaitClass.SHORT), partial(self._release, fh)))

    def _release(self, fh: int, _has_waited: bool) -> None:
        self._lock.run(self._listings.release, fh)


def _sort(act: OpcodeHandler, opcode: int, request: Request) -> WaitClass:
    """How long a request may take, if the filesystem below does not take changes at the moment."""
    if opcode == Opcode.OPEN and wire.OPEN_IN.unpack_from(request, REQUEST_HEAD_SIZE)[0] & os.O_TRUNC:
        return WaitClass.CHANGE
    return act.sort


def _key_of(request: Request, sort: WaitClass) -> Key:
    """The uid that a request comes from, and its sort."""
    _size, opcode, _unique, _nodeid, uid, _gid, _pid = wire.read_head(request)
    return None if opcode in _OF_NOBODY else uid, sort
