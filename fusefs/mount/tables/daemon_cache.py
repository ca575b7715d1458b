"""The daemon's cache for a slow backing filesystem, for data that the kernel has dropped, or has not requested yet.

A local filesystem is not cached, since it answers as quickly as the cache (docs/internals/decisions/0065).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Self

from fusefs.core.metadata_cache import Answers, Attributes, MetadataCache, PackedEntries, SourceKey, source_key
from fusefs.core.mount_counters import CachedKind
from fusefs.mount.native._core import Node, Tables
from fusefs.mount.places.counters import Counters
from fusefs.mount.tables.tables_lock import TablesLock

LookupResult = tuple[Attributes, bytes, Answers]
"""Result of looking up a name: attributes, file handle, and the extended attributes that were read with them."""
NameIn = tuple[Node, bytes]


class CacheFill:
    """Puts results from the backing filesystem into the cache until `end`. Their age counts from the fill's start."""

    def __init__(self, metadata: MetadataCache, lifetime_s: float, nodes: Tables) -> None:
        self._metadata = metadata
        self._lifetime_s = lifetime_s
        self._nodes = nodes
        self._began_s = time.monotonic()
        self._epoch = metadata.begin_lookup()
        nodes.is_caching = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.end()

    def end(self) -> None:
        """Stop caching results."""
        self._metadata.end_lookup()
        self._nodes.is_caching = not self._metadata.is_idle

    def cache_entry(self, directory: Node, name: bytes, source: SourceKey, attributes: Attributes) -> None:
        """Cache which inode a name refers to, and the inode's attributes."""
        self._metadata.learn_name(directory.source, name, source, self._epoch, self._began_s)
        self.learn_attributes(source, attributes)

    def cache_results(self, directory: Node, results: Mapping[bytes, LookupResult | None]) -> None:
        """Cache the lookup results of many names in a directory. None: the lookup failed"""
        for name, result in results.items():
            if result is None:
                continue
            attributes, handle, xattrs = result
            source = source_key(attributes, handle)
            self.cache_entry(directory, name, source, attributes)
            if xattrs:
                self.learn_xattrs(source, xattrs)

    def learn_missing(self, directory: Node, name: bytes) -> None:
        """Cache that a name does not exist (a negative entry)."""
        self._metadata.learn_name(directory.source, name, None, self._epoch, self._began_s)

    def learn_attributes(self, source: SourceKey, attributes: Attributes) -> None:
        """Cache attributes, unless one of these is true:

        - The file has several names. The reaper may delete one of them behind the mount.
        - It is a set-user-ID program, whose owner must be read each time that it is executed.
        - It is passed through.
        """
        if (
            (attributes.nlink > 1 and not attributes.is_directory())
            or attributes.gives_rights()
            or self._is_passed(source)
        ):
            return
        self._metadata.learn_attributes(source, attributes, self._epoch, self._began_s)

    def learn_xattrs(self, source: SourceKey, answers: Answers, uid: int = 0) -> None:
        """Cache extended attributes as this user sees them, unless the file is passed through: writes to such a file
        remove its capabilities unnoticed."""
        if not self._is_passed(source):
            self._metadata.learn_xattrs(source, answers, self._epoch, self._began_s, uid)

    def _is_passed(self, source: SourceKey) -> bool:
        node = self._nodes.find(source)
        return node is not None and node.is_passed

    def learn_target(self, source: SourceKey, target: bytes) -> None:
        self._metadata.learn_target(source, target, self._epoch, self._began_s)

    def learn_listing(self, directory: Node, entries: PackedEntries) -> None:
        self._metadata.learn_listing(directory.source, entries, self._epoch, self._began_s)

    def valid_s(self, source: SourceKey | None, *, named: NameIn | None) -> float:
        """Return for how many more seconds a result may be cached; 0 if it has changed since the fill began.

        source  the inode whose attributes were read
        named   the name that was looked up
        """
        if source is not None and not self._metadata.is_unchanged(self._epoch, source):
            return 0
        if named is not None and not self._metadata.is_name_unchanged(self._epoch, named[0].source, named[1]):
            return 0
        return max(0.0, self._lifetime_s - (time.monotonic() - self._began_s))


