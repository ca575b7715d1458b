"""Between the vfs's values and pyfuse3's, and from any exception to an errno: the only place that does."""

from __future__ import annotations

import errno
import functools
import logging
from collections.abc import Callable, Coroutine
from time import perf_counter_ns
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import pyfuse3
from pyfuse3 import EntryAttributes, FUSEError, StatvfsData

from fusefs.mount.listing import Listed
from fusefs.mount.replies import NAME_ONLY_GENERATION
from fusefs.mount.stats import CELL_OF, Stats
from fusefs.mount.vfs import Known

_SHORT_S = 1.0
"""For attributes of a directory: the kernel may take an answer for new that it got before a change in there, and
processes after it. And of a file with more names: one of them may be in an orphan, and be reaped behind the mount."""

P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger(__name__)
_STATVFS = ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_favail", "f_namemax")


class Counted(Protocol):
    """Whose answers are counted."""

    @property
    def stats(self) -> Stats:
        """Where."""


S = TypeVar("S", bound=Counted)


def answered(
    handler: Callable[Concatenate[S, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]:
    """A handler that is counted and timed, and raises nothing but FUSEError: anything else would end the mount."""
    cell = CELL_OF[handler.__name__]

    @functools.wraps(handler)
    async def answering(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        has_failed = True
        begun_ns = perf_counter_ns()
        try:
            answer = await handler(self, *args, **kwargs)
            has_failed = False
            return answer
        except FUSEError:
            raise
        except OSError as error:
            raise FUSEError(error.errno or errno.EIO) from None
        except Exception:
            _log.exception("%s failed", handler.__name__)
            raise FUSEError(errno.EIO) from None
        finally:
            self.stats.count(cell, perf_counter_ns() - begun_ns, has_failed=has_failed)

    return answering


def entry_of(known: Known) -> EntryAttributes:
    """What the kernel is told of a node."""
    entry = EntryAttributes()
    fill(entry, known)
    return entry


def fill(entry: EntryAttributes, known: Known) -> None:
    """The same in an entry that is there: one serves for a whole listing, as readdir_reply copies it."""
    field: Any = entry
    nodeid, attributes, timeout_s, _ = known
    (
        _dev, ino, field.st_mode, field.st_nlink, field.st_uid, field.st_gid, field.st_rdev, field.st_size,
        field.st_blocks, field.st_blksize, field.st_atime_ns, field.st_mtime_ns, field.st_ctime_ns, _btime,
    ) = attributes  # fmt: skip
    # One field is both the nodeid and the number that people see; the root's nodeid goes without saying.
    field.st_ino = ino if nodeid == pyfuse3.ROOT_INODE else nodeid
    field.entry_timeout = field.attr_timeout = timeout_s
    if timeout_s > _SHORT_S and (attributes.nlink > 1 or attributes.is_directory()):
        field.attr_timeout = _SHORT_S
    field.generation = 0


def name_only(entry: EntryAttributes, listed: Listed) -> None:
    """What the kernel is told of an entry of which nothing but the name is known: see replies.leave_out_nodes."""
    field: Any = entry
    field.st_ino, field.st_mode, field.generation = listed.ino, listed.kind << 12, NAME_ONLY_GENERATION


def statvfs_of(numbers: object) -> StatvfsData:
    """The numbers of os.statvfs for statfs."""
    data = StatvfsData()
    for field in _STATVFS:
        setattr(data, field, getattr(numbers, field))
    return data
