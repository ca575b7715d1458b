"""What the tree is: the mount's operations by nodeid, on the backing filesystem; knows nothing of pyfuse3.

Everything here is synchronous, so that nothing happens between finding a node and counting its reference (I8), and
raises OSError only. What changes names is in vfs_write.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import NamedTuple, NoReturn

from fusefs.core.attributes import Attributes
from fusefs.core.inodes import InodeTable, Node, NodeId
from fusefs.linux.attributes import look_at
from fusefs.linux.caller import Caller
from fusefs.linux.dirents import Dirents
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.mount import trashdir
from fusefs.mount.directories import Directories
from fusefs.mount.handles import Handles

_SPARE_FDS = 64
"""For the daemon's own needs, and those that an operation holds for a moment."""
_LEAST_DIRECTORIES = 16
_KERNELS_OWN = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_DIRECT | os.O_NOCTTY
"""Open flags that the kernel has dealt with; O_DIRECT would ask for aligned buffers, which requests don't have."""
_DOTS = (b".", b"..")


class Known(NamedTuple):
    """What a name or a nodeid means now.

    is_volatile  in the store: the kernel must not remember it
    """

    nodeid: NodeId
    attributes: Attributes
    is_volatile: bool = False


class Listed(NamedTuple):
    """An entry of a listing, and where the listing goes on after it."""

    name: bytes
    known: Known
    offset: int


