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
from fusefs.core.entries import Entries
from fusefs.core.inodes import Node, NodeId, source_key
from fusefs.core.names import STORE
from fusefs.linux.dirents import Dirent, Dirents
from fusefs.linux.fd import Fd
from fusefs.mount import trashdir
from fusefs.mount.ahead import Batch, Walk
from fusefs.mount.memory import Look
from fusefs.mount.vfs import Known, Vfs

_DOTS = (b".", b"..")
_N_TOLD = 256
"""Entries looked at before a reply: a little more than it takes."""
_N_RECALLED = 1024


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
    ready     the entries from there on; some of them
    walk      how far it is told
    batch     what was looked at for the next reply
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
        self.batch: Batch | None = None
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
    return vfs.handles.add(node, fd, Listing(node, Dirents(fd)))


def releasedir(vfs: Vfs, fh: int) -> None:
    """Close a handle of a directory."""
    vfs.handles.listing(fh).close()
    vfs.release(fh)


def prepare(vfs: Vfs, fh: int, offset: int) -> None:
    """Read what comes next from a slow filesystem, so that `read` need not wait; nothing on the loop's own thread."""
    listing = vfs.handles.listing(fh)
    if vfs.gate.is_home():
        listing.at = -1
        return
    node = listing.node
    with vfs.memory.changes(node.source):  # the time of its last access
        _go_to(vfs, listing, offset)
    listing.batch = None
    if trashdir.is_below(node) or vfs.folds(node, listing.entries.fd):
        listing.walk = None
        vfs.ahead.drop(node)
    walk, fd = listing.walk, listing.entries.fd
    if walk is None or not walk.is_asked:
        return
    names = [name for name, *_ in listing.ready if name not in _DOTS]
    if walk.batch is not None:
        vfs.gate.call(walk.batch.wait)
    listing.batch = vfs.ahead.fetch(walk, node, fd, names[:_N_TOLD])
    if listing.batch is not None:
        vfs.gate.call(listing.batch.wait)
    if vfs.memory.is_kept:
        vfs.ahead.fetch(walk, node, fd, names[_N_TOLD : 2 * _N_TOLD])


def _go_to(vfs: Vfs, listing: Listing, offset: int) -> None:
    """Have the entries ready that follow an offset."""
    if offset == 0:
        listing.close()
        listing.walk = vfs.ahead.begin(listing.node, listing.entries.fd)
        listing.look = vfs.memory.looking()
        listing.gathered = Entries()
        listing.recalled, listing.n_recalled = vfs.memory.listing(listing.node), 0
        listing.ready = ()
    elif listing.walk is None:
        listing.walk = vfs.ahead.begin(listing.node, listing.entries.fd)  # the filesystem was quick before
    if offset != 0 and offset != listing.at:
        passed = next((number for number, entry in enumerate(listing.ready, 1) if entry[2] == offset), None)
        if passed is None:
            listing.close()  # it was sent elsewhere
        listing.ready = () if passed is None else listing.ready[passed:]
    listing.at = offset
    if not listing.ready:
        listing.ready = _next(vfs, listing, offset)


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
    return _ready(vfs, listing) if listing.at == offset else _looked_at(vfs, listing, offset)


def _looked_at(vfs: Vfs, listing: Listing, offset: int) -> Iterator[Listed]:
    """An error after the first entry ends the listing there: the next call meets it again."""
    node, fd, learn, identify = listing.node, listing.entries.fd, vfs.nodes.learn, vfs.identifying()
    timeout_s = 0 if trashdir.is_below(node) or vfs.folds(node, fd) else vfs.memory.lifetime_s
    hidden = STORE if trashdir.is_hidden(node, STORE, shows_trash=vfs.shows_trash) else None
    began_ns, n = time.perf_counter_ns(), 0
    try:
        for name, ino, following, kind in listing.entries.read_from(offset):
            if name in _DOTS:
                yield Listed(name, _dot(ino), ino, kind, following, None)
            elif name != hidden:
                try:
                    seen, handle = identify(fd, name)
                except FileNotFoundError:
                    continue  # it went meanwhile
                found = learn(source_key(seen, handle), seen, node, name)
                known = Known(found.nodeid, seen, 0 if name == STORE else timeout_s)
                yield Listed(name, known, ino, kind, following, found)
            n += 1
    except OSError:
        if not n:
            raise
    finally:
        vfs.gate.took(time.perf_counter_ns() - began_ns, n)


def _ready(vfs: Vfs, listing: Listing) -> Iterator[Listed]:
    directory = listing.node
    is_below = trashdir.is_below(directory)
    for name, ino, following, kind in listing.ready:
        if name in _DOTS:
            yield Listed(name, _dot(ino), ino, kind, following, None)
        elif not trashdir.is_hidden(directory, name, shows_trash=vfs.shows_trash):
            known = None if is_below else vfs.remembered(directory, name) or _just_seen(vfs, listing, name)
            node = vfs.nodes.get(known.nodeid) if known is not None else None
            yield Listed(name, known if node is not None else None, ino, kind, following, node)


def _just_seen(vfs: Vfs, listing: Listing, name: bytes) -> Known | None:
    """What was looked at for this reply, and is not remembered: the cache is small, or there is none."""
    batch = listing.batch
    found = batch.found.get(name) if batch is not None else None
    if batch is None or found is None or name == STORE:
        return None
    seen, handle, _ = found
    source = source_key(seen, handle)
    left_s = batch.look.left_s(source, named=(listing.node, name))
    return Known(vfs.nodes.learn(source, seen, listing.node, name).nodeid, seen, left_s) if left_s else None


def told(vfs: Vfs, fh: int, listed: Listed, *, is_taken: bool) -> None:
    """Whether the kernel took an entry."""
    if listed.node is not None:
        if is_taken:
            listed.node.nlookup += 1
        else:
            vfs.not_taken(listed.node)
    elif listed.known is None and is_taken:
        walk = vfs.handles.listing(fh).walk
        if walk is not None:
            walk.names.append(listed.name)


def _dot(ino: int) -> Known:
    """What is told of `.` and `..`: the kernel takes no more than the number and the type."""
    return Known(NodeId(ino), Attributes(0, ino, 0o040755, 1, 0, 0, 0, 0, 0, 4096, 0, 0, 0, 0), 0)
