"""The handlers of the kernel's requests, by opcode: what each means to the tree, and what is answered.

All of it is done with the tables' lock, which is let go for each call to the backing filesystem: by the loop's own
thread, or by any other. An answer is put together when nothing waits any more, and written before the lock is let go
again: so there is one of each sort for all threads.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Generator, Iterable
from enum import IntEnum
from functools import partial
from typing import NamedTuple, TypeVar

from fusefs.core import fuse_protocol as wire
from fusefs.core.fuse_protocol import ANSWER_HEAD_SIZE, REQUEST_HEAD_SIZE, Opcode, Request
from fusefs.mount.native._core import Node
from fusefs.mount.places.counters import CELL_OF
from fusefs.mount.requests.failures import NotCached
from fusefs.mount.tree.act_as import RequestCaller
from fusefs.mount.tree.attribute_operations import Changes
from fusefs.mount.tree.opening import OpenedFile
from fusefs.mount.tree.readdir import ReaddirEntry
from fusefs.mount.tree.validity import EntryParam, shown_number
from fusefs.mount.tree.vfs import Vfs

_PATIENCE = 50
"""Requests that are read before what was just made is told by another number: what is deleted and in use keeps its own
longer than clients want to wait, and so does what stands behind a hundred thousand others that the kernel forgets."""

PART = 64
"""Nodes that are forgotten in one go: an eighth of a millisecond's work."""
_PART_BYTES = PART * wire.FORGET_ONE.size

_REST_S = 0.0005
"""Between two parts of what the kernel forgets, if requests come meanwhile."""

