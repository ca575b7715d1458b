"""Bits of replies that pyfuse3 has no field for, without patching it.

Before a handler returns, a file in memory takes the place of the session's fd; the reply that libfuse then writes is
patched and passed on to the kernel as soon as pyfuse3 wants to read again (loop.hook). A socket would do, but refuses
a listing of a megabyte.

Source  linux/fuse.h: fuse_out_header, fuse_init_out, fuse_open_out, fuse_direntplus
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable

_HEAD_SIZE = 16
_ERROR_AT = 4
_INIT_FLAGS_AT = _HEAD_SIZE + 12
_OPEN_FLAGS_AT = _HEAD_SIZE + 8
_FLAGS = struct.Struct("=I")
_INIT_BACKGROUND_AT = _HEAD_SIZE + 16
_BACKGROUND = struct.Struct("=HH")
_N_BACKGROUND = 256
_FUSE_DONT_MASK, _FUSE_PARALLEL_DIROPS = 1 << 6, 1 << 18
_FOPEN_KEEP_CACHE, _FOPEN_CACHE_DIR = 1 << 1, 1 << 3
_NO_NODE = bytes(40)
"""Of fuse_entry_out what comes before the attributes: nodeid, generation, and the timeouts."""
_GENERATION_AT = 8
NAME_ONLY_GENERATION = (1 << 64) - 1
"""Marks entries of a listing of which the kernel is to be told the name alone."""
_NAME_ONLY = NAME_ONLY_GENERATION.to_bytes(8, "little")
_NAME_SIZE_AT, _NAME_AT = 128 + 16, 128 + 24
_GONE = (errno.ENOENT, errno.ENODEV)

Patch = Callable[[bytearray], None]


class Replies:
    """The way of one session's replies to the kernel."""

    def __init__(self, session_fd: int) -> None:
        """session_fd: /dev/fuse, as libfuse writes to it."""
        self._session_fd = session_fd
        self._device = os.dup(session_fd)
        self._held_back = os.memfd_create("trashd-reply")
        self._patch: Patch | None = None
        self._can_patch = True

    def close(self) -> None:
        """Let go of it."""
        os.close(self._device)
        os.close(self._held_back)

    def let_pass(self) -> None:
        """Patch nothing from now on: nobody calls `replied`, and what is held back would never get there."""
        self._can_patch = False

    def patch_next(self, patch: Patch) -> None:
        """Have the reply patched that the handler which calls this is about to give, unless that is an error.

        Checkpoint  none must come before the handler returns: any other reply would be held back instead
        """
        if self._can_patch:
            os.dup2(self._held_back, self._session_fd, inheritable=False)
            self._patch = patch

    def replied(self) -> None:
        """Pass on what was held back, if anything was.

        Raises  OSError; not if the connection was aborted meanwhile: whoever reads next is told
        """
        if self._patch is None:
            return
        patch, self._patch = self._patch, None
        os.dup2(self._device, self._session_fd, inheritable=False)
        message = self._take()
        if not _FLAGS.unpack_from(message, _ERROR_AT)[0]:
            patch(message)
        try:
            os.write(self._device, message)
        except OSError as error:
            if error.errno not in _GONE:
                raise

    def _take(self) -> bytearray:
        """What libfuse has written."""
        message = bytearray(os.lseek(self._held_back, 0, os.SEEK_CUR))
        os.preadv(self._held_back, [message], 0)
        os.lseek(self._held_back, 0, os.SEEK_SET)
        return message


def begin_session(message: bytearray) -> None:
    """INIT: what libfuse does not ask for.

    Modes come as they were asked for: in a directory with a default ACL no umask applies. Whoever waits for a slow
    filesystem does not keep others in the same directory waiting, nor do reads ahead (of which the kernel has 12).
    """
    _add_flags(message, _INIT_FLAGS_AT, _FUSE_DONT_MASK | _FUSE_PARALLEL_DIROPS)
    _BACKGROUND.pack_into(message, _INIT_BACKGROUND_AT, _N_BACKGROUND, _N_BACKGROUND * 3 // 4)


def keep_listing(message: bytearray) -> None:
    """OPENDIR: the kernel keeps the listing, and shows what it kept last time; it has to be told of changes."""
    _add_flags(message, _OPEN_FLAGS_AT, _FOPEN_KEEP_CACHE | _FOPEN_CACHE_DIR)


def leave_out_nodes(message: bytearray) -> None:
    """READDIRPLUS: names and inode numbers alone of entries of that generation; the kernel counts no reference."""
    at = _HEAD_SIZE
    while at < len(message):
        if message[at + _GENERATION_AT : at + _GENERATION_AT + len(_NAME_ONLY)] == _NAME_ONLY:
            message[at : at + len(_NO_NODE)] = _NO_NODE
        name_size = _FLAGS.unpack_from(message, at + _NAME_SIZE_AT)[0]
        at += (_NAME_AT + name_size + 7) & ~7


def _add_flags(message: bytearray, at: int, flags: int) -> None:
    _FLAGS.pack_into(message, at, _FLAGS.unpack_from(message, at)[0] | flags)
