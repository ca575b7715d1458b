"""The counters of a mount's daemon, the file in which others read them, and whether its backing answers slowly.

The file is a head, a table of names in JSON, and 64-bit counters of the machine's own byte order, which the daemon
changes in place. Readers take the names from the file: numbers of another version's daemon keep their meaning.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from itertools import accumulate
from typing import Final, NamedTuple

import msgspec

from fusefs.core.errors import TrashdError
from fusefs.core.uring_choice import FastPathState

_SLOW_NS = 300_000
"""A look at an inode from memory takes 2 µs, from a local SSD some 100, over a network or from a turning disk more."""
QUICK_NS = 60_000
_MOST = 16.0
_ENOUGH = 8.0
_QUICK_LOCAL, _QUICK_REMOTE = 1 / 4, 1 / 64
"""What a quick answer weighs: a busy machine makes some late; a network's filesystem answers most from memory."""


class Latency:
    """Slow answers weighed against quick ones; one late answer is no sign, since a busy machine gives such too.

    is_slow  the verdict
    """

    __slots__ = ("_quick", "_score", "is_slow")

    def __init__(self, *, is_slow: bool) -> None:
        """is_slow: what is believed until the answers tell."""
        self._quick = _QUICK_REMOTE if is_slow else _QUICK_LOCAL
        self._score = _MOST if is_slow else 0.0
        self.is_slow = is_slow

    @property
    def is_in_doubt(self) -> bool:
        """Whether an answer quicker than QUICK_NS would tell anything new; of a local filesystem it seldom does."""
        return self._score > 0

    def took(self, answer_ns: float, n: int = 1) -> None:
        """Some answers in a row; what made them late may have been one thing. answer_ns: how long each took"""
        if answer_ns > _SLOW_NS:
            self._score = min(self._score + 1, _MOST)
            self.is_slow |= self._score >= _ENOUGH
        elif answer_ns < QUICK_NS and self._score:
            self._score = max(self._score - n * self._quick, 0.0)
            self.is_slow &= self._score > 0


OPERATIONS: Final = (
    "lookup", "getattr", "statx", "setattr", "readlink", "access", "getxattr", "setxattr", "listxattr", "removexattr",
    "opendir", "readdir", "fsyncdir", "releasedir",
    "create", "tmpfile", "open", "read", "write", "lseek", "fallocate", "copy_file_range", "flush", "fsync", "release",
    "mkdir", "mknod", "symlink", "link", "unlink", "rmdir", "rename", "statfs", "forget",
)  # fmt: skip
"""The kernel's requests, in the order in which people read them."""
_FIRST_BITS, _LAST_BITS = 12, 34
BOUNDS_NS: Final = tuple(1 << bits for bits in range(_FIRST_BITS, _LAST_BITS + 1))
"""Ends of the histogram's buckets, 4 µs to 17 s; one more holds what took longer."""
N_BUCKETS: Final = len(BOUNDS_NS) + 1
_MAGIC, _FORMAT = b"\x89trashd\n", 1
_HEAD = struct.Struct("=8sQQ")
"""Magic, format, and the bytes of the table with what fills it up to whole counters."""
_CELL_BYTES = 8
_N_MAX = 1 << 14


class Remembering(IntEnum):
    """What the daemon remembers; MISSING_NAME, MISSING_XATTR: that there is no such name, or extended attribute."""

    NAME = 0
    MISSING_NAME = 1
    ATTRIBUTES = 2
    LISTING = 3
    LINK_TARGET = 4
    XATTR = 5
    MISSING_XATTR = 6

    def label(self) -> str:
        """Its name in the file."""
        return self.name.lower()


class Gauges(NamedTuple):
    """How much there is at a moment.

    n_nodes           nodes that the kernel knows, or that are open
    n_handles         files and listings that are open
    n_directory_fds   directories that the daemon holds open
    n_cached          what it remembers: so many things, of
    cache_bytes       so many bytes, of at most
    cache_size_bytes  so many
    n_threads         threads that work at this moment
    n_prefetches      attributes that are being fetched ahead
    is_slow           whether the backing filesystem is treated as slow
    """

    n_nodes: int = 0
    n_handles: int = 0
    n_directory_fds: int = 0
    n_cached: int = 0
    cache_bytes: int = 0
    cache_size_bytes: int = 0
    n_threads: int = 0
    n_prefetches: int = 0
    is_slow: int = 0


class CounterTable(msgspec.Struct, frozen=True, kw_only=True):
    """What a file says of itself: whose numbers these are, and what they are called.

    version     of the daemon's trashd
    started_ns  wall time
    """

    version: str
    pid: int
    started_ns: int
    gauges: tuple[str, ...] = Gauges._fields
    sorts: tuple[str, ...] = tuple(sort.label() for sort in Remembering)
    operations: tuple[str, ...] = OPERATIONS
    bounds_ns: tuple[int, ...] = BOUNDS_NS


