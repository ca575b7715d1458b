"""The seam between pyfuse3 and trio: pyfuse3 looks trio up in its own namespace, and finds what we put there.

With trio's own lock and wait, two rounds of the scheduler lie between an answer and the next request: half of what a
request costs. Here the worker that has answered reads on at once, until nothing is left to read, its handler waits, or
its turn is over; then the others go on.

Source  docs/decisions/0009-the-seam.md: what this takes for granted of pyfuse3
"""

from __future__ import annotations

import logging
import re
import select
from collections.abc import Callable
from time import monotonic
from types import ModuleType

import pyfuse3
import trio

from fusefs.mount.vfs import Known, Vfs

_TURN_S = 0.001
"""For which requests keep every other task waiting, at most (and for the one request that is under way then)."""
_GLANCE_S = 30e-6
"""To go to sleep and to be woken takes about that, of which the client waits for the second half at least."""
_N_GLANCES_LEFT_OUT_MAX = 64
_PATIENCE = 50
"""Checkpoints, about a millisecond: what is deleted and in use keeps its number longer than anybody wants to wait."""
_KNOWN_PYFUSE3 = re.compile(r"3\.([4-9]|\d{2,})(\.|$)")

_log = logging.getLogger(__name__)


class _Glance:
    """Whether a request is there, or comes before sleeping would have paid.

    Looking pays while a client asks one thing after another, and for nothing else: each time that nothing came, it is
    left out twice as often. An idle mount costs nothing.
    """

    def __init__(self, fd: int, gone: Callable[[], None]) -> None:
        """fd: /dev/fuse; gone: called when the connection is gone, perhaps more than once."""
        self._gone = gone
        poll = select.poll()
        poll.register(fd, select.POLLIN)  # errors are reported unasked
        self._poll = poll.poll
        self._n_to_leave_out = 0
        self._n_left_out_next = 1

    def is_there(self) -> bool:
        """Whether reading would not block, or fail at once: the connection is gone."""
        seen = self._poll(0)
        if seen and seen[0][1] != select.POLLIN:
            self._gone()
        return bool(seen)

    def comes(self) -> bool:
        """The same, soon."""
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


class _Reading(trio.abc.Instrument):
    """pyfuse3's lock around reading a request, and its wait for one.

    Who holds the lock is the reader. A worker that has answered takes it again before anybody else can; it is handed
    to one that stands by as soon as trio goes on to another task while nobody holds it, whatever the reason: a handler
    that waits has nothing to announce, and a reader that ends (the connection is gone) makes the next one look.
    """

    def __init__(self, replied: Callable[[], None], gone: Callable[[], None]) -> None:
        self._replied = replied
        self._gone = gone
        self._is_taken = False
        self._standby: dict[trio.lowlevel.Task, None] = {}  # who came last is called first: its memory is warm
        self._serving: set[trio.lowlevel.Task] = set()  # who has read a request, until it is back
        self._turn_end_s = 0.0
        self._glance: _Glance | None = None  # once we know the fd

    async def __aenter__(self) -> None:
        """Be the reader. Checkpoint  when the turn is over, or while somebody else reads"""
        self._replied()
        self._serving.discard(trio.lowlevel.current_task())
        if monotonic() > self._turn_end_s and not self._is_taken:
            await trio.lowlevel.checkpoint()
            self._begin_turn()
        if self._is_taken:
            await self._stand_by()
            self._begin_turn()
        self._is_taken = True

    async def __aexit__(self, *_error: object) -> None:
        """A request is to be read and answered. Checkpoint  none: reading follows"""
        self._is_taken = False
        self._serving.add(trio.lowlevel.current_task())

    async def wait_readable(self, fd: int) -> None:
        """Wait for a request. Checkpoint  when none comes at once"""
        if self._glance is None:
            self._glance = _Glance(fd, self._gone)
            trio.lowlevel.add_instrument(self)
        if self._glance.is_there():
            return
        # While handlers wait for threads, those wait for the interpreter: we must not hold it.
        if self._serving or not self._glance.comes():
            await trio.lowlevel.wait_readable(fd)
            self._glance.is_there()
            self._begin_turn()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """Hand the lock on if it is free: trio calls this between two tasks."""
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


class _Instead:
    """A module, with some of its names replaced."""

    def __init__(self, module: ModuleType, **replaced: object) -> None:
        vars(self).update(replaced)
        self._module = module

    def __getattr__(self, name: str) -> object:
        return getattr(self._module, name)


def hook(replied: Callable[[], None], gone: Callable[[], None]) -> bool:
    """Have functions called on trio's thread; pyfuse3.init must follow.

    replied  after each reply, before anything else can happen
    gone     when the connection is gone: once, or more often
    Returns  False: this pyfuse3 may differ from what we know, so it has trio as it is; neither is ever called
    """
    version = str(vars(pyfuse3).get("__version__"))
    if not _KNOWN_PYFUSE3.match(version) or "trio" not in vars(pyfuse3):
        _log.warning("pyfuse3 %s is not one that we know (3.4 or later, before 4): the mount will be slower", version)
        vars(pyfuse3)["trio"] = trio
        return False
    reading = _Reading(replied, gone)
    lowlevel = _Instead(trio.lowlevel, wait_readable=reading.wait_readable)
    vars(pyfuse3)["trio"] = _Instead(trio, lowlevel=lowlevel, Lock=lambda: reading)
    return True


async def own_number(vfs: Vfs, known: Known) -> Known:
    """What was just made, with its own inode number for a nodeid wherever that can be had.

    It may be that of a file just deleted: the kernel lets go of that at once, but prefers to hand us requests. We
    let the other workers read on.
    Checkpoint  only then; the node is counted already (I8)
    """
    for _ in range(_PATIENCE):
        with vfs.gate.lock:
            known = vfs.renumbered(known)
            if not vfs.lacks_its_number(known):
                break
        await trio.lowlevel.checkpoint()
    return known
