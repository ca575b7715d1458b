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
from fusefs.core.fuse_protocol import ANSWER_HEAD_SIZE, CallerIds, Opcode, Request
from fusefs.mount.native._core import Node
from fusefs.mount.places.counters import CELL_OF
from fusefs.mount.requests.failures import NotCached
from fusefs.mount.tree.mount_state import OPERATIONS
from fusefs.mount.tree.vfs import Vfs

_PATIENCE = 50
"""Requests that are read before what was just made is told by another number: what is deleted and in use keeps its own
longer than clients want to wait, and so does what stands behind a hundred thousand others that the kernel forgets."""


Reply = wire.Answer | None
"""To a request; or there is none."""
ReplyInSteps = Generator[None, bool | None, Reply]
"""What takes several steps, others being served between any two. It is sent whether no other request waits."""
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


Handle = Callable[[int, Request, CallerIds], Reply]
"""Takes the nodeid that is asked about, the whole request, and the caller."""

_WAIT_CLASSES = {
    **dict.fromkeys((Opcode.FORGET, Opcode.BATCH_FORGET), WaitClass.SHORT),
    **dict.fromkeys((
        Opcode.SETATTR, Opcode.SYMLINK, Opcode.MKNOD, Opcode.MKDIR, Opcode.CREATE, Opcode.UNLINK, Opcode.RMDIR,
        Opcode.RENAME, Opcode.RENAME2, Opcode.LINK, Opcode.WRITE, Opcode.FLUSH, Opcode.SETXATTR, Opcode.REMOVEXATTR,
    ), WaitClass.CHANGE),
    **dict.fromkeys((
        Opcode.TMPFILE, Opcode.FALLOCATE, Opcode.COPY_FILE_RANGE, Opcode.COPY_FILE_RANGE_64, Opcode.FSYNC,
        Opcode.FSYNCDIR,
    ), WaitClass.LONG),
}  # fmt: skip
"""Of requests that are no mere LOOK."""


class OpcodeHandler(NamedTuple):
    """Of requests of one kind: where they are counted, what does them, and how long that may take."""

    cell: int
    act: Handle
    sort: WaitClass


class FuseOperations:
    """One mount's."""

    def __init__(self, vfs: Vfs) -> None:
        self._nodes = vfs.nodes
        self._vfs = vfs
        self._opened = wire.open_answer()
        self._created = wire.create_answer()

    def acts(self) -> dict[int, OpcodeHandler]:
        """What is done for each request, by its opcode."""
        acts: dict[Opcode, Handle] = {
            Opcode.FORGET: self._forget, Opcode.BATCH_FORGET: self._forget, Opcode.CREATE: self._create,
            Opcode.TMPFILE: self._create, Opcode.OPEN: self._open, Opcode.OPENDIR: self._open,
        }  # fmt: skip
        sorts = {opcode: _WAIT_CLASSES.get(opcode, WaitClass.LOOK) for opcode in OPERATIONS}
        return {
            int(opcode): OpcodeHandler(CELL_OF[name], acts.get(opcode, self._do), sorts[opcode])
            for opcode, name in OPERATIONS.items()
        }

    def recalls(self) -> dict[int, OpcodeHandler]:
        """What is done for a request that memory may answer, on a slow filesystem; it raises NotCached if not."""
        recalled = (Opcode.LOOKUP, Opcode.GETATTR, Opcode.STATX, Opcode.READLINK, Opcode.GETXATTR, Opcode.LISTXATTR)
        recalls: dict[Opcode, Handle] = {
            **dict.fromkeys(recalled, self._recall), Opcode.OPENDIR: self._recall_listing,
            Opcode.FORGET: self._forget, Opcode.BATCH_FORGET: self._forget,
        }  # fmt: skip
        return {
            int(opcode): OpcodeHandler(CELL_OF[OPERATIONS[opcode]], act, WaitClass.SHORT)
            for opcode, act in recalls.items()
        }

    def handle_in(self, answer: Reply) -> int | None:
        """The handle that an answer tells of, if it does: no client will let it go if that is lost."""
        if isinstance(answer, bytearray) and (answer is self._opened or answer is self._created):
            return wire.handle_in(answer)
        return None

    def _do(self, _nodeid: int, request: Request, _caller: CallerIds) -> Reply:
        return self._vfs.answer(request)

    def _create(self, _nodeid: int, request: Request, _caller: CallerIds) -> Reply:
        """A handle, which `handle_in` finds if nobody takes the reply."""
        self._created[ANSWER_HEAD_SIZE:] = self._vfs.answer(request)
        return self._created

    def _open(self, _nodeid: int, request: Request, _caller: CallerIds) -> Reply:
        """A handle, as in `_create`."""
        self._opened[ANSWER_HEAD_SIZE:] = self._vfs.answer(request)
        return self._opened

    def _forget(self, _nodeid: int, request: Request, _caller: CallerIds) -> None:
        self._vfs.do(request)

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

    def _recall(self, _nodeid: int, request: Request, _caller: CallerIds) -> Reply:
        return _remembered(self._vfs.recall(request))

    def _recall_listing(self, _nodeid: int, request: Request, _caller: CallerIds) -> Reply:
        self._opened[ANSWER_HEAD_SIZE:] = _remembered(self._vfs.recall(request))
        return self._opened


def _remembered(found: R | None) -> R:
    """What was found in memory. Raises  NotCached"""
    if found is None:
        raise NotCached
    return found
