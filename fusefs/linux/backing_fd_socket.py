"""A Unix socket where a process shows a directory, as an O_PATH fd, and gets the backing directory of it as another.

Each conversation is one byte with the fd, and an errno, with an fd if that is 0.
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
    """The process that sent an fd, as the kernel says, and what that is of.

    uid, pid     as our namespaces have them; 0 for a pid that they have not
    ino, mnt_id  of what the fd holds: its filesystem was not asked
    """

    uid: int
    pid: int
    ino: int
    mnt_id: int


def door_of(tree: bytes) -> bytes | None:
    """The path of the socket for a backing tree; None if the path is of anything else."""
    above = tree.removesuffix(b"/" + TREE)
    return above + b"/" + DOOR if above != tree and is_inside(tree, HOME) else None


def knock(path: bytes, shown: int) -> Fd:
    """The fd that the socket at a path gives for a directory (O_PATH); it is the caller's.

    Raises  OSError: as is answered there; EAGAIN: the server is busy; of connect(2): there is no server
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
    """The uid of the client."""
    credentials = conversation.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


def visitor(conversation: socket.socket) -> tuple[FdRequest, Fd]:
    """The client and the fd that it sends, which is ours now, and keeps its inode number from meaning anything else.

    It may be of anything: to get it, and to close it, may take as long as its filesystem's server likes.
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
    """Give an fd, or say with an errno why not. Raises  OSError: the client is gone"""
    fds = [given] if isinstance(given, Fd) else []
    socket.send_fds(conversation, [_ANSWER.pack(0 if fds else given)], fds)


def received(conversation: socket.socket) -> Fd:
    """What the other side answers. Raises  OSError: as it says; ConnectionResetError: it has ended"""
    message, fds, _flags, _address = socket.recv_fds(conversation, _ANSWER.size, 1, socket.MSG_CMSG_CLOEXEC)
    if len(message) == _ANSWER.size and not (number := _ANSWER.unpack(message)[0]) and fds:
        return Fd(fds[0])
    for fd in fds:
        os.close(fd)
    if not message:
        raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
    raise OSError(number or errno.EPROTO, os.strerror(number or errno.EPROTO))
