"""How a daemon's service ends: by a signal, by an unmount, or since it can't begin."""

from __future__ import annotations

import logging
import signal
from collections.abc import Awaitable, Callable

import trio

from fusefs.core.errors import Busy
from fusefs.core.names import printable
from fusefs.linux.mountinfo import Mount, read_mounts
from fusefs.mount.attach import Way, detach
from fusefs.mount.gate import Gate
from fusefs.mount.points import mount_of_device, top_mount

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_GRACE_S, _GLANCE_S = 2.0, 0.02

_log = logging.getLogger(__name__)


async def wait_no_longer(gate: Gate, ended: trio.Event, scope: trio.CancelScope) -> None:
    """In the end, give up operations that wait for a filesystem which hangs; who asked for them gets an error.

    Checkpoint  until the end, and for a while
    """
    await ended.wait()
    with trio.move_on_after(_GRACE_S):
        while gate.n_inside:
            await trio.sleep(_GLANCE_S)
    scope.cancel()


async def stop_on_signal(
    mount: Mount, moving: trio.Lock, unmount: Callable[[], Awaitable[None]], task_status: trio.TaskStatus[None]
) -> None:
    """End the service cleanly at the first signal; the second one ends the process.

    moving  nobody unmounts while somebody has it

    Checkpoint  while waiting for the signal, and while `unmount` does
    """
    with trio.open_signal_receiver(*STOPS) as signals:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        task_status.started()
        await anext(signals)
    _log.info("%s: stopping", printable(mount.point))
    async with moving:
        await unmount()


def leave(device: bytes) -> None:
    """Unmount the mount of a connection, if it is there and can be seen."""
    mount = mount_of_device(device)
    if mount is None:
        return
    if top_mount(mount.point, read_mounts()) != mount:
        _log.error("%s: something else is mounted over it, so it stays, dead", printable(mount.point))
        return
    try:
        detach(mount)
    except Busy:
        _log.info("%s: in use; who has something open there gets errors from now on", printable(mount.point))
        detach(mount, Way.LAZY)
