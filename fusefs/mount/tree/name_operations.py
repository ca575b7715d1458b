"""What changes names: each operation done on the backing filesystem first, then told to the table of nodes."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass

from fusefs.core.inode_attributes import Attributes
from fusefs.core.nodeids import SourceKey, source_key
from fusefs.linux import syscalls
from fusefs.linux.fd import Fd, closed_on_error
from fusefs.linux.fuse_caller import Caller, keeps_group
from fusefs.linux.kernel import Kernel
from fusefs.linux.statx import look_at, peek_at
from fusefs.mount.native._core import Node, Tables
from fusefs.mount.tables.daemon_cache import DaemonCache, NameIn
from fusefs.mount.tables.directory_fds import DirectoryFds
from fusefs.mount.tables.estale_retries import EstaleRetries
from fusefs.mount.tables.tables_lock import TablesLock
from fusefs.mount.tree.act_as import AsCaller, by_mode, by_mode_of, by_owner, file_writer
from fusefs.mount.tree.drop_adoption import DropAdoption
from fusefs.mount.tree.inode_reader import InodeReader
from fusefs.mount.tree.lookup_operations import LookupOperations
from fusefs.mount.tree.node_access import NodeAccess
from fusefs.mount.tree.opening import OpenedFile, Opening
from fusefs.mount.tree.references import NodeReferences
from fusefs.mount.tree.trashd_dir import StoredNodes, holds_trash, is_drop_folder
from fusefs.mount.tree.validity import AttrTimeouts, EntryParam

_NOT_BELOW = os.O_DIRECT | os.O_TRUNC | os.O_PATH | os.O_TMPFILE
_ANEW = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(eq=False, repr=False)
class NameOperations:
    """Those of one mount. To be used with the tables' lock; all methods raise OSError only."""

    _lock: TablesLock
    _nodes: Tables
    _cache: DaemonCache
    _directories: DirectoryFds
    _retries: EstaleRetries
    _timeouts: AttrTimeouts
    _stored: StoredNodes
    _access: NodeAccess
    _references: NodeReferences
    _reader: InodeReader
    _lookups: LookupOperations
    _opening: Opening
    adoption: DropAdoption

    # New names.

    def create(self, parent: int, name: bytes, mode: int, flags: int, caller: Caller) -> tuple[OpenedFile, EntryParam]:
        """A new file and a handle of it.

        Raises  OSError ESTALE if it was made meanwhile: the kernel then looks again, and checks again
        """
        directory, dir_fd = self._access.changeable(parent, name)
        self._opening.make_room(caller.uid)
        creating = self._creating(directory, dir_fd, mode, caller)
        try:
            with self._cache.changes(names=((directory, name),)):
                fd = Fd(creating.call(os.open, name, flags & ~_NOT_BELOW | _ANEW, stat.S_IMODE(mode), dir_fd=dir_fd))
        except FileExistsError as error:
            if flags & os.O_EXCL:
                raise
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE)) from error
        try:
            self._timeouts.changed(directory)
            known = self._lookups.see_made(directory, dir_fd, name, fd)
        except BaseException:
            fd.close()
            raise
        node = self._access.node(known.nodeid)
        node.nlookup += 1  # the kernel is told
        writer = file_writer(known.attributes.uid, known.attributes.mode)
        return OpenedFile(fd, self._opening.opened(node, fd, caller.uid, flags, writer=writer), keeps=True), known

    def create_unnamed(self, parent: int, mode: int, flags: int, caller: Caller) -> tuple[OpenedFile, EntryParam]:
        """A new file that no name leads to, and a handle of it: O_TMPFILE. `link` may give it one while it is open.

        Raises  OSError EOPNOTSUPP: some of FUSE's filesystems lose such a file when it is closed, though it has a name
        """
        directory, dir_fd = self._access.directory(parent)
        if not self._directories.has_handles:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        self._opening.make_room(caller.uid)
        wanted = flags & ~_NOT_BELOW | os.O_TMPFILE | os.O_CLOEXEC
        creating = self._creating(directory, dir_fd, mode, caller)
        fd = Fd(creating.call(os.open, b".", wanted, stat.S_IMODE(mode), dir_fd=dir_fd))
        with closed_on_error(fd):
            seen, handle = self._lock.call(peek_at, fd)
        node = self._nodes.learn(source_key(seen, self._directories.lasting(handle)), seen, directory, b"")
        self._nodes.take_away(node, directory, b"")
        node.nlookup += 1  # the kernel is told
        backing_id = self._opening.opened(
            node, fd, caller.uid, flags | os.O_CREAT, writer=file_writer(seen.uid, seen.mode)
        )
        return OpenedFile(fd, backing_id, keeps=True), EntryParam(node.nodeid, seen, 0)

    def mknod(self, parent: int, name: bytes, mode: int, rdev: int, caller: Caller) -> EntryParam:
        """A new file, FIFO, socket or device."""
        return self._make(parent, name, mode, caller, os.mknod, name, mode, rdev)

    def mkdir(self, parent: int, name: bytes, mode: int, caller: Caller) -> EntryParam:
        """A new directory."""
        return self._make(parent, name, 0, caller, os.mkdir, name, stat.S_IMODE(mode))

    def symlink(self, parent: int, name: bytes, target: bytes, caller: Caller) -> EntryParam:
        """A new symbolic link."""
        return self._make(parent, name, 0, caller, os.symlink, target, name)

    def _make(
        self, parent: int, name: bytes, mode: int, caller: Caller, act: Callable[..., None], *args: object
    ) -> EntryParam:
        """What a call with these arguments makes, and a dir_fd. mode: see `_creating`"""
        directory, dir_fd = self._access.changeable(parent, name)
        with self._cache.changes(names=[(directory, name)]):
            self._creating(directory, dir_fd, mode, caller).call(act, *args, dir_fd=dir_fd)
        return self._made(directory, dir_fd, name)

    def link(self, nodeid: int, parent: int, name: bytes, caller: Caller) -> EntryParam:
        """One more name of a file."""
        directory, dir_fd = self._access.changeable(parent, name)
        node = self._access.node(nodeid)
        with self._access.hold(node) as fd, self._cache.changes(node.source, names=[(directory, name)]):
            seen = self._lock.call(look_at, fd)
            needs = by_mode_of(self._lock, dir_fd), by_mode(seen), by_owner(seen)  # of the file: fs.protected_hardlinks
            linking = self._access.as_caller(caller, needs, (node, directory))
            linking.call(os.link, fd.path(), name, dst_dir_fd=dir_fd, follow_symlinks=True)
        node.told_until_s = 0.0  # of what has more names attributes last for less
        return self._made(directory, dir_fd, name)

    def _creating(self, directory: Node, dir_fd: Fd, mode: int, caller: Caller) -> AsCaller:
        """The making of what is to be the caller's: owner, group, setgid, ACLs, quota. mode: of a file; 0 for others"""
        gid = self._group(dir_fd, mode, caller)
        return self._access.as_caller(
            caller, (by_mode_of(self._lock, dir_fd),), (directory,), gid=gid, umask=caller.umask
        )

    def _group(self, dir_fd: Fd, mode: int, caller: Caller) -> int | None:
        """The group to make a set-group-ID file in: the bit stays if the caller may give that of the directory."""
        if not mode & stat.S_ISGID:
            return None
        directory = self._lock.call(look_at, dir_fd)
        is_given = directory.mode & stat.S_ISGID and keeps_group(caller, directory.uid, directory.gid)
        return directory.gid if is_given else None

    def _made(self, directory: Node, dir_fd: Fd, name: bytes) -> EntryParam:
        self._timeouts.changed(directory)
        known = self._lookups.see(directory, dir_fd, name)
        self._references.counted(known)
        return known

    # Names that go, or change.

    def unlink(self, parent: int, name: bytes, caller: Caller) -> None:
        """Remove the name of what is no directory."""
        self._remove(parent, name, os.unlink, caller)

    def rmdir(self, parent: int, name: bytes, caller: Caller) -> None:
        """Remove an empty directory; never more (ENOTEMPTY is what tools rely on)."""
        self._remove(parent, name, os.rmdir, caller)

    def _remove(self, parent: int, name: bytes, act: Callable[..., None], caller: Caller) -> None:
        directory, dir_fd = self._access.changeable(parent, name)
        source, seen = self._seen(dir_fd, name)
        removing = self._access.as_caller(caller, (by_mode_of(self._lock, dir_fd), by_owner(seen)), (directory,))
        with self._cache.changes(source, names=[(directory, name)]):
            removing.call(act, name, dir_fd=dir_fd)
        self._timeouts.changed(directory)
        self._lost(source, seen, directory, name)

    def rename(self, old_parent: int, old: bytes, new_parent: int, new: bytes, flags: int, caller: Caller) -> None:
        """Rename, with the flags of renameat2(2): honoured or refused by the backing filesystem, never ignored.

        What is moved into a drop folder is an orphan at once. Where that can't be nothing is replaced there (EEXIST):
        the reaper is to make an orphan of each thing.
        A directory's children hang on its node, not on its path: nothing is walked.
        """
        old_directory, old_fd = self._access.changeable(old_parent, old)
        new_directory, new_fd = self._access.changeable(new_parent, new)
        if old_directory is new_directory:
            self._rename(old_fd, (old_directory, old), new_fd, (new_directory, new), flags, caller)
            return
        # Two directories at a time: neither must push out the other.
        with self._directories.hold(old_directory) as old_fd, self._directories.hold(new_directory) as new_fd:
            self._rename(old_fd, (old_directory, old), new_fd, (new_directory, new), flags, caller)

    def _rename(self, old_fd: Fd, old: NameIn, new_fd: Fd, new: NameIn, flags: int, caller: Caller) -> None:
        source, seen = self._seen(old_fd, old[1])
        if flags in (0, syscalls.RENAME_NOREPLACE) and self._drop(old_fd, old, new_fd, new, source, seen, caller):
            return
        found = self._reader.find(new_fd, new[1])
        other = None if found is None else source_key(*found)
        sources = [source] if other is None else [source, other]
        needs = [by_mode_of(self._lock, old_fd), by_mode_of(self._lock, new_fd)]
        for one in [seen] if found is None else [seen, found[0]]:
            needs.append(by_owner(one))
            if one.is_directory() and old[0] is not new[0]:
                needs.append(by_mode(one))  # what is above it is written in it
        moving = self._access.as_caller(caller, needs, (old[0], new[0]))
        with self._cache.changes(*sources, names=[old, new]):
            if not flags and is_drop_folder(self._nodes, new[0]):
                moving.call(Kernel().rename_free, old_fd, old[1], new_fd, new[1])
            else:
                moving.call(syscalls.renameat2, old_fd, old[1], new_fd, new[1], flags)
        self._timeouts.changed(old[0])
        if new[0] is not old[0]:
            self._timeouts.changed(new[0])
        places = (old, new) if flags & syscalls.RENAME_EXCHANGE else (old,)
        if any(holds_trash(self._nodes, directory) for directory, _name in places):
            self._come_back()
        if source == other:
            return  # two names of one file: the kernel leaves both
        if other is not None and found is not None:
            if flags & syscalls.RENAME_EXCHANGE:
                self._moved(other, new, old)
            else:
                self._lost(other, found[0], *new)
        self._moved(source, old, new)

    def _drop(
        self, old_fd: Fd, old: NameIn, new_fd: Fd, new: NameIn, source: SourceKey, seen: Attributes, caller: Caller
    ) -> bool:
        """Make an orphan of what is moved into a drop folder; False: it is not moved yet, to wherever that is.

        The kernel gives it the new name, which expires soon after (forget_stored.py).
        """
        if not is_drop_folder(self._nodes, new[0]):
            return False
        with self._cache.changes(source, names=[old, new]):
            item = self.adoption.take_in(old_fd, old, seen, new_fd, new[0], caller)
        if item is None:
            return False
        self._timeouts.changed(old[0])
        self._timeouts.changed(new[0])
        self._moved(source, old, new)
        node = self._nodes.find(source)
        if node is not None:
            self._nodes.take_away(node, *new)
            self._stored.expire(*new, node)
        self._retries.moved(caller.pid, new, source, item)
        return True

    def _come_back(self) -> None:
        """What lies in a store is about to be taken from there: a reaper may have worked on it behind the mount."""
        self._cache.clear()
        # Most often it is known anew by then (forget_stored.py). But a thread may yet tell of what it saw before that.
        if self._lock.is_slow or not self._stored.is_known_anew:
            self._timeouts.renew_in_trash()

    def _moved(self, source: SourceKey, from_: NameIn, to: NameIn) -> None:
        node = self._nodes.find(source)
        if node is not None:
            self._nodes.move(node, from_, to)
            self._timeouts.moved(node)
            self._stored.moved(to[0], node)

    def _seen(self, dir_fd: Fd, name: bytes) -> tuple[SourceKey, Attributes]:
        """Which incarnation has a name, and what it is."""
        seen, handle = self._reader.identify(dir_fd, name)
        return source_key(seen, handle), seen

    def _lost(self, source: SourceKey, seen: Attributes, directory: Node, name: bytes) -> None:
        """An incarnation lost one name."""
        if stat.S_ISDIR(seen.mode) or seen.nlink == 1:
            self._cache.ended(source)
        node = self._nodes.find(source)
        if node is None:
            return
        self._nodes.take_away(node, directory, name)
        if node.is_directory or seen.nlink == 1:
            self._access.removed(node, seen)
