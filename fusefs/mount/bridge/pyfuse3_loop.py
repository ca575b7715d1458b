"""The seam between pyfuse3 and trio: pyfuse3 looks trio up in its own namespace, and finds what we put there.

With trio's own lock and wait, two rounds of the scheduler lie between an answer and the next request: half of what a
request costs. Here the worker that has answered reads on at once, until nothing is left to read, its handler waits, or
its turn is over; then the others go on.

Source  docs/decisions/0009-the-seam.md: what this takes for granted of pyfuse3
"""

from __future__ import annotations

import logging
import os
import re
import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic, thread_time
from types import ModuleType

import pyfuse3
import trio

from fusefs.mount.tables.tables_lock import TablesLock
from fusefs.mount.tree.references import NodeReferences
from fusefs.mount.tree.validity import EntryParam

_TURN_S = 0.001
"""For which requests keep every other task waiting, at most (and for the one request that is under way then)."""
_GLANCE_S = 30e-6
"""To go to sleep and to be woken takes about that, of which the client waits for the second half at least."""
_N_GLANCES_LEFT_OUT_MAX = 64
_SOON_S = 100e-6
"""Of which sleeping and waking take most."""
_PATIENCE, _PATIENCE_S = 50, 0.02
"""Checkpoints, and how long we may be at work in them: what is deleted and in use keeps its number longer than a client
wants to wait, and so does what stands behind a hundred thousand others that the kernel forgets."""
_KNOWN_PYFUSE3 = re.compile(r"3\.([4-9]|\d{2,})(\.|$)")

_POLLIN, _current_task = select.POLLIN, trio.lowlevel.current_task

_log = logging.getLogger(__name__)


Serve = Callable[[], bool | None]
"""Reads a request and serves it. False: it is pyfuse3's to read; None: none waits."""


def _leave() -> bool:
    return False


class _RequestPoll:
    """Whether a request is there, or comes before sleeping would have paid.

    Looking pays while a client asks one thing after another, and for nothing else: each time that nothing came, it is
    left out twice as often, until one comes soon after we went to sleep. An idle mount costs nothing. Where client and
    daemon have one core between them, a daemon that looks keeps the client from asking.
    """

    def __init__(self, fd: int, gone: Callable[[], None]) -> None:
        """fd: /dev/fuse; gone: called when the connection is gone, perhaps more than once."""
        self._gone = gone
        poll = select.poll()
        poll.register(fd, select.POLLIN)  # errors are reported unasked
        self._poll = poll.poll
        self._pays = len(os.sched_getaffinity(0)) > 1
        self._n_to_leave_out = 0
        self._n_left_out_next = 1

    def is_there(self) -> bool:
        """Whether reading would not block, or fail at once: the connection is gone."""
        seen = self._poll(0)
        if not seen:
            return False
        if seen[0][1] != _POLLIN:
            self._gone()
        return True

    def comes(self) -> bool:
        """Whether reading would not block soon: polled for a moment."""
        if not self._pays:
            return False
        if self._n_to_leave_out:
            self._n_to_leave_out -= 1
            return False
        end_s = monotonic() + _GLANCE_S
        while monotonic() < end_s:
            if self._poll(0):
                self._n_left_out_next = 1
                return True
        self._n_to_leave_out = self._n_left_out_next
        self._n_left_out_next = min(self._n_left_out_next * 2, _N_GLANCES_LEFT_OUT_MAX)
        return False

    def slept(self, for_s: float) -> None:
        """Until a request came."""
        if for_s < _SOON_S:
            self._n_to_leave_out, self._n_left_out_next = 0, 1


