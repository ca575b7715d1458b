"""The mount's filesystem operations by nodeid, on the backing filesystem; knows nothing of pyfuse3.

Everything here is synchronous, so that nothing happens between finding a node and counting its reference (I8), and
raises OSError only. It runs on the loop's own thread, or under the tables' lock in another: all that asks the backing
filesystem goes through that lock. What changes names is in vfs_write, listings in listing.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from fusefs.core.fair_share import FairShares
from fusefs.core.inode_attributes import Attributes
from fusefs.core.inode_table import ROOT, TOP, InodeTable, Node, NodeId, SourceKey, source_key
from fusefs.core.mount_counters import Gauges
from fusefs.linux.fd import Fd
from fusefs.linux.fuse_caller import Caller
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import TOP as TOP_NAME
from fusefs.linux.statx import StatxReaders, look_at
from fusefs.mount.places.counters import Counters
from fusefs.mount.tables.daemon_cache import CacheFill, DaemonCache
from fusefs.mount.tables.directory_fds import DirectoryFds
from fusefs.mount.tables.estale_retries import EstaleRetries
from fusefs.mount.tables.open_handles import OpenHandles
from fusefs.mount.tables.prefetch import Prefetch
from fusefs.mount.tables.prefetch_xattrs import PrefetchXattrs
from fusefs.mount.tables.tables_lock import TablesLock
from fusefs.mount.tree import trashd_dir
from fusefs.mount.tree.act_as import AsCaller
from fusefs.mount.tree.passthrough import Passthrough
from fusefs.mount.tree.validity import NOTHING, AttrTimeouts, EntryParam, NameValidity, PageValidity
from fusefs.store.layout import DROP

_SPARE_FDS, _SPARE_FDS_MAX = 64, 2048
"""For the daemon's own needs, and those that operations hold for a moment: many, where many wait."""
_LEAST_DIRECTORIES = 16


def shares_of(max_fds: int, *, is_for_all: bool) -> FairShares:
    """Of what a process that may have so many fds can have open for clients. is_for_all: for one user else"""
    return FairShares(_n_for_clients(max_fds) - _LEAST_DIRECTORIES, is_for_all=is_for_all)