class Remembered(NamedTuple):
    """How often something was remembered when it was needed, and how often not."""

    n_hits: int
    n_misses: int

    def rate(self) -> float | None:
        """The share of hits; None if nothing was asked."""
        n = self.n_hits + self.n_misses
        return self.n_hits / n if n else None


class Operation(NamedTuple):
    """How often a request came, and how long its answers took.

    n_failed   those answered with an errno, whatever it meant to the client
    counts     how many took less than each of the bounds and no less than the one before; the last: longer than all
    """

    n_failed: int
    total_ns: int
    max_ns: int
    counts: tuple[int, ...]
    bounds_ns: tuple[int, ...]

    def n(self) -> int:
        """All of them: the sum of the buckets, so that they agree however many come meanwhile."""
        return sum(self.counts)

    def mean_ns(self) -> float | None:
        """The mean; None if there was none."""
        n = self.n()
        return self.total_ns / n if n else None

    def percentile_ns(self, share: float) -> float | None:
        """About what a share of them took at most, as if those of a bucket were spread evenly; None if none came.

        share  above 0, at most 1
        """
        n = self.n()
        if not n:
            return None
        rank = share * n
        at = next(i for i, sum_ in enumerate(accumulate(self.counts)) if sum_ >= rank)
        low = self.bounds_ns[at - 1] if at else 0
        high = self.bounds_ns[at] if at < len(self.bounds_ns) else self.max_ns
        inside = (rank - sum(self.counts[:at])) / self.counts[at]
        return min(low + (high - low) * inside, float(self.max_ns or high))


class MountStats(NamedTuple):
    """The numbers of a mount at a moment.

    device      st_dev of the mount; 0 before it was mounted
    updated_ns  wall time of the gauges, a moment after the last operation; 0: none came
    """

    table: CounterTable
    device: int
    updated_ns: int
    gauges: dict[str, int]
    remembered: dict[str, Remembered]
    operations: dict[str, Operation]


class SeenMount(NamedTuple):
    """A mount as another process sees it.

    is_running  its daemon lives
    fast_paths  empty: nothing tells
    """

    point: bytes
    source: bytes
    stats: MountStats
    is_running: bool
    fast_paths: tuple[FastPathState, ...] = ()


class CounterLayout:
    """Where each counter of a file is, by its index."""

    device, updated_ns, gauges = 0, 1, 2
    """What comes first: the mount's device number, the wall time of the gauges, and these."""
    failed, total_ns, max_ns, buckets = 0, 1, 2, 3
    """What an operation has, in this order, from its own beginning on."""

    def __init__(self, table: CounterTable) -> None:
        self.sorts = self.gauges + len(table.gauges)
        first = self.sorts + 2 * len(table.sorts)
        step = self.buckets + len(table.bounds_ns) + 1
        self.operations = {name: first + step * i for i, name in enumerate(table.operations)}
        self.n_cells = first + step * len(table.operations)


def encode(table: CounterTable) -> bytes:
    """A file in which nothing has been counted yet; the counters are its end."""
    text = msgspec.json.encode(table)
    text += b"\n" * (-len(text) % _CELL_BYTES)
    return _HEAD.pack(_MAGIC, _FORMAT, len(text)) + text + bytes(_CELL_BYTES * CounterLayout(table).n_cells)


def decode(data: bytes | bytearray) -> MountStats:
    """The numbers of a file that a daemon may be changing. Raises  TrashdError for anything else"""
    try:
        magic, format_, n_table_bytes = _HEAD.unpack_from(data)
        if magic != _MAGIC or format_ != _FORMAT:
            raise ValueError("unknown format")
        begin = _HEAD.size + n_table_bytes
        table = msgspec.json.decode(data[_HEAD.size : begin], type=CounterTable)
        layout = CounterLayout(table)
        if layout.n_cells > _N_MAX:
            raise ValueError("too many numbers")
        cells = struct.unpack_from(f"={layout.n_cells}Q", data, begin)
    except (msgspec.MsgspecError, ValueError, struct.error) as error:
        hint = "its daemon may be of another version: mount it again with trashd mount --replace SRC MNT"
        raise TrashdError(f"the numbers of this mount can't be read ({error})", hint) from error
    gauges = dict(zip(table.gauges, cells[layout.gauges : layout.sorts], strict=True))
    pairs = range(layout.sorts, layout.sorts + 2 * len(table.sorts), 2)
    remembered = {name: Remembered(cells[at], cells[at + 1]) for name, at in zip(table.sorts, pairs, strict=True)}
    operations = {}
    for name, at in layout.operations.items():
        first = at + layout.buckets
        counts = tuple(cells[first : first + len(table.bounds_ns) + 1])
        n_failed, total_ns, max_ns = cells[at:first]
        operations[name] = Operation(n_failed, total_ns, max_ns, counts, table.bounds_ns)
    return MountStats(table, cells[layout.device], cells[layout.updated_ns], gauges, remembered, operations)
