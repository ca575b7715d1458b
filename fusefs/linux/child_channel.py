"""Between a process and its child: messages with fds, waiting for them, and that the child dies with its parent."""

from __future__ import annotations

import os
import select
import struct
from collections.abc import Callable, Sequence
from signal import SIGKILL
from socket import CMSG_SPACE, SCM_RIGHTS, SOL_SOCKET, socket

from fusefs.linux import syscalls
from fusefs.linux.fd import Fd

_MESSAGE_MAX = 256 * 1024 * 1024
_HEAD = struct.Struct("=QI")
_MAX_FDS = 253
"""SCM_MAX_FD, unix(7)"""
_FD_BYTES = struct.calcsize("i")
_GLANCE_MS = 200


class ChildLost(Exception):
    """The child ended without a result, or was stopped."""


def die_with_parent(parent: int) -> bool:
    """Be killed when the parent ends, however; False if it is gone already."""
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, SIGKILL)
    return os.getppid() == parent


def is_stopped(pid: int) -> bool:
    """Whether a child of ours was stopped: it will never say anything."""
    seen = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return seen is not None and seen.si_code in (os.CLD_STOPPED, os.CLD_TRAPPED)


def watch(pid: int, channel: socket) -> Callable[[], None]:
    """What waits until there is something to read from a child.

    Raises  ChildLost, when it is called, if the child was stopped
    """
    poll = select.poll()
    poll.register(channel, select.POLLIN)

    def wait() -> None:
        while not poll.poll(_GLANCE_MS):
            if is_stopped(pid):
                raise ChildLost

    return wait


def send(channel: socket, message: bytes, fds: Sequence[int] = ()) -> None:
    """Send one message; the other side gets fds of its own."""
    passed = [(SOL_SOCKET, SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))] if fds else []
    channel.sendmsg([_HEAD.pack(len(message), len(fds))], passed)
    channel.sendall(message)


def receive(channel: socket, wait: Callable[[], None] = lambda: None) -> tuple[bytes, list[Fd]]:
    """The next message and its fds, which are the caller's now.

    wait    called before each read; may raise
    Raises  EOFError if the other side is gone, or says what it can't mean
    """
    wait()
    head, passed, _flags, _address = channel.recvmsg(_HEAD.size, CMSG_SPACE(_MAX_FDS * _FD_BYTES))
    rights = [packed for level, kind, packed in passed if (level, kind) == (SOL_SOCKET, SCM_RIGHTS)]
    fds = [Fd(number) for packed in rights for (number,) in struct.iter_unpack("i", packed)]
    try:
        head += _read(channel, _HEAD.size - len(head), wait)
        length, n_fds = _HEAD.unpack(head)
        if length > _MESSAGE_MAX or n_fds != len(fds):
            raise EOFError
        return _read(channel, length, wait), fds
    except BaseException:
        for fd in fds:
            fd.close()
        raise


def _read(channel: socket, size: int, wait: Callable[[], None]) -> bytes:
    parts = []
    while size:
        wait()
        part = channel.recv(min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
