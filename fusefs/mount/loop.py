"""The seam between pyfuse3 and trio: pyfuse3 looks trio up in its own namespace, and finds what we put there."""

from __future__ import annotations

from collections.abc import Callable

import pyfuse3
import trio

from fusefs.mount.vfs import Known, Vfs

_PATIENCE = 50
"""Checkpoints, about a millisecond: what is deleted and in use keeps its number longer than anybody wants to wait."""


class _ReadLock:
    """pyfuse3's lock around reading a request: the first thing that it takes when a reply is written."""

    def __init__(self, replied: Callable[[], None]) -> None:
        self._replied = replied
        self._lock = trio.Lock()

    async def __aenter__(self) -> None:
        self._replied()
        await self._lock.acquire()

    async def __aexit__(self, *_error: object) -> None:
        self._lock.release()


class _Trio:
    """What pyfuse3 uses of trio."""

    ClosedResourceError = trio.ClosedResourceError
    from_thread = trio.from_thread
    lowlevel = trio.lowlevel
    open_nursery = staticmethod(trio.open_nursery)

    def __init__(self, replied: Callable[[], None]) -> None:
        self._replied = replied

    def Lock(self) -> _ReadLock:  # noqa: N802
        return _ReadLock(self._replied)


def hook(replied: Callable[[], None]) -> None:
    """Have a function called after each reply, before anything else can happen; pyfuse3.init must follow.

    Source  pyfuse3 3.4 and 3.5: pyfuse3.asyncio replaces trio in the same way
    """
    vars(pyfuse3)["trio"] = _Trio(replied)


async def own_number(vfs: Vfs, known: Known) -> Known:
    """What was just made, with its own inode number for a nodeid wherever that can be had.

    It may be that of a file just deleted: the kernel lets go of that at once, but prefers to hand us requests. We
    let the other workers read on.
    Checkpoint  only then; the node is counted already (I8)
    """
    for _ in range(_PATIENCE):
        if not vfs.lacks_its_number(known):
            break
        await trio.lowlevel.checkpoint()
        known = vfs.renumbered(known)
    return known