def _n_spare(max_fds: int) -> int:
    return max(_SPARE_FDS, min(max_fds // 4, _SPARE_FDS_MAX))


def _n_for_clients(max_fds: int) -> int:
    return max(max_fds - _n_spare(max_fds), 2 * _LEAST_DIRECTORIES)


class Vfs:
    """One mounted tree."""

    def __init__(
        self,
        root: Fd,
        lock: TablesLock,
        stats: Counters,
        *,
        max_fds: int,
        timeout_s: float = 0,
        cache_bytes: int = 0,
        n_in_flight: int = 1,
        shows_trash: bool = False,
        is_shared: bool = False,
        is_flushed: bool = False,
        is_checked: bool = True,
    ) -> None:
        """Begin with a backing tree.

        root         its directory (O_PATH will do), which stays the caller's
        max_fds      how many fds this process may have
        timeout_s    how long what is told may be believed
        cache_bytes  for what is remembered of a slow backing filesystem
        n_in_flight  looks at a time for one listing of such a one
        shows_trash  `.trashd` is in the root's listing too
        is_shared    names may change behind the mount at any time: each look verifies what it sees
        is_flushed   the backing filesystem may tell of a failed write as late as at a close
        is_checked   the kernel checks permissions; else the backing filesystem must, when something is opened
        """
        seen = look_at(root)
        self.lock = lock
        self.stats = stats
        self.cache = DaemonCache(lock, stats, cache_bytes, timeout_s)
        n_spare = _n_spare(max_fds)
        self._n_fds = _n_for_clients(max_fds)
        self.retries = EstaleRetries(lock)
        self.directories = DirectoryFds(root, self._n_fds, lock, self.retries)
        self.wanted = PrefetchXattrs(seen.dev, has_handles=self.directories.has_handles)
        self.prefetch = Prefetch(lock, self.cache, self.wanted, n_in_flight, n_spare)
        self.nodes = InodeTable(source_key(seen, self.directories.handle_of(root)), seen, trashd_dir.zone_in)
        self._missing = EntryParam(NodeId(0), NOTHING, timeout_s)
        self.shows_trash = shows_trash
        self.handles = OpenHandles(lock, shares_of(max_fds, is_for_all=is_checked))
        self.drops = trashd_dir.DropLinks(Kernel(), root)
        self.stored = trashd_dir.StoredNodes(self.nodes)
        self.keeps_listings = not is_shared
        """What the kernel keeps of a listing is right: it can't change, or we are told at once when it does."""
        self.is_shared = is_shared
        self.is_flushed = is_flushed
        self.is_checked = is_checked
        self._lookers = StatxReaders(asks=not Kernel().answers_at_once(root))
        self.names = NameValidity(self.nodes, root, seen.dev, lock)
        self.pages = PageValidity()
        self.timeouts = AttrTimeouts()
        self.unlisted: dict[bytes, Node] = {}
        """What is found, once, by a name that no directory has: for the test at the start (passthrough_probe.py)."""
        self.passthrough = Passthrough(lock, self.cache, root, is_shared=is_shared)
        self.as_caller = partial(AsCaller, lock, self._mistaken)
        """One act of a caller's: see AsCaller. If it is refused below, the nodes are not what they were taken for."""
        # The directories last: closing what they have open may take its time, and the nodeid may be another's then.
        self._by_node = (self.prefetch, self.names, self.pages, self.timeouts, self.passthrough, self.directories)

    def close(self) -> None:
        """Close all fds; what clients have open is lost to them."""
        with self.lock:
            self.handles.close()
            self.directories.close()
            self.retries.close()

    # Nodes.

    def node(self, nodeid: int) -> Node:
        """The node of a nodeid, to be asked. Raises  OSError ESTALE: the kernel then looks again; WouldWait"""
        node = self.nodes.get(nodeid)
        if node is None:
            _fail(errno.ESTALE if trashd_dir.user_of(nodeid) is None else errno.EOPNOTSUPP)
        self.lock.enter(node.source[0])
        self.lock.look_by(node.name)
        return node

    def directory(self, nodeid: int) -> tuple[Node, Fd]:
        """A directory and its fd, to be used at once. Raises  OSError ENOENT if it was removed."""
        node = self.node(nodeid)
        if node.last is not None:
            _fail(errno.ENOENT)
        return node, self.directories.fd_of(node)

    def changeable(self, parent: int, name: bytes) -> tuple[Node, Fd]:
        """A directory and its fd, for a change of that name in it. Raises  OSError EPERM for `.trashd/drop`"""
        directory, fd = self.directory(parent)
        self.lock.look_by(name)
        if name == DROP and trashd_dir.is_drop(directory, name):
            _fail(errno.EPERM)
        return directory, fd

    def lookup(self, parent: int, name: bytes, caller: Caller) -> EntryParam:
        """What a name means; one more reference for the kernel.

        Raises  OSError ENAMETOOLONG and so on; ENOENT where that must not be remembered
        """
        directory, fd = self.directory(parent)
        if name == DROP and trashd_dir.is_drop(directory, name):
            return self._drop(caller.uid, caller)
        if parent == ROOT and name == TOP_NAME and self.nodes.root.nodeid == TOP:  # asked by mount/life/root_inode.py
            self.nodes.root.nlookup += 1
            return EntryParam(TOP, self._attributes(self.nodes.root)._replace(ino=TOP), 0)
        if self.unlisted and (node := self.unlisted.pop(name, None)) is not None:
            node.nlookup += 1
            return EntryParam(node.nodeid, look_at(self.handles.fd_of(node)), 0)
        if self.retries and (known := self._look_again(directory, fd, name, caller)):
            return known
        is_fickle = self.names.is_fickle(directory, fd, name)
        if not is_fickle and not self.lock.is_home:
            self.prefetch.asked(directory, fd)
        look = self.cache.looking()
        try:
            found = self.find(fd, name)
            if found is None:
                if is_fickle:
                    _fail(errno.ENOENT)
                look.learn_missing(directory, name)
                proof = look.proof(None, named=(directory, name))
                return self._missing if proof is None else self._missing._replace(proof=proof)
            known = self.learn(directory, name, *found, look, is_fickle=is_fickle)
        finally:
            look.end()
        self.counted(known)
        return known

    def _look_again(self, directory: Node, dir_fd: Fd, name: bytes, caller: Caller) -> EntryParam | None:
        """What a name is to a client that was told ESTALE, and has it held; None: it was not, or nothing is there."""
        fd = self.retries.open(caller.pid, dir_fd, name)
        if fd is None:
            return None
        try:
            known = self.see_made(directory, dir_fd, name, fd)
        except BaseException:
            self.lock.call(fd.close)
            raise
        self.counted(known)
        self.retries.remove(caller.pid)
        if stat.S_ISREG(known.attributes.mode):
            self.retries.hold(caller.pid, self.node(known.nodeid), fd)
        else:
            self.retries.add(caller.pid)
            self.lock.call(fd.close)
        return known

    def still(self, known: EntryParam) -> EntryParam:
        """What is known as the answer goes out: not to be believed if it has changed meanwhile. To be called once."""
        if known.proof is None:
            return known
        with self.lock:
            return known._replace(timeout_s=known.proof.left_s(), proof=None)

    def see(self, directory: Node, fd: Fd, name: bytes) -> EntryParam:
        """What a name means, not counted yet: `counted` must follow."""
        is_fickle = self.names.is_fickle(directory, fd, name)
        with self.cache.looking() as look:
            return self.learn(directory, name, *self.identify(fd, name), look, is_fickle=is_fickle)

    def see_made(self, directory: Node, dir_fd: Fd, name: bytes, fd: Fd) -> EntryParam:
        """What a name means that was just made, by its own fd, not counted yet."""
        is_fickle = self.names.is_fickle(directory, dir_fd, name)
        with self.cache.looking() as look:
            seen, handle = self.lock.look(self._lookers.looker.peek, fd)
            return self.learn(directory, name, seen, self.directories.lasting(handle), look, is_fickle=is_fickle)

    def learn(
        self, directory: Node, name: bytes, seen: Attributes, handle: bytes, look: CacheFill, *, is_fickle: bool
    ) -> EntryParam:
        """What was seen under a name, as a node."""
        source = source_key(seen, handle)
        node = self.nodes.learn(source, seen, directory, name)
        if is_fickle:
            self.stored.seen(directory, node)
            return EntryParam(node.nodeid, seen, 0, is_fickle=True)
        look.learn(directory, name, source, seen)
        proof = look.proof(source, named=(directory, name))
        return EntryParam(node.nodeid, seen, self.cache.lifetime_s, proof, self.is_steady(source))

    def is_steady(self, source: SourceKey) -> bool:
        """Whether attributes that were seen just now may be believed at all."""
        device = source[0]
        self.lock.submounts.meet(device)
        was_asked = not (self.lock.is_home and device in self.lock.submounts.devices)
        return was_asked and source not in self.cache.unsteady

    def identify(self, fd: int, name: bytes) -> tuple[Attributes, bytes]:
        """The attributes and the file handle of a name in a directory. Raises  OSError ENOENT"""
        found = self.find(fd, name)
        if found is None:
            _fail(errno.ENOENT)
        return found

    def find(self, fd: int, name: bytes) -> tuple[Attributes, bytes] | None:
        """The attributes and the file handle of a name in a directory; None if nothing has it. Raises  WouldWait

        Both are of one inode: where others work behind the mount, another may have the name at the next call.
        """
        self.lock.look_by(name)
        if self.lock.is_home and not self.is_shared:
            seen = self.lock.look(self._lookers.looker.find, fd, name)
            return None if seen is None else (seen, self._handle_of(seen, fd, name))
        try:
            seen, handle = self.lock.look(self._lookers.looker.peek_name, fd, name)
        except FileNotFoundError:
            return None
        return seen, self.directories.lasting(handle)

    def _handle_of(self, seen: Attributes, fd: int, name: bytes) -> bytes:
        """The file handle of what was seen just now: that of the node that looks the same, if no other is at work.

        Two incarnations may be born in one tick of the kernel's clock, but only the first one of them has ended then.
        """
        if not self.directories.has_handles:
            return b""
        node = self.nodes.get(seen.ino)
        if node is not None and seen.btime_ns and node.last is None and node.is_seen_in(seen):
            handle = node.source[1]
            if isinstance(handle, bytes):
                return handle
        return self._lookers.looker.handle_of(fd, name)

    def identifying(self) -> Callable[[int, bytes], tuple[Attributes, bytes]]:
        """A function as `identify`, for many names, on the loop's own thread; `lock.took` must be told."""
        if not self.directories.has_handles:
            return self._identify_without_handle
        return self._lookers.looker.peek_name if self.is_shared else self._lookers.looker.identify

    def _identify_without_handle(self, fd: int, name: bytes) -> tuple[Attributes, bytes]:
        return self._lookers.looker.look(fd, name), b""

    def is_listing_kept(self, nodeid: int) -> bool:
        """Whether the kernel may keep a directory's listing."""
        node = self.nodes.get(nodeid)
        return self.keeps_listings and node is not None and not trashd_dir.is_below(self.nodes, node)

    def lacks_its_number(self, known: EntryParam) -> bool:
        """Whether the kernel's next messages may free the nodeid that what was just made should have."""
        node = self.nodes.get(known.nodeid)
        return node is not None and self.nodes.lacks_its_number(node)

    def renumbered(self, known: EntryParam) -> EntryParam:
        """What was just made, by its own number if that is free by now; the kernel must not know it yet."""
        node = self.nodes.get(known.nodeid)
        if node is None:
            _fail(errno.ESTALE)
        self.nodes.renumber(node)
        return known._replace(nodeid=node.nodeid)

    def counted(self, known: EntryParam) -> None:
        """The kernel was told: it has one more reference."""
        if (node := self.nodes.get(known.nodeid)) is None:
            _fail(errno.ESTALE)
        node.nlookup += 1
        node.is_told = True
        if self.lock.is_slow:
            node.told_until_s = time.monotonic() + known.timeout_s

    def not_taken(self, node: Node) -> None:
        """The kernel was not told of a node after all."""
        self._ended(node, 0)

    def forget(self, nodeid: int, n: int) -> None:
        """The kernel lets go of n references."""
        if (node := self.nodes.get(nodeid)) is not None:
            self._ended(node, n)

    def _ended(self, node: Node, n: int) -> None:
        if self.nodes.forget(node, n):
            for part in self._by_node:
                part.drop(node)

    def _drop(self, uid: int, caller: Caller) -> EntryParam:
        return EntryParam(NodeId((seen := self.lock.call(self.drops.look, uid, caller)).ino), seen, 0)

    # Looking.

    def getattr(self, nodeid: int, caller: Caller) -> EntryParam:
        """The attributes of a node as they are now."""
        uid = trashd_dir.user_of(nodeid)
        if uid is not None:
            return self._drop(uid, caller)
        return self.known(self.node(nodeid))

    def known(self, node: Node) -> EntryParam:
        """What a node is now."""
        self.passthrough.settle(node, self.directories)
        look = self.cache.looking()
        try:
            seen = self._attributes(node)
            if trashd_dir.is_below(self.nodes, node):
                return EntryParam(node.nodeid, seen, 0, is_fickle=True)
            look.learn_attributes(node.source, seen)
            is_steady = node.source not in self.cache.unsteady
            node.is_told |= is_steady
            return EntryParam(node.nodeid, seen, self.cache.lifetime_s, look.proof(node.source, named=None), is_steady)
        finally:
            look.end()

    def _attributes(self, node: Node) -> Attributes:
        try:
            return self._look_at(node)
        except OSError:
            if node.last is None:
                raise
            return node.last  # another operation has ended it meanwhile

    def _look_at(self, node: Node) -> Attributes:
        look = self.lock.look
        ask = self._lookers.looker.look
        if node.n_open:
            return look(ask, self.handles.fd_of(node))
        if node.last is not None:
            return node.last
        if node.is_directory:
            return look(ask, self.directories.fd_of(node))
        if node.parent is not None and not self.is_shared:
            try:
                seen = look(ask, self.directories.fd_of(node.parent), node.name)
            except (FileNotFoundError, NotADirectoryError):
                pass  # moved behind the mount
            else:
                if node.is_seen_in(seen):
                    return seen
        with self.directories.hold(node) as fd:
            return look(ask, fd)

    def hold(self, node: Node) -> Fd:
        """An fd of a node, the caller's own, to be asked and reopened; of an unlinked one as long as it is open."""
        if node.n_open:
            return self.lock.owned(Fd(os.dup(self.handles.fd_of(node))))
        return self.directories.hold(node)

    def hold_seen(self, node: Node, *, by_name: bool) -> tuple[Fd, Attributes]:
        """An fd of a node, the caller's own, and its attributes. by_name: by its name, if that is quicker"""
        held = self.directories.hold_by_name(node, is_alone=not self.is_shared) if by_name else None
        if held is not None:
            return held
        fd = self.hold(node)
        try:
            return fd, self.lock.call(look_at, fd)
        except BaseException:
            fd.close()
            raise

    def readlink(self, nodeid: int, caller: Caller) -> bytes:
        """A link's target."""
        uid = trashd_dir.user_of(nodeid)
        if uid is not None:
            return self.lock.call(self.drops.readlink, uid, caller)
        node = self.node(nodeid)
        with self.cache.reads(node.source), self.cache.looking() as look, self.directories.hold(node) as fd:
            target = self.lock.call(os.readlink, b"", dir_fd=fd)
            look.learn_target(node.source, target)
            self.timeouts.renew(node)
            return target

    def access(self, nodeid: int, mask: int) -> bool:
        """Whether the daemon's own user may (single-user mounts: it is the caller)."""
        with self.hold(self.node(nodeid)) as fd:
            return self.lock.call(os.access, fd.path(), mask, effective_ids=True)

    def statfs(self) -> os.statvfs_result:
        """The backing filesystem's numbers."""
        return self.lock.call(os.fstatvfs, self.root_fd())

    def root_fd(self) -> Fd:
        """The backing tree's directory, which stays its owner's."""
        return self.directories.fd_of(self.nodes.root)

    def gauges(self) -> Gauges:
        """How much there is at the moment."""
        with self.lock:
            return Gauges(
                n_nodes=len(self.nodes),
                n_handles=len(self.handles),
                n_directory_fds=len(self.directories),
                n_cached=len(self.cache.metadata),
                cache_bytes=self.cache.metadata.size_bytes if len(self.cache.metadata) else 0,
                cache_size_bytes=self.cache.size_bytes,
                n_threads=self.lock.n_inside,
                n_prefetches=self.prefetch.n_under_way,
                is_slow=int(self.lock.is_slow),
            )

    # Acting.

    def _mistaken(self, node: Node) -> None:
        self.cache.changed(node.source)
        self.timeouts.renew(node)

    # Handles.

    def make_room(self, opener: int) -> None:
        """Before a handle of a uid's: the fds are shared between handles and directories, which give way.

        Raises  OSError EMFILE: the opener has its share
        """
        if not self.handles.shares.may_have(opener):
            _fail(errno.EMFILE)
        self.directories.limit(max(_LEAST_DIRECTORIES, self._n_fds - len(self.handles) - 1))

    def opened(
        self, node: Node, fd: Fd, opener: int, flags: int, size: int | None = None, writer: int | None = None
    ) -> int:
        """Have a handle of a node by an fd, which is the vfs's now; the id by which it is passed through, or 0."""
        try:
            backing_id = self.passthrough.opened(node, fd, flags, size, writer)
        except BaseException:
            self.lock.call(fd.close)
            raise
        node.last = None  # if its last link went while it was being opened
        self.handles.add(node, fd, opener, flags)
        return backing_id

    def release(self, fh: int) -> None:
        """Close a handle of a file or a directory; with the last one of what has no name any more, that has ended."""
        node = self.handles.node(fh)
        if node.n_open == 1 and node.parent is None and node is not self.nodes.root:
            try:
                seen = self.lock.call(look_at, self.handles.file(fh))
            except OSError:
                seen = NOTHING  # what it is can't be told any more
            if node.n_open == 1 and (node.is_directory or not seen.nlink):
                self.nodes.detach(node, seen)
        fd = self.handles.remove(fh)
        backing_id = self.passthrough.released(node, fd)
        if not node.nlookup:
            self._ended(node, 0)
        try:
            if backing_id:
                self.passthrough.close_id(backing_id)
        finally:
            self.lock.close(fd)


def _fail(number: int) -> NoReturn:
    raise OSError(number, os.strerror(number))
