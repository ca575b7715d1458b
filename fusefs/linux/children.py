"""Waiting for what a child says, though somebody may have stopped it: its user may signal it."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable

_GLANCE_MS = 200


class ChildLost(Exception):
    """The child ended without a result, or was stopped."""


def watch(pid: int, channel: socket.socket) -> Callable[[], None]:
    """What waits until there is something to read from a child.

    Raises  ChildLost, when it is called, if the child was stopped: it will never say anything
    """
    poll = select.poll()
    poll.register(channel, select.POLLIN)

    def wait() -> None:
        while not poll.poll(_GLANCE_MS):
            seen = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if seen is not None and seen.si_code in (os.CLD_STOPPED, os.CLD_TRAPPED):
                raise ChildLost

    return wait