class DaemonCache:
    """The cache of one mount. Callers must hold the tables lock."""

    def __init__(self, lock: TablesLock, nodes: Tables, stats: Counters, size_bytes: int, lifetime_s: float) -> None:
        """lifetime_s: how long the kernel and the daemon together may cache a result"""
        self.size_bytes = size_bytes
        self.is_enabled = size_bytes > 0 and lifetime_s > 0
        self.lifetime_s = lifetime_s
        self.metadata = MetadataCache(size_bytes, lifetime_s)
        self._nodes = nodes
        self._lock = lock
        self._stats = stats

    def fill_if_slow(self) -> AbstractContextManager[CacheFill | None]:
        """Begin a fill for one operation; the block gets None if the filesystem is not slow, and thus not cached."""
        return self.begin_fill() if self._lock.is_slow else nullcontext()

    def begin_fill(self) -> CacheFill:
        """Begin a fill, which the caller must end."""
        return CacheFill(self.metadata, self.lifetime_s, self._nodes)

    def update_is_caching(self) -> None:
        """Update whether anything is cached or being fetched. If not, the native core makes changes without Python."""
        self._nodes.is_caching = not self.metadata.is_idle

    def is_cached(self, directory: Node, name: bytes, xattrs_of: Callable[[Attributes], Collection[bytes]]) -> bool:
        """Return whether a name's entry is cached, with the inode's attributes and requested extended attributes.

        xattrs_of  returns the names of the requested extended attributes, given the inode's attributes
        """
        now_s = time.monotonic()
        cached_name = self.metadata.name(directory.source, name, now_s)
        if cached_name is None or cached_name[0] is None:
            return cached_name is not None
        cached_attributes = self.metadata.attributes(cached_name[0], now_s)
        if cached_attributes is None:
            return False
        return self.metadata.has_xattrs(cached_name[0], xattrs_of(cached_attributes[0]), now_s)

    def find_name(self, directory: Node, name: bytes) -> tuple[SourceKey | None, float] | None:
        """Return the cached source of a name (None: no such name), and for how many seconds it stays valid; None if not
        cached."""
        cached = self.metadata.name(directory.source, name, time.monotonic())
        kind = CachedKind.MISSING_NAME if cached is not None and cached[0] is None else CachedKind.NAME
        return cached if self._count_hit(kind, cached) else None

    def find_attributes(self, source: SourceKey) -> tuple[Attributes, float] | None:
        """Return the attributes of an inode, and for how many seconds they stay valid; None if not cached."""
        cached = self.metadata.attributes(source, time.monotonic())
        return cached if self._count_hit(CachedKind.ATTRIBUTES, cached) else None

    def find_target(self, node: Node) -> bytes | None:
        """Return the target of a symbolic link; None if not cached."""
        cached = self.metadata.target(node.source, time.monotonic())
        return cached if self._count_hit(CachedKind.LINK_TARGET, cached) else None

    def find_xattr(self, node: Node, name: bytes, uid: int) -> bytes | int | None:
        """Return an extended attribute as a user sees it, or the errno that reading it returns; None if not cached."""
        cached = self.metadata.xattr(node.source, name, time.monotonic(), uid)
        kind = CachedKind.MISSING_XATTR if isinstance(cached, int) else CachedKind.XATTR
        return cached if self._count_hit(kind, cached) else None

    def find_listing(self, directory: Node) -> PackedEntries | None:
        """Return all entries of a directory; None if not cached."""
        cached = self.metadata.listing(directory.source, time.monotonic())
        return cached if self._count_hit(CachedKind.LISTING, cached) else None

    def _count_hit(self, kind: CachedKind, cached: object) -> bool:
        """Count a hit or a miss; return whether it is a hit."""
        is_hit = cached is not None
        (self._stats.count_hit if is_hit else self._stats.count_miss)(kind)
        return is_hit

    def clear(self) -> None:
        self.metadata.clear()
        self.update_is_caching()

    @contextmanager
    def changing(self, *sources: SourceKey, names: Sequence[NameIn] = ()) -> Iterator[None]:
        """Drop inodes, names and the names' directories from the cache before and after the block, which changes them.

        They are dropped before it so that no client gets outdated entries, and after it because other threads may have
        cached results in the meantime.
        """
        nodes = {node for source in sources if (node := self._nodes.find(source)) is not None}
        nodes |= {directory for directory, _name in names}
        for node in nodes:
            self._nodes.change_begins(node)
        self.forget(sources, names)
        try:
            yield
        finally:
            for node in nodes:
                self._nodes.change_ends(node)
            self.forget(sources, names)

    @contextmanager
    def reading(self, source: SourceKey) -> Iterator[None]:
        """Drop the attributes of an inode whose atime the block changes by reading; keep its extended attributes."""
        if not self.metadata.is_idle:
            self.metadata.note_access(source)
        try:
            yield
        finally:
            if not self.metadata.is_idle:
                self.metadata.note_access(source)

    def forget(self, sources: Iterable[SourceKey], names: Iterable[NameIn]) -> None:
        """Drop inodes and names that have changed or are about to change."""
        if self.metadata.is_idle:
            return
        for source in sources:
            self.metadata.note_attributes_change(source)
        for directory, name in names:
            self.metadata.note_name_change(directory.source, name)
