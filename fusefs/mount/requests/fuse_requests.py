"""Requests that the C core does not answer.

The thread that received such a request either replies itself or passes it to a worker of the pool, depending on how
long the request may block. If the backing filesystem is slow, the thread first tries to reply from the cache. Threads
hold the tables lock while they serve requests, but release it during each call to the backing filesystem.

Source  docs/internals/decisions/0060-how-requests-travel.md
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
from fusefs.mount.requests.thread_pool import Key, PoolTask, ThreadPool
from fusefs.mount.tables.tables_lock import WouldWait
from fusefs.mount.tree.mount_state import CELL_OF_OPCODE, errno_of
from fusefs.mount.tree.vfs import Vfs

GONE_ERRNOS: Final = (errno.ENOENT, errno.ENODEV)
"""Errors from sending a reply: the process that waited for it is gone, or the connection is gone."""
_FORGETS = (Opcode.FORGET, Opcode.BATCH_FORGET)
_WITHOUT_REPLY = (*_FORGETS, Opcode.INTERRUPT)
_RELEASES = (Opcode.RELEASE, Opcode.RELEASEDIR)
"""Releases of handles: no client waits for them, and they must not be refused."""
_OPENING = (Opcode.OPEN, Opcode.OPENDIR, Opcode.CREATE, Opcode.TMPFILE)
"""Requests whose replies end with a handle."""
_N_NUMBER_TRIES = 50
"""After this many other requests, a new inode gets a nodeid other than its inode number. A deleted file may
keep that number for longer than clients want to wait, if it is open, or if its FORGET is queued behind a hundred
thousand others."""

_log = logging.getLogger(__name__)

SendReply = Callable[[wire.Answer, int], None]
"""Sends a reply to the kernel, given the reply and the request's number. Callers must hold the tables lock. Raises
OSError"""


class Patience(IntEnum):
    """How long a thread may block for a request; the values are those in native/core.h."""

    NO_CALLS = 0
    """The thread must not call the backing filesystem, because other requests wait for the thread."""
    NO_WAITING = 1
    """The thread leaves long requests to a worker, because it also reads the next request."""
    ANY_TIME = 2


class WaitClass(IntEnum):
    """How long a request may block."""

    SHORT = 0
    READ = 1
    CHANGE = 2
    """Blocks if the backing filesystem is frozen, or its journal is busy."""
    LONG = 3
    """Takes long on any filesystem."""
    OTHER_PROCESS = 4
    """Waits for another process or another machine, perhaps forever."""


_WAIT_CLASSES: Final[dict[int, WaitClass]] = {
    **dict.fromkeys(_FORGETS, WaitClass.SHORT),
    **dict.fromkeys(
        (
            Opcode.SETATTR, Opcode.SYMLINK, Opcode.MKNOD, Opcode.MKDIR, Opcode.CREATE, Opcode.UNLINK, Opcode.RMDIR,
            Opcode.RENAME, Opcode.RENAME2, Opcode.LINK, Opcode.WRITE, Opcode.FLUSH, Opcode.SETXATTR, Opcode.REMOVEXATTR,
        ),
        WaitClass.CHANGE,
    ),
    **dict.fromkeys(
        (
            Opcode.TMPFILE, Opcode.FALLOCATE, Opcode.COPY_FILE_RANGE, Opcode.COPY_FILE_RANGE_64, Opcode.FSYNC,
            Opcode.FSYNCDIR,
        ),
        WaitClass.LONG,
    ),
}  # fmt: skip
"""The wait classes of opcodes; all others are READ."""


class _ReplyTo(NamedTuple):
    """The data from a request that the reply needs."""

    opcode: int
    unique: int
    pid: int
    begun_ns: int
    send: SendReply


class _NewNodeReply(NamedTuple):
    """A node that a request has created, the reply's body, and how often the node's own number was still in use."""

    to: _ReplyTo
    node: Node
    body: bytes
    n_tries: int = 0


class FuseRequests:
    def __init__(self, vfs: Vfs, device: int, pool: ThreadPool) -> None:
        """Set up to serve the requests of a device.

        device  /dev/fuse
        pool    workers for requests that may block
        """
        self._vfs = vfs
        self._nodes = vfs.nodes
        self._lock = vfs.lock
        self._stats = vfs.stats
        self._pool = pool
        self.device = device
        os.set_blocking(self.device, False)  # a request that poll reports may be gone when it is read
        self._unnumbered: deque[_NewNodeReply] = deque()
        self.wake = Fd(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        """Wakes the thread that reads /dev/fuse, so that it calls `retry_numbers`."""

    def answer(self, request: bytes, send: SendReply, patience: int) -> None:
        """Reply to a request, or have a worker reply. patience: how long this thread may block"""
        lock = self._lock
        if wire.is_cut_off(request):
            self._refuse_cut_off(request, send)
            return
        opcode = wire.read_head(request)[1]
        if opcode not in CELL_OF_OPCODE:
            if opcode == Opcode.INTERRUPT:
                self._interrupt(request)
            else:
                self._refuse(errno.ENOSYS, request, send)
            return
        if lock.is_slow:
            with lock:
                if self._serve(request, send, self._vfs.answer_from_cache):
                    return
        wait_class = _WAIT_CLASSES.get(opcode, WaitClass.READ)
        is_for_worker = patience == Patience.NO_CALLS or lock.is_slow or wait_class is WaitClass.LONG
        if wait_class and patience < Patience.ANY_TIME and is_for_worker:
            self._submit(request, self._class_of(request, wait_class), send)
            return
        try:
            if patience == Patience.ANY_TIME:
                self._stats.note_change()
                lock.run_patient_operation(self._serve, request, send)
                return
            with lock:
                self._serve(request, send)
        except WouldWait:
            self._submit(request, WaitClass.OTHER_PROCESS, send)

    # These replies wait until the new node has its inode number as its nodeid, or can't get it soon. The number may
    # belong to a file just deleted: the kernel forgets that file at once, but sends other requests before the FORGET.

    def answer_later(
        self, node: Node, body: bytes, unique: int, pid: int, opcode: int, begun_ns: int, send: SendReply
    ) -> None:
        """Reply to a request that has created a node, once the nodeid is the inode number. Any thread may call this."""
        if not self._try_number(
            _NewNodeReply(_ReplyTo(opcode, unique, pid, begun_ns, send), node, body), is_last=False
        ):
            os.eventfd_write(self.wake, 1)

    @property
    def n_unnumbered(self) -> int:
        """The number of replies that wait for a node to get its number."""
        return len(self._unnumbered)

    def retry_numbers(self, *, is_idle: bool) -> None:
        """Retry the replies that wait for a number. is_idle: no request is waiting in /dev/fuse"""
        for _ in range(len(self._unnumbered)):
            with suppress(IndexError):  # another thread is the reader now, and retries them
                made = self._unnumbered.popleft()
                self._try_number(made, is_last=is_idle or made.n_tries == _N_NUMBER_TRIES)

    def _try_number(self, made: _NewNodeReply, *, is_last: bool) -> bool:
        with self._lock:
            if self._nodes.renumber(made.node) or is_last:
                self._reply(wire.replace_nodeid(made.body, made.node.nodeid), made.to)
                return True
        self._unnumbered.append(made._replace(n_tries=made.n_tries + 1))
        return False

    # Refused requests.

    def _refuse(self, error: int, request: bytes, send: SendReply) -> None:
        with self._lock:
            self._send(error, wire.read_head(request)[2], send)

    def _refuse_cut_off(self, request: bytes, send: SendReply) -> None:
        """Refuse a truncated request, if its head can be read and a client waits for the reply."""
        _log.error("the kernel sent a truncated request of %d bytes", len(request))
        if len(request) >= REQUEST_HEAD_SIZE and wire.read_head(request)[1] not in _WITHOUT_REPLY:
            self._refuse(errno.EINVAL, request, send)

    def _interrupt(self, request: bytes) -> None:
        """Drop a killed client's request if it is still queued. All other requests continue, as on any filesystem."""
        (unique,) = wire.INTERRUPT_IN.unpack_from(request, REQUEST_HEAD_SIZE)
        task = self._pool.queued_task(unique)
        if task is not None and is_killed(task.pid) and self._pool.remove(unique):
            with self._lock:
                self._send(errno.EINTR, unique, task.send or self.write)

    # Requests for workers.

    def _submit(self, request: bytes, wait_class: WaitClass, send: SendReply) -> None:
        """Have a worker serve a request."""
        _size, opcode, unique, _nodeid, uid, _gid, pid = wire.read_head(request)
        if opcode == Opcode.RELEASE:  # the file may be opened for writing before the worker releases it
            with self._lock:
                self._nodes.mark_not_executed(*wire.HANDLE_IN.unpack_from(request, REQUEST_HEAD_SIZE))
        self._stats.note_change()
        key: Key = (None if opcode in _RELEASES else uid, wait_class)
        serve = partial(self._serve_in_worker, request, wait_class, send)
        if not self._pool.submit(PoolTask(key, serve, unique, pid, len(request), send)):
            self._refuse(errno.EAGAIN, request, send)

    def _serve_in_worker(self, request: bytes, wait_class: WaitClass, send: SendReply, has_waited: bool) -> None:
        _size, opcode, _unique, _nodeid, _uid, _gid, pid = wire.read_head(request)
        if has_waited and opcode not in _RELEASES and is_killed(pid):
            self._refuse(errno.EINTR, request, send)
            return
        # A request that waits for another process must not hold up others of its class.
        run_operation = self._lock.run_operation if wait_class < WaitClass.LONG else self._lock.run_patient_operation
        try:
            run_operation(self._serve, request, send)
        except WouldWait:
            self._submit(request, WaitClass.OTHER_PROCESS, send)

    def _class_of(self, request: bytes, wait_class: WaitClass) -> WaitClass:
        """Return the wait class with which a request is queued. wait_class: that of its opcode"""
        _size, opcode, _unique, nodeid, *_caller = wire.read_head(request)
        submounts = self._lock.submounts
        with self._lock:
            node = self._nodes.get(nodeid)
            if node is not None and (node.dev in submounts.devices or node.name in submounts.names):
                return WaitClass.OTHER_PROCESS
        if submounts.names and not submounts.names.isdisjoint(request[REQUEST_HEAD_SIZE:].split(b"\0")):
            return WaitClass.OTHER_PROCESS
        if opcode == Opcode.OPEN and wire.OPEN_IN.unpack_from(request, REQUEST_HEAD_SIZE)[0] & os.O_TRUNC:
            return WaitClass.CHANGE
        return wait_class

    # Callers must hold the tables lock.

    def _serve(self, request: bytes, send: SendReply, compute: Callable[[bytes], bytes | None] | None = None) -> bool:
        """Reply to a request with the result of `compute`, which by default carries out the request.

        Returns  False: the result was None, and no reply was sent
        Raises   WouldWait
        """
        begun_ns = perf_counter_ns()
        _size, opcode, unique, _nodeid, _uid, _gid, pid = wire.read_head(request)
        answer: wire.Answer | None
        try:
            answer = (compute or self._vfs.answer)(request)
        except WouldWait:
            raise
        except Exception as error:
            answer = errno_of(error, Opcode(opcode).name)
        if answer is None:
            return False
        self._reply(answer, _ReplyTo(opcode, unique, pid, begun_ns, send))
        return True

    def _reply(self, answer: wire.Answer, to: _ReplyTo) -> None:
        has_failed = isinstance(answer, int)
        self._vfs.count(CELL_OF_OPCODE[to.opcode], to.begun_ns, has_failed=has_failed)
        if to.opcode in _FORGETS and not has_failed:
            return
        if answer == errno.ESTALE:
            self._vfs.retries.add_process(to.pid)
        self._send(answer, to.unique, to.send, has_handle=to.opcode in _OPENING)

    def _send(self, answer: wire.Answer, unique: int, send: SendReply, *, has_handle: bool = False) -> None:
        try:
            send(answer, unique)
        except OSError as error:
            self.lose_answer(
                error.errno, wire.read_handle(answer) if has_handle and isinstance(answer, bytes) else None
            )

    def write(self, answer: wire.Answer, unique: int) -> None:
        """Write a reply to /dev/fuse. This method is a SendReply."""
        if isinstance(answer, int):
            os.write(self.device, wire.encode_error(unique, answer))
        else:
            os.writev(self.device, (wire.encode_head(unique, len(answer)), answer))

    def lose_answer(self, error: int | None, fh: int | None) -> None:
        """Handle a reply that the kernel has rejected. error: the errno; fh: the handle in the reply"""
        if error not in GONE_ERRNOS:  # the kernel has returned an error to the client, too
            _log.error("the kernel rejected a reply: %s", os.strerror(error or 0))
        if fh:  # no client knows this handle, so none releases it
            self._pool.submit(PoolTask((None, WaitClass.SHORT), partial(self._release, fh)))

    def _release(self, fh: int, _has_waited: bool) -> None:
        self._lock.run_operation(self._vfs.listings.release, fh)
