"""Changes made behind the mount: the kernel is told at once to forget the names and the content that are wrong now.

Here it is found out what that is, on the trio thread; another process (invalidation_process) says so, and waits.

An inode that the kernel does not know may be on its way to it, in an answer that is older than the change: nothing
would make that void. So it is told again, until the kernel knows the inode, or was read to have forgotten it. A name
needs no such thing: the kernel waits for the directory's lock, which who looks it up keeps until he has the answer.

Source  fuse_notify in the kernel's fs/fuse/dev.c, and what it calls
"""

from __future__ import annotations

import errno
import logging
import math
import os
import select
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import trio

from fusefs.core.inode_table import Node, NodeId
from fusefs.linux import fanotify
from fusefs.linux.fd import Fd
from fusefs.linux.fuse_device import INVAL_INODE, NOTIFY_INVAL_ENTRY, NOTIFY_INVAL_INODE
from fusefs.linux.kernel import Kernel
from fusefs.linux.syscalls import handle_of
from fusefs.mount.notices.forget_stored import StoredNotices
from fusefs.mount.notices.invalidation_process import ANSWER, MESSAGE_MAX, invalidation_process
from fusefs.mount.tree.trashd_dir import is_drop_folder
from fusefs.mount.tree.vfs import Vfs

_log = logging.getLogger(__name__)

_NAMES = fanotify.FAN_CREATE | fanotify.FAN_DELETE | fanotify.FAN_MOVED_FROM | fanotify.FAN_MOVED_TO
_GATHER_S = 0.005
"""Between two looks: the daemon's own work is told too, and must not wake it for each file."""
_REST_PER_WORK = 4
"""Whatever else is done on the filesystem is told too; clients' requests go before that."""
_AGAIN_S = 0.02
"""Between two tries to tell of what is on its way to the kernel, or from it; so late what it forgot may be read."""
_START_OVER_S = 1.0
_N_AT_A_TIME = 500

_INVAL_ENTRY = struct.Struct("=IiQQII")
"""fuse_out_header, as in INVAL_INODE, and fuse_notify_inval_entry_out: nodeid of the directory, length of the name,
flags; then the name with a zero byte."""
_EXPIRE_ONLY = 1


class ChangeSource(NamedTuple):
    """What tells of changes (fanotify), and the channel to what tells the kernel."""

    changes: Fd
    channel: socket.socket

    def has_news(self) -> bool:
        """Whether there are changes that are not read yet."""
        return bool(select.select([self.changes], [], [], 0)[0])


@contextmanager
def watching(root: int, device: int, connection: int) -> Iterator[ChangeSource | None]:
    """What `ChangeNotices.run` needs; None if nothing tells of changes: then the log says so.

    To be entered on the main thread, when it is mounted and before it is served, so that no change is missed.

    root        a directory of the backing tree (O_PATH will do)
    device      the connection's fd
    connection  the mount's minor device number
    """
    with ExitStack() as stack:
        watched = None
        try:
            if not Kernel().is_local(root):
                raise OSError(errno.EREMOTE, "other machines may change this filesystem")
            if not handle_of(root):
                raise OSError(errno.EOPNOTSUPP, "this filesystem has no file handles")
            changes = stack.enter_context(fanotify.watch_filesystem(root))
            watched = ChangeSource(changes, stack.enter_context(invalidation_process(device, connection)))
        except OSError as error:
            _log.info("changes behind the mount are seen when the timeout is over, not at once: %s", error.strerror)
        yield watched


