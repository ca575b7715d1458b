"""A Unix socket to which a process sends a directory as an O_PATH fd, to receive an fd of its backing directory.

The client sends one byte with the fd. The server replies with an errno, and with an fd if the errno is 0.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from contextlib import suppress
from typing import NamedTuple

from fusefs.linux.fd import Fd, close_on_error, read_fdinfo
from fusefs.linux.mountinfo import is_inside
from fusefs.linux.runtime_directories import MOUNTS_RUNTIME

TREE, SOCKET_NAME = b"closed/tree", b"door"
"""Names in the /run/trashd directory of a mount that covers SRC: the backing tree, which only root can reach by path,
and the socket."""
_CREDENTIALS = struct.Struct("=iII")
_ANSWER, _FD = struct.Struct("=i"), struct.Struct("=i")
_ROOM = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(_FD.size)
_N_WAITING = 128
_PATIENCE_S, _RETRY_S = 10.0, 0.02


class FdRequest(NamedTuple):
    """The process that sent an fd, as reported by the kernel, and the inode of the fd.

    uid, pid     of the process, as seen in our namespaces; pid 0: the process is not visible there
    ino, mnt_id  inode number and mount ID of the fd, read without access to its filesystem
    """

    uid: int
    pid: int
    ino: int
    mnt_id: int


def socket_path(tree: bytes) -> bytes | None:
    """Return the path of the socket for a backing tree; None if the path is not that of a backing tree."""
    above = tree.removesuffix(b"/" + TREE)
    return above + b"/" + SOCKET_NAME if above != tree and is_inside(tree, MOUNTS_RUNTIME) else None


def request_backing_fd(path: bytes, shown: int) -> Fd:
    """Send a directory (O_PATH) to the socket at a path. Returns  the fd received, which the caller must close

    Raises  OSError: the errno that the server returned; EAGAIN: the server is busy; or, without a server, an error of
            connect(2)
    """
    deadline_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline_s:
        with suppress(BlockingIOError, ConnectionResetError, BrokenPipeError, TimeoutError):
            return _request_once(path, shown)
        time.sleep(_RETRY_S)
    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN), path)


def _request_once(path: bytes, shown: int) -> Fd:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.settimeout(_PATIENCE_S)
        client.connect(path)
        socket.send_fds(client, [b"?"], [shown])
        return receive_answer(client)


def listen(path: bytes) -> socket.socket:
    """Create a listening socket. Every process that can reach the path may connect. Raises  OSError"""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with close_on_error(listener):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        listener.bind(path)
        os.chmod(path, 0o666)
        listener.listen(_N_WAITING)
    return listener


def peer_uid(conversation: socket.socket) -> int:
    credentials = conversation.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


def receive_request(conversation: socket.socket) -> tuple[FdRequest, Fd]:
    """Receive the client's identity and its fd, which the caller must close.

    While the fd is open, its inode number is not reused. The fd may refer to any filesystem, so receiving or closing it
    may block until that filesystem's server responds.
    Raises  OSError: the message does not contain exactly one O_PATH fd
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
        fdinfo = read_fdinfo(fds[0])
        if not int(fdinfo["flags"], 8) & os.O_PATH:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    pid, uid, _gid = _CREDENTIALS.unpack(credentials)
    return FdRequest(uid, pid, int(fdinfo["ino"]), int(fdinfo["mnt_id"])), Fd(fds[0])


def send_answer(conversation: socket.socket, fd_or_errno: Fd | int) -> None:
    """Reply with an fd, or with the errno of a refusal. Raises  OSError: the client is gone"""
    fds = [fd_or_errno] if isinstance(fd_or_errno, Fd) else []
    socket.send_fds(conversation, [_ANSWER.pack(0 if fds else fd_or_errno)], fds)


def receive_answer(conversation: socket.socket) -> Fd:
    """Receive the server's fd. Raises  OSError: the server's errno; ConnectionResetError: the server has ended"""
    message, fds, _flags, _address = socket.recv_fds(conversation, _ANSWER.size, 1, socket.MSG_CMSG_CLOEXEC)
    if len(message) == _ANSWER.size and not (number := _ANSWER.unpack(message)[0]) and fds:
        return Fd(fds[0])
    for fd in fds:
        os.close(fd)
    if not message:
        raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
    raise OSError(number or errno.EPROTO, os.strerror(number or errno.EPROTO))
