"""Between the vfs's values and pyfuse3's, and from what is raised to its errors: all of it in this file."""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Coroutine
from time import perf_counter_ns
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from pyfuse3 import EntryAttributes, FUSEError, SetattrFields, StatvfsData

from fusefs.mount.bridge.pyfuse3_threads import Pyfuse3Threads
from fusefs.mount.bridge.reply_patching import NAME_ONLY_GENERATION
from fusefs.mount.places.counters import CELL_OF, Counters
from fusefs.mount.requests.failures import errno_of
from fusefs.mount.tables.tables_lock import TablesLock, WouldWait
from fusefs.mount.tree.attribute_operations import Changes
from fusefs.mount.tree.readdir import ReaddirEntry
from fusefs.mount.tree.validity import AttrTimeouts, EntryParam, shown_number

P = ParamSpec("P")
R = TypeVar("R")
D = TypeVar("D")

_STATVFS = ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_favail", "f_namemax")


class HasTablesLock(Protocol):
    """The object that these are handlers of."""

    lock: TablesLock
    """The tables' lock, and whether the backing filesystem is slow."""
    threads: Pyfuse3Threads
    """The threads for operations, if it is."""
    stats: Counters
    """Where they are counted."""

    def told_stale(self, caller: object) -> None:
        """A process, if the kernel says which, is told ESTALE: see mount/tables/estale_retries.py."""


S = TypeVar("S", bound=HasTablesLock)
_Act = Callable[Concatenate[S, P], R]
"""A plain function of such an object."""
_Handler = Callable[Concatenate[S, P], Coroutine[Any, Any, R]]
"""What pyfuse3 calls."""


def answered(handler: _Handler[S, P, R]) -> _Handler[S, P, R]:
    """A handler that is counted and timed, and raises nothing but FUSEError: anything else would end the mount."""
    made: _Handler[S, P, R] = _handler(handler.__name__, handler, None, None, None)
    return made


def done(act: _Act[S, P, R]) -> _Handler[S, P, R]:
    """A handler of a plain function, by the thread that suits it: one coroutine is quicker than one in another."""
    made: _Handler[S, P, R] = _handler(act.__name__, None, act, None, None)
    return made


def told(
    tell: Callable[[S, D], R], *, recall: _Act[S, P, D | None] | None = None
) -> Callable[[_Act[S, P, D]], _Handler[S, P, R]]:
    """A handler of a plain function where the kernel is told something else than what that returns.

    tell    what it is told; on the loop's own thread, as the answer goes out
    recall  see `recalled`
    """
    return lambda act: _handler(act.__name__, None, act, tell, recall)


def recalled(recall: _Act[S, P, R | None]) -> Callable[[_Act[S, P, R]], _Handler[S, P, R]]:
    """A handler of a plain function, answered from memory on a slow filesystem unless recall returns None."""
    return lambda act: _handler(act.__name__, None, act, None, recall)


def _handler(name: str, handler: Any, act: Any, tell: Any, recall: Any) -> Any:
    """Either a handler that may suspend, or a plain function with what was told of it; types are the callers'."""
    cell = CELL_OF[name]

    @functools.wraps(handler or act)
    async def answering(self: HasTablesLock, /, *args: Any) -> Any:
        has_failed, waits = True, False
        begun_ns = perf_counter_ns()
        try:
            if handler is not None:
                answer = await handler(self, *args)
            elif (lock := self.lock).is_slow:
                answer = self.threads.recall(recall, self, *args) if recall is not None else None
                if answer is None:
                    answer = await self.threads.wait_for(act, self, *args)
                if tell is not None:
                    answer = tell(self, answer)
            else:
                try:
                    with lock:
                        answer = act(self, *args)
                        if tell is not None:
                            answer = tell(self, answer)
                except WouldWait:
                    waits = True
                if waits:
                    answer = await self.threads.outwait(act, self, *args)
                    if tell is not None:
                        answer = tell(self, answer)
            has_failed = False
            return answer
        except FUSEError:
            raise
        except Exception as error:
            number = errno_of(error, name)
            if number == errno.ESTALE:
                self.told_stale(args[-1])
            raise FUSEError(number) from None
        finally:
            with self.lock:
                self.stats.count(cell, perf_counter_ns() - begun_ns, has_failed=has_failed)

    return answering


def entry_of(known: EntryParam, timeouts: AttrTimeouts) -> EntryAttributes:
    """What the kernel is told of a node; not to be changed."""
    if not known.nodeid:
        return _missing(known.timeout_s)
    entry = EntryAttributes()
    fill(entry, known, timeouts)
    return entry


@functools.lru_cache(maxsize=8)
def _missing(timeout_s: float) -> EntryAttributes:
    """That nothing has a name: the same answer again and again, on a local filesystem."""
    entry = EntryAttributes()
    field: Any = entry
    field.st_ino, field.entry_timeout = 0, timeout_s
    return entry


def fill(entry: EntryAttributes, known: EntryParam, timeouts: AttrTimeouts) -> None:
    """Write what is known of a node to a given entry: one serves for a whole listing, as readdir_reply copies it."""
    field: Any = entry
    attributes = known.attributes
    (
        _dev, _ino, field.st_mode, field.st_nlink, field.st_uid, field.st_gid, field.st_rdev, field.st_size,
        field.st_blocks, field.st_blksize, field.st_atime_ns, field.st_mtime_ns, field.st_ctime_ns, _btime,
    ) = attributes  # fmt: skip
    field.st_ino = shown_number(known)  # the nodeid, too; the root's goes without saying
    field.entry_timeout, field.attr_timeout = timeouts.lifetimes(known)
    field.generation = 0


def name_only(entry: EntryAttributes, listed: ReaddirEntry) -> None:
    """What the kernel is told of an entry whose name alone is known: see reply_patching.omit_nodes."""
    field: Any = entry
    field.st_ino, field.st_mode, field.generation = listed.ino, listed.kind << 12, NAME_ONLY_GENERATION


def statvfs(numbers: object) -> StatvfsData:
    """The numbers of os.statvfs for statfs."""
    data = StatvfsData()
    for field in _STATVFS:
        setattr(data, field, getattr(numbers, field))
    return data


def changes_of(attr: EntryAttributes, fields: SetattrFields) -> Changes:
    """What setattr is to change."""
    return Changes(
        mode=attr.st_mode if fields.update_mode else None,
        uid=attr.st_uid if fields.update_uid else None,
        gid=attr.st_gid if fields.update_gid else None,
        size=attr.st_size if fields.update_size else None,
        atime_ns=attr.st_atime_ns if fields.update_atime else None,
        mtime_ns=attr.st_mtime_ns if fields.update_mtime else None,
    )
