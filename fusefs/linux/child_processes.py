"""A child process that works beside a daemon."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Callable

from fusefs.linux import syscalls

_FD_MAX = 2**31 - 1


def child(at_parents_death: signal.Signals, body: Callable[[], None], *fds: int) -> int:
    """A process that has the given fds, as 0 and so on, and nothing else; its pid.

    It exits with 0 if the body does, with the errno if that raises OSError, else with 255.

    To be called on the main thread, whose end the kernel takes for the parent's.

    at_parents_death  it gets this signal then, at once: also where the parent lives on for some thread's sake
    """
    parent_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        code = 255
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
            os.setsid()
            os.chdir("/")
            syscalls.prctl(syscalls.PR_SET_PDEATHSIG, at_parents_death)
            for at, fd in enumerate([fcntl.fcntl(fd, fcntl.F_DUPFD, len(fds)) for fd in fds]):
                os.dup2(fd, at)
            os.closerange(len(fds), _FD_MAX)
            if os.getppid() == parent_pid:
                body()
            code = 0
        except OSError as error:
            code = error.errno or code
        finally:
            os._exit(code)
    return pid
