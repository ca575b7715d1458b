"""Directory listings. C code lists local directories (native/listings.c); this module lists and caches slow ones.

READDIRPLUS of a slow directory returns names at once. Attributes are added for names that are cached, and for all names
once a process has begun to stat them (prefetch.py).

Offsets are those of the backing filesystem, so an entry that exists during the whole listing is returned exactly once.

If the kernel opens directories without OPENDIR, it sends READDIRPLUS with a nodeid instead of a handle, and only for
entries that it has not cached. It checks its cached listing against the directory's mtime, as it does for all caches.

Source  docs/internals/decisions/0063-what-the-kernel-caches.md, 0065-slow-filesystems.md
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import time
from collections.abc import Collection, Sequence
from contextlib import suppress

from fusefs.core import fuse_protocol as wire
from fusefs.core.fuse_protocol import FOPEN_CACHE_DIR, FOPEN_KEEP_CACHE, REQUEST_HEAD_SIZE, Opcode
from fusefs.core.metadata_cache import ROOT, PackedEntries, source_key
from fusefs.linux.fd import Fd
from fusefs.linux.getdents import Dirents
from fusefs.linux.kernel import BTRFS_MAGIC, EXT_MAGIC, TMPFS_MAGIC, XFS_MAGIC, Kernel
from fusefs.linux.statx import stat_at
from fusefs.mount.native._core import Node
from fusefs.mount.tables.daemon_cache import CacheFill
from fusefs.mount.tables.prefetch import PrefetchBatch, PrefetchQueue
from fusefs.mount.tree.kernel_timeouts import EntryParam
from fusefs.mount.tree.mount_state import MountState
from fusefs.mount.tree.trashd_dir import hides_stores, is_in_store
from fusefs.store.layout import is_store_name

_WITH_LASTING_OFFSETS = frozenset({EXT_MAGIC, XFS_MAGIC, BTRFS_MAGIC, TMPFS_MAGIC})
_DISTINCT_TIMES_SINCE = (6, 13)
"""Since Linux 6.13, two changes never leave a directory with the same time if there was a stat in between."""

DIRECTORIES = frozenset({Opcode.OPENDIR, Opcode.READDIRPLUS, Opcode.FSYNCDIR, Opcode.RELEASEDIR})
_TO_READ = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_DOTS = (b".", b"..")
_N_REPLY = 256
"""Entries that are read for a reply: a few more than fit."""
_N_PREFETCHED = 2048
"""Entries whose attributes are fetched while earlier ones are returned."""
_SOON_S = 1.0
"""Within this time, a process that lists a directory will have requested the remaining entries."""
_FIRST_UNOPENED_HANDLE = 1 << 32
"""Slow listings get handles from this number on, which is above all handles in the tables."""


def why_opendir_is_needed(root: Fd, *, checks_permissions: bool) -> str | None:
    """Return why the kernel must send OPENDIR; None if it need not.

    checks_permissions  the kernel checks permissions; otherwise the backing filesystem must, when a directory is opened
    """
    if not checks_permissions:
        return "the backing filesystem must check whether the user may open a directory"
    if Kernel().filesystem(root) not in _WITH_LASTING_OFFSETS:
        return "on this filesystem, positions in a listing may be valid only while the directory is open"
    if tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) < _DISTINCT_TIMES_SINCE:
        return "before Linux 6.13, a directory may change without a new mtime"
    return None


class SlowListing:
    """The progress of listing a slow directory through one handle.

    entries      the entries read so far, from the offset `start` on; or all entries, if they come from the cache
    is_complete  no more entries follow
    position     how many of the entries were returned
    n_requested  how many of the entries, from the first one on, have had their attributes requested
    queue        prefetches for this listing; None: nothing in this directory may be cached
    fill         caches all entries at the end; None: the entries are not read from beginning to end
    handle       the handle's number in the tables; 0: the directory was not opened, because all its entries were cached
    fd           of the directory, for a listing without a handle; opened when something has to be read
    """

    def __init__(self, node: Node, uid: int, handle: int = 0) -> None:
        """uid: of the caller"""
        self.node = node
        self.uid = uid
        self.handle = handle
        self.fd: Fd | None = None
        self.queue: PrefetchQueue | None = None
        self.fill: CacheFill | None = None
        self.restart(-1)

    def restart(self, offset: int, cached: PackedEntries | None = None) -> None:
        """Continue at an offset. cached: all entries of the directory, from the first one"""
        self.start = offset if cached is None else 0
        self.entries = PackedEntries() if cached is None else cached
        self.is_complete = cached is not None
        self.position = self.n_requested = 0
        self.end_fill()

    def keep_fd(self, fd: Fd) -> Fd:
        """Read from this fd from now on, unless another thread has opened one in the meantime; return the fd in use."""
        if self.fd is None:
            self.fd = fd
        else:
            fd.close()
        return self.fd

    def end_fill(self) -> None:
        """Stop collecting entries for the cache."""
        if self.fill is not None:
            self.fill.end()
            self.fill = None

    def offset_at(self, position: int) -> int:
        return self.entries[position - 1][2] if position else self.start

    def seek(self, offset: int) -> bool:
        """Set the position to an offset, since the kernel may have dropped part of the last reply; return False if no
        entry has that offset."""
        if offset != self.offset_at(self.position):
            position = 0 if offset == self.start else self.entries.after(offset)
            if position is None:
                return False
            self.position = position
        return True

    def drop_returned(self) -> None:
        """Drop the entries that were returned, because this directory is too large for the cache."""
        start, entries, n = self.offset_at(self.position), self.entries, self.position
        n_requested = max(0, self.n_requested - n)
        self.restart(start)
        self.entries.extend(entries[number] for number in range(n, len(entries)))
        self.n_requested = n_requested


class Listings:
    """The listings of one mount. Callers must hold the tables lock. Methods raise nothing but OSError."""

    def __init__(self, mount: MountState) -> None:
        self._mount, self._lock, self._nodes, self._cache = mount, mount.lock, mount.nodes, mount.cache
        self._slow: dict[int, SlowListing] = {}
        self._numbers = itertools.count(_FIRST_UNOPENED_HANDLE)

    @property
    def n_unopened(self) -> int:
        """The number of handles whose directories were not opened."""
        return sum(not listing.handle for listing in self._slow.values())

    def answer(self, request: wire.Request) -> bytes:
        """Handle a request about a directory handle; return the reply's body."""
        _size, opcode, _unique, nodeid, uid, _gid, _pid = wire.read_head(request)
        if opcode == Opcode.OPENDIR:
            return self._opendir(request, nodeid, uid)
        (fh,) = wire.HANDLE_IN.unpack_from(request, REQUEST_HEAD_SIZE)
        listing = self._slow.get(fh)
        if listing is None:
            node = self._nodes.handle(fh)[0] if fh else self._nodes.get(nodeid)
            if node is None or opcode != Opcode.READDIRPLUS:
                return self._mount.do(request)
            with self._cache.reading(node.source):
                return self._mount.do(request)
        match opcode:
            case Opcode.READDIRPLUS:
                return self._read(listing, *wire.read_in(request)[1:])
            case Opcode.RELEASEDIR:
                self._release(listing, request)
                del self._slow[fh]
                return b""
        return self._mount.do(wire.replace_handle(request, listing.handle))

    # Handles of slow directories.

    def _opendir(self, request: wire.Request, nodeid: int, uid: int) -> bytes:
        reply = self._mount.do(request)
        node = self._nodes.get(nodeid)
        if node is None or not self._lock.is_slow:
            return reply
        return self._opened(SlowListing(node, uid, wire.read_handle(reply)), reply)

    def answer_from_cache(self, request: wire.Request) -> bytes | None:
        """Return the reply to OPENDIR of a directory whose entries are cached, without opening it; None if it must be
        opened."""
        _size, opcode, _unique, nodeid, uid, _gid, _pid = wire.read_head(request)
        node = self._nodes.get(nodeid)
        if opcode != Opcode.OPENDIR or not self._nodes.opens_directories or not self._mount.options.default_permissions:
            return None
        if node is None or node.final_stat is not None or self._cache.find_listing(node) is None:
            return None
        if not self._nodes.make_room(uid):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        self._nodes.add_to_share(uid, 1)
        is_kept = FOPEN_CACHE_DIR if self._mount.is_shared else FOPEN_CACHE_DIR | FOPEN_KEEP_CACHE
        flags = 0 if is_in_store(self._nodes, node) else is_kept
        return self._opened(SlowListing(node, uid), wire.encode_open(0, flags))

    def release(self, fh: int) -> None:
        """Release a handle of a directory or file that no client will release."""
        self.answer(wire.encode_request(Opcode.RELEASEDIR, ROOT, (0, 0, 0), wire.HANDLE_IN.pack(fh)))

    def _opened(self, listing: SlowListing, reply: bytes) -> bytes:
        fh = next(self._numbers)
        self._slow[fh] = listing
        return wire.encode_open(fh, wire.read_open_flags(reply))

    def _release(self, listing: SlowListing, request: wire.Request) -> None:
        listing.end_fill()
        if listing.handle:
            self._mount.do(wire.replace_handle(request, listing.handle))
            return
        self._nodes.add_to_share(listing.uid, -1)
        if listing.fd is not None:
            self._lock.call(listing.fd.close)

    def _fd(self, listing: SlowListing) -> Fd:
        if listing.handle:
            return self._nodes.handle(listing.handle)[1]
        return listing.fd or listing.keep_fd(self._open_to_read(listing.node))

    def _open_to_read(self, directory: Node) -> Fd:
        """Open a directory for reading; for the kernel, it is already open.

        Raises  OSError ENOENT: the directory was removed behind the mount; for an open directory, other filesystems
                report ENOENT, too
        """
        try:
            return Fd(self._lock.call(os.open, self._mount.directory_fd(directory).path(), _TO_READ))
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)) from error

    # Entries of slow directories.

    def _read(self, listing: SlowListing, offset: int, room: int) -> bytes:
        self._seek(listing, offset)
        is_prefetching = listing.queue is not None and listing.queue.is_active
        n_needed = _N_PREFETCHED if is_prefetching else _N_REPLY
        while not listing.is_complete and len(listing.entries) - listing.position < n_needed:
            self._read_block(listing)
        batches = self._fetch(listing, listing.queue) if listing.queue is not None and is_prefetching else ()
        return self._reply(listing, batches, room)

    def _seek(self, listing: SlowListing, offset: int) -> None:
        node = listing.node
        if offset and listing.seek(offset):
            return
        cached = self._cache.find_listing(node)
        if offset and cached is not None and cached.after(offset) is None:
            cached = None
        listing.restart(offset, cached)
        listing.seek(offset)
        if not offset or listing.queue is None:
            listing.queue = self._mount.prefetch.begin(node)
        if cached is None and self._mount.are_uncacheable_in(node, self._fd(listing)):
            self._mount.prefetch.drop(node)
            listing.queue = None
        elif cached is None and not offset:
            listing.end_fill()
            listing.fill = self._cache.begin_fill()

    def _read_block(self, listing: SlowListing) -> None:
        node, entries = listing.node, listing.entries
        offset = listing.offset_at(len(entries))
        with self._cache.reading(node.source):
            block = self._lock.call(Dirents(self._fd(listing)).block, offset)
        if listing.entries is not entries or listing.offset_at(len(entries)) != offset:
            return  # another request, whose process was killed, was still reading here
        entries.extend(block)
        listing.is_complete = not block
        if block and entries.n_bytes > self._cache.metadata.largest_bytes:
            listing.drop_returned()
        elif not block and listing.fill is not None:
            if not self._mount.are_uncacheable_in(node, self._fd(listing)):
                listing.fill.learn_listing(node, entries)
                with (
                    suppress(OSError),
                    self._cache.begin_fill() as fill,
                ):  # cache the directory's own attributes, too, with the new atime
                    fill.learn_attributes(node.source, self._lock.call(stat_at, self._fd(listing)))
            listing.end_fill()

    def _fetch(self, listing: SlowListing, queue: PrefetchQueue) -> Sequence[PrefetchBatch]:
        """Prefetch the attributes of the next entries, and wait for those of this reply."""
        entries, first = listing.entries, max(listing.position, listing.n_requested)
        listing.n_requested = max(first, min(len(entries), listing.position + _N_PREFETCHED))
        new = [entries[number][0] for number in range(first, listing.n_requested)]
        missing = self._mount.prefetch.uncached_names(queue, listing.node, [name for name in new if name not in _DOTS])
        if missing:
            self._mount.prefetch.fetch(queue, listing.node, self._fd(listing), missing)
        batches = queue.batches()
        end = min(len(entries), listing.position + _N_REPLY)
        names = [entries[number][0] for number in range(listing.position, end)]
        for batch in batches:
            self._lock.call(batch.wait_for, names)
        return batches

    def _reply(self, listing: SlowListing, batches: Sequence[PrefetchBatch], room: int) -> bytes:
        """Return as many entries as fit. The kernel gets one more reference to each node whose attributes are sent."""
        node, queue, reply = listing.node, listing.queue, []
        hides = hides_stores(node, shows_trash=self._mount.options.show_trash)
        is_cached = bool(batches) or self._cache.metadata.has_names(node.source)
        now_s = time.monotonic()
        while listing.position < len(listing.entries):
            name, ino, following, kind = listing.entries[listing.position]
            room -= wire.direntplus_size(name)
            if room < 0:
                break
            listing.position += 1
            if hides and is_store_name(name):
                continue
            entry = self._entry_of(node, batches, name) if is_cached and name not in _DOTS else None
            entry_node = None if entry is None else self._nodes.get(entry.nodeid)
            if entry is None or entry_node is None or _is_cached_by_kernel(entry_node, entry, node, name, now_s):
                reply.append(wire.encode_dirent_without_node(name, following, ino, kind))
            else:
                lifetimes = self._mount.timeouts.timeouts_of(entry)
                number = entry.nodeid
                reply.append(wire.encode_direntplus(name, following, number, number, entry.attributes, *lifetimes))
                entry_node.nlookup += 1
                entry_node.was_sent |= entry_node.is_directory
                entry_node.cached_until_s = now_s + min(lifetimes)
                if queue is not None and queue.is_active:
                    continue
            if queue is not None and name not in _DOTS:
                queue.names.append(name)
        return b"".join(reply)

    def _entry_of(self, directory: Node, batches: Collection[PrefetchBatch], name: bytes) -> EntryParam | None:
        """Return the entry of a name if it is cached, or was fetched for this reply and did not fit into the cache."""
        entry = self._mount.cached_entry(directory, name)
        for batch in batches if entry is None else ():
            result = batch.results.get(name)
            if result is not None and not is_store_name(name):
                attributes, handle, _ = result
                source = source_key(attributes, handle)
                valid_s = batch.fill.valid_s(source, named=(directory, name))
                if valid_s:
                    node = self._nodes.learn(source, attributes, directory, name)
                    return EntryParam(node.nodeid, attributes, valid_s, not node.is_unsteady)
        return entry


def _is_cached_by_kernel(node: Node, entry: EntryParam, directory: Node, name: bytes, now_s: float) -> bool:
    """Return whether the kernel has this entry cached, and will keep it for a while; see native/listings.c."""
    is_single_name = entry.is_steady and entry.attributes.nlink == 1 and not node.is_directory
    is_cached = is_single_name and node.cached_until_s > now_s + _SOON_S and node.nlookup
    return bool(is_cached) and node.parent is directory and node.name == name
