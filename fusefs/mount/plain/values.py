"""pyfuse3's values, made of the tree's."""

from __future__ import annotations

import time
from typing import Any

from pyfuse3 import EntryAttributes, FileHandleT, FileInfo, SetattrFields, StatvfsData

from fusefs.core import fuse_protocol as wire
from fusefs.core.fuse_protocol import (
    FOPEN_KEEP_CACHE,
    NANO,
    STATFS_OUT,
    Entry,
    Listed,
    read_attr,
    read_entry,
    read_opened,
)
from fusefs.mount.native._core import Tables

_STATVFS = ("f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_bsize", "f_namemax", "f_frsize")
_NOW_NS = 60 * 10**9
_GENERATIONS = 0x7FFFFFFF


def entry_in(reply: bytes, nodes: Tables) -> EntryAttributes:
    """The entry in a reply."""
    return _entry(read_entry(reply), nodes)


def entry_listed(listed: Listed, nodes: Tables) -> EntryAttributes:
    """The entry of what a listing has; of `.` and `..` the kernel takes the number and the type."""
    if listed.entry.nodeid:
        return _entry(listed.entry, nodes)
    entry = EntryAttributes()
    field: Any = entry
    field.st_ino, field.st_mode = listed.ino, listed.kind << 12
    return entry


def _entry(said: Entry, nodes: Tables) -> EntryAttributes:
    """The kernel makes file handles of nodeid and generation: each incarnation has one of its own."""
    node = nodes.get(said.nodeid) if said.nodeid else None
    entry = EntryAttributes()
    field: Any = entry
    field.entry_timeout, field.attr_timeout = said.name_s, said.attr_s
    field.generation = 0 if node is None else hash(node.source) & _GENERATIONS
    return _with_numbers(entry, said.numbers)


def _with_numbers(entry: EntryAttributes, numbers: tuple[int, ...]) -> EntryAttributes:
    """An entry with those of struct fuse_attr."""
    field: Any = entry
    (
        field.st_ino, field.st_size, field.st_blocks, atime_s, mtime_s, ctime_s, atime_ns, mtime_ns, ctime_ns,
        field.st_mode, field.st_nlink, field.st_uid, field.st_gid, field.st_rdev, field.st_blksize,
    ) = numbers  # fmt: skip
    field.st_atime_ns = atime_s * NANO + atime_ns
    field.st_mtime_ns = mtime_s * NANO + mtime_ns
    field.st_ctime_ns = ctime_s * NANO + ctime_ns
    return entry


def attributes_in(reply: bytes) -> EntryAttributes:
    """The attributes in a reply."""
    said = read_attr(reply)
    entry = EntryAttributes()
    entry.attr_timeout = said.attr_s
    return _with_numbers(entry, said.numbers)


def file_info(reply: bytes) -> FileInfo:
    """The handle in a reply to OPEN, of a file whose reads and writes come to the daemon."""
    fh, flags, _backing_id = read_opened(reply)
    return FileInfo(fh=FileHandleT(fh), keep_cache=bool(flags & FOPEN_KEEP_CACHE))


def statvfs(reply: bytes) -> StatvfsData:
    """The numbers in a reply to STATFS."""
    data = StatvfsData()
    for field, number in zip(_STATVFS, STATFS_OUT.unpack(reply), strict=True):
        setattr(data, field, number)
    data.f_favail = data.f_ffree
    return data


def changes_of(attr: EntryAttributes, fields: SetattrFields, fh: int | None, more: int = 0) -> bytes:
    """What SETATTR is to change. more: further FATTR_*"""
    valid = {
        wire.FATTR_MODE: fields.update_mode, wire.FATTR_UID: fields.update_uid, wire.FATTR_GID: fields.update_gid,
        wire.FATTR_SIZE: fields.update_size, wire.FATTR_ATIME: fields.update_atime,
        wire.FATTR_MTIME: fields.update_mtime, wire.FATTR_FH: fh is not None,
    }  # fmt: skip
    atime_s, atime_ns = divmod(attr.st_atime_ns, NANO)
    mtime_s, mtime_ns = divmod(attr.st_mtime_ns, NANO)
    return wire.SETATTR_IN.pack(
        sum(one for one, is_wanted in valid.items() if is_wanted) | more, fh or 0, attr.st_size, atime_s, mtime_s,
        atime_ns, mtime_ns, attr.st_mode, attr.st_uid, attr.st_gid,
    )  # fmt: skip


def are_now(attr: EntryAttributes, fields: SetattrFields) -> bool:
    """Whether both times are to be set, to what may be now: a time that is no further from that than a minute."""
    is_one = fields.update_atime and fields.update_mtime and attr.st_atime_ns == attr.st_mtime_ns
    return is_one and abs(time.time_ns() - attr.st_mtime_ns) <= _NOW_NS