_NANO = 1_000_000_000

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

    def __init__(self, vfs: Vfs, *, opens_directories: bool) -> None:
        """opens_directories: else the kernel is told at its first question to do that without us."""
        self._nodes = vfs.nodes
        self._lookups = vfs.lookups
        self._recalls = vfs.recalls
        self._references = vfs.references
        self._names = vfs.names
        self._attributes = vfs.attributes
        self._xattrs = vfs.xattrs
        self._files = vfs.files
        self._opening = vfs.opening
        self._listings = vfs.listings
        self._unopened = vfs.unopened
        self._lifetimes = vfs.timeouts.lifetimes
        self._lock = vfs.lock
        self._opens_directories = opens_directories
        self._done = wire.answer()
        self._entry, self._missing, self._missing_s = wire.entry_answer(), wire.entry_answer(), -1.0
        self._attr, self._statx_told = wire.attr_answer(), wire.statx_answer()
        self._opened = wire.open_answer()
        self._created = wire.create_answer()
        self._written = wire.write_answer()

    def acts(self) -> dict[int, OpcodeHandler]:
        """What is done for each request, by its opcode."""
        acts: dict[Opcode, tuple[str, Callable[[int, Request, RequestCaller], ReplyOrSteps], WaitClass]] = {
            Opcode.LOOKUP: ("lookup", self._name, WaitClass.LOOK),
            Opcode.FORGET: ("forget", self._forget, WaitClass.SHORT),
            Opcode.BATCH_FORGET: ("forget", self._forget_many, WaitClass.SHORT),
            Opcode.GETATTR: ("getattr", self._getattr, WaitClass.LOOK),
            Opcode.SETATTR: ("setattr", self._setattr, WaitClass.CHANGE),
            Opcode.STATX: ("statx", self._statx, WaitClass.LOOK),
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
            Opcode.READ: ("read", self._read, WaitClass.LOOK),
            Opcode.WRITE: ("write", self._write, WaitClass.CHANGE),
            Opcode.LSEEK: ("lseek", self._lseek, WaitClass.LOOK),
            Opcode.FALLOCATE: ("fallocate", self._fallocate, WaitClass.LONG),
            Opcode.COPY_FILE_RANGE: ("copy_file_range", partial(self._copy, wire.COPY_OUT.pack), WaitClass.LONG),
            Opcode.COPY_FILE_RANGE_64: ("copy_file_range", partial(self._copy, wire.COPY_64_OUT.pack), WaitClass.LONG),
            Opcode.FLUSH: ("flush", partial(self._end, self._files.flush), WaitClass.CHANGE),
            Opcode.FSYNC: ("fsync", self._fsync, WaitClass.LONG),
            Opcode.RELEASE: ("release", partial(self._end, self._opening.release), WaitClass.LOOK),
            Opcode.STATFS: ("statfs", self._statfs, WaitClass.LOOK),
            Opcode.ACCESS: ("access", self._access, WaitClass.LOOK),
            Opcode.SETXATTR: ("setxattr", self._setxattr, WaitClass.CHANGE),
            Opcode.GETXATTR: ("getxattr", self._getxattr, WaitClass.LOOK),
            Opcode.LISTXATTR: ("listxattr", self._listxattr, WaitClass.LOOK),
            Opcode.REMOVEXATTR: ("removexattr", self._removexattr, WaitClass.CHANGE),
            Opcode.OPENDIR: ("opendir", self._opendir, WaitClass.LOOK),
            Opcode.READDIRPLUS: ("readdir", self._readdirplus, WaitClass.LOOK),
            Opcode.FSYNCDIR: ("fsyncdir", self._fsyncdir, WaitClass.LONG),
            Opcode.RELEASEDIR: ("releasedir", partial(self._end, self._listings.releasedir), WaitClass.LOOK),
        }
        return {int(opcode): OpcodeHandler(CELL_OF[name], act, sort) for opcode, (name, act, sort) in acts.items()}

    def recalls(self) -> dict[int, OpcodeHandler]:
        """What is done for a request that memory may answer, on a slow filesystem; it raises NotCached if not."""
        recalls: dict[Opcode, tuple[str, Callable[[int, Request, RequestCaller], ReplyOrSteps]]] = {
            Opcode.LOOKUP: ("lookup", self._recall_name),
            Opcode.FORGET: ("forget", self._forget),
            Opcode.BATCH_FORGET: ("forget", self._forget_many),
            Opcode.GETATTR: ("getattr", self._recall_node),
            Opcode.STATX: ("statx", self._recall_birth),
            Opcode.READLINK: ("readlink", self._recall_target),
            Opcode.GETXATTR: ("getxattr", self._recall_xattr),
            Opcode.LISTXATTR: ("listxattr", self._recall_xattrs),
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
        known = self._recalls.lookup(parent, name, caller.pid)
        return self._named(_remembered(known))

    def _named(self, known: EntryParam) -> bytearray:
        if not known.nodeid:
            known = self._still(known)
            if known.timeout_s != self._missing_s:
                wire.put_missing(self._missing, known.timeout_s)
                self._missing_s = known.timeout_s
            return self._missing
        return self._put(self._entry, known)

    def _still(self, known: EntryParam) -> EntryParam:
        """What was found, to be believed as long as it may be when the answer goes out, which is now."""
        if known.proof is not None:
            return known._replace(timeout_s=known.proof.left_s(), proof=None)
        return known

    def _put(self, answer: bytearray, known: EntryParam) -> bytearray:
        known = self._still(known)
        wire.put_entry(answer, known.nodeid, shown_number(known), known.attributes, *self._lifetimes(known))
        return answer

    def _forget(self, nodeid: int, request: Request, caller: RequestCaller) -> None:
        self._references.forget(nodeid, *wire.FORGET_IN.unpack_from(request, REQUEST_HEAD_SIZE))

    def _forget_many(self, _nodeid: int, request: Request, caller: RequestCaller) -> ReplyOrSteps:
        forgotten = wire.forgotten(request)
        if len(forgotten) > _PART_BYTES:
            return self._forget_parts(bytes(forgotten))
        self._references.forget_many(forgotten)
        return None

    def _forget_parts(self, forgotten: bytes) -> ReplyInSteps:
        again_s = 0.0
        for at in range(0, len(forgotten), _PART_BYTES):
            while time.monotonic() < again_s:
                if (yield):
                    break
            self._references.forget_many(forgotten[at : at + _PART_BYTES])
            again_s = time.monotonic() + _REST_S
        return None

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
        answer = self._created if len(body) > len(self._entry) - ANSWER_HEAD_SIZE else self._entry
        answer[ANSWER_HEAD_SIZE:] = wire.with_number(body, node.nodeid)
        return answer

    # Attributes.

    def _getattr(self, nodeid: int, _request: Request, caller: RequestCaller) -> ReplyOrSteps:
        return self._tell(self._lookups.getattr(nodeid, caller))

    def _recall_node(self, nodeid: int, _request: Request, caller: RequestCaller) -> ReplyOrSteps:
        return self._tell(_remembered(self._recalls.getattr(nodeid)))

    def _tell(self, known: EntryParam) -> bytearray:
        known = self._still(known)
        wire.put_attr(self._attr, shown_number(known), known.attributes, self._lifetimes(known)[1])
        return self._attr

    def _statx(self, nodeid: int, _request: Request, caller: RequestCaller) -> ReplyOrSteps:
        """A node's attributes with its birth, asked for once: the kernel keeps that as long as it knows the node."""
        return self._tell_birth(self._lookups.getattr(nodeid, caller))

    def _recall_birth(self, nodeid: int, _request: Request, _caller: RequestCaller) -> ReplyOrSteps:
        return self._tell_birth(_remembered(self._recalls.getattr(nodeid)))

    def _tell_birth(self, known: EntryParam) -> bytearray:
        known = self._still(known)
        wire.put_statx(self._statx_told, shown_number(known), known.attributes, self._lifetimes(known)[1])
        return self._statx_told

    def _setattr(self, nodeid: int, request: Request, caller: RequestCaller) -> ReplyOrSteps:
        wanted, fh, size, *times, mode, uid, gid = wire.SETATTR_IN.unpack_from(request, REQUEST_HEAD_SIZE)
        atime_s, mtime_s, atime_ns, mtime_ns = times
        is_now = wire.FATTR_ATIME_NOW, wire.FATTR_MTIME_NOW
        now_ns = time.time_ns()
        atime_ns, mtime_ns = (
            now_ns if wanted & one else seconds * _NANO + ns
            for one, seconds, ns in zip(is_now, (atime_s, mtime_s), (atime_ns, mtime_ns), strict=True)
        )
        changes = Changes(
            mode=mode if wanted & wire.FATTR_MODE else None,
            uid=uid if wanted & wire.FATTR_UID else None,
            gid=gid if wanted & wire.FATTR_GID else None,
            size=size if wanted & wire.FATTR_SIZE else None,
            atime_ns=atime_ns if wanted & wire.FATTR_ATIME else None,
            mtime_ns=mtime_ns if wanted & wire.FATTR_MTIME else None,
        )
        handle = fh if wanted & wire.FATTR_FH else None
        return self._tell(self._attributes.setattr(nodeid, changes, handle, caller))

    def _recall_target(self, nodeid: int, _request: Request, _caller: RequestCaller) -> ReplyOrSteps:
        return _remembered(self._recalls.readlink(nodeid))

    def _access(self, nodeid: int, request: Request, _caller: RequestCaller) -> ReplyOrSteps:
        (mask,) = wire.ACCESS_IN.unpack_from(request, REQUEST_HEAD_SIZE)
        return self._done if self._attributes.access(nodeid, mask) else errno.EACCES

    def _statfs(self, _nodeid: int, _request: Request, _caller: RequestCaller) -> ReplyOrSteps:
        found = self._attributes.statfs()
        blocks = found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree
        return wire.STATFS_OUT.pack(*blocks, found.f_bsize, found.f_namemax, found.f_frsize)

    def _setxattr(self, nodeid: int, request: Request, caller: RequestCaller) -> ReplyOrSteps:
        size, flags = wire.SETXATTR_IN.unpack_from(request, REQUEST_HEAD_SIZE)
        name, _, value = bytes(request[REQUEST_HEAD_SIZE + wire.SETXATTR_IN.size :]).partition(b"\0")
        self._xattrs.set(nodeid, name, value[:size], caller, flags)
        return self._done

    def _removexattr(self, nodeid: int, request: Request, caller: RequestCaller) -> ReplyOrSteps:
        (name,) = wire.strings(request)
        self._xattrs.remove(nodeid, name, caller)
        return self._done

    def _listxattr(self, nodeid: int, request: Request, caller: RequestCaller) -> ReplyOrSteps:
        return self._tell_names(self._xattrs.names(nodeid, caller), request)

    def _recall_xattrs(self, nodeid: int, request: Request, caller: RequestCaller) -> ReplyOrSteps:
        return self._tell_names(_remembered(self._xattrs.recall_names(nodeid, caller)), request)

    def _tell_names(self, names: Iterable[bytes], request: Request) -> ReplyOrSteps:
        return self._tell_xattr(b"".join(name + b"\0" for name in names), request)

    def _getxattr(self, nodeid: int, request: Request, caller: RequestCaller) -> ReplyOrSteps:
        (name,) = wire.strings(request, wire.GETXATTR_IN)
        return self._tell_xattr(self._xattrs.find(nodeid, name, caller), request)

    def _recall_xattr(self, nodeid: int, request: Request, caller: RequestCaller) -> ReplyOrSteps:
        (name,) = wire.strings(request, wire.GETXATTR_IN)
        answer = self._xattrs.recall(nodeid, name, caller)
        if answer is None:
            raise NotCached
        return self._tell_xattr(answer, request)

    def _tell_xattr(self, answer: bytes | int, request: Request) -> ReplyOrSteps:
        (room,) = wire.GETXATTR_IN.unpack_from(request, REQUEST_HEAD_SIZE)
        if isinstance(answer, int):
            return answer
        if not room:
            return wire.GETXATTR_OUT.pack(len(answer))
        return answer if len(answer) <= room else errno.ERANGE

    # Files.

    def _open(self, nodeid: int, request: Request, caller: RequestCaller) -> ReplyOrSteps:
        (flags,) = wire.OPEN_IN.unpack_from(request, REQUEST_HEAD_SIZE)
        return self._handle(self._opened, self._files.open(nodeid, flags, caller))

    def _handle(self, answer: bytearray, opened: OpenedFile) -> bytearray:
        """The kernel reads and writes the file of an id itself, and keeps no pages then."""
        fh, backing_id, keeps = opened
        flags = wire.FOPEN_PASSTHROUGH if backing_id else wire.FOPEN_KEEP_CACHE if keeps else 0
        wire.put_opened(answer, fh, flags, backing_id)
        return answer

    def _read(self, _nodeid: int, request: Request, caller: RequestCaller) -> ReplyOrSteps:
        fh, offset, size = wire.read_in(request)
        return self._files.read(fh, offset, size)

    def _write(self, _nodeid: int, request: Request, caller: RequestCaller) -> ReplyOrSteps:
        fh, offset, size, flags = wire.WRITE_IN.unpack_from(request, REQUEST_HEAD_SIZE)
        data = memoryview(request)[REQUEST_HEAD_SIZE + wire.WRITE_IN.size :][:size]
        wire.put_written(self._written, self._files.write(fh, offset, data, flags))
        return self._written

    def _lseek(self, _nodeid: int, request: Request, caller: RequestCaller) -> ReplyOrSteps:
        fh, offset, whence = wire.LSEEK_IN.unpack_from(request, REQUEST_HEAD_SIZE)
        return wire.LSEEK_OUT.pack(self._files.seek(fh, offset, whence))

    def _fallocate(self, _nodeid: int, request: Request, caller: RequestCaller) -> ReplyOrSteps:
        fh, offset, size, mode = wire.FALLOCATE_IN.unpack_from(request, REQUEST_HEAD_SIZE)
        self._files.allocate(fh, mode, offset, size, caller)
        return self._done

    def _copy(
        self, tell: Callable[[int], bytes], _nodeid: int, request: Request, caller: RequestCaller
    ) -> ReplyOrSteps:
        fh, offset, to_fh, to_offset, size = wire.COPY_IN.unpack_from(request, REQUEST_HEAD_SIZE)
        return tell(self._files.copy(fh, offset, to_fh, to_offset, size, caller))

    def _fsync(self, _nodeid: int, request: Request, _caller: RequestCaller) -> ReplyOrSteps:
        fh, flags = wire.FSYNC_IN.unpack_from(request, REQUEST_HEAD_SIZE)
        self._files.fsync(fh, data_only=bool(flags & wire.FSYNC_DATA_ONLY))
        return self._done

    def _end(self, act: Callable[[int], None], _nodeid: int, request: Request, _caller: RequestCaller) -> ReplyOrSteps:
        """A client closes a file by a handle, or lets that go."""
        act(*wire.HANDLE_IN.unpack_from(request, REQUEST_HEAD_SIZE))
        return self._done

    # Listings.

    def _opendir(self, nodeid: int, _request: Request, caller: RequestCaller) -> ReplyOrSteps:
        if not self._opens_directories:
            return errno.ENOSYS
        return self._listing(self._listings.opendir(nodeid, caller))

    def _recall_listing(self, nodeid: int, _request: Request, caller: RequestCaller) -> ReplyOrSteps:
        if not self._opens_directories:
            return errno.ENOSYS
        return self._listing(_remembered(self._listings.recall_opendir(nodeid, caller)))

    def _listing(self, fh: int) -> bytearray:
        wire.put_opened(self._opened, fh, self._listings.cache_flags(fh))
        return self._opened

    def _readdirplus(self, nodeid: int, request: Request, _caller: RequestCaller) -> ReplyOrSteps:
        fh, offset, room = wire.read_in(request)
        if fh:
            self._listings.prepare(fh, offset)
            is_slow = self._lock.is_slow
            return self._entries(self._listings.read(fh, offset, room), room, fh if is_slow else None)
        if not self._lock.is_slow:
            return self._entries(self._unopened.read(nodeid, offset, room), room)
        found = self._unopened.read_names(nodeid, offset, room)
        names = (ReaddirEntry(name, None, ino, kind, following, None) for name, ino, following, kind in found)
        return self._entries(names, room)

    def _entries(self, all_listed: Iterable[ReaddirEntry], room: int, fh: int | None = None) -> bytes:
        """What is told of entries. fh: of a listing on a slow filesystem, of whose entries more is fetched then"""
        entries, left = [], room
        now_s = time.monotonic()
        for listed in all_listed:
            entry, lasts_s = self._direntplus(listed)
            left -= len(entry)
            if fh is not None:
                self._listings.told(fh, listed, is_taken=left >= 0)
            elif listed.node is not None:
                self._listings.count(listed.node, now_s + lasts_s, is_taken=left >= 0)
            if left < 0:
                break
            entries.append(entry)
        return b"".join(entries)

    def _fsyncdir(self, nodeid: int, request: Request, caller: RequestCaller) -> ReplyOrSteps:
        fh, flags = wire.FSYNC_IN.unpack_from(request, REQUEST_HEAD_SIZE)
        data_only = bool(flags & wire.FSYNC_DATA_ONLY)
        if fh:
            self._listings.fsyncdir(fh, data_only=data_only)
        else:
            self._unopened.fsyncdir(nodeid, data_only=data_only)
        return self._done

    def _direntplus(self, listed: ReaddirEntry) -> tuple[bytes, float]:
        """An entry, and for how long all that it tells may be believed, in seconds."""
        name, known, ino, kind, offset, node = listed
        if known is None or node is None:
            return wire.dirent_alone(name, offset, ino, kind), 0
        known = self._still(known)
        entry_s, attr_s = self._lifetimes(known)
        number = known.nodeid
        return wire.direntplus(name, offset, number, number, known.attributes, entry_s, attr_s), min(entry_s, attr_s)


def _remembered(found: R | None) -> R:
    """What was found in memory. Raises  NotCached"""
    if found is None:
        raise NotCached
    return found
