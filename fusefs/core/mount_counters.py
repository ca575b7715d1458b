"""A mount daemon's counters, and the file where other processes read them.

The file consists of a header, a table of names in JSON, and 64-bit counters in the machine's byte order, which the
daemon updates in place. Readers take the names from the file, so they can read the file of another version's daemon.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from itertools import accumulate
from typing import Final, NamedTuple

import msgspec

from fusefs.core.errors import TrashdError
from fusefs.core.uring_choice import FastPathState

OPERATIONS: Final = (
    "lookup", "getattr", "statx", "setattr", "readlink", "access", "getxattr", "setxattr", "listxattr", "removexattr",
    "opendir", "readdir", "fsyncdir", "releasedir",
    "create", "tmpfile", "open", "read", "write", "lseek", "fallocate", "copy_file_range", "flush", "fsync", "release",
    "mkdir", "mknod", "symlink", "link", "unlink", "rmdir", "rename", "statfs", "forget",
)  # fmt: skip
"""The kernel's requests, in the order in which they are printed."""
_FIRST_BITS, _LAST_BITS = 12, 34
BOUNDS_NS: Final = tuple(1 << bits for bits in range(_FIRST_BITS, _LAST_BITS + 1))
"""Upper bounds of the histogram's buckets, 4 µs to 17 s; one more bucket counts everything slower."""
N_BUCKETS: Final = len(BOUNDS_NS) + 1
_MAGIC, _FORMAT = b"\x89trashd\n", 1
_HEAD = struct.Struct("=8sQQ")
"""The magic number, the format, and the size of the table in bytes, including its padding."""
_CELL_BYTES = 8
_N_MAX = 1 << 14


class CachedKind(IntEnum):
    """Kinds of cached facts; MISSING_NAME, MISSING_XATTR: there is no such name, or no such extended attribute."""

    NAME = 0
    MISSING_NAME = 1
    ATTRIBUTES = 2
    LISTING = 3
    LINK_TARGET = 4
    XATTR = 5
    MISSING_XATTR = 6

    def label(self) -> str:
        """Return the name of this kind in the counter file."""
        return self.name.lower()