class _ReadLock(trio.abc.Instrument):
    """pyfuse3's lock around reading a request, and its wait for one.

    The task with the lock is the reader. A worker that has answered takes it again before others can; it is handed
    to one that stands by as soon as trio goes on to another task while it is free, whatever the reason: a handler
    that waits has nothing to announce, and a reader that ends (the connection is gone) makes the next one look.
    """

    def __init__(self, replied: Callable[[], None], gone: Callable[[], None]) -> None:
        self._replied = replied
        self._gone = gone
        self._is_taken = False
        self._standby: dict[trio.lowlevel.Task, None] = {}  # the last to come is called first: its memory is warm
        self._serving: set[trio.lowlevel.Task] = set()  # those that have read a request, until they are back
        self._reader: trio.lowlevel.Task | None = None  # in this step of it, the lock was given back after a wait
        self._has_waited = False
        self._turn_end_s = 0.0
        self._glance: _RequestPoll | None = None  # once we know the fd
        self.serve: Serve = _leave
        self.elsewhere: trio.Event | None = None
        """Set when pyfuse3 is to read again; None: it reads."""

    async def __aenter__(self) -> None:
        """Be the reader. Checkpoint  when the turn is over, or while another task reads"""
        self._replied()
        self._serving.discard(_current_task())
        if monotonic() > self._turn_end_s and not self._is_taken:
            await trio.lowlevel.checkpoint()
            self._begin_turn()
        if self._is_taken:
            await self._stand_by()
            self._begin_turn()
        self._is_taken = True
        self._has_waited = False

    async def __aexit__(self, *_error: object) -> None:
        """A request is to be read and answered. Checkpoint  none: reading follows"""
        task = _current_task()
        self._is_taken = False
        self._serving.add(task)
        self._reader = task if self._has_waited else None

    async def wait_readable(self, fd: int) -> None:
        """Wait for a request that is pyfuse3's to read, and serve all others. Checkpoint  when none comes at once"""
        if self._glance is None:
            self._glance = _RequestPoll(fd, self._gone)
            trio.lowlevel.add_instrument(self)
        self._has_waited = self._is_taken
        while True:
            if self.elsewhere is not None:
                await self.elsewhere.wait()
                return
            serve = self.serve
            served = serve()
            if not served:
                await self._until_there(fd)
                if served is False and serve is self.serve and self.elsewhere is None:
                    return
            elif monotonic() > self._turn_end_s:
                await trio.lowlevel.checkpoint()
                self._begin_turn()

    async def _until_there(self, fd: int) -> None:
        """Wait for any request. Checkpoint  when none comes at once"""
        glance = self._glance
        assert glance is not None
        # While handlers wait for threads, those wait for the interpreter: we must not hold it.
        if not glance.is_there() and (self._serving or not glance.comes()):
            began_s = monotonic()
            await trio.lowlevel.wait_readable(fd)
            while not glance.is_there():  # the client was killed meanwhile: reading would stop us all
                await trio.lowlevel.wait_readable(fd)
            glance.slept(monotonic() - began_s)
            self._begin_turn()

    def has_led_here(self) -> bool:
        """Whether the task that asks has taken the lock, waited, given it back, and come here without a checkpoint."""
        return self._reader is trio.lowlevel.current_task()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """Hand the lock on if it is free: trio calls this between two tasks."""
        self._reader = None
        self._replied()  # nothing stays held back, whatever the task does next
        if self._standby and not self._is_taken:
            self._is_taken = True
            trio.lowlevel.reschedule(self._standby.popitem()[0])

    def _begin_turn(self) -> None:
        self._turn_end_s = monotonic() + _TURN_S

    async def _stand_by(self) -> None:
        """Wait to be handed the lock; it is ours then, cancelled or not. Checkpoint  always"""
        task = trio.lowlevel.current_task()
        self._standby[task] = None

        def leave(_raise_cancel: object) -> trio.lowlevel.Abort:
            del self._standby[task]
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(leave)


class _TrioReadLock:
    """trio's own lock, and held-back replies."""

    def __init__(self, replied: Callable[[], None]) -> None:
        self._replied = replied
        self._lock = trio.Lock()

    async def __aenter__(self) -> None:
        """Be the reader. Checkpoint  always"""
        self._replied()
        await self._lock.acquire()

    async def __aexit__(self, *_error: object) -> None:
        """Let another task read. Checkpoint  none"""
        self._lock.release()


