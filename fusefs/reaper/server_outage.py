"""Waits while the server of a network filesystem does not answer during a reap.

An error may affect only one entry, or only one of many servers. So the reaper stats a random name in the container,
which no cache can know. If the server answers, the failure is in doubt: the reaper removes everything else, and tries
the rest again at the end. It retries errors that mean "no answer" up to the time limit, but EIO and ESTALE, which may
be permanent for an entry, only twice. After each wait, the reaper trusts no open fd: it claims and locks the container
again by its name, and opens everything below the container again.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from typing import NamedTuple

from fusefs.core.errors import ServerAway
from fusefs.core.human_units import format_duration
from fusefs.core.record import Entered
from fusefs.core.results import Report, ShouldStop
from fusefs.engine.pace import REACTION_S
from fusefs.linux.kernel import Kernel

CUT_OFF = frozenset(
    {
        errno.ENOTCONN,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.ECANCELED,
        errno.ECOMM,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ESHUTDOWN,
        errno.ETIMEDOUT,
    }
)

"""Errors that mean that no server is answering."""


DOUBTFUL = frozenset({errno.EIO, errno.EREMOTEIO, errno.ESTALE})
"""Errors that mean that either the server is away, or this entry is unreadable."""
COMMAND_LIMIT_S = 120.0
"""How long commands at a terminal wait: longer than NFS's grace period (90 s) and a server's failover."""


DOUBT_PAUSES_S = (0.5, 2.0)
"""The pauses before doubtful failures are retried."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0


class OutageOptions(NamedTuple):
    """How long to wait for a server, and the callbacks.

    limit_s         how long to wait without progress
    on_outage       called with the errno when the wait begins, and with None once entries are being removed again
    sleep           waits for up to this many seconds
    doubt_pauses_s  the pause before each retry of doubtful failures
    """

    limit_s: float = COMMAND_LIMIT_S
    on_outage: Callable[[int | None], None] = lambda _number: None
    sleep: Callable[[float], None] = time.sleep
    doubt_pauses_s: tuple[float, ...] = DOUBT_PAUSES_S


class ServerWasAway(Exception):
    """The server was away, or may have been, so the container must be claimed again."""

    def __init__(self, report: Report, entered: tuple[Entered, ...]) -> None:
        """report: the removal so far. entered: the directories noted for the next attempt by `LateArrivals.note`"""
        super().__init__()
        self.report = report
        self.entered = entered


class ServerOutage:
    """Waits out server outages during a reap."""

    def __init__(self, kernel: Kernel, options: OutageOptions, stops: ShouldStop) -> None:
        """stops: called during waits; returns whether to stop"""
        self._kernel = kernel
        self._options = options
        self._stops = stops
        self._since_s: float | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._n_doubts = 0

    def note_progress(self) -> None:
        """End the outage, since something has been removed."""
        if self._since_s is not None:
            self._since_s = None
            self._pause_s = _FIRST_PAUSE_S
            self._options.on_outage(None)

    def wait(self, number: int, fd: int) -> bool:
        """Wait until the server answers calls on an fd. Return False if the reap is stopped. Raises  ServerAway"""
        if self._since_s is None:
            self._since_s = time.monotonic()
            if self._options.limit_s > 0:
                self._options.on_outage(number)
        while True:
            if time.monotonic() - self._since_s >= self._options.limit_s:
                limit_s = round(self._options.limit_s)
                waited = f" (waited {format_duration(limit_s)})" if self._options.limit_s else ""
                raise ServerAway(f"{os.strerror(number)}{waited}", number=number)
            if not self._rest(self._pause_s):
                return False
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            # ESTALE is an answer, too: the caller then opens the directory again by its name.
            if probe_server(self._kernel, fd) in (0, errno.ESTALE):
                return True

    def wait_in_doubt(self) -> bool:
        """Wait before doubtful failures are retried. Return False if no retry remains, or if the reap is stopped."""
        if self._n_doubts >= len(self._options.doubt_pauses_s):
            return False
        self._n_doubts += 1
        return self._rest(self._options.doubt_pauses_s[self._n_doubts - 1])

    def wait_after(self, error: OSError, fd: int) -> bool:
        """Wait after a call outside the slices has failed. Return whether to continue; False if the reap is stopped.

        Raises  ServerAway; the error itself if the server did not cause it, or if it persists
        """
        number = error.errno or errno.EIO
        if number in CUT_OFF or (number in DOUBTFUL and probe_server(self._kernel, fd)):
            return self.wait(number, fd)
        if number not in DOUBTFUL or not (self.wait_in_doubt() or self._stops()):
            raise error
        return not self._stops()

    def _rest(self, seconds: float) -> bool:
        ends_s = time.monotonic() + seconds
        while (remaining_s := ends_s - time.monotonic()) > 0:
            if self._stops():
                return False
            self._options.sleep(min(remaining_s, REACTION_S))
        return not self._stops()


def may_be_away(kernel: Kernel, fd: int) -> bool:
    """Return whether an fd is on a network filesystem, whose server may be away. Raises  OSError"""
    try:
        return not kernel.is_local(fd)
    except OSError as error:
        if error.errno in CUT_OFF:
            return True
        raise


def probe_server(kernel: Kernel, fd: int) -> int:
    """Check whether a server answers. Return 0 if it does, even with "permission denied"; otherwise the errno."""
    try:
        kernel.free_bytes(fd)
        kernel.stat(fd, os.urandom(8).hex().encode())
    except OSError as error:
        return error.errno if error.errno in CUT_OFF | DOUBTFUL else 0
    return 0
