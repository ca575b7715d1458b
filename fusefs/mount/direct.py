"""The kernel's commonest requests, read and answered without libfuse and pyfuse3; those get all others.

That is half of what a request costs, and bits of answers that pyfuse3 has no field for cost nothing more. Where the
backing filesystem is slow, what is remembered is answered so; what has to wait for it in a thread is pyfuse3's, if that
knows it.

Source  docs/decisions/0014-direct-requests.md
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from struct import Struct
from time import perf_counter_ns
from typing import Concatenate, ParamSpec, TypeVar

from fusefs.core import fusewire as wire
from fusefs.core.fusewire import REQUEST_HEAD_SIZE, Opcode, Request
from fusefs.mount import listing, recall, unopened, vfs_files, vfs_write
from fusefs.mount.asking import Asking
from fusefs.mount.gate import WouldWait
from fusefs.mount.hands import PART, Hands
from fusefs.mount.jumps import Jumps, Reader
from fusefs.mount.known import Known, shown_number
from fusefs.mount.listing import Listed
from fusefs.mount.loop import own_number
from fusefs.mount.replies import GONE, Replies
from fusefs.mount.stats import CELL_OF, Stats
from fusefs.mount.translate import attempt, attempt_later
from fusefs.mount.vfs import Vfs
from fusefs.mount.vfs_files import Opened
from fusefs.mount.xattrs import Xattrs

_SHORT_BYTES = 1 << 13
_GIVEN = (bytearray, bytes, int, type(None))

Given = bytearray | bytes | int | None
"""To a request: complete but for its number; its body alone; an errno; or there is no answer."""
Answer = Given | Awaitable[Given]
P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger(__name__)


class Direct:
    """One mount's requests. On the trio thread."""

    def __init__(
        self, vfs: Vfs, xattrs: Xattrs, hands: Hands, replies: Replies, stats: Stats, *, opens_directories: bool = True
    ) -> None:
        """Begin.

        replies            the way to the kernel, and to libfuse
        opens_directories  else the kernel is told at its first question to do that without us
        """
        self._vfs = vfs
        self._lifetimes = vfs.lasting.lifetimes
        self._gate = hands.gate
        self._xattrs = xattrs
        self._hands = hands
        self._replies = replies
        self._stats = stats
        self._device = replies.device
        self._caller = Asking()
        self._jumps = Jumps()
        os.set_blocking(self._device, False)  # the request that is there may be gone when we read
        self._read_to = memoryview(bytearray(wire.REQUEST_BYTES_MAX))
        self._room = (self._read_to,)
        # Each answer is written before the next one is made: there is one of each sort.
        self._done = wire.answer()
        self._entry, self._missing, self._missing_s = wire.entry_answer(), wire.entry_answer(), -1.0
        self._attr, self._statx_told = wire.attr_answer(), wire.statx_answer()
        self._opened = wire.open_answer()
        self._created = wire.create_answer()
        self._written = wire.write_answer()
        acts: dict[Opcode, tuple[str, Callable[[int, Request], Answer]]] = {
            Opcode.LOOKUP: ("lookup", self._lookup),
            Opcode.FORGET: ("forget", self._forget),
            Opcode.BATCH_FORGET: ("forget", self._forget_many),
            Opcode.GETATTR: ("getattr", self._getattr),
            Opcode.STATX: ("statx", self._statx),
            Opcode.MKDIR: ("mkdir", self._mkdir),
            Opcode.CREATE: ("create", self._create),
            Opcode.TMPFILE: ("tmpfile", self._tmpfile),
            Opcode.UNLINK: ("unlink", self._unlink),
            Opcode.RMDIR: ("rmdir", self._rmdir),
            Opcode.RENAME: ("rename", partial(self._rename, wire.RENAME_IN)),
            Opcode.RENAME2: ("rename", partial(self._rename, wire.RENAME2_IN)),
            Opcode.OPEN: ("open", self._open),
            Opcode.READ: ("read", self._read),
            Opcode.WRITE: ("write", self._write),
            Opcode.LSEEK: ("lseek", self._lseek),
            Opcode.FALLOCATE: ("fallocate", self._fallocate),
            Opcode.COPY_FILE_RANGE: ("copy_file_range", partial(self._copy, wire.COPY_OUT.pack)),
            Opcode.COPY_FILE_RANGE_64: ("copy_file_range", partial(self._copy, wire.COPY_64_OUT.pack)),
            Opcode.FLUSH: ("flush", self._flush),
            Opcode.RELEASE: ("release", self._release),
            Opcode.GETXATTR: ("getxattr", self._getxattr),
            Opcode.OPENDIR: ("opendir", self._opendir),
            Opcode.READDIRPLUS: ("readdir", self._readdirplus),
            Opcode.RELEASEDIR: ("releasedir", self._releasedir),
        }
        when_slow: dict[Opcode, tuple[str, Callable[[int, Request], Answer]]] = {
            Opcode.LOOKUP: ("lookup", self._recall_name),
            Opcode.FORGET: acts[Opcode.FORGET],
            Opcode.BATCH_FORGET: acts[Opcode.BATCH_FORGET],
            Opcode.GETATTR: ("getattr", self._recall_node),
            Opcode.GETXATTR: ("getxattr", self._recall_xattr),
        }
        self._opens_directories = opens_directories
        if not opens_directories:
            acts[Opcode.FSYNCDIR] = ("fsyncdir", self._fsyncdir)
        self._acts, self._when_slow = (
            {int(opcode): (CELL_OF[name], act) for opcode, (name, act) in table.items()} for table in (acts, when_slow)
        )

    def serve(self) -> bool | Awaitable[None] | None:
        """Read a request, and answer it.

        Returns  False: somebody else has to read it; None: none waits; or what answers it, while others are answered
        """
        gate = self._gate
        try:
            size = os.readv(self._device, self._room)
        except BlockingIOError:
            return None
        except OSError as error:
            return error.errno == errno.ENOENT  # who asked has been killed while we read; or everybody is gone
        # A write is not copied; all others are short.
        request = self._read_to[:size] if size > _SHORT_BYTES else self._read_to[:size].tobytes()
        caller = self._caller
        _size, opcode, unique, nodeid, caller.uid, caller.gid, caller.pid = wire.read_head(request)
        is_slow = gate.is_slow and not wire.is_ours_alone(opcode, request)
        served = (self._when_slow if is_slow else self._acts).get(opcode)
        if served is None:
            if opcode == Opcode.INTERRUPT:
                return True  # nobody wants to know; and libfuse may not know the request that it is about
            self._replies.hand_over(request)
            return False
        cell, act = served
        begun_ns = perf_counter_ns()
        try:
            with gate.lock:
                answer = attempt(act, nodeid, request)
        except WouldWait:
            self._replies.hand_over(request)
            return False
        if not isinstance(answer, _GIVEN):
            return self._finish(answer, unique, caller.pid, cell, begun_ns)
        self._stats.count(cell, perf_counter_ns() - begun_ns, has_failed=type(answer) is int)
        if answer is not None:
            self._give(answer, unique, caller.pid)
        return True

    async def _finish(self, answering: Awaitable[Given], unique: int, pid: int, cell: int, begun_ns: int) -> None:
        """Answer what takes longer. Checkpoint  as that does, but none before the answer has gone out"""
        answer = await attempt_later(answering)
        self._stats.count(cell, perf_counter_ns() - begun_ns, has_failed=type(answer) is int)
        if answer is not None:
            self._give(answer, unique, pid)

    def _give(self, answer: bytearray | bytes | int, unique: int, pid: int) -> None:
        try:
            if type(answer) is bytearray:
                wire.put_number(answer, wire.NUMBER_AT, unique)
                os.write(self._device, answer)
            elif type(answer) is bytes:
                os.writev(self._device, (wire.head(unique, len(answer)), answer))
            elif type(answer) is int:
                if answer == errno.ESTALE:
                    with self._gate.lock:
                        self._vfs.directories.losers.add(pid)
                os.write(self._device, wire.refusal(unique, answer))
        except OSError as error:
            if error.errno not in GONE:  # who asked has got an error, too
                _log.error("the kernel takes an answer for wrong: %s", error.strerror)
            if answer is self._opened or answer is self._created:  # nobody will release what nobody was told of
                self._hands.finish_soon(self._vfs.release, wire.handle_in(answer))

    # Names. Each takes the nodeid that is asked about and the whole request.

    def _lookup(self, parent: int, request: Request) -> Answer:
        return self._named(self._vfs.lookup(parent, wire.name(request), self._caller))

    def _recall_name(self, parent: int, request: Request) -> Answer:
        known = recall.lookup(self._vfs, parent, wire.name(request), self._caller.pid)
        return self._named(_remembered(known))

    def _named(self, known: Known) -> bytearray:
        if not known.nodeid:
            if known.timeout_s != self._missing_s:
                wire.put_missing(self._missing, known.timeout_s)
                self._missing_s = known.timeout_s
            return self._missing
        return self._put(self._entry, known)

    def _put(self, answer: bytearray, known: Known) -> bytearray:
        wire.put_entry(answer, known.nodeid, shown_number(known), known.attributes, *self._lifetimes(known))
        return answer

    def _forget(self, nodeid: int, request: Request) -> None:
        self._vfs.forget(nodeid, *wire.FORGET_IN.unpack_from(request, REQUEST_HEAD_SIZE))

    def _forget_many(self, _nodeid: int, request: Request) -> Answer:
        forgotten = wire.forgotten(request)
        if len(forgotten) > PART:
            return self._hands.forget(self._vfs.forget, forgotten)
        for nodeid, n in forgotten:
            self._vfs.forget(nodeid, n)
        return None

    def _mkdir(self, parent: int, request: Request) -> Answer:
        mode, self._caller.umask = wire.MKDIR_IN.unpack_from(request, REQUEST_HEAD_SIZE)
        (name,) = wire.names(request, wire.MKDIR_IN)
        known = vfs_write.mkdir(self._vfs, parent, name, mode, self._caller)
        if known.nodeid != known.attributes.ino:
            return self._made_later(known, None)
        return self._put(self._entry, known)

    def _create(self, parent: int, request: Request) -> Answer:
        flags, mode, self._caller.umask = wire.CREATE_IN.unpack_from(request, REQUEST_HEAD_SIZE)
        (name,) = wire.names(request, wire.CREATE_IN)
        opened, known = vfs_write.create(self._vfs, parent, name, mode, flags, self._caller)
        if known.nodeid != known.attributes.ino:
            return self._made_later(known, opened)
        return self._put(self._handle(self._created, opened), known)

    def _tmpfile(self, parent: int, request: Request) -> Answer:
        flags, mode, self._caller.umask = wire.CREATE_IN.unpack_from(request, REQUEST_HEAD_SIZE)
        return self._make_unnamed(parent, mode, flags, self._caller.as_now())

    async def _make_unnamed(self, parent: int, mode: int, flags: int, asking: Asking) -> Given:
        """Checkpoint"""
        opened, known = await self._hands.wait_for(vfs_write.create_unnamed, self._vfs, parent, mode, flags, asking)
        return await self._made_later(known, opened)

    async def _made_later(self, known: Known, opened: Opened | None) -> Given:
        """Answer when it has its own number, or won't get it. Checkpoint"""
        known = await own_number(self._vfs, known)
        return self._put(self._entry if opened is None else self._handle(self._created, opened), known)

    def _unlink(self, parent: int, request: Request) -> Answer:
        vfs_write.unlink(self._vfs, parent, wire.name(request), self._caller)
        return self._done

    def _rmdir(self, parent: int, request: Request) -> Answer:
        vfs_write.rmdir(self._vfs, parent, wire.name(request), self._caller)
        return self._done

    def _rename(self, numbers: Struct, parent: int, request: Request) -> Answer:
        new_parent, *flags = numbers.unpack_from(request, REQUEST_HEAD_SIZE)
        old, new = wire.names(request, numbers)
        vfs_write.rename(self._vfs, parent, old, new_parent, new, sum(flags), self._caller)
        return self._done

    # Attributes.

    def _getattr(self, nodeid: int, _request: Request) -> Answer:
        return self._tell(self._vfs.getattr(nodeid, self._caller))

    def _recall_node(self, nodeid: int, _request: Request) -> Answer:
        return self._tell(_remembered(recall.getattr_(self._vfs, nodeid)))

    def _tell(self, known: Known) -> bytearray:
        wire.put_attr(self._attr, shown_number(known), known.attributes, self._lifetimes(known)[1])
        return self._attr

    def _statx(self, nodeid: int, _request: Request) -> Answer:
        """The same with its birth, asked for once: the kernel keeps that as long as it knows the node."""
        known = recall.getattr_(self._vfs, nodeid) if self._gate.is_slow else None
        if known is not None:
            return self._tell_birth(known)
        return self._by_whom_it_suits(self._tell_birth, Vfs.getattr, nodeid, self._caller.as_now())

    def _tell_birth(self, known: Known) -> Given:
        known = self._vfs.still(known)
        wire.put_statx(self._statx_told, shown_number(known), known.attributes, self._lifetimes(known)[1])
        return self._statx_told

    def _getxattr(self, nodeid: int, request: Request) -> Answer:
        return self._tell_xattr(
            self._xattrs.find(nodeid, wire.names(request, wire.GETXATTR_IN)[0], self._caller), request
        )

    def _recall_xattr(self, nodeid: int, request: Request) -> Answer:
        (name,) = wire.names(request, wire.GETXATTR_IN)
        answer = self._xattrs.recall(nodeid, name, self._caller)
        if answer is None:
            raise WouldWait
        return self._tell_xattr(answer, request)

    def _tell_xattr(self, answer: bytes | int, request: Request) -> Answer:
        (room,) = wire.GETXATTR_IN.unpack_from(request, REQUEST_HEAD_SIZE)
        if isinstance(answer, int):
            return answer
        if not room:
            return wire.GETXATTR_OUT.pack(len(answer))
        return answer if len(answer) <= room else errno.ERANGE

    # Files.

    def _open(self, nodeid: int, request: Request) -> Answer:
        (flags,) = wire.OPEN_IN.unpack_from(request, REQUEST_HEAD_SIZE)
        return self._handle(self._opened, vfs_files.open_(self._vfs, nodeid, flags, self._caller))

    def _handle(self, answer: bytearray, opened: Opened) -> bytearray:
        """The kernel reads and writes the file of an id itself, and keeps no pages then."""
        fh, backing_id, keeps = opened
        flags = wire.FOPEN_PASSTHROUGH if backing_id else wire.FOPEN_KEEP_CACHE if keeps else 0
        if not backing_id and self._vfs.handles.comes_whole(fh):
            flags |= wire.FOPEN_DIRECT_IO
        wire.put_opened(answer, fh, flags, backing_id)
        return answer

    def _read(self, _nodeid: int, request: Request) -> Answer:
        fh, offset, size = wire.READ_IN.unpack_from(request, REQUEST_HEAD_SIZE)
        return vfs_files.read(self._vfs, fh, offset, size)

    def _write(self, _nodeid: int, request: Request) -> Answer:
        fh, offset, size, flags = wire.WRITE_IN.unpack_from(request, REQUEST_HEAD_SIZE)
        data = memoryview(request)[REQUEST_HEAD_SIZE + wire.WRITE_IN.size :][:size]
        if self._gate.is_slow:  # and the next request comes to where this one lies
            return self._by_thread(self._say_written, vfs_files.write, fh, offset, data.tobytes(), flags)
        return self._say_written(vfs_files.write(self._vfs, fh, offset, data, flags))

    def _say_written(self, n: int) -> Given:
        wire.put_written(self._written, n)
        return self._written

    def _lseek(self, _nodeid: int, request: Request) -> Answer:
        fh, offset, whence = wire.LSEEK_IN.unpack_from(request, REQUEST_HEAD_SIZE)
        return self._by_whom_it_suits(wire.LSEEK_OUT.pack, vfs_files.seek, fh, offset, whence)

    def _fallocate(self, _nodeid: int, request: Request) -> Answer:
        fh, offset, size, mode = wire.FALLOCATE_IN.unpack_from(request, REQUEST_HEAD_SIZE)
        return self._by_thread(self._say_done, vfs_files.allocate, fh, mode, offset, size, self._caller.as_now())

    def _copy(self, tell: Callable[[int], bytes], _nodeid: int, request: Request) -> Answer:
        fh, offset, to_fh, to_offset, size = wire.COPY_IN.unpack_from(request, REQUEST_HEAD_SIZE)
        asking = self._caller.as_now()
        return self._by_thread(tell, vfs_files.copy, fh, offset, to_fh, to_offset, size, asking)

    def _say_done(self, _nothing: None) -> Given:
        return self._done

    def _by_whom_it_suits(
        self, tell: Callable[[R], Given], act: Callable[Concatenate[Vfs, P], R], *args: P.args, **named: P.kwargs
    ) -> Answer:
        """At once, or by a thread where the filesystem has become slow, or it would wait: nobody else can answer it."""
        if self._gate.is_slow:
            return self._by_thread(tell, act, *args, **named)
        try:
            return tell(act(self._vfs, *args, **named))
        except WouldWait:
            return self._by_thread(tell, act, *args, **named)

    async def _by_thread(
        self, tell: Callable[[R], Given], act: Callable[Concatenate[Vfs, P], R], *args: P.args, **named: P.kwargs
    ) -> Given:
        """Checkpoint  while the thread is at work"""
        return tell(await self._hands.wait_for(act, self._vfs, *args, **named))

    def _flush(self, _nodeid: int, request: Request) -> Answer:
        vfs_files.flush(self._vfs, *wire.HANDLE_IN.unpack_from(request, REQUEST_HEAD_SIZE))
        return self._done

    def _release(self, _nodeid: int, request: Request) -> Answer:
        self._vfs.release(*wire.HANDLE_IN.unpack_from(request, REQUEST_HEAD_SIZE))
        return self._done

    # Listings.

    def _opendir(self, nodeid: int, _request: Request) -> Answer:
        if not self._opens_directories:
            return errno.ENOSYS
        fh = listing.opendir(self._vfs, nodeid, self._caller)
        keeps = wire.FOPEN_KEEP_CACHE | wire.FOPEN_CACHE_DIR if self._vfs.is_listing_kept(nodeid) else 0
        wire.put_opened(self._opened, fh, keeps)
        return self._opened

    def _readdirplus(self, nodeid: int, request: Request) -> Answer:
        fh, offset, room = wire.READ_IN.unpack_from(request, REQUEST_HEAD_SIZE)
        reader = Reader(nodeid, self._caller.pid)
        room = self._jumps.room(reader, offset, room)
        if fh:
            listing.prepare(self._vfs, fh, offset)
            return self._entries(listing.read(self._vfs, fh, offset, room), room, reader)
        if self._gate.is_slow:
            return self._list_names(reader, offset, room)
        try:
            return self._entries(unopened.read(self._vfs, nodeid, offset, room), room, reader)
        except WouldWait:
            return self._list_names(reader, offset, room)

    def _entries(self, all_listed: Iterable[Listed], room: int, reader: Reader) -> bytes:
        entries, end, left = [], 0, room
        for listed in all_listed:
            entry = self._direntplus(listed)
            left -= len(entry)
            if listed.node is not None:
                listing.count(self._vfs, listed.node, is_taken=left >= 0)
            if left < 0:
                break
            entries.append(entry)
            end = listed.offset
        if entries:
            self._jumps.told(reader, end, room)
        return b"".join(entries)

    async def _list_names(self, reader: Reader, offset: int, room: int) -> Given:
        """Of a filesystem that has become slow. Checkpoint"""
        found = await self._hands.wait_for(unopened.read_names, self._vfs, reader.nodeid, offset, room)
        names = (Listed(name, None, ino, kind, following, None) for name, ino, following, kind in found)
        return self._entries(names, room, reader)

    def _fsyncdir(self, nodeid: int, request: Request) -> Answer:
        fh, flags = wire.FSYNC_IN.unpack_from(request, REQUEST_HEAD_SIZE)
        data_only = bool(flags & wire.FSYNC_DATA_ONLY)
        if fh:
            return self._by_thread(self._say_done, listing.fsyncdir, fh, data_only=data_only)
        return self._by_thread(self._say_done, unopened.fsyncdir, nodeid, data_only=data_only)

    def _direntplus(self, listed: Listed) -> bytes:
        name, known, ino, kind, offset, node = listed
        if known is None or node is None:
            return wire.dirent_alone(name, offset, ino, kind)
        return wire.direntplus(name, offset, known.nodeid, known.nodeid, known.attributes, *self._lifetimes(known))

    def _releasedir(self, _nodeid: int, request: Request) -> Answer:
        listing.releasedir(self._vfs, *wire.HANDLE_IN.unpack_from(request, REQUEST_HEAD_SIZE))
        return self._done


def _remembered(known: Known | None) -> Known:
    """What was found in memory. Raises  WouldWait: nothing"""
    if known is None:
        raise WouldWait
    return known
