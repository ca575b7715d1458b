"""Between the vfs's values and pyfuse3's, and from any exception to an errno: the only place that does."""

from __future__ import annotations

import errno
import functools
import logging
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, ParamSpec, TypeVar

import pyfuse3
from pyfuse3 import EntryAttributes, FUSEError, StatvfsData

from fusefs.mount.vfs import Known

P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger(__name__)
_STATVFS = ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_favail", "f_namemax")


class Timeouts(NamedTuple):
    """How long the kernel may remember names and attributes, in seconds."""

    entry_s: float
    attributes_s: float


def answered(handler: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, Coroutine[Any, Any, R]]:
    """A handler that raises nothing but FUSEError: anything else would end the mount."""

    @functools.wraps(handler)
    async def answering(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return await handler(*args, **kwargs)
        except FUSEError:
            raise
        except OSError as error:
            raise FUSEError(error.errno or errno.EIO) from None
        except Exception:
            _log.exception("%s failed", handler.__name__)
            raise FUSEError(errno.EIO) from None

    return answering


def entry_of(known: Known, timeouts: Timeouts) -> EntryAttributes:
    """What the kernel is told of a node."""
    _dev, ino, mode, nlink, uid, gid, rdev, size, blocks, blksize, atime_ns, mtime_ns, ctime_ns, _btime = (
        known.attributes
    )
    entry = EntryAttributes()
    # One field is both the nodeid and the number that people see; the root's nodeid goes without saying.
    entry.st_ino = pyfuse3.InodeT(ino if known.nodeid == pyfuse3.ROOT_INODE else known.nodeid)
    entry.st_mode = pyfuse3.ModeT(mode)
    entry.st_nlink = nlink
    entry.st_uid = uid
    entry.st_gid = gid
    entry.st_rdev = rdev
    entry.st_size = size
    entry.st_blocks = blocks
    entry.st_blksize = blksize
    entry.st_atime_ns = atime_ns
    entry.st_mtime_ns = mtime_ns
    entry.st_ctime_ns = ctime_ns
    entry.entry_timeout = 0 if known.is_volatile else timeouts.entry_s
    entry.attr_timeout = 0 if known.is_volatile else timeouts.attributes_s
    return entry


def statvfs_of(numbers: object) -> StatvfsData:
    """The numbers of os.statvfs for statfs."""
    data = StatvfsData()
    for field in _STATVFS:
        setattr(data, field, getattr(numbers, field))
    return data
