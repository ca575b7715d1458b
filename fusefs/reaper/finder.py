"""Which directories hold a store that is ours to serve; some of them may be on disks that don't answer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import trio

from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import Mount
from fusefs.reaper.context import in_thread
from fusefs.reaper.volume import find_store

_AT_ONCE = 16
_HUNG_S = 3.0
"""How long mount points may take to answer."""

_Which = tuple[int, int]


class Finder:
    """Looks for stores."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._asked: set[bytes] = set()  # by threads that have not come back

    async def find(self, paths: Sequence[bytes], mounts: list[Mount]) -> list[bytes]:
        """Those of the paths that hold a store, each store once, by the first path that leads to it.

        What does not answer is passed over; it keeps one thread, not one for each time that somebody looks.
        Checkpoint  yes
        """
        found: dict[bytes, _Which | None] = {}
        limiter = trio.CapacityLimiter(_AT_ONCE)
        with trio.move_on_after(_HUNG_S):
            async with trio.open_nursery() as nursery:
                for path in dict.fromkeys(paths):
                    if path not in self._asked:
                        nursery.start_soon(self._look, path, mounts, limiter, found)
        stores: dict[_Which, bytes] = {}
        for path in paths:
            which = found.get(path)
            if which is not None:
                stores.setdefault(which, path)
        return list(stores.values())

    async def _look(
        self, path: bytes, mounts: list[Mount], limiter: trio.CapacityLimiter, found: dict[bytes, _Which | None]
    ) -> None:
        found[path] = await in_thread(limiter, partial(self._ask, path, mounts))

    def _ask(self, path: bytes, mounts: list[Mount]) -> _Which | None:
        self._asked.add(path)
        try:
            return find_store(self._kernel, path, mounts)
        finally:
            self._asked.discard(path)
