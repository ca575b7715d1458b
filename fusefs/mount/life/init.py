"""INIT, the kernel's first request on a connection: the kernel offers features, and the daemon selects some of them.

The request waits in /dev/fuse from the moment of mounting. All other requests wait for the reply.

Source  linux/fuse.h: fuse_init_in, fuse_init_out; process_init_reply in the kernel's fs/fuse/inode.c
"""

from __future__ import annotations

import os
import re
import struct
from enum import IntFlag
from typing import Final, NamedTuple

from fusefs.core.errors import KernelRefused
from fusefs.core.fuse_protocol import REQUEST_BYTES_MAX, REQUEST_HEAD_SIZE, Opcode, encode_head, read_head

_MAJOR, _MINOR = 7, 33
"""The protocol version in the reply, which is the oldest that the daemon supports. Flags enable newer features."""
_SINCE = (5, 11)
"""The first Linux release with protocol version 7.33."""
_REQUEST = struct.Struct("=IIIII")
"""Major and minor version, max_readahead, flags, flags2."""
_REPLY = struct.Struct("=IIIIHHIIHHII24x")
"""Major and minor version, max_readahead, flags, max_background, congestion_threshold, max_write, time_gran, max_pages,
map_alignment, flags2, max_stack_depth."""
_WRITE_BYTES = 1 << 20
_PAGES = _WRITE_BYTES >> 12
_BACKGROUND = 256
"""Limit for requests that no process waits for, such as readahead. With the kernel's default of 12, they would queue up
for a slow filesystem."""

_ASYNC_READ, _ATOMIC_O_TRUNC, _BIG_WRITES, _DONT_MASK = 1 << 0, 1 << 3, 1 << 5, 1 << 6
_AUTO_INVAL_DATA, _DO_READDIRPLUS, _ASYNC_DIO, _POSIX_ACL = 1 << 12, 1 << 13, 1 << 15, 1 << 20
_PARALLEL_DIROPS, _MAX_PAGES, _HANDLE_KILLPRIV_V2, _INIT_EXT = 1 << 18, 1 << 22, 1 << 28, 1 << 30
_NO_EXPORT_SUPPORT = 1 << 38
_ALWAYS: Final = (
    _ASYNC_READ  # several reads of a file may be under way at a time
    # an open with O_TRUNC is one request, so the file is truncated as the caller, after waiting for a lease
    | _ATOMIC_O_TRUNC
    | _BIG_WRITES
    | _MAX_PAGES  # a write of up to 1 MiB is one request
    | _DONT_MASK  # modes arrive as the caller passed them: in a directory with a default ACL, no umask applies
    | _AUTO_INVAL_DATA  # the kernel drops its cached pages of a file whose mtime has changed
    | _DO_READDIRPLUS  # names are sent with attributes; always, since READDIRPLUS_AUTO is not set
    | _ASYNC_DIO
    | _PARALLEL_DIROPS  # lookups in one directory do not wait for each other
    | _HANDLE_KILLPRIV_V2  # a write removes set-user-ID bits and file capabilities without another request
    | _INIT_EXT  # the kernel reads flags2
    | _NO_EXPORT_SUPPORT  # no file handles: the kernel makes them from a nodeid, which may later belong to another file
)


class InitFlag(IntFlag):
    """Flags that depend on the backing filesystem and on the mount's options."""

    CACHE_SYMLINKS = 1 << 23
    NO_OPENDIR_SUPPORT = 1 << 24
    PASSTHROUGH = 1 << 37
    OVER_IO_URING = 1 << 41


class InitRequest(NamedTuple):
    """The INIT request, with the features that the kernel offers."""

    unique: int
    max_readahead: int
    flags: int

    def offers(self, flag: InitFlag) -> bool:
        """Return whether the kernel supports and allows a feature."""
        return bool(self.flags & flag)


def why_too_old(release: str) -> str | None:
    """Return why a kernel release is too old for the engine; None if it is not. Call this before mounting."""
    if tuple(map(int, re.findall(r"\d+", release)[:2])) < _SINCE:
        return f"it needs Linux 5.11 or later, and this is {release}"
    return None


def read_init(device: int) -> InitRequest:
    """Read the request from /dev/fuse.

    Raises  KernelRefused: the kernel's FUSE is too old; OSError: the connection is gone
    """
    request = os.read(device, REQUEST_BYTES_MAX)
    _size, opcode, unique, *_ = read_head(request)
    major, minor, max_readahead, flags, more = _REQUEST.unpack_from(request.ljust(64, b"\0"), REQUEST_HEAD_SIZE)
    if opcode != Opcode.INIT or (major, minor) < (_MAJOR, _MINOR):
        detail = f"FUSE {_MAJOR}.{_MINOR} is needed (Linux 5.11), but this kernel has {major}.{minor}"
        raise KernelRefused(detail, "-o engine=plain works with older kernels")
    return InitRequest(unique, max_readahead, flags | more << 32 if flags & _INIT_EXT else flags)


def reply_to_init(
    device: int, request: InitRequest, extra_flags: InitFlag, *, has_acls: bool, stack_depth: int
) -> None:
    """Reply to INIT. From then on, the kernel sends other requests. It ignores flags that it has not offered.

    has_acls     the kernel checks permissions, including ACLs
    stack_depth  how many filesystems are stacked, including this one, if files are passed through
    Raises       OSError: the connection is gone
    """
    flags = _ALWAYS | extra_flags | (_POSIX_ACL if has_acls else 0)
    body = _REPLY.pack(
        _MAJOR, _MINOR, request.max_readahead, flags & 0xFFFFFFFF, _BACKGROUND, _BACKGROUND * 3 // 4, _WRITE_BYTES, 1,
        _PAGES, 0, flags >> 32, stack_depth if extra_flags & InitFlag.PASSTHROUGH else 0,
    )  # fmt: skip
    os.writev(device, (encode_head(request.unique, len(body)), body))
