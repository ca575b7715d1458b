"""A process that opens the tree below a mount over itself for users' commands, which can't reach it by path.

A client sends an fd of a directory of the mount, to which it thus has access. It gets the same directory of the backing
tree, with the restrictions of its mount, and no access to the directory above. For the root of the whole mount, in our
own mount namespace, it gets the root of the tree, whose parent it can't enter. Everything else is opened in a clone of
the mount, which is closed before the fd is sent: otherwise a user could change the flags of an unattached mount in a
user namespace of their own (Linux 6.18).

The client's fd may be of any kind; receiving or closing it may block on its filesystem. So each client is served by a
child process with a time limit. The child looks up the fd in /proc only: the directory's own filesystem is the daemon,
which knows the directory by its inode number as long as the client's fd is open.
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
from fusefs.linux.backing_fd_socket import FdRequest, answer, open_door, received, uid_of, visitor
from fusefs.linux.children import fork
from fusefs.linux.fd import Fd
from fusefs.linux.mount_calls import clone_tree
from fusefs.linux.mountinfo import read_mounts
from fusefs.mount.tree.vfs import Vfs

_QUESTION = struct.Struct("=Q")
_N_OF_ONE, _N, _N_WAITING = 16, 256, 1024
"""Clients served at a time: of one user, of all users; and clients that wait."""
_VISIT_S, _PAUSE_S = 8, 0.02
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC

_log = logging.getLogger(__name__)


@contextmanager
def backing_fd_server(path: bytes, tree: int, device: bytes) -> Iterator[socket.socket]:
    """Run the process for the block; yields the socket by which `serve` receives its questions.

    To be entered on the main thread: the kernel treats the end of that thread as the daemon's.

    path    of the socket, which is not removed
    tree    root of the backing tree (O_PATH)
    device  of the mount above it, as in mountinfo
    Raises  OSError
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, open_door(path) as door:
        pid = fork(lambda: _keep(3, 4, 5, device), [door.fileno(), theirs.fileno(), tree])
        try:
            theirs.close()
            door.close()
            ours.setblocking(False)
            yield ours
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _keep(door: int, daemon: int, tree: int, device: bytes) -> None:
    """Serve clients, first those of the user with the fewest being served. No user's queue delays another's."""
    visits: dict[int, int] = {}
    waiting: dict[int, list[socket.socket]] = {}
    n_max = min(_N_WAITING, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
    with socket.socket(fileno=door) as listening, socket.socket(fileno=daemon) as asking:
        while True:
            _forget_ended(visits)
            count = Counter(visits.values())
            if sum(map(len, waiting.values())) >= n_max and len(visits) < _N:
                uid = max(waiting, key=lambda one: len(waiting[one]))  # the longest queue is dropped
                visits[_fork(waiting[uid], None, tree, device)] = uid
                waiting[uid].clear()
            able = [uid for uid in waiting if waiting[uid] and count[uid] < _N_OF_ONE] if len(visits) < _N else []
            if able:
                uid = min(able, key=count.__getitem__)
                visits[_fork([waiting[uid].pop(0)], asking, tree, device)] = uid
            waiting = {uid: queue for uid, queue in waiting.items() if queue}
            patience_s = 0 if able else _PAUSE_S if waiting else None
            for _ in range(n_max - sum(map(len, waiting.values()))):
                if not select.select([listening], [], [], patience_s)[0]:
                    break
                patience_s = 0  # clients that have connected are served before the next one is waited for
                conversation, _address = listening.accept()
                waiting.setdefault(uid_of(conversation), []).append(conversation)


def _fork(conversations: list[socket.socket], daemon: socket.socket | None, tree: int, device: bytes) -> int:
    """Fork a child that serves a client, or turns clients away if there is no daemon; return its pid.

    This process closes its sockets of the clients while the child has them open: the fds queued in them are the child's
    to wait for.
    """
    go, ready = os.pipe()

    def meet() -> None:
        os.close(ready)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
        signal.alarm(_VISIT_S)
        os.read(go, 1)  # until no other process has the sockets open
        for conversation in conversations:
            with conversation, suppress(OSError):  # closed while the alarm can still interrupt it: at exit it could not
                if daemon is not None:
                    answer(conversation, _given(conversation, daemon, tree, device))

    while True:
        with suppress(BlockingIOError):  # too many processes
            pid = fork(meet)
            break
        time.sleep(_PAUSE_S)
    for conversation in conversations:
        conversation.close()
    os.close(ready)
    os.close(go)
    return pid


def _forget_ended(visits: dict[int, int]) -> None:
    with suppress(ChildProcessError):
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            visits.pop(pid, None)


def _given(conversation: socket.socket, daemon: socket.socket, tree: int, device: bytes) -> Fd | int:
    """Return the fd that a client gets, or an errno."""
    try:
        who, shown = visitor(conversation)
        with shown:
            return _of(who, daemon, tree, device)
    except OSError as error:
        return error.errno or errno.EIO


def _of(who: FdRequest, daemon: socket.socket, tree: int, device: bytes) -> Fd:
    """Return the backing directory for the directory that a client sent, while that is open. Raises  OSError"""
    is_here = _has_mount("self", who.mnt_id, device)
    if not is_here and not _has_mount(str(who.pid), who.mnt_id, device):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
    found = _found(daemon, who)
    if is_here and os.path.samestat(os.fstat(found), os.fstat(tree)):
        return Fd(os.open(b".", _DIRECTORY, dir_fd=tree))
    with clone_tree(found) as clone:
        return Fd(os.open(b".", _DIRECTORY, dir_fd=clone))


def _has_mount(pid: str, mnt_id: int, device: bytes) -> bool:
    """Return whether a process sees a mount of this id and device. No other mount gets the id while an fd of this one
    is open."""
    return any(mount.mnt_id == mnt_id and mount.device == device for mount in read_mounts(pid))


def _found(daemon: socket.socket, who: FdRequest) -> Fd:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            socket.send_fds(daemon, [_QUESTION.pack(who.ino)], [theirs.fileno()])
        return received(ours)


async def serve(channel: socket.socket, vfs: Vfs) -> None:
    """Answer the process's questions about directories, until cancelled. Checkpoint  everywhere"""
    limiter = trio.CapacityLimiter(_N)
    async with trio.open_nursery() as nursery:
        while True:
            await trio.lowlevel.wait_readable(channel)
            question, fds, _flags, _address = socket.recv_fds(channel, _QUESTION.size, 1, socket.MSG_CMSG_CLOEXEC)
            if not question:
                break
            find = partial(vfs.lock.run, _hold_shown, vfs, *_QUESTION.unpack(question))
            nursery.start_soon(_tell, socket.socket(fileno=fds[0]), find, limiter)
    _log.error("commands of users can no longer reach the backing tree: the process that provides it has ended")


def _hold_shown(vfs: Vfs, number: int) -> Fd:
    """Return an fd of the directory with this inode number in the mount; a client has it open, too.

    Raises  OSError ENOTDIR
    """
    root = vfs.nodes.root
    node = root if number in (*ROOTS, root.ino) else vfs.nodes.get(number)
    if node is None or not node.is_directory:
        raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    return Fd(os.dup(vfs.fd_of(node)))


async def _tell(asking: socket.socket, find: Callable[[], Fd], limiter: trio.CapacityLimiter) -> None:
    """Answer one question. Checkpoint  while a thread calls the backing filesystem"""
    with asking, suppress(BrokenPipeError):  # the client was gone already
        try:
            found = await trio.to_thread.run_sync(find, abandon_on_cancel=True, limiter=limiter)
        except OSError as error:
            answer(asking, error.errno or errno.EIO)
        else:
            with found:
                answer(asking, found)
