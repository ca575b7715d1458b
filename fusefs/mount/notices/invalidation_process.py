"""Two processes beside the daemon: one tells the kernel what to forget, the other aborts the connection at the end.

The kernel takes a directory's lock before it forgets a name of it, and a page's before it forgets content. The owner of
the lock may be waiting for the daemon's answer. So no handler may tell (I10), nor any other thread of the daemon: if
the daemon died while that waits, it could not die, would keep the connection open, and so the lock's owner waiting, for
good (measured: kill -9 with four clients in one directory ended so each time). Another process can wait so; then the
guard, told of the daemon's death, aborts the connection.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from fusefs.linux.child_processes import child
from fusefs.linux.fuse_device import NOTIFY_INVAL_INODE, abort, open_abort

MESSAGE_MAX = 32768
ANSWER = struct.Struct("=i")
"""An errno, or 0; after it come the notices of inodes that the kernel does not know."""
_HEAD = struct.Struct("=Ii")
"""Length and code, of struct fuse_out_header."""


@contextmanager
def invalidation_process(device: int, connection: int) -> Iterator[socket.socket]:
    """A channel to a process that tells the kernel; at the end, what still waits for an answer gets an error.

    Each message is some notices, one after the other, each with its length first; the answer to it is an ANSWER. To be
    entered on the main thread, whose end the two take for the daemon's.

    device      the connection's fd, /dev/fuse
    connection  its number: the mount's minor device number
    Raises      OSError: the connection can't be guarded
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, open_abort(connection) as switch:
        pids = [child(signal.SIGKILL, lambda: _tell(0, 1), theirs.fileno(), device)]
        try:
            pids.append(child(signal.SIGUSR1, lambda: _guard(0), switch))
            theirs.close()
            ours.setblocking(False)
            yield ours
        finally:
            abort(switch)
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _guard(switch: int) -> None:
    signal.sigwait({signal.SIGUSR1})
    abort(switch)


def _tell(channel: int, device: int) -> None:
    with socket.socket(fileno=channel) as daemon:
        while message := daemon.recv(MESSAGE_MAX):
            daemon.send(_tell_all(device, message))


def _tell_all(device: int, message: bytes) -> bytes:
    """The answer to a message."""
    at, unknown = 0, b""
    try:
        while at < len(message):
            length, code = _HEAD.unpack_from(message, at)
            notice = message[at : at + length]
            try:
                os.write(device, notice)
            except FileNotFoundError:
                if code == NOTIFY_INVAL_INODE:
                    unknown += notice
            at += length
    except OSError as error:
        return ANSWER.pack(error.errno or -1)
    return ANSWER.pack(0) + unknown