class ChangeNotices:
    """What is said of the changes behind one mount."""

    def __init__(self, vfs: Vfs, stored: StoredNotices) -> None:
        """stored: what lets go of directories that were removed"""
        self._lock = vfs.lock
        self._nodes = vfs.nodes
        self._cache = vfs.cache
        self._passthrough = vfs.passthrough
        self._listings = vfs.listings
        self._stored = stored

    async def run(self, watched: ChangeSource) -> None:
        """Let the kernel forget what changes behind the mount, until cancelled.

        Checkpoint  between two looks at the tables, which are asked for what is there then
        """
        own_pid = os.getpid()
        unknown: list[bytes] = []
        try:
            while True:
                with trio.move_on_after(_AGAIN_S if unknown else math.inf):
                    await trio.lowlevel.wait_readable(watched.changes)
                start_s = time.monotonic()
                changes = fanotify.read_changes(watched.changes, own_pid)
                with self._lock:
                    notices = [notice for notice in unknown if self._is_on_its_way(notice)]
                    notices += [notice for change in changes for notice in self._notices(change)]
                took_s = time.monotonic() - start_s
                unknown = await _tell(watched.channel, notices)
                if any(change.mask & fanotify.FAN_Q_OVERFLOW for change in changes):
                    unknown += await self._forget_all(watched.channel)
                await trio.sleep(max(_GATHER_S, took_s * _REST_PER_WORK))
        except OSError as error:
            self._listings.are_kept = False
            _log.error("changes behind the mount are seen when the timeout is over from now on: %s", error.strerror)

    def _is_on_its_way(self, notice: bytes) -> bool:
        """Whether the kernel has been told of an inode that it did not know: the answer was not taken in yet, and may
        be older than the change; or it has forgotten it, and that was not read yet."""
        node = self._nodes.get(NodeId(INVAL_INODE.unpack(notice)[3]))
        return node is not None and node.nlookup > 0

    def _notices(self, change: fanotify.FanotifyChange) -> Iterator[bytes]:
        """What a change makes wrong of what the kernel knows."""
        device = self._nodes.root.source[0]
        subject = self._nodes.find((device, change.subject))
        is_directory = bool(change.mask & fanotify.FAN_ONDIR)
        self._cache.changed((device, change.subject))
        if change.mask & _NAMES:
            self._cache.changed((device, change.directory), change.name)
            directory = self._nodes.find((device, change.directory))
            if directory is not None:
                is_taken = change.mask & fanotify.FAN_MOVED_FROM and is_drop_folder(self._nodes, directory)
                yield _forget_name(directory, change.name, keeps_node=is_directory and not is_taken)
                yield _forget_inode(directory)
            if subject is not None and is_directory and change.mask & fanotify.FAN_DELETE:
                self._stored.close_removed([subject])
        if subject is not None and (change.mask != fanotify.FAN_MODIFY or not self._passthrough.is_unbelieved(subject)):
            yield _forget_inode(subject, keeps_content=not change.mask & fanotify.FAN_MODIFY)

    async def _forget_all(self, channel: socket.socket) -> list[bytes]:
        """Some changes were lost, with so much going on: forget everything; the notices of inodes that are not known.

        And leave it at that for a while: it will be necessary again and again, and the timeout sees to what isn't told.
        """
        start_s = time.monotonic()
        with self._lock:
            self._cache.clear()
            nodes = list(self._nodes)
        unknown: list[bytes] = []
        for at in range(0, len(nodes), _N_AT_A_TIME):
            part = nodes[at : at + _N_AT_A_TIME]
            unknown += await _tell(channel, [notice for node in part for notice in _forget_node(node)])
        await trio.sleep(max(_START_OVER_S, (time.monotonic() - start_s) * _REST_PER_WORK))
        return unknown


async def _tell(channel: socket.socket, notices: Iterable[bytes]) -> list[bytes]:
    """Have the kernel told, each thing once; the notices of inodes that it does not know.

    Raises      OSError: it doesn't listen any more
    Checkpoint  at each message
    """
    message, unknown = b"", list[bytes]()
    for notice in dict.fromkeys(notices):
        if len(message) + len(notice) > MESSAGE_MAX:
            unknown += await _send(channel, message)
            message = b""
        message += notice
    if message:
        unknown += await _send(channel, message)
    return unknown


async def _send(channel: socket.socket, message: bytes) -> list[bytes]:
    channel.send(message)
    await trio.lowlevel.wait_readable(channel)
    answer = channel.recv(ANSWER.size + MESSAGE_MAX)
    number = ANSWER.unpack_from(answer)[0] if answer else errno.EPIPE
    if number:
        raise OSError(number, os.strerror(number))
    return [answer[at : at + INVAL_INODE.size] for at in range(ANSWER.size, len(answer), INVAL_INODE.size)]


def _forget_node(node: Node) -> Iterator[bytes]:
    for directory, name in node.places():
        yield _forget_name(directory, name, keeps_node=True)
    yield _forget_inode(node)


def _forget_name(directory: Node, name: bytes, *, keeps_node: bool) -> bytes:
    """Look again what a name means.

    keeps_node  until it is looked up again: a directory that still is the same stays the parent of what is known in it,
                and the working directory of processes in it (before Linux 6.2 it is known anew). What was taken from a
                drop folder is let go of at once, with all that is known in it: 4 µs each, for which the next one to
                drop something by that name would wait, and all renames
    """
    size, flags = _INVAL_ENTRY.size + len(name) + 1, _EXPIRE_ONLY if keeps_node else 0
    return _INVAL_ENTRY.pack(size, NOTIFY_INVAL_ENTRY, 0, directory.nodeid, len(name), flags) + name + b"\0"


def _forget_inode(node: Node, *, keeps_content: bool = False) -> bytes:
    """Ask again for attributes and, if there is content (or a listing), for that."""
    return INVAL_INODE.pack(INVAL_INODE.size, NOTIFY_INVAL_INODE, 0, node.nodeid, -1 if keeps_content else 0, 0)
