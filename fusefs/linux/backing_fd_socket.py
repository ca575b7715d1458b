"""A Unix socket to which a process sends a directory as an O_PATH fd, and receives an fd of its backing directory.

Each conversation is one byte with the fd, then an errno, with an fd if that is 0.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from contextlib import suppress
from typing import NamedTuple

from fusefs.linux.fd import Fd, closed_on_error, told_of
from fusefs.linux.mountinfo import is_inside
from fusefs.linux.runtime_directories import HOME

TREE, DOOR = b"closed/tree", b"door"
"""In the directory of a mount over itself: its backing tree, which only root reaches by path, and the socket for it."""
_CREDENTIALS = struct.Struct("=iII")
_ANSWER, _FD = struct.Struct("=i"), struct.Struct("=i")
_ROOM = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(_FD.size)
_N_WAITING = 128
_PATIENCE_S, _GLANCE_S = 10.0, 0.02


class FdRequest(NamedTuple):
    """The process that sent an fd, from the kernel, and the inode of the fd.

    uid, pid     in our namespaces; 0 for a pid that does not exist there
    ino, mnt_id  of the fd, read without access to its filesystem
    """

    uid: int
    pid: int
    ino: int
    mnt_id: int


def door_of(tree: bytes) -> bytes | None:
    """The path of the socket for a backing tree; None if the path is anything else."""
    above = tree.removesuffix(b"/" + TREE)
    return above + b"/" + DOOR if above != tree and is_inside(tree, HOME) else None


def knock(path: bytes, shown: int) -> Fd:
    """Send a directory (O_PATH) to the socket at a path. Returns  the fd received, which the caller must close

    Raises  OSError: the server's answer; EAGAIN: the server is busy; those of connect(2): there is no server
    """
    deadline_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline_s:
        with suppress(BlockingIOError, ConnectionResetError, BrokenPipeError, TimeoutError):
            return _ask(path, shown)
        time.sleep(_GLANCE_S)
    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN), path)


def _ask(path: bytes, shown: int) -> Fd:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.settimeout(_PATIENCE_S)
        door.connect(path)
        socket.send_fds(door, [b"?"], [shown])
        return received(door)


def open_door(path: bytes) -> socket.socket:
    """A new listening socket at a path, open to every process that reaches it. Raises  OSError"""
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with closed_on_error(door):
        door.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        door.bind(path)
        os.chmod(path, 0o666)
        door.listen(_N_WAITING)
    return door


def uid_of(conversation: socket.socket) -> int:
    """The client's uid."""
    credentials = conversation.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


def visitor(conversation: socket.socket) -> tuple[FdRequest, Fd]:
    """The client and the fd that it sent, which the caller must close.

    While the fd is open, its inode number is not reused. It may be of anything: receiving and closing it may take as
    long as its filesystem's server likes.
    Raises  OSError: it is no message with one O_PATH fd
    """
    message, ancillary, flags, _address = conversation.recvmsg(2, _ROOM, socket.MSG_CMSG_CLOEXEC)
    credentials, fds = b"", []
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            credentials = data
        elif (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds += [fd for (fd,) in _FD.iter_unpack(data[: len(data) // _FD.size * _FD.size])]
    try:
        if len(message) != 1 or len(fds) != 1 or len(credentials) != _CREDENTIALS.size or flags & socket.MSG_CTRUNC:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        told = told_of(fds[0])
        if not int(told["flags"], 8) & os.O_PATH:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    pid, uid, _gid = _CREDENTIALS.unpack(credentials)
    return FdRequest(uid, pid, int(told["ino"]), int(told["mnt_id"])), Fd(fds[0])


def answer(conversation: socket.socket, given: Fd | int) -> None:
    """Send an fd, or the errno of a refusal. Raises  OSError: the client is gone"""
    fds = [given] if isinstance(given, Fd) else []
    socket.send_fds(conversation, [_ANSWER.pack(0 if fds else given)], fds)


def received(conversation: socket.socket) -> Fd:
    """The fd in the server's answer. Raises  OSError: the server's errno; ConnectionResetError: the server has ended"""
    message, fds, _flags, _address = socket.recv_fds(conversation, _ANSWER.size, 1, socket.MSG_CMSG_CLOEXEC)
    if len(message) == _ANSWER.size and not (number := _ANSWER.unpack(message)[0]) and fds:
        return Fd(fds[0])
    for fd in fds:
        os.close(fd)
    if not message:
        raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
    raise OSError(number or errno.EPROTO, os.strerror(number or errno.EPROTO))
