"""Prefetching: looks up many names of a slow filesystem at a time, before a process requests their attributes.

READDIRPLUS first returns only names, without delay. When a process then stats one of them, the attributes of the next
names are fetched, in growing batches. So a plain `ls` causes no lookups, and `ls -l` waits for a few round trips.

C threads do the lookups (native/prefetch.c), and one Python thread caches the results.
"""

from __future__ import annotations

import itertools
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from fusefs.core.metadata_cache import CACHED_XATTRS, UNSUPPORTED, Attributes, is_cached_xattr
from fusefs.linux.fd import Fd
from fusefs.linux.thread_progress import allow_all_cores
from fusefs.mount.native._core import Node, Prefetcher
from fusefs.mount.tables.daemon_cache import CacheFill, DaemonCache, LookupResult
from fusefs.mount.tables.tables_lock import TablesLock
from fusefs.store.layout import is_store_name

_BATCH = 256
_N_QUEUES = 16
_N_THREADS_MAX = 256
"""The limit for all directories together. Other requests do not depend on these threads."""
_N_KEPT = 2
"""How many batches keep their results for the next reply, even if the cache does not keep them."""
_NAMES_MAX, _N_TAKEN_MAX = 1 << 17, 1 << 12
_N_SKIPPED_MAX = 1 << 10
"""How many cached names one request may skip; other requests wait during that time."""
_POLL_S = 0.001
_LOOKUP_TIMEOUT_S = 2.0
"""How long a reply waits for a lookup that hangs. The name is then sent without attributes; requests for these wait."""
_N_REFUSED_MAX = 64
_Kind = tuple[bytes, bool]
"""The name of an extended attribute, and whether it is read from directories (otherwise, from files). A filesystem may
support it only for one of the two."""


class PrefetchXattrs:
    """The extended attributes to prefetch. A client that reads one from a file probably reads it from others, too.

    Any thread may read this. Callers that change it must hold the tables lock.
    """

    def __init__(self, device: int) -> None:
        """device: of the backing filesystem. A filesystem mounted inside it may support different attributes"""
        self._device = device
        self._kinds: frozenset[_Kind] = frozenset()
        self._read_in_listing: frozenset[_Kind] = frozenset()
        self._supported: frozenset[_Kind] = frozenset()
        self._unsupported: frozenset[_Kind] = frozenset()

    def begin(self) -> None:
        """Record that a listing begins. Attributes that no client has read since the previous one began are no longer
        fetched."""
        self._kinds, self._read_in_listing = self._kinds & self._read_in_listing, frozenset()

    def has(self, name: bytes, *, is_directory: bool) -> bool:
        return (name, is_directory) in self._kinds

    def add(self, name: bytes, *, is_directory: bool) -> bool:
        """Add an attribute that a client has read, to fetch it during this listing and the next. Returns  whether it is
        new"""
        if not is_cached_xattr(name):
            return False
        kind = (name, is_directory)
        is_new = kind not in self._kinds
        self._read_in_listing |= {kind}
        self._supported |= {kind}
        self._kinds |= {kind}
        return is_new

    def names_for(self, attributes: Attributes) -> tuple[bytes, ...]:
        """Return the names of the attributes to fetch for one inode."""
        if not self._kinds or not _is_file_or_directory(attributes):
            return ()
        is_directory = attributes.is_directory()
        return tuple(name for name, of_directories in self._kinds if of_directories is is_directory)

    def bits(self) -> tuple[int, int]:
        """Return the attributes to fetch for files, and for directories, as bit masks over the indexes of
        CACHED_XATTRS."""
        files, directories = (
            sum(1 << CACHED_XATTRS.index(name) for name, is_directory in self._kinds if is_directory is of_directories)
            for of_directories in (False, True)
        )
        return files, directories

    def is_unsupported(self, device: int, name: bytes, *, is_directory: bool) -> bool:
        """Return whether the filesystem is known not to support an attribute."""
        return device == self._device and (name, is_directory) in self._unsupported

    def note_answers(self, attributes: Attributes, answers: Iterable[tuple[bytes, bytes | int]]) -> None:
        """Record which attributes are unsupported, so that they are not read again. An attribute that was ever
        supported is not recorded."""
        if attributes.dev != self._device or not _is_file_or_directory(attributes):
            return
        for name, answer in answers:
            kind = (name, attributes.is_directory())
            if answer not in UNSUPPORTED:
                if kind not in self._supported and is_cached_xattr(name):
                    self._supported |= {kind}
            elif kind not in self._supported:
                self._unsupported = (self._unsupported if len(self._unsupported) < _N_REFUSED_MAX else frozenset()) | {
                    kind
                }
                self._kinds -= {kind}

    def note_supported(self, name: bytes, *, is_directory: bool) -> None:
        """Record that an attribute is supported, since a client has set it."""
        self._unsupported -= {(name, is_directory)}


