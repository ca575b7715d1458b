"""FUSE over io_uring: the kernel hands requests to a thread on the core that they come from (Linux 6.14).

A connection has a queue for each core that there could be, and each queue has entries: memory of ours for one request
and its answer. A thread's ring has entries of one queue or more. An entry that is registered or committed is the
kernel's until it comes back with a request. All this happens inside of io_uring_enter, by the thread that made the ring
(DEFER_TASKRUN): until it calls that, nothing is written to its entries, and a thread that is stuck elsewhere keeps a
request waiting that the kernel has meant for one of them.

Source  linux/fuse.h: fuse_uring_req_header, fuse_uring_cmd_req; fs/fuse/dev_uring.c
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
import threading
from math import inf
from typing import Protocol

from fusefs.core.fuse_protocol import REQUEST_HEAD_SIZE, Request
from fusefs.linux.fd import Fd
from fusefs.linux.io_uring import READ, IoUring

_REGISTER, _COMMIT_AND_FETCH = 1, 2
_N_SUBMISSIONS = 32
_PAGE = mmap.PAGESIZE
_HEADERS_SIZE = 288
"""struct fuse_uring_req_header: the request's head, or the answer's; the operation's own part of a request; and"""
_OWN_AT, _ENTRY_AT = 128, 256
_ENTRY_IN = struct.Struct("=8xQI")
"""struct fuse_uring_ent_in_out: flags, number to commit by, size of the payload."""
_ANSWER = struct.Struct("=IiQ")
_SIZE_AT = _ENTRY_AT + 16
_SIZE = struct.Struct("=I")
_IOVEC = struct.Struct("=QQQQ")
_SHORT_BYTES = 1 << 13
_KEPT_BYTES = 1 << 16
"""Of an entry that stay in memory."""
_REST_S = 1.0
"""After which memory is given back."""
_WAKE, _NOTHING = 0, (1 << 64) - 1
"""What is no entry's number."""
_GONE = (errno.ENOTCONN, errno.ECONNABORTED, errno.ECANCELED, errno.ENOENT, errno.EBADF)
"""The last: /dev/fuse was closed, as by the daemon's end before a thread has given its last answer."""


class ConnectionGone(Exception):
    """The mount is gone, or its connection was aborted: no entry comes back any more."""


class RingEntry:
    """Memory for one request and its answer; for whoever answers it, from when it has come to when it is committed."""

    __slots__ = ("_iovec", "_large", "_memory", "address", "iovec_at", "is_ours", "queue", "token", "unique")

    def __init__(self, queue: int, token: int, payload_bytes: int, large: set[RingEntry]) -> None:
        """An entry of a queue. large: is to hold those that have much memory in use. Raises  OSError ENOMEM"""
        self.queue = queue
        self.token = token
        self.unique = 0
        self.is_ours = True
        """Whether it is not the kernel's: it is new, or has come with a request that is not answered yet."""
        # private: MADV_DONTNEED gives nothing back of a shared mapping
        self._memory = mmap.mmap(-1, _PAGE + payload_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_DONTFORK)
        self._large = large
        self.address = at = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._iovec = ctypes.create_string_buffer(_IOVEC.pack(at, _HEADERS_SIZE, at + _PAGE, payload_bytes))
        self.iovec_at = ctypes.addressof(self._iovec)

    def request(self) -> Request:
        """What has come, as it would be read from /dev/fuse; a large one stays in the entry, and is good until then."""
        memory = self._memory
        self.unique, n_payload = _ENTRY_IN.unpack_from(memory, _ENTRY_AT)
        size = _SIZE.unpack_from(memory)[0]
        n_own = size - REQUEST_HEAD_SIZE - n_payload
        head, own = memory[:REQUEST_HEAD_SIZE], memory[_OWN_AT : _OWN_AT + n_own]
        if n_payload <= _SHORT_BYTES:
            return head + own + memory[_PAGE : _PAGE + n_payload]
        if n_payload > _KEPT_BYTES:
            self._large.add(self)
        begin = _PAGE - n_own - REQUEST_HEAD_SIZE
        memory[begin:_PAGE] = head + own
        return memoryview(memory)[begin : begin + size]

    def answer(self, body: bytes | bytearray | memoryview) -> None:
        """Write what is answered, without a head."""
        memory, n = self._memory, len(body)
        memory[_PAGE : _PAGE + n] = body
        _ANSWER.pack_into(memory, 0, _ANSWER.size + n, 0, self.unique)
        _SIZE.pack_into(memory, _SIZE_AT, n)
        if n > _KEPT_BYTES:
            self._large.add(self)

    def refuse(self, error: int) -> None:
        """Write that it fails. error: an errno; 0: it is done, and there is nothing to say"""
        _ANSWER.pack_into(self._memory, 0, _ANSWER.size, -error, self.unique)
        _SIZE.pack_into(self._memory, _SIZE_AT, 0)

    def give_back(self) -> None:
        """Let the memory go that large ones have taken; nothing may be in it."""
        self._memory.madvise(mmap.MADV_DONTNEED, _PAGE + _KEPT_BYTES)
        self._large.discard(self)


