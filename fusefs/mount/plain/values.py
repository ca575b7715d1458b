"""pyfuse3's values, made of the tree's."""

from __future__ import annotations

from typing import Any

from pyfuse3 import EntryAttributes, FileHandleT, FileInfo, SetattrFields, StatvfsData

from fusefs.core.fuse_protocol import NANO, read_entry
from fusefs.mount.native._core import Node, Tables
from fusefs.mount.tree.attribute_operations import Changes
from fusefs.mount.tree.opening import OpenedFile
from fusefs.mount.tree.validity import AttrTimeouts, EntryParam, shown_number

_STATVFS = ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_favail", "f_namemax")
_GENERATIONS = 0x7FFFFFFF


def entry_of(known: EntryParam, node: Node | None, timeouts: AttrTimeouts) -> EntryAttributes:
    """The entry of what is known now; without a nodeid: nothing has the name.

    The kernel makes file handles of the nodeid and the generation: so that a handle never means a later inode of that
    number, each incarnation has a generation of its own.
    """
    if known.proof is not None:
        known = known._replace(timeout_s=known.proof.left_s(), proof=None)
    entry = EntryAttributes()
    field: Any = entry
    if not known.nodeid:
        field.st_ino, field.entry_timeout = 0, known.timeout_s
        return entry
    (
        _dev, _ino, field.st_mode, field.st_nlink, field.st_uid, field.st_gid, field.st_rdev, field.st_size,
        field.st_blocks, field.st_blksize, field.st_atime_ns, field.st_mtime_ns, field.st_ctime_ns, _btime,
    ) = known.attributes  # fmt: skip
    field.st_ino = shown_number(known)  # the nodeid, too; the root's goes without saying
    field.entry_timeout, field.attr_timeout = timeouts.lifetimes(known)
    field.generation = _generation(node)
    return entry


def entry_in(reply: bytes, nodes: Tables) -> EntryAttributes:
    """The entry in a reply."""
    said = read_entry(reply)
    entry = EntryAttributes()
    field: Any = entry
    field.st_ino, field.entry_timeout, field.attr_timeout = said.nodeid, said.name_s, said.attr_s
    node = nodes.get(said.nodeid) if said.nodeid else None
    (
        _ino, field.st_size, field.st_blocks, atime_s, mtime_s, ctime_s, atime_ns, mtime_ns, ctime_ns, field.st_mode,
        field.st_nlink, field.st_uid, field.st_gid, field.st_rdev, field.st_blksize,
    ) = said.numbers  # fmt: skip
    field.st_atime_ns = atime_s * NANO + atime_ns
    field.st_mtime_ns = mtime_s * NANO + mtime_ns
    field.st_ctime_ns = ctime_s * NANO + ctime_ns
    field.generation = _generation(node)
    return entry


def _generation(node: Node | None) -> int:
    return 0 if node is None else hash(node.source) & _GENERATIONS


def file_info(opened: OpenedFile) -> FileInfo:
    """A handle of a file whose reads and writes come to the daemon."""
    return FileInfo(fh=FileHandleT(opened.fh), keep_cache=opened.keeps)


def statvfs(numbers: object) -> StatvfsData:
    """The numbers of os.statvfs."""
    data = StatvfsData()
    for field in _STATVFS:
        setattr(data, field, getattr(numbers, field))
    return data


def changes_of(attr: EntryAttributes, fields: SetattrFields) -> Changes:
    """What SETATTR is to change."""
    return Changes(
        mode=attr.st_mode if fields.update_mode else None,
        uid=attr.st_uid if fields.update_uid else None,
        gid=attr.st_gid if fields.update_gid else None,
        size=attr.st_size if fields.update_size else None,
        atime_ns=attr.st_atime_ns if fields.update_atime else None,
        mtime_ns=attr.st_mtime_ns if fields.update_mtime else None,
    )
