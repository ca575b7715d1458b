"""Child processes: one that works beside a daemon, what is said between a process and a child, and waiting for that."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import struct
from collections.abc import Callable, Sequence

from fusefs.linux import syscalls
from fusefs.linux.fd import Fd

MESSAGE_MAX = 256 * 1024 * 1024
_HEAD = struct.Struct("=QI")
_MAX_FDS = 253
"""SCM_MAX_FD, unix(7)"""
_GLANCE_MS = 200
_FD_MAX = 2**31 - 1


class ChildLost(Exception):
    """The child ended without a result, or was stopped."""


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


def send(channel: socket.socket, message: bytes, fds: Sequence[int] = ()) -> None:
    """Send one message; the other side gets fds of its own."""
    socket.send_fds(channel, [_HEAD.pack(len(message), len(fds))], list(fds))
    channel.sendall(message)


def receive(channel: socket.socket, wait: Callable[[], None] = lambda: None) -> tuple[bytes, list[Fd]]:
    """The next message and its fds, which are the caller's now.

    wait    called before each read; may raise
    Raises  EOFError if the other side is gone, or says what it can't mean
    """
    wait()
    head, numbers, _flags, _address = socket.recv_fds(channel, _HEAD.size, _MAX_FDS)
    fds = [Fd(number) for number in numbers]
    try:
        head += _read(channel, _HEAD.size - len(head), wait)
        length, n_fds = _HEAD.unpack(head)
        if length > MESSAGE_MAX or n_fds != len(fds):
            raise EOFError
        return _read(channel, length, wait), fds
    except BaseException:
        for fd in fds:
            fd.close()
        raise


def _read(channel: socket.socket, size: int, wait: Callable[[], None]) -> bytes:
    parts = []
    while size:
        wait()
        part = channel.recv(min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
