"""Opens directories in the backing tree for users' commands, if the mount covers its own source and hides the tree.

A client proves that it has access to a directory in the mount by sending an fd of it. The client gets an fd of the
same directory in the backing tree, with the restrictions of that tree's mount, and without access to the parent
directory. If the directory is the mount's root, opened in our own mount namespace, the client gets the tree's root,
whose parent it can't enter. Any other directory is opened in a clone of the mount, which is closed before the fd is
sent. Otherwise a user could change the flags of an unattached mount in a user namespace of their own (Linux 6.18).

The client's fd may refer to any filesystem, and receiving or closing the fd may block on that filesystem. So a child
process with a time limit serves each client. The child reads data about the fd only from /proc, because the daemon
itself serves the directory's filesystem. The daemon knows the directory by its inode number as long as the client's fd
is open.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import select
import signal
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import trio

from fusefs.core.metadata_cache import ROOTS
from fusefs.linux.backing_fd_socket import FdRequest, listen, peer_uid, receive_answer, receive_request, send_answer
from fusefs.linux.children import fork
from fusefs.linux.fd import Fd
from fusefs.linux.mount_calls import clone_tree
from fusefs.linux.mountinfo import read_mounts
from fusefs.mount.tree.vfs import Vfs

_QUERY = struct.Struct("=Q")
_N_PER_USER, _N, _N_WAITING = 16, 256, 1024
"""How many clients of one user, and of all users, are served at a time; and how many may wait."""
_CLIENT_TIMEOUT_S, _PAUSE_S = 8, 0.02
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC

_log = logging.getLogger(__name__)


@contextmanager
def run_server(path: bytes, tree: int, device: bytes) -> Iterator[socket.socket]:
    """Run the server process during the block; yield the socket through which `answer_queries` receives its queries.

    The block must be entered on the main thread: the kernel kills the process when the thread that forked it ends.

    path    the socket's path; the socket is not removed
    tree    the root of the backing tree (O_PATH)
    device  the device of the mount that covers the tree, as in mountinfo
    Raises  OSError
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, listen(path) as listener:
        pid = fork(lambda: _serve_clients(3, 4, 5, device), [listener.fileno(), theirs.fileno(), tree])
        try:
            theirs.close()
            listener.close()
            ours.setblocking(False)
            yield ours
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _serve_clients(listener_fd: int, daemon_fd: int, tree: int, device: bytes) -> None:
    """Serve clients, each time one of the user with the fewest in service, so that no user delays another."""
    uid_of_child: dict[int, int] = {}
    waiting: dict[int, list[socket.socket]] = {}
    n_max = min(_N_WAITING, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
    with socket.socket(fileno=listener_fd) as listener, socket.socket(fileno=daemon_fd) as daemon_socket:
        while True:
            _reap_children(uid_of_child)
            count = Counter(uid_of_child.values())
            if sum(map(len, waiting.values())) >= n_max and len(uid_of_child) < _N:
                uid = max(waiting, key=lambda one: len(waiting[one]))  # the longest queue is dropped
                uid_of_child[_fork_child(waiting[uid], None, tree, device)] = uid
                waiting[uid].clear()
            ready_uids = (
                [uid for uid in waiting if waiting[uid] and count[uid] < _N_PER_USER] if len(uid_of_child) < _N else []
            )
            if ready_uids:
                uid = min(ready_uids, key=count.__getitem__)
                uid_of_child[_fork_child([waiting[uid].pop(0)], daemon_socket, tree, device)] = uid
            waiting = {uid: queue for uid, queue in waiting.items() if queue}
            patience_s = 0 if ready_uids else _PAUSE_S if waiting else None
            for _ in range(n_max - sum(map(len, waiting.values()))):
                if not select.select([listener], [], [], patience_s)[0]:
                    break
                patience_s = 0  # serve the clients that have connected before waiting for the next one
                client, _address = listener.accept()
                waiting.setdefault(peer_uid(client), []).append(client)


def _fork_child(clients: list[socket.socket], daemon: socket.socket | None, tree: int, device: bytes) -> int:
    """Fork a child that serves a client, or turns clients away if `daemon` is None; return its pid.

    This process closes its copies of the clients' sockets while the child has them open. So if closing the fds queued
    in a socket blocks, only the child waits.
    """
    start_fd, started_fd = os.pipe()

    def serve_in_child() -> None:
        os.close(started_fd)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
        signal.alarm(_CLIENT_TIMEOUT_S)
        os.read(start_fd, 1)  # wait until no other process has the sockets open
        for client in clients:
            with client, suppress(OSError):  # a close that blocks can be interrupted by the alarm, unlike one at exit
                if daemon is not None:
                    send_answer(client, _fd_for(client, daemon, tree, device))

    while True:
        with suppress(BlockingIOError):  # too many processes
            pid = fork(serve_in_child)
            break
        time.sleep(_PAUSE_S)
    for conversation in clients:
        conversation.close()
    os.close(started_fd)
    os.close(start_fd)
    return pid


def _reap_children(uid_of_child: dict[int, int]) -> None:
    with suppress(ChildProcessError):
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            uid_of_child.pop(pid, None)


def _fd_for(client: socket.socket, daemon: socket.socket, tree: int, device: bytes) -> Fd | int:
    """Return the fd that a client gets, or an errno."""
    try:
        request, client_fd = receive_request(client)
        with client_fd:
            return _open_backing(request, daemon, tree, device)
    except OSError as error:
        return error.errno or errno.EIO


def _open_backing(request: FdRequest, daemon: socket.socket, tree: int, device: bytes) -> Fd:
    """Return the backing directory of the directory that a client sent and still has open. Raises  OSError"""
    is_here = _has_mount("self", request.mnt_id, device)
    if not is_here and not _has_mount(str(request.pid), request.mnt_id, device):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
    fd = _fetch_fd(daemon, request)
    if is_here and os.path.samestat(os.fstat(fd), os.fstat(tree)):
        return Fd(os.open(b".", _DIRECTORY, dir_fd=tree))
    with clone_tree(fd) as clone:
        return Fd(os.open(b".", _DIRECTORY, dir_fd=clone))


def _has_mount(pid: str, mnt_id: int, device: bytes) -> bool:
    """Return whether a process sees a mount with this id and device. While an fd of the mount is open, no other mount
    gets the id."""
    return any(mount.mnt_id == mnt_id and mount.device == device for mount in read_mounts(pid))


def _fetch_fd(daemon: socket.socket, request: FdRequest) -> Fd:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            socket.send_fds(daemon, [_QUERY.pack(request.ino)], [theirs.fileno()])
        return receive_answer(ours)


async def answer_queries(channel: socket.socket, vfs: Vfs) -> None:
    """Answer the server process's queries about directories, until cancelled. Checkpoint  everywhere"""
    limiter = trio.CapacityLimiter(_N)
    async with trio.open_nursery() as nursery:
        while True:
            await trio.lowlevel.wait_readable(channel)
            query, fds, _flags, _address = socket.recv_fds(channel, _QUERY.size, 1, socket.MSG_CMSG_CLOEXEC)
            if not query:
                break
            find = partial(vfs.lock.run_operation, _open_directory, vfs, *_QUERY.unpack(query))
            nursery.start_soon(_reply, socket.socket(fileno=fds[0]), find, limiter)
    _log.error("users' commands can no longer reach the backing tree: the process that opens it for them has ended")


def _open_directory(vfs: Vfs, number: int) -> Fd:
    """Return an fd of a directory that a client has open in the mount. number: its inode number there

    Raises  OSError ENOTDIR
    """
    root = vfs.nodes.root
    node = root if number in (*ROOTS, root.ino) else vfs.nodes.get(number)
    if node is None or not node.is_directory:
        raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    return Fd(os.dup(vfs.directory_fd(node)))


async def _reply(reply_socket: socket.socket, find: Callable[[], Fd], limiter: trio.CapacityLimiter) -> None:
    """Answer one query. Checkpoint  while a thread calls the backing filesystem"""
    with reply_socket, suppress(BrokenPipeError):  # the client is already gone
        try:
            fd = await trio.to_thread.run_sync(find, abandon_on_cancel=True, limiter=limiter)
        except OSError as error:
            send_answer(reply_socket, error.errno or errno.EIO)
        else:
            with fd:
                send_answer(reply_socket, fd)
