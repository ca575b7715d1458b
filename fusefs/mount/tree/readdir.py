"""Listings: on a local filesystem each entry is looked at when it is told; on a slow one names are told at once.

There, attributes come with the names when they are remembered, or when a client has begun to ask for them (prefetch).
Offsets are the backing filesystem's own: what stands in a directory throughout comes exactly once.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

from fusefs.core.fuse_protocol import FOPEN_CACHE_DIR, FOPEN_KEEP_CACHE
from fusefs.core.inode_attributes import Attributes
from fusefs.core.nodeids import NodeId, source_key
from fusefs.core.packed_entries import Dirent, PackedEntries
from fusefs.linux.fd import Fd
from fusefs.linux.fuse_caller import Caller
from fusefs.linux.getdents import Dirents
from fusefs.linux.statx import look_at
from fusefs.mount.native._core import Node, Tables
from fusefs.mount.tables.daemon_cache import DaemonCache
from fusefs.mount.tables.directory_fds import TO_READ, DirectoryFds
from fusefs.mount.tables.open_handles import DirHandle, OpenHandles
from fusefs.mount.tables.prefetch import Prefetch
from fusefs.mount.tables.tables_lock import TablesLock
from fusefs.mount.tree import trashd_dir
from fusefs.mount.tree.act_as import by_mode_of
from fusefs.mount.tree.cached_replies import CachedReplies
from fusefs.mount.tree.file_operations import FileOperations, sync
from fusefs.mount.tree.inode_reader import InodeReader
from fusefs.mount.tree.node_access import NodeAccess
from fusefs.mount.tree.references import NodeReferences
from fusefs.mount.tree.validity import EntryParam, NameValidity
from fusefs.store.layout import is_stores_own

_DOTS = (b".", b"..")
_N_TOLD = 256
"""Entries looked at before a reply: a little more than it takes."""
_N_TIMED = 8
_ROOM = 1 << 17
"""Of an answer whose room is unknown."""
BYTES_TOLD = 4
"""An entry takes at least so many times as much in the kernel's answer as below."""
_SOON_S = 1.0
"""By then the listing process has asked for what it wants."""
_N_AHEAD = _N_RECALLED = 2048
"""Entries whose attributes are fetched while others are told; and those that are taken from memory at a time."""


class ReaddirEntry(NamedTuple):
    """An entry of a listing, and where the listing goes on after it.

    known  None: the kernel is told the name, the inode number and the kind, and asks for the rest when it wants it
    node   that a reference is counted on, if the kernel takes it; None also of `.` and `..`
    """

    name: bytes
    known: EntryParam | None
    ino: int
    kind: int
    offset: int
    node: Node | None


