"""Fields of replies that pyfuse3 does not know, set without patching it; and flags of INIT that the kernel offers.

Before a handler returns, a file in memory takes the place of the session's fd; the reply that libfuse then writes is
patched and passed on to the kernel as soon as pyfuse3 wants to read again (pyfuse3_loop.hook). A socket would do, but
refuses a listing of a megabyte.

Source  linux/fuse.h: fuse_in_header, fuse_init_in, fuse_out_header, fuse_init_out, fuse_open_out, fuse_direntplus
"""

from __future__ import annotations

import os
import select
import struct
from collections.abc import Callable, Collection
from functools import partial
from typing import Final

from fusefs.core import fuse_protocol as wire
from fusefs.core.fast_paths import FastPath
from fusefs.core.fuse_protocol import ANSWER_HEAD_SIZE, REQUEST_HEAD_SIZE
from fusefs.linux.fd import Fd
from fusefs.mount.requests.fuse_requests import GONE

_ERROR_AT = 4
_OFFER_AT = REQUEST_HEAD_SIZE + 12
_OFFER = struct.Struct("=II")
_REQUEST_BYTES_MAX = 1 << 16
_INIT_FLAGS_AT = ANSWER_HEAD_SIZE + 12
_INIT_MORE_FLAGS_AT = ANSWER_HEAD_SIZE + 32
_INIT_STACK_DEPTH_AT = ANSWER_HEAD_SIZE + 36
_OPEN_FLAGS_AT = ANSWER_HEAD_SIZE + 8
_FLAGS = struct.Struct("=I")
_INIT_BACKGROUND_AT = ANSWER_HEAD_SIZE + 16
_BACKGROUND = struct.Struct("=HH")
_N_BACKGROUND = 256
_FUSE_DONT_MASK, _FUSE_INIT_EXT, _FUSE_NO_EXPORT_SUPPORT = 1 << 6, 1 << 30, 1 << 38
_FUSE_ALWAYS = _FUSE_DONT_MASK | _FUSE_INIT_EXT | _FUSE_NO_EXPORT_SUPPORT
INIT_BITS: Final = {
    FastPath.PARALLEL: 1 << 18, FastPath.LINKS: 1 << 23, FastPath.KILLPRIV: 1 << 28,
    FastPath.UNOPENED: 1 << 24, FastPath.PASSTHROUGH: 1 << 37, FastPath.URING: 1 << 41,
}  # fmt: skip
"""What the kernel offers in INIT, and is told that we want: fast paths by their bits, of two words of 32."""
_CREATE_FLAGS_AT = ANSWER_HEAD_SIZE + 128 + 8
_OPEN_END = struct.Struct("=Ii")
_NO_NODE = bytes(40)
"""Of fuse_entry_out what comes before the attributes: nodeid, generation, and the timeouts."""
_GENERATION_AT = 8
NAME_ONLY_GENERATION = (1 << 64) - 1
"""Marks entries of a listing of which the kernel is to be told the name alone."""
_NAME_ONLY = NAME_ONLY_GENERATION.to_bytes(8, "little")
_NAME_SIZE_AT, _NAME_AT = 128 + 16, 128 + 24
_SHORT_BYTES, _LONG_BYTES = 1 << 9, 1 << 18
"""All replies but listings fit into the first; what reads them asks for no length before."""

Patch = Callable[[bytearray], None]


def _as_it_is(_message: bytearray) -> None:
    """A reply that needs no patch."""


def _nobody_cares() -> None:
    """A reply is lost that nothing hangs on."""


