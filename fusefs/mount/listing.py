"""Listings: on a local filesystem each entry is looked at when it is told; on a slow one names are told at once.

There, attributes come with the names when they are remembered, or when somebody has begun to ask for them (see ahead).
Offsets are the backing filesystem's own: what stands in a directory throughout comes exactly once.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fusefs.core.attributes import Attributes
from fusefs.core.entries import Dirent, Entries
from fusefs.core.inodes import Node, NodeId, source_key
from fusefs.core.names import STORE
from fusefs.linux.dirents import Dirents
from fusefs.linux.fd import Fd
from fusefs.mount import trashdir
from fusefs.mount.known import Known
from fusefs.mount.memory import Look
from fusefs.mount.recall import remembered
from fusefs.mount.vfs import Vfs
from fusefs.mount.walk import Batch, Walk
from fusefs.store.layout import is_stores_own

_DOTS = (b".", b"..")
_N_TOLD = 256
"""Entries looked at before a reply: a little more than it takes."""
_N_TIMED = 8
_N_AHEAD = _N_RECALLED = 2048
"""Entries whose attributes are fetched while others are told; and those that are taken from memory at a time."""


class Listed(NamedTuple):
    """An entry of a listing, and where the listing goes on after it.

    known  None: the kernel is told the name, the inode number and the kind, and asks for the rest when it wants it
    node   whose reference it is, if the kernel takes it; None also of `.` and `..`
    """

    name: bytes
    known: Known | None
    ino: int
    kind: int
    offset: int
    node: Node | None


class Listing:
    """A directory that a client reads. Of a slow filesystem:

    at        the offset for which entries are ready
    ready     the entries from there on: some of them, or all
    walk      how far it is told
    n_new     how many of them were not looked at yet; the last ones
    batches   what was looked at for the next reply
    gathered  the entries from the beginning on, to be remembered at the end; the look began with them
    recalled  all entries, from memory, and how many of them were made ready
    """

    def __init__(self, node: Node, entries: Dirents) -> None:
        """entries: from its beginning."""
        self.node = node
        self.entries = entries
        self.at = -1
        self.ready: Sequence[Dirent] = ()
        self.walk: Walk | None = None
        self.batches: Sequence[Batch] = ()
        self.is_complete = False
        self.n_new = 0
        self.gathered: Entries | None = None
        self.look: Look | None = None
        self.recalled: Entries | None = None
        self.n_recalled = 0

    def close(self) -> None:
        """It is not read any more, or not from one end to the other."""
        self.gathered = self.recalled = None
        if self.look is not None:
            self.look.end()
            self.look = None


def opendir(vfs: Vfs, nodeid: int) -> int:
    """A handle of a directory."""
    node = vfs.node(nodeid)
    if node.last is not None:
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
    vfs.make_room()
    path = b"/proc/self/fd/%d" % vfs.directories.fd_of(node)
    fd = Fd(vfs.gate.call(os.open, path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    return vfs.handles.add(node, fd, listing=Listing(node, Dirents(fd)))


def releasedir(vfs: Vfs, fh: int) -> None:
    """Close a handle of a directory."""
    vfs.handles.listing(fh).close()
    vfs.release(fh)


def advance(vfs: Vfs, fh: int, offset: int) -> bool:
    """Go on with what is ready, if that is all that is needed; nobody has to wait for it."""
    listing = vfs.handles.listing(fh)
    if listing.walk is None or listing.walk.is_asked or not _skip_to(listing, offset):
        return False
    return bool(listing.ready)


def prepare(vfs: Vfs, fh: int, offset: int) -> None:
    """Read what comes next from a slow filesystem, so that `read` need not wait; nothing on the loop's own thread."""
    listing = vfs.handles.listing(fh)
    listing.batches = ()
    vfs.gate.enter(listing.node.source[0])
    if vfs.gate.is_home:
        listing.at = -1
        return
    node, fd = listing.node, listing.entries.fd
    with vfs.memory.changes(node.source):  # the time of its last access
        _go_to(vfs, listing, offset)
    if trashdir.is_below(node) or vfs.folding.folds(node, fd):
        listing.walk = None
        vfs.ahead.drop(node)
    walk = listing.walk
    if walk is None or not walk.is_asked:
        return
    new = listing.ready[len(listing.ready) - listing.n_new :]
    listing.n_new = 0
    vfs.ahead.fetch(walk, node, fd, [name for name, *_ in new if name not in _DOTS])
    listing.batches = walk.batches()
    names = [name for name, *_ in listing.ready[:_N_TOLD]]
    for batch in listing.batches:
        vfs.gate.call(batch.wait_for, names)


def _go_to(vfs: Vfs, listing: Listing, offset: int) -> None:
    """Have the entries ready that follow an offset: enough to fetch attributes of some while others are told."""
    if offset == 0:
        listing.close()
        listing.look = vfs.memory.looking()
        listing.gathered = Entries()
        listing.recalled, listing.n_recalled = vfs.memory.listing(listing.node), 0
        listing.ready, listing.is_complete, listing.n_new = (), False, 0
    if offset == 0 or listing.walk is None:  # or the filesystem was quick before
        listing.walk = vfs.ahead.begin(listing.node)
    if offset != 0 and not _skip_to(listing, offset):
        listing.close()  # it was sent elsewhere
        listing.ready, listing.is_complete, listing.n_new = (), False, 0
    listing.at = offset
    while len(listing.ready) < (_N_AHEAD if listing.walk.is_asked else _N_TOLD) and not listing.is_complete:
        more = _next(vfs, listing, listing.ready[-1][2] if listing.ready else offset)
        listing.ready = [*listing.ready, *more]
        listing.n_new += len(more)
        listing.is_complete = not more


