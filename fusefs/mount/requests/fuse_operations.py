"""The handlers of the kernel's requests, by opcode: what each means to the tree, and what is answered.

All of it is done with the tables' lock, which is let go for each call to the backing filesystem: by the loop's own
thread, or by any other. An answer is put together when nothing waits any more, and written before the lock is let go
again: so there is one of each sort for all threads.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from enum import IntEnum
from typing import NamedTuple, TypeVar

from fusefs.core import fuse_protocol as wire
from fusefs.core.fuse_protocol import ANSWER_HEAD_SIZE, Opcode, Request
from fusefs.mount.native._core import Node
from fusefs.mount.places.counters import CELL_OF
from fusefs.mount.requests.failures import NotCached
from fusefs.mount.tree.act_as import RequestCaller
from fusefs.mount.tree.validity import shown_number
from fusefs.mount.tree.vfs import Vfs

_PATIENCE = 50
"""Requests that are read before what was just made is told by another number: what is deleted and in use keeps its own
longer than clients want to wait, and so does what stands behind a hundred thousand others that the kernel forgets."""


Reply = wire.Answer | None
"""To a request; or there is none."""
ReplyInSteps = Generator[None, bool | None, Reply]
"""What takes several steps, others being served between any two. It is sent whether no other request waits."""
ReplyOrSteps = Reply | ReplyInSteps
R = TypeVar("R")


class WaitClass(IntEnum):
    """How long a request may take."""

    SHORT = 0
    LOOK = 1
    CHANGE = 2
    """Waits where the filesystem below is frozen, or its journal busy."""
    LONG = 3
    """Takes its time on any filesystem."""
    OTHERS = 4
    """Waits for another process, or another machine, perhaps for ever."""


class OpcodeHandler(NamedTuple):
    """Of requests of one kind: where they are counted, what does them, and how long that may take."""

    cell: int
    act: Callable[[int, Request, RequestCaller], ReplyOrSteps]
    sort: WaitClass


class FuseOperations:
    """One mount's."""

    def __init__(self, vfs: Vfs) -> None:
        self._nodes = vfs.nodes
        self._recalls = vfs.recalls
        self._core = vfs.core
        self._names = vfs.names
        self._xattrs = vfs.xattrs
        self._files = vfs.files
        self._listings = vfs.listings
        self._lifetimes = vfs.timeouts.lifetimes
        self._lock = vfs.lock
        self._done = wire.answer()
        self._opened = wire.open_answer()
        self._created = wire.create_answer()

    def acts(self) -> dict[int, OpcodeHandler]:
        """What is done for each request, by its opcode."""
        acts: dict[Opcode, tuple[str, Callable[[int, Request, RequestCaller], ReplyOrSteps], WaitClass]] = {
            Opcode.LOOKUP: ("lookup", self._name, WaitClass.LOOK),
            Opcode.FORGET: ("forget", self._forget, WaitClass.SHORT),
            Opcode.BATCH_FORGET: ("forget", self._forget, WaitClass.SHORT),
            Opcode.GETATTR: ("getattr", self._file, WaitClass.LOOK),
            Opcode.SETATTR: ("setattr", self._file, WaitClass.CHANGE),
            Opcode.STATX: ("statx", self._file, WaitClass.LOOK),
            Opcode.READLINK: ("readlink", self._name, WaitClass.LOOK),
            Opcode.SYMLINK: ("symlink", self._name, WaitClass.CHANGE),
            Opcode.MKNOD: ("mknod", self._name, WaitClass.CHANGE),
            Opcode.MKDIR: ("mkdir", self._name, WaitClass.CHANGE),
            Opcode.CREATE: ("create", self._create, WaitClass.CHANGE),
            Opcode.TMPFILE: ("tmpfile", self._create, WaitClass.LONG),
            Opcode.UNLINK: ("unlink", self._name, WaitClass.CHANGE),
            Opcode.RMDIR: ("rmdir", self._name, WaitClass.CHANGE),
            Opcode.RENAME: ("rename", self._name, WaitClass.CHANGE),
            Opcode.RENAME2: ("rename", self._name, WaitClass.CHANGE),
            Opcode.LINK: ("link", self._name, WaitClass.CHANGE),
            Opcode.OPEN: ("open", self._open, WaitClass.LOOK),
            Opcode.READ: ("read", self._file, WaitClass.LOOK),
            Opcode.WRITE: ("write", self._file, WaitClass.CHANGE),
            Opcode.LSEEK: ("lseek", self._file, WaitClass.LOOK),
            Opcode.FALLOCATE: ("fallocate", self._file, WaitClass.LONG),
            Opcode.COPY_FILE_RANGE: ("copy_file_range", self._file, WaitClass.LONG),
            Opcode.COPY_FILE_RANGE_64: ("copy_file_range", self._file, WaitClass.LONG),
            Opcode.FLUSH: ("flush", self._file, WaitClass.CHANGE),
            Opcode.FSYNC: ("fsync", self._file, WaitClass.LONG),
            Opcode.RELEASE: ("release", self._file, WaitClass.LOOK),
            Opcode.STATFS: ("statfs", self._file, WaitClass.LOOK),
            Opcode.ACCESS: ("access", self._file, WaitClass.LOOK),
            Opcode.SETXATTR: ("setxattr", self._xattr, WaitClass.CHANGE),
            Opcode.GETXATTR: ("getxattr", self._xattr, WaitClass.LOOK),
            Opcode.LISTXATTR: ("listxattr", self._xattr, WaitClass.LOOK),
            Opcode.REMOVEXATTR: ("removexattr", self._xattr, WaitClass.CHANGE),
            Opcode.OPENDIR: ("opendir", self._opendir, WaitClass.LOOK),
            Opcode.READDIRPLUS: ("readdir", self._list, WaitClass.LOOK),
            Opcode.FSYNCDIR: ("fsyncdir", self._list, WaitClass.LONG),
            Opcode.RELEASEDIR: ("releasedir", self._list, WaitClass.LOOK),
        }
        return {int(opcode): OpcodeHandler(CELL_OF[name], act, sort) for opcode, (name, act, sort) in acts.items()}

    def recalls(self) -> dict[int, OpcodeHandler]:
        """What is done for a request that memory may answer, on a slow filesystem; it raises NotCached if not."""
        recalls: dict[Opcode, tuple[str, Callable[[int, Request, RequestCaller], ReplyOrSteps]]] = {
            Opcode.LOOKUP: ("lookup", self._recall_name),
            Opcode.FORGET: ("forget", self._forget),
            Opcode.BATCH_FORGET: ("forget", self._forget),
            Opcode.GETATTR: ("getattr", self._recall_node),
            Opcode.STATX: ("statx", self._recall_birth),
            Opcode.READLINK: ("readlink", self._recall_target),
            Opcode.GETXATTR: ("getxattr", self._recall_xattr),
            Opcode.LISTXATTR: ("listxattr", self._recall_xattr),
            Opcode.OPENDIR: ("opendir", self._recall_listing),
        }
        return {
            int(opcode): OpcodeHandler(CELL_OF[name], act, WaitClass.SHORT) for opcode, (name, act) in recalls.items()
        }

    def handle_in(self, answer: Reply) -> int | None:
        """The handle that an answer tells of, if it does: no client will let it go if that is lost."""
        if isinstance(answer, bytearray) and (answer is self._opened or answer is self._created):
            return wire.handle_in(answer)
        return None

    # Names. Each takes the nodeid that is asked about and the whole request.

    def _name(self, _nodeid: int, request: Request, _caller: RequestCaller) -> ReplyOrSteps:
        return self._names.answer(request)

    def _create(self, _parent: int, request: Request, _caller: RequestCaller) -> ReplyOrSteps:
        """A handle, which `handle_in` finds if nobody takes the reply."""
        self._created[ANSWER_HEAD_SIZE:] = self._names.answer(request)
        return self._created

    def _recall_name(self, parent: int, request: Request, caller: RequestCaller) -> ReplyOrSteps:
        (name,) = wire.names(request)
        known = _remembered(self._recalls.lookup(parent, name, caller.pid))
        if not known.nodeid:
            return wire.missing(known.timeout_s)
        return wire.entry(known.nodeid, shown_number(known), known.attributes, *self._lifetimes(known))

    def _forget(self, _nodeid: int, request: Request, _caller: RequestCaller) -> None:
        self._lock.call(self._core.do, request)

    def number(self, node: Node, body: bytes) -> ReplyInSteps:
        """Reply to what has made a node when that has its own inode number for a nodeid, or won't get it.

        It may be that of a file just deleted: the kernel lets go of that at once, but prefers to hand us requests.
        """
        is_idle: bool | None = False
        for _ in range(_PATIENCE):
            self._nodes.renumber(node)
            if is_idle or not self._nodes.lacks_its_number(node):
                break
            is_idle = yield
        body = wire.with_number(body, node.nodeid)
        if len(body) < len(self._created) - ANSWER_HEAD_SIZE:
            return body
        self._created[ANSWER_HEAD_SIZE:] = body
        return self._created

    # Attributes.

    def _file(self, _nodeid: int, request: Request, _caller: RequestCaller) -> ReplyOrSteps:
        return self._files.answer(request)

    def _recall_node(self, nodeid: int, _request: Request, caller: RequestCaller) -> ReplyOrSteps:
        known = _remembered(self._recalls.getattr(nodeid))
        return wire.attr(shown_number(known), known.attributes, self._lifetimes(known)[1])

    def _recall_birth(self, nodeid: int, _request: Request, _caller: RequestCaller) -> ReplyOrSteps:
        known = _remembered(self._recalls.getattr(nodeid))
        return wire.statx(shown_number(known), known.attributes, self._lifetimes(known)[1])

    def _recall_target(self, nodeid: int, _request: Request, _caller: RequestCaller) -> ReplyOrSteps:
        return _remembered(self._recalls.readlink(nodeid))

    def _xattr(self, _nodeid: int, request: Request, _caller: RequestCaller) -> ReplyOrSteps:
        return self._xattrs.answer(request)

    def _recall_xattr(self, _nodeid: int, request: Request, _caller: RequestCaller) -> ReplyOrSteps:
        return _remembered(self._xattrs.recall(request))

    def _open(self, _nodeid: int, request: Request, _caller: RequestCaller) -> ReplyOrSteps:
        """A handle, as in `_create`."""
        self._opened[ANSWER_HEAD_SIZE:] = self._files.answer(request)
        return self._opened

    # Listings.

    def _list(self, _nodeid: int, request: Request, _caller: RequestCaller) -> ReplyOrSteps:
        return self._listings.answer(request)

    def _opendir(self, _nodeid: int, request: Request, _caller: RequestCaller) -> ReplyOrSteps:
        self._opened[ANSWER_HEAD_SIZE:] = self._listings.answer(request)
        return self._opened

    def _recall_listing(self, _nodeid: int, request: Request, _caller: RequestCaller) -> ReplyOrSteps:
        self._opened[ANSWER_HEAD_SIZE:] = _remembered(self._listings.recall(request))
        return self._opened


def _remembered(found: R | None) -> R:
    """What was found in memory. Raises  NotCached"""
    if found is None:
        raise NotCached
    return found
