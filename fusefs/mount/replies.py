"""Bits of replies that pyfuse3 has no field for, without patching it.

Before a handler returns, one end of a socket takes the place of the session's fd; the reply that libfuse then writes
is patched and passed on to the kernel as soon as pyfuse3 wants to read again (loop.hook).
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable

_MOST = 4096
_ERROR_AT = 4
_INIT_FLAGS_AT = 16 + 12
_FLAGS = struct.Struct("=I")
_FUSE_DONT_MASK = 1 << 6

Patch = Callable[[bytearray], None]


class Replies:
    """The way of one session's replies to the kernel."""

    def __init__(self, session_fd: int) -> None:
        """session_fd: /dev/fuse, as libfuse writes to it."""
        self._session_fd = session_fd
        self._device = os.dup(session_fd)
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)
        self._patch: Patch | None = None

    def close(self) -> None:
        """Let go of it."""
        os.close(self._device)
        self._ours.close()
        self._theirs.close()

    def patch_next(self, patch: Patch) -> None:
        """Have the reply patched that the handler which calls this is about to give, unless that is an error."""
        os.dup2(self._theirs.fileno(), self._session_fd, inheritable=False)
        self._patch = patch

    def replied(self) -> None:
        """Pass on what was held back, if anything was. Raises  OSError"""
        if self._patch is None:
            return
        patch, self._patch = self._patch, None
        os.dup2(self._device, self._session_fd, inheritable=False)
        message = bytearray(self._ours.recv(_MOST))
        if not _FLAGS.unpack_from(message, _ERROR_AT)[0]:
            patch(message)
        os.write(self._device, message)


def leave_umask_to_us(message: bytearray) -> None:
    """INIT: the kernel hands us modes as they were asked for: in a directory with a default ACL no umask applies."""
    flags = _FLAGS.unpack_from(message, _INIT_FLAGS_AT)[0]
    _FLAGS.pack_into(message, _INIT_FLAGS_AT, flags | _FUSE_DONT_MASK)
