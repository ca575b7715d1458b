"""Messages, with fds if need be, between a process and the child that it forked."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Sequence

from fusefs.linux.fd import Fd

MESSAGE_MAX = 256 * 1024 * 1024
_HEAD = struct.Struct("=QI")
_MAX_FDS = 253
"""SCM_MAX_FD, unix(7)"""


def send(channel: socket.socket, message: bytes, fds: Sequence[int] = ()) -> None:
    """Send one message; the other side gets fds of its own."""
    socket.send_fds(channel, [_HEAD.pack(len(message), len(fds))], list(fds))
    channel.sendall(message)


def receive(channel: socket.socket, watch: Callable[[], None] = lambda: None) -> tuple[bytes, list[Fd]]:
    """The next message and its fds, which are the caller's now.

    watch   called before each wait; may raise
    Raises  EOFError if the other side is gone, or says what it can't mean
    """
    watch()
    head, numbers, _flags, _address = socket.recv_fds(channel, _HEAD.size, _MAX_FDS)
    fds = [Fd(number) for number in numbers]
    try:
        head += _read(channel, _HEAD.size - len(head), watch)
        length, n_fds = _HEAD.unpack(head)
        if length > MESSAGE_MAX or n_fds != len(fds):
            raise EOFError
        return _read(channel, length, watch), fds
    except BaseException:
        for fd in fds:
            fd.close()
        raise


def _read(channel: socket.socket, size: int, watch: Callable[[], None]) -> bytes:
    parts = []
    while size:
        watch()
        part = channel.recv(min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
