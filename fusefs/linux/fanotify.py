"""What changes on a whole filesystem, as fanotify(7) tells root: by file handle and name, without opening anything."""

from __future__ import annotations

import errno
import os
import struct
from typing import NamedTuple

from fusefs.linux.fd import Fd
from fusefs.linux.syscalls import fanotify_init, fanotify_mark

FAN_MODIFY = 0x2
FAN_ATTRIB = 0x4
FAN_MOVED_FROM = 0x40
FAN_MOVED_TO = 0x80
FAN_CREATE = 0x100
FAN_DELETE = 0x200
FAN_Q_OVERFLOW = 0x4000
FAN_ONDIR = 0x4000_0000

_FAN_CLOEXEC = 0x1
_FAN_NONBLOCK = 0x2
_FAN_REPORT_DFID_NAME_TARGET = 0x200 | 0x400 | 0x800 | 0x1000  # since Linux 5.17
_FAN_MARK_ADD = 0x1
_FAN_MARK_ONLYDIR = 0x8
_FAN_MARK_FILESYSTEM = 0x100
_ALL = FAN_MODIFY | FAN_ATTRIB | FAN_MOVED_FROM | FAN_MOVED_TO | FAN_CREATE | FAN_DELETE | FAN_ONDIR

_VERSION = 3
_FID, _DFID_NAME = 1, 2
_WITH_HANDLE = (_FID, _DFID_NAME)
_EVENT = struct.Struct("=IBxHQii")
"""struct fanotify_event_metadata: length, version, length of this head, mask, fd, pid."""
_RECORD = struct.Struct("=BxH")
"""struct fanotify_event_info_header: type and length."""
_FID_RECORD = struct.Struct("=BxH8xIi")
"""struct fanotify_event_info_fid: that, the filesystem's id, and the head of a file handle: size and type."""
_HANDLE_AT = 12
_BUFFER_SIZE = 32768


class FanotifyChange(NamedTuple):
    """Something that happened; several things that happened to the same names may come as one.

    mask       what, as bits (FAN_*)
    pid        the process that did it; 0 if it is not of our pid namespace
    directory  the handle of the directory that a name is in; empty if there is none to tell
    name       the name that it happened to, or by which it was reached; empty if there is none to tell
    subject    the handle of the inode that it happened to, or that has or had the name; empty if there is none to tell
    """

    mask: int
    pid: int
    directory: bytes
    name: bytes
    subject: bytes


def watch_filesystem(dir_fd: int) -> Fd:
    """An fd that is readable when something changes on the filesystem of a directory (O_PATH will do).

    What is written through a mapping is not told, nor what another machine does on a network filesystem.

    Raises  OSError: EPERM without CAP_SYS_ADMIN, EINVAL before Linux 5.17, EXDEV in a btrfs subvolume, ENODEV or
            EOPNOTSUPP on a filesystem without an id or handles
    """
    flags = _FAN_CLOEXEC | _FAN_NONBLOCK | _FAN_REPORT_DFID_NAME_TARGET
    watch = Fd(fanotify_init(flags, os.O_RDONLY | os.O_CLOEXEC))
    try:
        how = _FAN_MARK_ADD | _FAN_MARK_FILESYSTEM | _FAN_MARK_ONLYDIR
        fanotify_mark(watch, how, _ALL, dir_fd, b".")
    except BaseException:
        watch.close()
        raise
    return watch


def read_changes(watch: int, but_of: int) -> list[FanotifyChange]:
    """What has happened since the last call, at most a buffer full, in its order; nothing if there is nothing.

    but_of  a pid whose changes are left out
    """
    try:
        raw = os.read(watch, _BUFFER_SIZE)
    except BlockingIOError:
        return []
    return parse_changes(raw, but_of)


def parse_changes(raw: bytes, but_of: int) -> list[FanotifyChange]:
    """The changes in a buffer. Raises  OSError EBADMSG: this is nothing that we understand."""
    found = []
    at, end = 0, len(raw)
    try:
        while at < end:
            length, version, head, mask, _fd, pid = _EVENT.unpack_from(raw, at)
            if version != _VERSION or not _EVENT.size <= head <= length <= end - at:
                raise OSError(errno.EBADMSG, "not an event of fanotify")
            if pid != but_of or mask & FAN_Q_OVERFLOW:
                found.append(FanotifyChange(mask, pid, *_parse_records(raw, at + head, at + length)))
            at += length
    except struct.error as error:
        raise OSError(errno.EBADMSG, "an event of fanotify was cut off") from error
    return found


def _parse_records(raw: bytes, at: int, end: int) -> tuple[bytes, bytes, bytes]:
    """Directory, name and subject from what follows an event's head."""
    directory = name = subject = b""
    while at < end:
        kind = raw[at]
        if kind in _WITH_HANDLE:
            _kind, length, size, _type = _FID_RECORD.unpack_from(raw, at)
            name_at = at + _FID_RECORD.size + size
        else:
            _kind, length = _RECORD.unpack_from(raw, at)
            name_at = at + _RECORD.size
        if not name_at <= at + length <= end:
            raise OSError(errno.EBADMSG, "not a record of fanotify")
        if kind == _FID:
            subject = raw[at + _HANDLE_AT : name_at]
        elif kind == _DFID_NAME:
            directory, name = raw[at + _HANDLE_AT : name_at], raw[name_at : at + length].rstrip(b"\0")
        at += length
    if name == b".":  # it happened to the directory itself
        return b"", b"", directory
    return directory, name, subject
