"""The kernel's messages as linux/fuse.h has them, for ctypes."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_uint32, c_uint64


class InHeader(ctypes.Structure):
    _fields_ = (
        ("len", c_uint32), ("opcode", c_uint32), ("unique", c_uint64), ("nodeid", c_uint64), ("uid", c_uint32),
        ("gid", c_uint32), ("pid", c_uint32), ("total_extlen", ctypes.c_uint16), ("padding", ctypes.c_uint16),
    )  # fmt: skip


class OutHeader(ctypes.Structure):
    _fields_ = (("len", c_uint32), ("error", c_int32), ("unique", c_uint64))


class Attr(ctypes.Structure):
    _fields_ = (
        ("ino", c_uint64), ("size", c_uint64), ("blocks", c_uint64),
        ("atime", c_uint64), ("mtime", c_uint64), ("ctime", c_uint64),
        ("atimensec", c_uint32), ("mtimensec", c_uint32), ("ctimensec", c_uint32),
        ("mode", c_uint32), ("nlink", c_uint32), ("uid", c_uint32), ("gid", c_uint32), ("rdev", c_uint32),
        ("blksize", c_uint32), ("flags", c_uint32),
    )  # fmt: skip


class EntryOut(ctypes.Structure):
    _fields_ = (
        ("nodeid", c_uint64), ("generation", c_uint64), ("entry_valid", c_uint64), ("attr_valid", c_uint64),
        ("entry_valid_nsec", c_uint32), ("attr_valid_nsec", c_uint32), ("attr", Attr),
    )  # fmt: skip


class AttrOut(ctypes.Structure):
    _fields_ = (("attr_valid", c_uint64), ("attr_valid_nsec", c_uint32), ("dummy", c_uint32), ("attr", Attr))


class OpenOut(ctypes.Structure):
    _fields_ = (("fh", c_uint64), ("open_flags", c_uint32), ("backing_id", c_int32))


class WriteOut(ctypes.Structure):
    _fields_ = (("size", c_uint32), ("padding", c_uint32))


class Dirent(ctypes.Structure):
    _fields_ = (("ino", c_uint64), ("off", c_uint64), ("namelen", c_uint32), ("type", c_uint32))


class WriteIn(ctypes.Structure):
    _fields_ = (
        ("fh", c_uint64), ("offset", c_uint64), ("size", c_uint32), ("write_flags", c_uint32),
        ("lock_owner", c_uint64), ("flags", c_uint32), ("padding", c_uint32),
    )  # fmt: skip


class ReadIn(ctypes.Structure):
    _fields_ = (
        ("fh", c_uint64), ("offset", c_uint64), ("size", c_uint32), ("read_flags", c_uint32),
        ("lock_owner", c_uint64), ("flags", c_uint32), ("padding", c_uint32),
    )  # fmt: skip


class CreateIn(ctypes.Structure):
    _fields_ = (("flags", c_uint32), ("mode", c_uint32), ("umask", c_uint32), ("open_flags", c_uint32))


class OpenIn(ctypes.Structure):
    _fields_ = (("flags", c_uint32), ("open_flags", c_uint32))


class MkdirIn(ctypes.Structure):
    _fields_ = (("mode", c_uint32), ("umask", c_uint32))


class RenameIn(ctypes.Structure):
    _fields_ = (("newdir", c_uint64),)


class Rename2In(ctypes.Structure):
    _fields_ = (("newdir", c_uint64), ("flags", c_uint32), ("padding", c_uint32))


class FsyncIn(ctypes.Structure):
    _fields_ = (("fh", c_uint64), ("fsync_flags", c_uint32), ("padding", c_uint32))


class GetxattrIn(ctypes.Structure):
    _fields_ = (("size", c_uint32), ("padding", c_uint32))


class FallocateIn(ctypes.Structure):
    _fields_ = (
        ("fh", c_uint64), ("offset", c_uint64), ("length", c_uint64), ("mode", c_uint32), ("padding", c_uint32),
    )  # fmt: skip


class LseekIn(ctypes.Structure):
    _fields_ = (("fh", c_uint64), ("offset", c_uint64), ("whence", c_uint32), ("padding", c_uint32))


class LseekOut(ctypes.Structure):
    _fields_ = (("offset", c_uint64),)


class CopyFileRangeIn(ctypes.Structure):
    _fields_ = (
        ("fh_in", c_uint64), ("off_in", c_uint64), ("nodeid_out", c_uint64), ("fh_out", c_uint64),
        ("off_out", c_uint64), ("len", c_uint64), ("flags", c_uint64),
    )  # fmt: skip


class CopyFileRangeOut(ctypes.Structure):
    _fields_ = (("bytes_copied", c_uint64),)


class SxTime(ctypes.Structure):
    _fields_ = (("tv_sec", c_int64), ("tv_nsec", c_uint32), ("reserved", c_int32))


class StatxStruct(ctypes.Structure):
    _fields_ = (
        ("mask", c_uint32), ("blksize", c_uint32), ("attributes", c_uint64), ("nlink", c_uint32), ("uid", c_uint32),
        ("gid", c_uint32), ("mode", ctypes.c_uint16), ("spare0", ctypes.c_uint16), ("ino", c_uint64),
        ("size", c_uint64), ("blocks", c_uint64), ("attributes_mask", c_uint64),
        ("atime", SxTime), ("btime", SxTime), ("ctime", SxTime), ("mtime", SxTime),
        ("rdev_major", c_uint32), ("rdev_minor", c_uint32), ("dev_major", c_uint32), ("dev_minor", c_uint32),
        ("spare2", c_uint64 * 14),
    )  # fmt: skip


class StatxOut(ctypes.Structure):
    _fields_ = (
        ("attr_valid", c_uint64), ("attr_valid_nsec", c_uint32), ("flags", c_uint32), ("spare", c_uint64 * 2),
        ("stat", StatxStruct),
    )  # fmt: skip


class ForgetIn(ctypes.Structure):
    _fields_ = (("nlookup", c_uint64),)


class ReleaseIn(ctypes.Structure):
    _fields_ = (("fh", c_uint64), ("flags", c_uint32), ("release_flags", c_uint32), ("lock_owner", c_uint64))


class BatchForgetIn(ctypes.Structure):
    _fields_ = (("count", c_uint32), ("dummy", c_uint32))


class ForgetOne(ctypes.Structure):
    _fields_ = (("nodeid", c_uint64), ("nlookup", c_uint64))
