"""INIT, the kernel's first request on a connection: what the kernel offers, and what the daemon takes of it.

The request waits in /dev/fuse from the moment of mounting. Every other request waits for the reply.

Source  linux/fuse.h: fuse_init_in, fuse_init_out; process_init_reply in the kernel's fs/fuse/inode.c
"""

from __future__ import annotations

import os
import re
import struct
from enum import IntFlag
from typing import Final, NamedTuple

from fusefs.core.errors import KernelRefused
from fusefs.core.fuse_protocol import REQUEST_BYTES_MAX, REQUEST_HEAD_SIZE, Opcode, head, read_head

_MAJOR, _MINOR = 7, 33
"""The version of the reply, and the oldest that will do. What is newer has a flag."""
_SINCE = (5, 11)
"""The release of Linux with that version."""
_REQUEST = struct.Struct("=IIIII")
"""Major and minor version, max_readahead, flags, flags2."""
_REPLY = struct.Struct("=IIIIHHIIHHII24x")
"""Major and minor version, max_readahead, flags, max_background, congestion_threshold, max_write, time_gran, max_pages,
map_alignment, flags2, max_stack_depth."""
_WRITE_BYTES = 1 << 20
_PAGES = _WRITE_BYTES >> 12
_BACKGROUND = 256
"""Requests for which no process waits, such as those that read ahead, under way at a time; the kernel's own limit of 12
keeps them waiting for a slow filesystem."""

_ASYNC_READ, _ATOMIC_O_TRUNC, _BIG_WRITES, _DONT_MASK = 1 << 0, 1 << 3, 1 << 5, 1 << 6
_AUTO_INVAL_DATA, _DO_READDIRPLUS, _ASYNC_DIO, _POSIX_ACL = 1 << 12, 1 << 13, 1 << 15, 1 << 20
_PARALLEL_DIROPS, _MAX_PAGES, _HANDLE_KILLPRIV_V2, _INIT_EXT = 1 << 18, 1 << 22, 1 << 28, 1 << 30
_NO_EXPORT_SUPPORT = 1 << 38
_ALWAYS: Final = (
    _ASYNC_READ  # several reads of a file are under way at a time
    | _ATOMIC_O_TRUNC  # an open with O_TRUNC is one request, so the file is cut as the caller and after a lease
    | _BIG_WRITES
    | _MAX_PAGES  # a write of up to 1 MiB is one request
    | _DONT_MASK  # modes come as the caller passed them: no umask applies in a directory with a default ACL
    | _AUTO_INVAL_DATA  # the kernel drops its pages of a file whose time of change is another
    | _DO_READDIRPLUS  # attributes come with the names; without _READDIRPLUS_AUTO always
    | _ASYNC_DIO
    | _PARALLEL_DIROPS  # lookups in one directory do not wait for each other
    | _HANDLE_KILLPRIV_V2  # a write takes away set-user-ID bits and file capabilities without a request for that
    | _INIT_EXT  # flags2 count
    | _NO_EXPORT_SUPPORT  # no file handles: the kernel makes them of a nodeid, which may be another file's later
)


class InitFlag(IntFlag):
    """Flags of which a mount has those that suit its backing filesystem and its options."""

    CACHE_SYMLINKS = 1 << 23
    NO_OPENDIR_SUPPORT = 1 << 24
    PASSTHROUGH = 1 << 37
    OVER_IO_URING = 1 << 41


class InitRequest(NamedTuple):
    """What the kernel offers."""

    unique: int
    max_readahead: int
    flags: int

    def offers(self, flag: InitFlag) -> bool:
        """Whether the kernel knows a flag, and allows it."""
        return bool(self.flags & flag)


def why_too_old(release: str) -> str | None:
    """What keeps the engine from a kernel, by its release: to be asked before the mount. None: nothing does"""
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
        detail = f"FUSE {_MAJOR}.{_MINOR} is needed (Linux 5.11), and this kernel has {major}.{minor}"
        raise KernelRefused(detail, "-o engine=plain works with older kernels")
    return InitRequest(unique, max_readahead, flags | more << 32 if flags & _INIT_EXT else flags)


def answer_init(device: int, request: InitRequest, wanted: InitFlag, *, has_acls: bool, stack_depth: int) -> None:
    """Answer the request: the kernel sends others from now on. A flag that it has not offered it passes over.

    has_acls     the kernel checks permissions by ACLs, too
    stack_depth  how many filesystems lie on each other with ours on top, as far as files are passed through
    Raises       OSError: the connection is gone
    """
    flags = _ALWAYS | wanted | (_POSIX_ACL if has_acls else 0)
    body = _REPLY.pack(
        _MAJOR, _MINOR, request.max_readahead, flags & 0xFFFFFFFF, _BACKGROUND, _BACKGROUND * 3 // 4, _WRITE_BYTES, 1,
        _PAGES, 0, flags >> 32, stack_depth if wanted & InitFlag.PASSTHROUGH else 0,
    )  # fmt: skip
    os.writev(device, (head(request.unique, len(body)), body))