def _is_file_or_directory(attributes: Attributes) -> bool:
    return stat.S_ISREG(attributes.mode) or stat.S_ISDIR(attributes.mode)


class Prefetch:
    """The prefetch queues of a mount. Callers must hold the tables lock."""

    def __init__(
        self, lock: TablesLock, cache: DaemonCache, device: int, *, has_handles: bool, n_in_flight: int, n_fds: int
    ) -> None:
        """Set up, without starting a thread.

        device       of the backing filesystem
        has_handles  whether its file handles are reliable, and thus fetched, too
        n_in_flight  how many lookups of a queue may be in progress at a time
        n_fds        how many fds lookups may briefly hold
        """
        self._lock = lock
        self._cache = cache
        self.xattrs = PrefetchXattrs(device)
        self._has_handles = has_handles
        self._n_in_flight = n_in_flight
        self._queues: dict[Node, PrefetchQueue] = {}
        self._numbers = itertools.count()
        self._prefetcher = Prefetcher(min(_N_THREADS_MAX, n_fds // 4))
        self._thread: threading.Thread | None = None

    @property
    def n_under_way(self) -> int:
        """The number of names whose attributes are being fetched or will be fetched next."""
        return sum(queue.n_pending() for queue in self._queues.values())

    def close(self) -> None:
        """Begin no more lookups."""
        self._prefetcher.end()

    def begin(self, directory: Node) -> PrefetchQueue:
        """Return a new queue for a listing that begins."""
        self.xattrs.begin()
        self.drop(directory)
        queue = self._queues[directory] = PrefetchQueue(next(self._numbers))
        if len(self._queues) > _N_QUEUES:
            self.drop(next(iter(self._queues)))
        return queue

    def drop(self, directory: Node) -> None:
        """Drop the queue of a directory that is forgotten, or listed again."""
        self._queues.pop(directory, None)

    def note_lookup(self, directory: Node, fd: Fd | None) -> None:
        """Record that a process stats a name in this directory, and prefetch the next names.

        fd  of the directory, owned by the caller; None: the directory is not open, and nothing is fetched now
        """
        queue = self._queues.get(directory) or self._queue_of_cached_listing(directory)
        if queue is None:
            return
        queue.is_active = True
        queue.n_allowed += self._n_in_flight
        if fd is not None and queue.names and self._cache.is_enabled and queue.n_pending() < self._n_in_flight:
            names = queue.take(min(queue.n_allowed, _BATCH), partial(self._is_cached, directory))
            queue.n_allowed -= len(names)
            self.fetch(queue, directory, fd, names)

    def note_getxattr(self, name: bytes, node: Node, fd: Fd | None) -> None:
        """Record that an extended attribute of a node was read. fd: of the node's directory, as for `note_lookup`"""
        if self.xattrs.add(name, is_directory=node.is_directory):
            for queue in self._queues.values():
                queue.requeue_taken()
        if node.parent is not None:
            self.note_lookup(node.parent, fd)

    def _queue_of_cached_listing(self, directory: Node) -> PrefetchQueue | None:
        """Return a queue for a directory whose listing both the kernel and the daemon have cached; None if the daemon
        has not cached it."""
        entries = self._cache.metadata.listing(directory.source, time.monotonic())
        if entries is None:
            return None
        queue = self.begin(directory)
        queue.names.extend(name for name, *_ in entries)
        return queue

    def uncached_names(self, queue: PrefetchQueue, directory: Node, names: Sequence[bytes]) -> Sequence[bytes]:
        """Return the names in the next reply whose entries are not completely cached."""
        queue.note_taken(names)
        return [name for name in names if not self._is_cached(directory, name)]

    def _is_cached(self, directory: Node, name: bytes) -> bool:
        return is_store_name(name) or self._cache.is_cached(directory, name, self.xattrs.names_for)

    def fetch(self, queue: PrefetchQueue, directory: Node, fd: Fd, names: Sequence[bytes]) -> None:
        """Begin to look up names. fd: of the directory, owned by the caller"""
        names = list(dict.fromkeys(names))
        if not names or not self._has_thread():
            return
        try:
            own_fd = os.dup(fd)
        except OSError:
            return  # too many open fds: the request itself looks the name up
        batch = PrefetchBatch(self._cache.begin_fill(), directory, frozenset(names))
        begun = self._prefetcher.add(
            batch, own_fd, names, self.xattrs.bits(), self._has_handles, queue.number, self._n_in_flight
        )
        if begun:
            queue.add(batch)
        else:
            batch.fill.end()

    def _has_thread(self) -> bool:
        if self._thread is None:
            self._thread = threading.Thread(target=self._cache_results, daemon=True, name="prefetch")
            try:
                self._thread.start()
            except RuntimeError:  # no more threads allowed
                self._thread = None
        return self._thread is not None

    def _cache_results(self) -> None:
        """Cache results until the prefetcher ends."""
        allow_all_cores()
        while results := self._prefetcher.results():
            results_by_batch: dict[PrefetchBatch, dict[bytes, LookupResult | None]] = {}
            for batch, name, result in results:
                results_by_batch.setdefault(batch, {})[name] = result
            with self._lock:
                for batch, names in results_by_batch.items():
                    batch.add_results(names)
                    for result_of_name in filter(None, names.values()):
                        self.xattrs.note_answers(result_of_name[0], result_of_name[2].items())


class PrefetchBatch:
    """Names of a directory that are looked up together. Callers must hold the tables lock."""

    def __init__(self, fill: CacheFill, directory: Node, names: frozenset[bytes]) -> None:
        """fill: now owned by the batch, which ends it"""
        self.results: dict[bytes, LookupResult | None] = {}
        """None: the lookup failed; a request for the name finds out why."""
        self.fill = fill
        self._directory = directory
        self._names = names
        self._has_all = threading.Event()

    def add_results(self, results: Mapping[bytes, LookupResult | None]) -> None:
        """Add and cache the results of some of the names."""
        self.results.update(results)
        self.fill.cache_results(self._directory, results)
        if len(self.results) == len(self._names):
            self.fill.end()
            self._has_all.set()

    @property
    def n_pending(self) -> int:
        return len(self._names) - len(self.results)

    def wait_for(self, names: Iterable[bytes]) -> None:
        """Wait until these names have been looked up, or one takes too long. Callers must release the tables lock."""
        deadline_s = time.monotonic() + _LOOKUP_TIMEOUT_S
        pending = self._names.intersection(names)
        while not pending <= self.results.keys() and time.monotonic() < deadline_s:
            self._has_all.wait(_POLL_S)


class PrefetchQueue:
    """The prefetch queue of one listing. Callers must hold the tables lock.

    names      names that were returned to the kernel, but whose attributes have not been fetched yet
    n_allowed  how many of them may be fetched; grows with each request
    is_active  whether a process has begun to stat names, so that attributes are sent with later names
    """

    def __init__(self, number: int) -> None:
        """number: identifies the queue to the C threads"""
        self.number = number
        self.names: deque[bytes] = deque(maxlen=_NAMES_MAX)
        self.n_allowed = 0
        self.is_active = False
        self._taken: deque[bytes] = deque(maxlen=_N_TAKEN_MAX)
        self._batches: list[PrefetchBatch] = []

    def take(self, n: int, is_cached: Callable[[bytes], bool]) -> Sequence[bytes]:
        """Remove and return at most n names whose entries are not completely cached; skip the others."""
        uncached: list[bytes] = []
        for _ in range(min(len(self.names), _N_SKIPPED_MAX)):
            if len(uncached) == n:
                break
            name = self.names.popleft()
            self._taken.append(name)
            if not is_cached(name):
                uncached.append(name)
        return uncached

    def note_taken(self, names: Iterable[bytes]) -> None:
        """Record names that are fetched before they are returned to the kernel."""
        self._taken.extend(names)

    def requeue_taken(self) -> None:
        """Queue the last names again, because a client requests another attribute."""
        self.names.extendleft(reversed(self._taken))
        self._taken.clear()

    def add(self, batch: PrefetchBatch) -> None:
        self._batches = [*self.batches(), batch]

    def batches(self) -> Sequence[PrefetchBatch]:
        """Return the batches that are being fetched, and those that were fetched last."""
        self._batches = [one for one in self._batches[:-_N_KEPT] if one.n_pending] + self._batches[-_N_KEPT:]
        return self._batches

    def n_pending(self) -> int:
        """Return how many names are being fetched or will be fetched next."""
        return sum(batch.n_pending for batch in self._batches)