class Gauges(NamedTuple):
    """The state of the daemon at one moment.

    n_nodes           nodes that the kernel has looked up, or that are open
    n_handles         open files and listings
    n_directory_fds   directories that the daemon keeps open
    n_cached          number of inodes in the metadata cache
    cache_bytes       memory that the cache uses
    cache_size_bytes  memory that the cache may use
    n_threads         threads that are working
    n_prefetches      attributes that are being prefetched
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
    """The table at the start of a counter file: which daemon writes the file, and the names of its counters.

    version     the trashd version of the daemon
    started_ns  wall time
    """

    version: str
    pid: int
    started_ns: int
    gauges: tuple[str, ...] = Gauges._fields
    sorts: tuple[str, ...] = tuple(sort.label() for sort in CachedKind)
    operations: tuple[str, ...] = OPERATIONS
    bounds_ns: tuple[int, ...] = BOUNDS_NS


class CacheHits(NamedTuple):
    """Cache hits and misses for one kind of fact."""

    n_hits: int
    n_misses: int

    def rate(self) -> float | None:
        """Return the share of hits, or None if there was no lookup."""
        n = self.n_hits + self.n_misses
        return self.n_hits / n if n else None


class Operation(NamedTuple):
    """How often one kind of request arrived, and how long the replies took.

    n_failed   replies with an errno, even if the client expected it
    counts     replies per bucket of bounds_ns; the last bucket counts those that exceed every bound
    """

    n_failed: int
    total_ns: int
    max_ns: int
    counts: tuple[int, ...]
    bounds_ns: tuple[int, ...]

    def n(self) -> int:
        """Return the number of requests, as the sum of the buckets, because counts read during an update may differ."""
        return sum(self.counts)

    def mean_ns(self) -> float | None:
        n = self.n()
        return self.total_ns / n if n else None

    def percentile_ns(self, share: float) -> float | None:
        """Return the approximate time within which this share of requests was answered, or None if there were none.

        The times of the requests in one bucket are assumed to be evenly distributed.

        share  greater than 0, at most 1
        """
        n = self.n()
        if not n:
            return None
        rank = share * n
        bucket = next(i for i, sum_ in enumerate(accumulate(self.counts)) if sum_ >= rank)
        low = self.bounds_ns[bucket - 1] if bucket else 0
        high = self.bounds_ns[bucket] if bucket < len(self.bounds_ns) else self.max_ns
        inside = (rank - sum(self.counts[:bucket])) / self.counts[bucket]
        return min(low + (high - low) * inside, float(self.max_ns or high))


class MountStats(NamedTuple):
    """The counters of a mount at one moment.

    device      st_dev of the mount; 0 until it is mounted
    updated_ns  wall time of the gauges, shortly after the last operation; 0: there has been no operation
    """

    table: CounterTable
    device: int
    updated_ns: int
    gauges: dict[str, int]
    remembered: dict[str, CacheHits]
    operations: dict[str, Operation]


class ObservedMount(NamedTuple):
    """A mount as observed by another process.

    is_running  whether its daemon is alive
    fast_paths  empty: not known
    """

    point: bytes
    source: bytes
    stats: MountStats
    is_running: bool
    fast_paths: tuple[FastPathState, ...] = ()


class CounterLayout:
    """The index of each counter in the file."""

    device, updated_ns, gauges = 0, 1, 2
    """The first counters: the mount's device number, the wall time of the gauges, and the gauges themselves."""
    failed, total_ns, max_ns, buckets = 0, 1, 2, 3
    """The indexes of an operation's counters, relative to its first one."""

    def __init__(self, table: CounterTable) -> None:
        self.sorts = self.gauges + len(table.gauges)
        first = self.sorts + 2 * len(table.sorts)
        step = self.buckets + len(table.bounds_ns) + 1
        self.operations = {name: first + step * i for i, name in enumerate(table.operations)}
        self.n_cells = first + step * len(table.operations)


def encode_counters(table: CounterTable) -> bytes:
    """Encode a file with all counters at 0; the counters are at its end."""
    text = msgspec.json.encode(table)
    text += b"\n" * (-len(text) % _CELL_BYTES)
    return _HEAD.pack(_MAGIC, _FORMAT, len(text)) + text + bytes(_CELL_BYTES * CounterLayout(table).n_cells)


def decode_counters(data: bytes | bytearray) -> MountStats:
    """Read the counters from a file that a daemon may be changing. Raises  TrashdError for anything else"""
    try:
        magic, format_, n_table_bytes = _HEAD.unpack_from(data)
        if magic != _MAGIC or format_ != _FORMAT:
            raise ValueError("unknown format")
        begin = _HEAD.size + n_table_bytes
        table = msgspec.json.decode(data[_HEAD.size : begin], type=CounterTable)
        layout = CounterLayout(table)
        if layout.n_cells > _N_MAX:
            raise ValueError("the file has too many counters")
        cells = struct.unpack_from(f"={layout.n_cells}Q", data, begin)
    except (msgspec.MsgspecError, ValueError, struct.error) as error:
        hint = "its daemon may run another version of trashd; unmount the mount and mount it again"
        raise TrashdError(f"the counters of this mount can't be read ({error})", hint) from error
    gauges = dict(zip(table.gauges, cells[layout.gauges : layout.sorts], strict=True))
    pairs = range(layout.sorts, layout.sorts + 2 * len(table.sorts), 2)
    remembered = {name: CacheHits(cells[at], cells[at + 1]) for name, at in zip(table.sorts, pairs, strict=True)}
    operations = {}
    for name, at in layout.operations.items():
        first = at + layout.buckets
        counts = tuple(cells[first : first + len(table.bounds_ns) + 1])
        n_failed, total_ns, max_ns = cells[at:first]
        operations[name] = Operation(n_failed, total_ns, max_ns, counts, table.bounds_ns)
    return MountStats(table, cells[layout.device], cells[layout.updated_ns], gauges, remembered, operations)