def _skip_to(listing: Listing, offset: int) -> bool:
    """Leave out what was told; False: the listing does not go on from there."""
    if offset != listing.at:
        passed = next((number for number, entry in enumerate(listing.ready, 1) if entry[2] == offset), 0)
        if not passed:
            return False
        listing.ready = listing.ready[passed:]
        listing.n_new = min(listing.n_new, len(listing.ready))
        listing.at = offset
    return True


def _next(vfs: Vfs, listing: Listing, offset: int) -> Sequence[Dirent]:
    if listing.recalled is not None:
        part = range(listing.n_recalled, min(listing.n_recalled + _N_RECALLED, len(listing.recalled)))
        listing.n_recalled = part.stop
        return [listing.recalled[number] for number in part]
    entries = vfs.gate.call(listing.entries.block, offset)
    if listing.look is not None and listing.gathered is not None:
        if entries:
            listing.gathered.extend(entries)
        else:
            listing.look.learn_listing(listing.node, listing.gathered)
        if not entries or listing.gathered.n_bytes > vfs.memory.cache.largest_bytes:
            listing.close()
    return entries


def read(vfs: Vfs, fh: int, offset: int) -> Iterator[Listed]:
    """The entries from an offset on; `told` must follow each."""
    listing = vfs.handles.listing(fh)
    return _ready(vfs, listing) if listing.at == offset else looked_at(vfs, listing, offset)


def looked_at(vfs: Vfs, listing: Listing, offset: int) -> Iterator[Listed]:
    """The same, each looked at when it is asked for.

    An error after the first entry ends the listing there: the next call meets it again.
    """
    node, fd, learn, identify = listing.node, listing.entries.fd, vfs.nodes.learn, vfs.identifying()
    timeout_s = 0 if trashdir.is_below(node) or vfs.folding.folds(node, fd) else vfs.memory.lifetime_s
    hidden, dev, is_trash = left_out(vfs, node), node.source[0], trashdir.holds_trash(node)
    unlooked = frozenset() if vfs.gate.stays_home else vfs.gate.inner.names
    unsteady = vfs.memory.unsteady
    began_ns, n = time.perf_counter_ns(), 0
    try:
        for name, ino, following, kind in listing.entries.read_from(offset):
            if name in _DOTS:
                yield Listed(name, _dot(ino), ino, kind, following, None)
            elif name in unlooked:
                yield Listed(name, None, ino, kind, following, None)  # who asks for it waits
            elif name != hidden:
                try:
                    seen, handle = identify(fd, name)
                except FileNotFoundError:
                    continue  # it went meanwhile
                found = learn(source_key(seen, handle), seen, node, name)
                if is_trash:
                    vfs.stored.add(found)
                is_steady = (not unsteady and seen.dev == dev) or vfs.is_steady(found.source)
                known = Known(found.nodeid, seen, 0 if is_stores_own(name) else timeout_s, None, is_steady)
                yield Listed(name, known, ino, kind, following, found)
            n += 1
            if n % _N_TIMED == 0:
                vfs.gate.took(time.perf_counter_ns() - began_ns, _N_TIMED)
                if vfs.gate.is_slow:
                    return  # nobody else has to wait for the rest
                began_ns = time.perf_counter_ns()
    except OSError:
        if not n:
            raise


def _ready(vfs: Vfs, listing: Listing) -> Iterator[Listed]:
    directory, hidden = listing.node, left_out(vfs, listing.node)
    knows_none = trashdir.is_below(directory) or not (listing.batches or vfs.memory.has_names(directory))
    for name, ino, following, kind in listing.ready:
        if name in _DOTS:
            yield Listed(name, _dot(ino), ino, kind, following, None)
        elif name != hidden:
            known = None if knows_none else remembered(vfs, directory, name) or _just_seen(vfs, listing, name)
            node = vfs.nodes.get(known.nodeid) if known is not None else None
            yield Listed(name, known if node is not None else None, ino, kind, following, node)


def _just_seen(vfs: Vfs, listing: Listing, name: bytes) -> Known | None:
    """What was looked at for this reply, and is not remembered: the cache is small, or there is none."""
    for batch in listing.batches:
        found = batch.found.get(name)
        if found is not None and not is_stores_own(name):
            seen, handle, _ = found
            source = source_key(seen, handle)
            left_s = batch.look.left_s(source, named=(listing.node, name))
            if left_s:
                nodeid = vfs.nodes.learn(source, seen, listing.node, name).nodeid
                return Known(nodeid, seen, left_s, None, source not in vfs.memory.unsteady)
    return None


def told(vfs: Vfs, fh: int, listed: Listed, *, is_taken: bool) -> None:
    """Whether the kernel took an entry."""
    if listed.node is not None:
        count(vfs, listed.node, is_taken=is_taken)
    elif listed.known is None and is_taken:
        walk = vfs.handles.listing(fh).walk
        if walk is not None:
            walk.names.append(listed.name)


def count(vfs: Vfs, node: Node, *, is_taken: bool) -> None:
    """The same of an entry's node, on a filesystem that is not slow."""
    if is_taken:
        node.nlookup += 1
    else:
        vfs.not_taken(node)


def left_out(vfs: Vfs, directory: Node) -> bytes | None:
    """The name that a directory's listing leaves out."""
    return STORE if trashdir.is_hidden(directory, STORE, shows_trash=vfs.shows_trash) else None


def _dot(ino: int) -> Known:
    """What is told of `.` and `..`: the kernel takes no more than the number and the type."""
    return Known(NodeId(ino), Attributes(0, ino, 0o040755, 1, 0, 0, 0, 0, 0, 4096, 0, 0, 0, 0), 0)