class _ModuleProxy:
    """A module, with some of its names replaced."""

    def __init__(self, module: ModuleType, **replaced: object) -> None:
        vars(self).update(replaced)
        self._module = module

    def __getattr__(self, name: str) -> object:
        return getattr(self._module, name)


def hook(replied: Callable[[], None], gone: Callable[[], None], *, is_fast: bool = True) -> bool:
    """Have functions called on trio's thread; pyfuse3.init must follow.

    replied  after each reply, before anything else can happen
    gone     when the connection is gone: once, or more often; not if it is slow
    is_fast  False: all goes as trio has it, but for the first of these
    Returns  False: this pyfuse3 may differ from what we know, so it has trio as it is; neither is ever called
    """
    version = str(vars(pyfuse3).get("__version__"))
    if not _KNOWN_PYFUSE3.match(version) or "trio" not in vars(pyfuse3):
        _log.warning("pyfuse3 %s is not one that we know (3.4 or later, before 4): the mount will be slower", version)
        vars(pyfuse3)["trio"] = trio
        return False
    if not is_fast:
        vars(pyfuse3)["trio"] = _ModuleProxy(trio, Lock=lambda: _TrioReadLock(replied))
        return True
    reading = _ReadLock(replied, gone)
    lowlevel = _ModuleProxy(trio.lowlevel, wait_readable=reading.wait_readable)
    vars(pyfuse3)["trio"] = _ModuleProxy(trio, lowlevel=lowlevel, Lock=lambda: reading)
    return True


def is_as_known() -> bool:
    """Whether pyfuse3, which has called the handler that asks this, came to it as we take for granted; if not, say so.

    Source  docs/decisions/0009-the-seam.md
    """
    lock = vars(pyfuse3)["trio"].Lock()
    if isinstance(lock, _ReadLock) and lock.has_led_here():
        return True
    _log.warning("this pyfuse3 reads its requests otherwise than those that we know: the mount will be slower")
    return False


@contextmanager
def session(handlers: pyfuse3.Operations, device_fd: int) -> Iterator[None]:
    """A session of libfuse's on an open /dev/fuse; its end closes that, and unmounts nothing, as it mounted nothing."""
    pyfuse3.init(handlers, f"/dev/fd/{device_fd}", set())
    try:
        yield
    finally:
        pyfuse3.close(unmount=False)


async def answer_requests(n_tasks: int) -> None:
    """Answer what the session's kernel asks until `stop_answering` or its end; some requests may be under way yet.

    n_tasks     min = max: pyfuse3 must never end one between a reply and the next request
    Checkpoint  everywhere
    """
    await pyfuse3.main(min_tasks=n_tasks, max_tasks=n_tasks)


def stop_answering() -> None:
    """End `answer_requests`."""
    pyfuse3.terminate()


def serve_by(serve: Serve) -> None:
    """From now on requests are read by this first. The seam must be there (hook)."""
    _read_lock().serve = serve


def read_elsewhere() -> Callable[[], None]:
    """From now on requests are read by other threads. The seam must be there (hook).

    Returns  what has pyfuse3 read again, on trio's thread: as it finds the connection gone, its loop ends
    """
    lock = _read_lock()
    lock.elsewhere = trio.Event()
    return lock.elsewhere.set


def _read_lock() -> _ReadLock:
    lock = vars(pyfuse3)["trio"].Lock()
    assert isinstance(lock, _ReadLock)
    return lock


async def own_number(lock: TablesLock, references: NodeReferences, known: EntryParam) -> EntryParam:
    """What was just made, with its own inode number for a nodeid wherever that can be had.

    It may be that of a file just deleted: the kernel lets go of that at once, but prefers to hand us requests. We
    let the other workers read on.
    Checkpoint  only then; the node is counted already (I8)
    """
    if known.nodeid == known.attributes.ino:
        return known
    end_s = thread_time() + _PATIENCE_S  # a busy machine may keep us from work for longer
    for _ in range(_PATIENCE):
        with lock:
            known = references.renumbered(known)
            if not references.lacks_its_number(known) or thread_time() > end_s:
                break
        await trio.lowlevel.checkpoint()
    return known
