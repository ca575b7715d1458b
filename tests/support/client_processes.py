"""Clients of a mount, each a process: one that waits for what hangs can't be killed."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

LIMIT_S = 40.0


@contextmanager
def clients(acts: Sequence[Callable[[], object]]) -> Iterator[list[int]]:
    """Processes that do something once, each ending with its errno, or 255 where something else went wrong; they are
    there when they are waited for.
    """
    pids = []
    for act in acts:
        pid = os.fork()
        if pid == 0:
            code = 255
            try:
                act()
                code = 0
            except BaseException as error:  # nothing of it gets into the parent's frames, which are here, too
                code = (isinstance(error, OSError) and error.errno) or 255
                traceback.print_exc()
            finally:
                os._exit(code)
        pids.append(pid)
    try:
        yield pids
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)


def ends(pid: int) -> int:
    """A client's errno; it must end in time."""
    fd = os.pidfd_open(pid)
    try:
        assert select.select([fd], [], [], LIMIT_S)[0], f"client {pid} hangs"
    finally:
        os.close(fd)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def is_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def in_time(act: Callable[[], object]) -> None:
    """Something that has to end while other things hang."""
    with clients([act]) as (pid,):
        assert ends(pid) == 0
