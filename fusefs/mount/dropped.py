"""What was moved into a drop folder: the kernel forgets it bit by bit, before somebody has to wait for that.

A reaper takes it from there behind the mount. When its name in the drop folder is looked up again, since the next one
of that name is to be moved there, the kernel lets go of all that it knows in the first one: 5 µs each, for which the
caller waits, and all who rename.

No client holds what is waited for here, and what is in use is passed over. So the daemon itself may say it, without a
teller, and who works in what was dropped stays where he is.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from functools import partial

import trio

from fusefs.linux.backing import forget_unused
from fusefs.mount.trashdir import is_dropped
from fusefs.mount.vfs import Vfs

_log = logging.getLogger(__name__)

_SETTLE_S = 0.2
"""From a move to the look at what is known: more may be moved."""
_REST_PER_WORK = 4
_N_AT_A_TIME = 128
"""Half a millisecond's work, for the kernel and for us, whom it tells what it has forgotten."""


async def forget_dropped(vfs: Vfs, device: int) -> None:
    """Have the kernel forget what clients moved into drop folders, until cancelled or for as long as it understands.

    device      the connection's fd
    Checkpoint  between parts of the table, and until something is moved
    """
    moves, moved = trio.open_memory_channel[None](1)

    def tell() -> None:
        with suppress(trio.WouldBlock):
            moves.send_nowait(None)

    token = trio.lowlevel.current_trio_token()
    vfs.drops.tell = partial(token.run_sync_soon, tell, idempotent=True)
    try:
        async for _ in moved:
            await trio.sleep(_SETTLE_S)
            await _forget_all(vfs, device)
    except OSError as error:
        _log.info("the kernel forgets what is dropped when that name is used again: %s", error.strerror)


async def _forget_all(vfs: Vfs, device: int) -> None:
    """Raises  OSError: the kernel doesn't know the message. Checkpoint"""
    with vfs.gate.lock:
        nodes = list(vfs.nodes)
    while nodes:
        start_s = time.monotonic()
        # From the newest: what is in a directory goes before it, or that is in use.
        part = nodes[-_N_AT_A_TIME:]
        del nodes[-_N_AT_A_TIME:]
        with vfs.gate.lock:
            dropped = [node.nodeid for node in reversed(part) if is_dropped(node)]
        if dropped:
            forget_unused(device, dropped)
        await trio.sleep((time.monotonic() - start_s) * _REST_PER_WORK)