class ReplyPatching:
    """The way of one session's replies to the kernel."""

    def __init__(self, session_fd: int) -> None:
        """session_fd: /dev/fuse, as libfuse writes to it."""
        self._session_fd = session_fd
        self.device = os.dup(session_fd)
        """/dev/fuse, whatever libfuse reads and writes at the moment; ours."""
        self._held_back = os.memfd_create("trashd-reply")
        self._end = 0  # of what was written to it so far
        self._patch: Patch | None = None
        self._lost = _nobody_cares
        self._can_patch = True

    def close(self) -> None:
        """Let go of it."""
        os.close(self.device)
        os.close(self._held_back)

    def let_pass(self) -> None:
        """Patch nothing from now on: `replied` is not called, and what is held back would never get there."""
        self._can_patch = False

    def offered(self) -> int | None:
        """The bits of INIT that the kernel offers; None if it has not asked.

        Its first request waits from the moment of mounting. We take it, and leave it where libfuse reads next: in a
        file in memory that takes the place of the session's fd. Its answer must be patched: the device comes back then.
        Nothing may be asked of the session's fd in between.
        """
        poll = select.poll()
        poll.register(self.device, select.POLLIN)
        if [events for _fd, events in poll.poll(0)] != [select.POLLIN]:
            return None
        request = os.read(self.device, _REQUEST_BYTES_MAX)
        with Fd(os.memfd_create("trashd-request")) as file:
            os.write(file, request)
            os.lseek(file, 0, os.SEEK_SET)
            os.dup2(file, self._session_fd, inheritable=False)
        return _offer(request)

    def patch_next(self, patch: Patch, lost: Callable[[], None] = _nobody_cares) -> None:
        """Have the reply patched that the handler which calls this is about to give, unless that is an error.

        lost        called if no process waits for it any more
        Checkpoint  none must come before the handler returns: any other reply would be held back instead
        """
        if self._can_patch:
            os.dup2(self._held_back, self._session_fd, inheritable=False)
            self._patch, self._lost = patch, lost

    def hand_over(self, request: bytes | memoryview) -> None:
        """Leave a request that we have read where libfuse reads now; its answer is passed on as what is held back."""
        os.pwrite(self._held_back, request, self._end)
        os.lseek(self._held_back, self._end, os.SEEK_SET)
        self._end += len(request)
        self.patch_next(_as_it_is)

    def replied(self) -> None:
        """Pass on what was held back, if anything was.

        Raises  OSError; not if the connection was aborted meanwhile: the next read tells that
        """
        if self._patch is None:
            return
        patch, lost, self._patch = self._patch, self._lost, None
        os.dup2(self.device, self._session_fd, inheritable=False)
        rest = self._take()
        # None: it was a request without an answer, or its handler waits: that goes out as usual. More than one: libfuse
        # had something to say about an interrupted request first.
        while rest:
            size = _FLAGS.unpack_from(rest)[0]
            message, rest = (rest, bytearray()) if size == len(rest) else (rest[:size], rest[size:])
            has_failed = bool(_FLAGS.unpack_from(message, _ERROR_AT)[0])
            if not has_failed:
                patch(message)
            try:
                os.write(self.device, message)
            except OSError as error:
                if error.errno not in GONE:
                    raise
                if not has_failed:
                    lost()

    def _take(self) -> bytearray:
        """What libfuse has written: behind all before it, in a file that begins anew when it has grown."""
        message, size = bytearray(), _SHORT_BYTES
        while len(part := os.pread(self._held_back, size, self._end + len(message))) == size:
            message += part
            size = _LONG_BYTES
        message += part
        self._end += len(message)
        if self._end > _LONG_BYTES:
            os.ftruncate(self._held_back, 0)
            os.lseek(self._held_back, 0, os.SEEK_SET)
            self._end = 0
        return message


def _offer(request: bytes) -> int:
    """The bits of an INIT request; before Linux 5.17 it has 32 of them."""
    flags, more = _OFFER.unpack_from(request.ljust(_OFFER_AT + _OFFER.size, b"\0"), _OFFER_AT)
    return int(flags | more << 32 if flags & _FUSE_INIT_EXT else flags)


def beginning(wanted: Collection[FastPath], *, stack_depth: int) -> Patch:
    """INIT: what libfuse does not ask for.

    Modes come as they were asked for: in a directory with a default ACL no umask applies. Reads ahead (of which the
    kernel has 12) do not wait for a slow filesystem. There are no file handles (Linux 6.9): the kernel makes them of a
    nodeid, which is another file's when this one is gone.

    wanted       fast paths; a kernel that does not know a bit passes over it
    stack_depth  how many filesystems lie on each other with ours on top, as far as it is passed through
    """
    bits = sum(INIT_BITS.get(path, 0) for path in wanted) | _FUSE_ALWAYS

    def begin_session(message: bytearray) -> None:
        _add_flags(message, _INIT_FLAGS_AT, bits & 0xFFFFFFFF)
        _add_flags(message, _INIT_MORE_FLAGS_AT, bits >> 32)
        if FastPath.PASSTHROUGH in wanted:
            _FLAGS.pack_into(message, _INIT_STACK_DEPTH_AT, stack_depth)
        _BACKGROUND.pack_into(message, _INIT_BACKGROUND_AT, _N_BACKGROUND, _N_BACKGROUND * 3 // 4)

    return begin_session


def cache_listing(flags: int, message: bytearray) -> None:
    """OPENDIR: whether the kernel keeps the listing, and shows what it kept last time. flags: FOPEN_*"""
    _add_flags(message, _OPEN_FLAGS_AT, flags)


def open_through(backing_id: int) -> Patch:
    """OPEN: the kernel reads and writes the file of an id itself, and keeps no pages."""
    return partial(_pass_through, _OPEN_FLAGS_AT, backing_id)


def create_through(backing_id: int) -> Patch:
    """CREATE: the same."""
    return partial(_pass_through, _CREATE_FLAGS_AT, backing_id)


def _pass_through(flags_at: int, backing_id: int, message: bytearray) -> None:
    flags = _FLAGS.unpack_from(message, flags_at)[0]
    _OPEN_END.pack_into(message, flags_at, flags & ~wire.FOPEN_KEEP_CACHE | wire.FOPEN_PASSTHROUGH, backing_id)


def omit_nodes(message: bytearray) -> None:
    """READDIRPLUS: names and inode numbers alone of entries of that generation; the kernel counts no reference."""
    at = ANSWER_HEAD_SIZE
    while at < len(message):
        if message[at + _GENERATION_AT : at + _GENERATION_AT + len(_NAME_ONLY)] == _NAME_ONLY:
            message[at : at + len(_NO_NODE)] = _NO_NODE
        name_size = _FLAGS.unpack_from(message, at + _NAME_SIZE_AT)[0]
        at += (_NAME_AT + name_size + 7) & ~7


def _add_flags(message: bytearray, at: int, flags: int) -> None:
    _FLAGS.pack_into(message, at, _FLAGS.unpack_from(message, at)[0] | flags)