@dataclass(eq=False, repr=False)
class Listings:
    """Those of one mount. To be used with the tables' lock; all methods raise OSError only.

    is_shared    directories may change behind the mount at any time
    shows_trash  `.trashd` is in the root's listing too
    is_checked   the kernel checks permissions; else the backing filesystem must, when something is opened
    """

    _lock: TablesLock
    _nodes: Tables
    _cache: DaemonCache
    _directories: DirectoryFds
    _handles: OpenHandles
    _prefetch: Prefetch
    _validity: NameValidity
    _stored: trashd_dir.StoredNodes
    _access: NodeAccess
    _references: NodeReferences
    _reader: InodeReader
    _recalls: CachedReplies
    _files: FileOperations
    _: KW_ONLY
    is_shared: bool
    shows_trash: bool
    is_checked: bool

    def __post_init__(self) -> None:
        self._submounts = self._lock.submounts
        self.looks_at_all = False
        """Whether no entry can be sent by its name alone."""

    def cache_flags(self, fh: int) -> int:
        """What the reply to OPENDIR says of the listing that the kernel keeps: FOPEN_*."""
        if trashd_dir.is_below(self._nodes, self._handles.node(fh)):
            return 0
        return FOPEN_CACHE_DIR | (FOPEN_KEEP_CACHE if self._handles.listing(fh).is_unchanged else 0)

    def opendir(self, nodeid: int, caller: Caller) -> int:
        """A handle of a directory, which is opened as the caller."""
        node = self._access.node(nodeid)
        if node.last is not None:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        self._make_room(caller.uid)
        dir_fd = self._directories.fd_of(node)
        opening = self._access.as_caller(caller, (by_mode_of(self._lock, dir_fd),), (node,))
        fd = Fd(opening.call(os.open, dir_fd.path(), TO_READ))
        try:
            is_unchanged = not self.is_shared or self._nodes.pages_are_right(node, self._lock.call(look_at, fd))
        except BaseException:
            self._lock.call(fd.close)
            raise
        listing = DirHandle(node, Dirents(fd), is_unchanged=is_unchanged)
        return self._handles.add_listing(fd, caller.uid, listing)

    def recall_opendir(self, nodeid: int, caller: Caller) -> int | None:
        """A handle of a directory whose entries are remembered: it need not be opened. None: it must be."""
        node = self._nodes.get(nodeid)
        if node is None or node.last is not None or not self.is_checked or self._cache.listing(node) is None:
            return None
        self._make_room(caller.uid)
        return self._handles.add_late(caller.uid, DirHandle(node, None, is_unchanged=not self.is_shared))

    def _make_room(self, opener: int) -> None:
        """Before a handle of a uid's: directories' fds give way. Raises  OSError EMFILE: the opener has its share"""
        if not self._nodes.make_room(opener):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def _entries(self, listing: DirHandle) -> Dirents:
        """Where to read them."""
        return listing.entries or listing.opened(Dirents(self._directories.open_to_read(listing.node)))

    def fsyncdir(self, fh: int, *, data_only: bool) -> None:
        """Make the names of a directory durable."""
        self._handles.node(fh)
        sync(self._lock, self._entries(self._handles.listing(fh)).fd, data_only=data_only)

    def releasedir(self, fh: int) -> None:
        """Close a handle of a directory."""
        listing = self._handles.remove_listing(fh)
        listing.close()
        if not listing.is_late:
            self._files.release(fh)
        elif listing.entries is not None:
            self._lock.call(listing.entries.fd.close)

    def advance(self, fh: int, offset: int) -> bool:
        """Go on with what is ready, if that is all that is needed; it never waits."""
        listing = self._handles.listing(fh)
        if listing.queue is None or listing.queue.is_asked or not _skip_to(listing, offset):
            return False
        return bool(listing.ready)

    def prepare(self, fh: int, offset: int) -> None:
        """Read what comes next from a slow filesystem, so that `read` won't wait; nothing on the loop's own thread."""
        listing = self._handles.listing(fh)
        listing.batches = ()
        if not self._lock.is_slow:
            listing.at = -1
            return
        node = listing.node
        self._go_to(listing, offset)
        if listing.recalled is None and self._is_not_remembered(listing):
            listing.queue = listing.gathered = None
            self._prefetch.drop(node)
        queue = listing.queue
        if queue is None or not queue.is_asked:
            return
        new = listing.ready[len(listing.ready) - listing.n_new :]
        listing.n_new = 0
        missing = self._prefetch.missing(queue, node, [name for name, *_ in new if name not in _DOTS])
        if missing:
            self._prefetch.fetch(queue, node, self._entries(listing).fd, missing)
        listing.batches = queue.batches()
        names = [name for name, *_ in listing.ready[:_N_TOLD]]
        for batch in listing.batches:
            self._lock.call(batch.wait_for, names)

    def _is_not_remembered(self, listing: DirHandle) -> bool:
        """Whether a directory's names change behind the mount, or may be spelled otherwise."""
        return self._validity.are_fickle_in(listing.node, self._entries(listing).fd)

    def _go_to(self, listing: DirHandle, offset: int) -> None:
        """Have the entries ready that follow an offset: enough to fetch attributes of some while others are told."""
        if offset == 0:
            listing.close()
            listing.look = self._cache.looking_ahead()
            listing.gathered = PackedEntries()
            listing.recalled, listing.n_passed = self._cache.listing(listing.node), 0
            listing.ready, listing.is_complete, listing.n_new = (), False, 0
        if offset == 0 or listing.queue is None:  # or the filesystem was quick before
            listing.queue = self._prefetch.begin(listing.node)
        if offset != 0 and not _skip_to(listing, offset):
            self._go_back(listing, offset)
            listing.ready, listing.is_complete, listing.n_new = (), False, 0
        listing.at = offset
        while len(listing.ready) < (_N_AHEAD if listing.queue.is_asked else _N_TOLD) and not listing.is_complete:
            more = self._next(listing, listing.ready[-1][2] if listing.ready else offset)
            listing.ready = [*listing.ready, *more]
            listing.n_new += len(more)
            listing.is_complete = not more

    def _go_back(self, listing: DirHandle, offset: int) -> None:
        """To what was told before: the kernel has lost what it kept of it. Or to anywhere."""
        if listing.known is None:
            listing.recalled = self._cache.listing(listing.node)
        passed = None if listing.known is None else listing.known.after(offset)
        if passed is None:
            listing.close()
        else:
            listing.n_passed = passed

    def _next(self, listing: DirHandle, offset: int) -> Sequence[Dirent]:
        known = listing.known
        if known is not None and (listing.recalled is not None or listing.n_passed < len(known)):
            part = range(listing.n_passed, min(listing.n_passed + _N_RECALLED, len(known)))
            listing.n_passed = part.stop
            return [known[number] for number in part]
        with self._cache.reads(listing.node.source):
            entries = self._lock.call(self._entries(listing).block, offset)
        if listing.look is not None and listing.gathered is not None:
            if entries:
                listing.gathered.extend(entries)
                listing.n_passed = len(listing.gathered)
            elif not self._is_not_remembered(listing):
                listing.look.learn_listing(listing.node, listing.gathered)
                with suppress(OSError), self._cache.looking_ahead() as look:  # it is cached, too, with its new atime
                    look.learn_attributes(listing.node.source, self._lock.call(look_at, self._entries(listing).fd))
            if not entries or listing.gathered.n_bytes > self._cache.largest_bytes:
                listing.close()
        return entries

    def read(self, fh: int, offset: int, room: int = _ROOM) -> Iterator[ReaddirEntry]:
        """The entries from an offset on; `told` must follow each. room: bytes of the answer"""
        listing = self._handles.listing(fh)
        return self._ready(listing) if listing.at == offset else self.looked_at(listing, offset, room)

    def looked_at(self, listing: DirHandle, offset: int, room: int) -> Iterator[ReaddirEntry]:
        """The entries from an offset on, each looked at when it is asked for.

        An error after the first entry ends the listing there: the next call meets it again.
        room: bytes of the answer, no more is read at a time than it takes
        """
        node, entries, learn, identify = (
            listing.node,
            self._entries(listing),
            self._nodes.learn,
            self._reader.identifying(),
        )
        fd = entries.fd
        timeout_s = 0 if self._validity.are_fickle_in(node, fd) else self._cache.lifetime_s
        hides, dev, is_trash = self.hides_stores(node), node.source[0], trashd_dir.holds_trash(self._nodes, node)
        unlooked = frozenset() if self.looks_at_all else self._submounts.names
        soon_s, node_of = time.monotonic() + _SOON_S, self._nodes.get
        began_ns = n = n_looked = 0
        try:
            for name, ino, following, kind in entries.read_from(offset, room // BYTES_TOLD, self._lock.call):
                if name in _DOTS:
                    yield ReaddirEntry(name, _dot(ino), ino, kind, following, None)
                elif name in unlooked:
                    yield ReaddirEntry(name, None, ino, kind, following, None)  # a request for it waits
                elif timeout_s and (told := node_of(ino)) and _is_told_already(told, node, name, soon_s):
                    yield ReaddirEntry(name, None, ino, kind, following, None)
                    n_looked = 0
                elif not (hides and is_stores_own(name)):
                    if not n_looked:
                        began_ns = time.perf_counter_ns()
                    try:
                        seen, handle = self._lock.call(identify, fd, name)
                    except FileNotFoundError:
                        continue  # it went meanwhile
                    found = learn(source_key(seen, handle), seen, node, name)
                    if is_trash:
                        self._stored.add(found)
                    is_steady = not found.is_unsteady and (seen.dev == dev or self._submounts.are_asked(seen.dev))
                    known = EntryParam(found.nodeid, seen, 0 if is_stores_own(name) else timeout_s, is_steady)
                    yield ReaddirEntry(name, known, ino, kind, following, found)
                    n_looked += 1
                n += 1
                if n_looked == _N_TIMED:
                    self._lock.took(time.perf_counter_ns() - began_ns, _N_TIMED)
                    if self._lock.is_slow:
                        return  # no other request has to wait for the rest
                    n_looked = 0
        except OSError:
            if not n:
                raise

    def _ready(self, listing: DirHandle) -> Iterator[ReaddirEntry]:
        directory, hides = listing.node, self.hides_stores(listing.node)
        soon_s = time.monotonic() + _SOON_S
        knows_none = trashd_dir.is_below(self._nodes, directory) or not (
            listing.batches or self._cache.has_names(directory)
        )
        for name, ino, following, kind in listing.ready:
            if name in _DOTS:
                yield ReaddirEntry(name, _dot(ino), ino, kind, following, None)
            elif not (hides and is_stores_own(name)):
                known = None if knows_none else self._recalls.name(directory, name) or self._just_seen(listing, name)
                node = self._nodes.get(known.nodeid) if known is not None else None
                is_told = node is not None and _is_told_already(node, directory, name, soon_s)
                if known is None or node is None or (is_told and known.is_steady and known.attributes.nlink == 1):
                    yield ReaddirEntry(name, None, ino, kind, following, None)
                else:
                    yield ReaddirEntry(name, known, ino, kind, following, node)

    def _just_seen(self, listing: DirHandle, name: bytes) -> EntryParam | None:
        """What was looked at for this reply, and is not remembered: the cache is small, or there is none."""
        for batch in listing.batches:
            found = batch.found.get(name)
            if found is not None and not is_stores_own(name):
                seen, handle, _ = found
                source = source_key(seen, handle)
                left_s = batch.look.left_s(source, named=(listing.node, name))
                if left_s:
                    node = self._nodes.learn(source, seen, listing.node, name)
                    return EntryParam(node.nodeid, seen, left_s, not node.is_unsteady)
        return None

    def told(self, fh: int, listed: ReaddirEntry, *, is_taken: bool) -> None:
        """Whether the kernel took an entry."""
        name, known, *_, node = listed
        if node is not None:
            self.count(node, 0, is_taken=is_taken)
        queue = self._handles.listing(fh).queue
        if queue is None or not is_taken or name in _DOTS:
            return
        if known is not None and node is not None:
            node.told_until_s = time.monotonic() + known.timeout_s
        if known is None or not queue.is_asked:  # a client that asks for more than that asks for it of all
            queue.names.append(name)

    def count(self, node: Node, told_until_s: float, *, is_taken: bool) -> None:
        """Count a reference to an entry's node if the kernel took it, and believes it until then.

        What is open is told again each time: the kernel does not believe it once it has been written.
        """
        if is_taken:
            node.nlookup += 1
            node.told_until_s = 0 if node.n_open else told_until_s
        else:
            self._references.not_taken(node)

    def hides_stores(self, directory: Node) -> bool:
        """Whether a directory's listing leaves stores out."""
        return trashd_dir.hides_stores(directory, shows_trash=self.shows_trash)


def _skip_to(listing: DirHandle, offset: int) -> bool:
    """Leave out what was told; False: the listing does not go on from there."""
    if offset != listing.at:
        passed = next((number for number, entry in enumerate(listing.ready, 1) if entry[2] == offset), 0)
        if not passed:
            return False
        listing.ready = listing.ready[passed:]
        listing.n_new = min(listing.n_new, len(listing.ready))
        listing.at = offset
    return True


def _is_told_already(node: Node, directory: Node, name: bytes, until_s: float) -> bool:
    """Whether the kernel has been told what has a name, which is no directory, and may believe that for longer than
    until then.

    Told again, it would drop the file's ACL, and ask for that again. A directory may have been told for less long.
    """
    is_believed = node.told_until_s > until_s and node.nlookup and not node.is_directory
    return bool(is_believed) and node.parent is directory and node.name == name


def _dot(ino: int) -> EntryParam:
    """What is told of `.` and `..`: the kernel takes no more than the number and the type."""
    return EntryParam(NodeId(ino), Attributes(0, ino, 0o040755, 1, 0, 0, 0, 0, 0, 4096, 0, 0, 0, 0), 0)