class Vfs:
    """One mounted tree."""

    def __init__(self, root: Fd, *, max_fds: int, shows_trash: bool = False, is_shared: bool = False) -> None:
        """Begin with a backing tree.

        root         its directory (O_PATH will do), which stays the caller's
        max_fds      how many fds this process may have
        shows_trash  `.trashd` is in the root's listing too
        is_shared    names may change behind the mount at any time: each look verifies what it sees
        """
        seen = look_at(root)
        self._n_fds = max(max_fds - _SPARE_FDS, 2 * _LEAST_DIRECTORIES)
        self.directories = Directories(root, self._n_fds)
        self.nodes = InodeTable(self.directories.source_of(root, b"", seen), seen)
        self._drops = trashdir.Drops(Kernel(), root)
        self._shows_trash = shows_trash
        self._is_shared = is_shared
        self._handles = Handles()

    def close(self) -> None:
        """Close all fds; what clients have open is lost to them."""
        self._handles.close()
        self.directories.close()

    # Nodes.

    def node(self, nodeid: int) -> Node:
        """The node of a nodeid. Raises  OSError ESTALE, which the kernel takes as a reason to look again."""
        node = self.nodes.get(NodeId(nodeid))
        if node is None:
            _fail(errno.ESTALE if trashdir.user_of(nodeid) is None else errno.EOPNOTSUPP)
        return node

    def directory(self, nodeid: int) -> tuple[Node, Fd]:
        """A directory and its fd, to be used at once. Raises  OSError ENOENT if it was removed."""
        node = self.node(nodeid)
        if node.last is not None:
            _fail(errno.ENOENT)
        return node, self.directories.fd_of(node)

    def changeable(self, parent: int, name: bytes) -> tuple[Node, Fd]:
        """The same, for a change of that name. Raises  OSError EPERM for the one that nobody may change"""
        directory, fd = self.directory(parent)
        if trashdir.is_drop(directory, name):
            _fail(errno.EPERM)
        return directory, fd

    def lookup(self, parent: int, name: bytes, caller: Caller) -> Known:
        """What a name means; one more reference for the kernel. Raises  OSError ENOENT, ENAMETOOLONG and so on."""
        directory, fd = self.directory(parent)
        if trashdir.is_drop(directory, name):
            return self._drop(caller.uid, caller)
        known = self.see(directory, fd, name)
        self.counted(known)
        return known

    def see(self, directory: Node, fd: Fd, name: bytes) -> Known:
        """What a name means, not counted yet: `counted` or `not_taken` must follow."""
        return self.learn(directory, name, fd, name)

    def learn(self, directory: Node, name: bytes, fd: Fd, at: bytes = b"") -> Known:
        """The same of what an fd holds, or of a name (`at`) in it."""
        seen = look_at(fd, at)
        node = self.nodes.learn(self.directories.source_of(fd, at, seen), seen, directory, name)
        return Known(node.nodeid, seen, trashdir.is_below(node))

    def lacks_its_number(self, known: Known) -> bool:
        """Whether the kernel's next messages may free the nodeid that what was just made should have."""
        node = self.nodes.get(known.nodeid)
        return node is not None and self.nodes.lacks_its_number(node)

    def renumbered(self, known: Known) -> Known:
        """What was just made, by its own number if that is free by now; the kernel must not know it yet."""
        node = self.node(known.nodeid)
        self.nodes.renumber(node)
        return known._replace(nodeid=node.nodeid)

    def counted(self, known: Known) -> None:
        """The kernel was told: it has one more reference."""
        self.node(known.nodeid).nlookup += 1

    def not_taken(self, known: Known) -> None:
        """The kernel was not told after all."""
        self._ended(self.node(known.nodeid), 0)

    def forget(self, nodeid: int, n: int) -> None:
        """The kernel lets go of n references."""
        node = self.nodes.get(NodeId(nodeid))
        if node is not None:
            self._ended(node, n)

    def _ended(self, node: Node, n: int) -> None:
        if self.nodes.forget(node, n):
            self.directories.drop(node)

    def _drop(self, uid: int, caller: Caller) -> Known:
        return Known(trashdir.drop_of(uid), self._drops.look(uid, caller), is_volatile=True)

    # Looking.

    def getattr(self, nodeid: int, caller: Caller) -> Known:
        """The attributes of a node as they are now."""
        uid = trashdir.user_of(nodeid)
        if uid is not None:
            return self._drop(uid, caller)
        return self.known(self.node(nodeid))

    def known(self, node: Node) -> Known:
        """What a node is now."""
        return Known(node.nodeid, self._attributes(node), trashdir.is_below(node))

    def _attributes(self, node: Node) -> Attributes:
        if node.last is not None:
            return node.last
        if node.n_open:
            return look_at(self._handles.fd_of(node))
        if node.is_directory:
            return look_at(self.directories.fd_of(node))
        if node.parent is not None and not self._is_shared:
            try:
                seen = look_at(self.directories.fd_of(node.parent), node.name)
            except (FileNotFoundError, NotADirectoryError):
                pass  # moved behind the mount
            else:
                if node.is_seen_in(seen):
                    return seen
        with self.directories.hold(node) as fd:
            return look_at(fd)

    def hold(self, node: Node) -> Fd:
        """An fd of a node, the caller's own, to be asked and reopened; of an unlinked one as long as it is open."""
        if node.n_open:
            return Fd(os.dup(self._handles.fd_of(node)))
        return self.directories.hold(node)

    def readlink(self, nodeid: int, caller: Caller) -> bytes:
        """A link's target."""
        uid = trashdir.user_of(nodeid)
        if uid is not None:
            return self._drops.readlink(uid, caller)
        with self.directories.hold(self.node(nodeid)) as fd:
            return os.readlink(b"", dir_fd=fd)

    def access(self, nodeid: int, mask: int) -> bool:
        """Whether the daemon's own user may (single-user mounts: it is the caller)."""
        with self.hold(self.node(nodeid)) as fd:
            return os.access(b"/proc/self/fd/%d" % fd, mask, effective_ids=True)

    def statfs(self) -> os.statvfs_result:
        """The backing filesystem's numbers."""
        return os.fstatvfs(self.directories.fd_of(self.nodes.root))

    def getxattr(self, nodeid: int, name: bytes) -> bytes:
        """One extended attribute."""
        with self.hold(self.node(nodeid)) as fd:
            return os.getxattr(b"/proc/self/fd/%d" % fd, name)

    def listxattr(self, nodeid: int, caller: Caller) -> list[bytes]:
        """Their names; trusted ones are root's to see."""
        with self.hold(self.node(nodeid)) as fd:
            names = [os.fsencode(name) for name in os.listxattr(b"/proc/self/fd/%d" % fd)]
        return [name for name in names if caller.uid == 0 or not name.startswith(b"trusted.")]

    # Files.

    def open(self, nodeid: int, flags: int) -> int:
        """A handle of a file."""
        node = self.node(nodeid)
        self.make_room()
        with self.hold(node) as fd:
            return self.opened(node, Fd(os.open(b"/proc/self/fd/%d" % fd, (flags & ~_KERNELS_OWN) | os.O_CLOEXEC)))

    def make_room(self) -> None:
        """Before a handle: the fds are shared between handles and directories. Raises  OSError EMFILE"""
        n_directories = self._n_fds - len(self._handles) - 1
        if n_directories < _LEAST_DIRECTORIES:
            _fail(errno.EMFILE)
        self.directories.limit(n_directories)

    def opened(self, node: Node, fd: Fd) -> int:
        """A handle of a node by an fd, which is the vfs's now."""
        return self._handles.add(node, fd)

    def file(self, fh: int) -> Fd:
        """The fd of a handle."""
        return self._handles.file(fh)

    def read(self, fh: int, offset: int, size: int) -> bytes:
        """Some bytes; fewer at the end."""
        return os.pread(self.file(fh), size, offset)

    def write(self, fh: int, offset: int, data: bytes) -> int:
        """How many bytes were written."""
        return os.pwrite(self.file(fh), data, offset)

    def fsync(self, fh: int, *, data_only: bool) -> None:
        """Make a file or a directory's names durable."""
        (os.fdatasync if data_only else os.fsync)(self.file(fh))

    def release(self, fh: int) -> None:
        """Close a handle of a file or a directory; with the last one of what has no name any more, that has ended."""
        node = self._handles.node(fh)
        if node.n_open == 1 and node.parent is None and node is not self.nodes.root:
            seen = look_at(self.file(fh))
            if node.is_directory or not seen.nlink:
                self.nodes.detach(node, seen)
        self._handles.remove(fh)
        self._ended(node, 0)

    # Listings.

    def opendir(self, nodeid: int) -> int:
        """A handle of a directory."""
        node = self.node(nodeid)
        if node.last is not None:
            _fail(errno.ENOENT)
        self.make_room()
        path = b"/proc/self/fd/%d" % self.directories.fd_of(node)
        fd = Fd(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        return self._handles.add(node, fd, Dirents(fd))

    def readdir(self, fh: int, offset: int) -> Iterator[Listed]:
        """The entries from an offset on; `told` must follow each.

        Offsets are the backing filesystem's own: what stands there throughout comes exactly once. An error after the
        first entry ends the listing there: the next call meets it again.
        """
        node, entries = self._handles.listing(fh)
        is_first = True
        try:
            for name, ino, following in entries.read_from(offset):
                listed = self._listed(node, entries.fd, name, ino, following)
                if listed is not None:
                    yield listed
                    is_first = False
        except OSError:
            if is_first:
                raise

    def _listed(self, node: Node, fd: Fd, name: bytes, ino: int, following: int) -> Listed | None:
        if name in _DOTS:
            return Listed(name, Known(NodeId(ino), _directory(ino)), following)
        if trashdir.is_hidden(node, name, shows_trash=self._shows_trash):
            return None
        try:
            return Listed(name, self.see(node, fd, name), following)
        except FileNotFoundError:
            return None  # it went meanwhile

    def told(self, listed: Listed, *, is_taken: bool) -> None:
        """Whether the kernel took an entry of a listing: a reference more, unless it is `.` or `..`."""
        if listed.name in _DOTS:
            return
        if is_taken:
            self.counted(listed.known)
        else:
            self.not_taken(listed.known)


def _directory(ino: int) -> Attributes:
    """What is told of `.` and `..`: the kernel takes no more than the number and the type."""
    return Attributes(0, ino, 0o040755, 1, 0, 0, 0, 0, 0, 4096, 0, 0, 0, 0)


def _fail(number: int) -> NoReturn:
    raise OSError(number, os.strerror(number))
