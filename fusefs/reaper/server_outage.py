"""A server that does not answer is waited for: its outage is no failure of the entry that was just to be removed.

Off local filesystems alone. Any error of that kind may be about one entry, or about what one of many servers keeps: so
the container is asked for a name that no cache knows. If that is answered, the failure is one in doubt: all else goes,
and what is left over in the end is tried again. If its error says that nobody answers, that goes on to the limit; after
EIO and ESTALE, which an entry may have for good, twice.

After each wait nothing is believed that was open before: the container is claimed anew by its name, with its lock, and
all below it is opened again.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from typing import NamedTuple

from fusefs.core.durations import format_duration
from fusefs.core.errors import ServerAway
from fusefs.core.record import Entered
from fusefs.core.report import Report, Stops
from fusefs.engine.slice_pace import GLANCE_S
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
"""They say that nobody answers."""
DOUBTFUL = frozenset({errno.EIO, errno.EREMOTEIO, errno.ESTALE})
"""The server is away, or this entry can't be had."""
COMMAND_LIMIT_S = 120.0
"""Somebody looks at it. NFS's grace (90 s) and the restart of a server, or its replacement, are shorter."""
DOUBT_PAUSES_S = (0.5, 2.0)
"""Before what failed in doubt is tried again."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0


class OutageWishes(NamedTuple):
    """How long a server is waited for, and who is told.

    limit_s         since it did something for us
    tells           called with the errno when the wait begins, with None when something was removed again
    waits           for so many seconds, or less
    doubt_pauses_s  before each further attempt at what failed in doubt
    """

    limit_s: float = COMMAND_LIMIT_S
    tells: Callable[[int | None], None] = lambda _number: None
    waits: Callable[[float], None] = time.sleep
    doubt_pauses_s: tuple[float, ...] = DOUBT_PAUSES_S


class ServerWasAway(Exception):
    """The server was away, or may have been: the container has to be claimed anew."""

    def __init__(self, report: Report, entered: tuple[Entered, ...]) -> None:
        """What was done before, and what has to be told the next time."""
        super().__init__()
        self.report = report
        self.entered = entered


class ServerOutage:
    """The outages in one reap."""

    def __init__(self, kernel: Kernel, wishes: OutageWishes, stops: Stops) -> None:
        """stops: asked while it waits"""
        self._kernel = kernel
        self._wishes = wishes
        self._stops = stops
        self._since_s: float | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._n_doubts = 0

    def has_gone_on(self) -> None:
        """Something was removed."""
        if self._since_s is not None:
            self._since_s = None
            self._pause_s = _FIRST_PAUSE_S
            self._wishes.tells(None)

    def wait(self, number: int, fd: int) -> bool:
        """Wait until what an fd holds can be asked again; False: told to stop.

        Raises  ServerAway
        """
        if self._since_s is None:
            self._since_s = time.monotonic()
            if self._wishes.limit_s > 0:
                self._wishes.tells(number)
        while True:
            if time.monotonic() - self._since_s >= self._wishes.limit_s:
                raise _away(number, self._wishes.limit_s)
            if not self._rest(self._pause_s):
                return False
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            # What is stale itself has to be found again, by its name.
            if asked(self._kernel, fd) in (0, errno.ESTALE):
                return True

    def wait_in_doubt(self) -> bool:
        """Wait a little before what failed is tried again; False: it was, or it is to stop."""
        if self._n_doubts >= len(self._wishes.doubt_pauses_s):
            return False
        self._n_doubts += 1
        return self._rest(self._wishes.doubt_pauses_s[self._n_doubts - 1])

    def wait_after(self, error: OSError, fd: int) -> bool:
        """Wait after a call that failed beside the slices: whether to go on; False: told to stop.

        Raises  ServerAway; the error, if it is none of a server or does not pass
        """
        number = error.errno or errno.EIO
        if number in CUT_OFF or (number in DOUBTFUL and asked(self._kernel, fd)):
            return self.wait(number, fd)
        if number not in DOUBTFUL or not (self.wait_in_doubt() or self._stops()):
            raise error
        return not self._stops()

    def _rest(self, seconds: float) -> bool:
        ends_s = time.monotonic() + seconds
        while (left_s := ends_s - time.monotonic()) > 0:
            if self._stops():
                return False
            self._wishes.waits(min(left_s, GLANCE_S))
        return not self._stops()


def may_be_away(kernel: Kernel, fd: int) -> bool:
    """Whether it is a server that keeps what an fd holds. Raises  OSError"""
    try:
        return not kernel.is_local(fd)
    except OSError as error:
        if error.errno in CUT_OFF:
            return True
        raise


def asked(kernel: Kernel, fd: int) -> int:
    """Why a directory can't be asked, as an errno; 0 if it can, be it that this is not permitted."""
    try:
        kernel.free_bytes(fd)
        kernel.stat(fd, os.urandom(8).hex().encode())
    except OSError as error:
        return error.errno if error.errno in CUT_OFF | DOUBTFUL else 0
    return 0


def _away(number: int, limit_s: float) -> ServerAway:
    waited = f", for {format_duration(round(limit_s))}" if limit_s else ""
    return ServerAway(f"{os.strerror(number)}{waited}", number=number)