class Answering(Protocol):
    """What answers some requests when they come, without Python."""

    def enter(self, n_results: int, timeout_s: float, /) -> list[tuple[int, int]]:
        """As IoUring's; what it returns is left to be answered, or is no request."""

    def add(self, token: int, address: int, queue: int, /) -> None:
        """An entry, from now on, and where its memory is; the first token is 1."""


class FuseRing(IoUring):
    """For the thread alone that makes it, but for `wake`."""

    def __init__(self, device: int, payload_bytes: int) -> None:
        """Begin without entries.

        device         /dev/fuse
        payload_bytes  that each entry has: 8 KiB at least, as much as a write and as all pages of a request, as INIT
                       was answered; memory is taken where it is touched
        Raises         OSError: as IoUring; EMFILE
        """
        super().__init__(_N_SUBMISSIONS, 1, is_wide=True)
        self._device = device
        self._payload_bytes = payload_bytes
        self._entries: list[RingEntry] = []
        self._large: set[RingEntry] = set()
        self._come: list[RingEntry] = []
        self._answering: Answering | None = None
        self._woken = ctypes.create_string_buffer(8)
        self._wakes = Fd(os.eventfd(0, os.EFD_CLOEXEC))
        self._is_woken = False
        """Whether it was, and no `wait` has returned since: a `flush` may hear of it first."""
        self._is_open, self._waking = True, threading.Lock()
        self._await_wake()

    def close(self) -> None:
        """Let it go: its entries never come back, and their clients wait until the connection is aborted."""
        super().close()
        with self._waking:
            self._is_open = False
            self._wakes.close()

    def new_entry(self, queue: int) -> RingEntry:
        """An entry of a queue, to be registered. Raises  OSError ENOMEM"""
        entry = RingEntry(queue, len(self._entries) + 1, self._payload_bytes, self._large)
        self._entries.append(entry)
        if self._answering is not None:
            self._answering.add(entry.token, entry.address, queue)
        return entry

    def answer_with(self, answering: Answering) -> None:
        """Have some requests answered by that from now on."""
        for entry in self._entries:
            answering.add(entry.token, entry.address, entry.queue)
        self._answering = answering

    def done(self, token: int, unique: int) -> RingEntry:
        """An entry whose request has been done, but not answered yet."""
        entry = self._entries[token - 1]
        entry.is_ours, entry.unique = True, unique
        return entry

    def register(self, entry: RingEntry) -> None:
        """Give the kernel an entry, from the next `wait` on."""
        entry.is_ours = False
        self._command(_REGISTER, entry.token, entry.queue, address=entry.iovec_at, length=2)

    def register_nothing(self) -> None:
        """Ask at once for what the kernel refuses: before all queues have entries, that sends it back to /dev/fuse."""
        self._command(_REGISTER, _NOTHING, 0)
        self.enter(0)

    def commit(self, entry: RingEntry) -> None:
        """Give the kernel an answer, and the entry back, from the next `wait` on."""
        entry.is_ours = False
        self._command(_COMMIT_AND_FETCH, entry.token, entry.queue, commit_id=entry.unique)

    def _command(
        self, command: int, token: int, queue: int, *, address: int = 0, length: int = 0, commit_id: int = 0
    ) -> None:
        self._make_room()
        self.submit_command(self._device, command, token, commit_id, queue, address=address, length=length)

    def _make_room(self) -> None:
        while self.is_full():  # the kernel may be short of memory, and take nothing at first
            self.flush()

    def flush(self) -> None:
        """Let the kernel have what it is to be given. Raises  as `wait`"""
        self._sort(self.enter(0))

    def has_free_entry(self, queue: int) -> bool:
        """Whether the kernel has an entry to put a request of a queue's into; by any thread."""
        return any(entry.queue == queue and not entry.is_ours for entry in self._entries)

    def wake(self) -> None:
        """Have `wait` return, if it is not closed yet: its number may be another's by then; by any thread."""
        with self._waking:
            if self._is_open:
                os.eventfd_write(self._wakes, 1)

    def _await_wake(self) -> None:
        self._make_room()  # the native core may have filled the queue with answers
        self.submit(READ, self._wakes, _WAKE, address=ctypes.addressof(self._woken), length=8)

    def wait(self) -> list[RingEntry]:
        """Wait for entries that have come back with requests; none: it was woken.

        Raises  ConnectionGone; OSError: an entry was not taken: EAGAIN before the connection has begun, EINVAL if its
                payload is too short, EOPNOTSUPP if the administrator has forbidden it meanwhile
        """
        if not self._come and not self._is_woken:
            enter = self.enter if self._answering is None else self._answering.enter
            found = enter(1, _REST_S if self._large else inf)
            if not found and self.is_empty():  # an answer that was not submitted is in its entry's memory still
                self._give_back()
            self._sort(found)
        come, self._come, self._is_woken = self._come, [], False
        return come

    def _sort(self, found: list[tuple[int, int]]) -> None:
        for token, result in found:
            if not result:
                entry = self._entries[token - 1]
                entry.is_ours = True
                self._come.append(entry)
            elif token == _WAKE:
                self._is_woken = True
                self._await_wake()
            elif -result in _GONE:
                raise ConnectionGone
            else:
                raise OSError(-result, os.strerror(-result))

    def _give_back(self) -> None:
        for entry in [one for one in self._large if not one.is_ours]:
            entry.give_back()
