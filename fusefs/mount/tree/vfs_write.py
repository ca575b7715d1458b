"""What changes the tree: each operation done on the backing filesystem first, then told to the table of nodes."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

from fusefs.core.inode_attributes import Attributes
from fusefs.core.inode_table import Node, SourceKey, source_key
from fusefs.linux import syscalls
from fusefs.linux.capabilities import Capability
from fusefs.linux.fd import Fd
from fusefs.linux.fuse_caller import Caller, keeps_group
from fusefs.linux.statx import look_at, peek_at, set_times, set_times_to_now
from fusefs.linux.thread_credentials import call_as, in_no_group
from fusefs.mount.tables.daemon_cache import NameIn
from fusefs.mount.tree import setid_bits, trashd_dir, vfs_files
from fusefs.mount.tree.act_as import (
    AsCaller,
    NeededCapability,
    by_mode,
    by_mode_of,
    by_owner,
    by_owner_alone,
    file_writer,
)
from fusefs.mount.tree.validity import EntryParam
from fusefs.mount.tree.vfs import Vfs
from fusefs.mount.tree.vfs_files import OpenedFile


class Changes(NamedTuple):
    """What setattr is to change; None: left as it is."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None


_NOTHING = Changes()
_NOW_NS = 60 * 10**9
"""A time that is no further from now means now: a process that may write to a file may set that anyway."""
_NOT_BELOW = os.O_DIRECT | os.O_TRUNC
_ANEW = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


# New names.


def create(vfs: Vfs, parent: int, name: bytes, mode: int, flags: int, caller: Caller) -> tuple[OpenedFile, EntryParam]:
    """A new file and a handle of it.

    Raises  OSError ESTALE if it was made meanwhile: the kernel then looks again, and checks again
    """
    directory, dir_fd = vfs.changeable(parent, name)
    vfs.make_room(caller.uid)
    creating = _creating(vfs, directory, dir_fd, mode, caller)
    try:
        with vfs.cache.changes(names=((directory, name),)):
            fd = Fd(creating.call(os.open, name, flags & ~_NOT_BELOW | _ANEW, stat.S_IMODE(mode), dir_fd=dir_fd))
    except FileExistsError as error:
        if flags & os.O_EXCL:
            raise
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE)) from error
    try:
        vfs.timeouts.changed(directory)
        known = vfs.see_made(directory, dir_fd, name, fd)
    except BaseException:
        fd.close()
        raise
    node = vfs.node(known.nodeid)
    node.nlookup += 1  # the kernel is told
    writer = file_writer(known.attributes.uid, known.attributes.mode)
    return OpenedFile(fd, vfs.opened(node, fd, caller.uid, flags, writer=writer), keeps=True), known


def create_unnamed(vfs: Vfs, parent: int, mode: int, flags: int, caller: Caller) -> tuple[OpenedFile, EntryParam]:
    """A new file that no name leads to, and a handle of it: O_TMPFILE. `link` may give it one while it is open.

    Raises  OSError EOPNOTSUPP: some of FUSE's filesystems lose such a file when it is closed, though it has a name
    """
    directory, dir_fd = vfs.directory(parent)
    if not vfs.directories.has_handles:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    vfs.make_room(caller.uid)
    wanted = flags & ~_NOT_BELOW | os.O_TMPFILE | os.O_CLOEXEC
    creating = _creating(vfs, directory, dir_fd, mode, caller)
    fd = Fd(creating.call(os.open, b".", wanted, stat.S_IMODE(mode), dir_fd=dir_fd))
    try:
        seen, handle = vfs.lock.call(peek_at, fd)
    except BaseException:
        fd.close()
        raise
    node = vfs.nodes.learn(source_key(seen, vfs.directories.lasting(handle)), seen, directory, b"")
    vfs.nodes.take_away(node, directory, b"")
    node.nlookup += 1  # the kernel is told
    backing_id = vfs.opened(node, fd, caller.uid, flags | os.O_CREAT, writer=file_writer(seen.uid, seen.mode))
    return OpenedFile(fd, backing_id, keeps=True), EntryParam(node.nodeid, seen, 0)


def mknod(vfs: Vfs, parent: int, name: bytes, mode: int, rdev: int, caller: Caller) -> EntryParam:
    """A new file, FIFO, socket or device."""
    return _make(vfs, parent, name, mode, caller, os.mknod, name, mode, rdev)


def mkdir(vfs: Vfs, parent: int, name: bytes, mode: int, caller: Caller) -> EntryParam:
    """A new directory."""
    return _make(vfs, parent, name, 0, caller, os.mkdir, name, stat.S_IMODE(mode))


def symlink(vfs: Vfs, parent: int, name: bytes, target: bytes, caller: Caller) -> EntryParam:
    """A new symbolic link."""
    return _make(vfs, parent, name, 0, caller, os.symlink, target, name)


def _make(
    vfs: Vfs, parent: int, name: bytes, mode: int, caller: Caller, act: Callable[..., None], *args: object
) -> EntryParam:
    """What a call with these arguments makes, and a dir_fd. mode: see `_creating`"""
    directory, dir_fd = vfs.changeable(parent, name)
    with vfs.cache.changes(names=[(directory, name)]):
        _creating(vfs, directory, dir_fd, mode, caller).call(act, *args, dir_fd=dir_fd)
    return _made(vfs, directory, dir_fd, name)


def link(vfs: Vfs, nodeid: int, parent: int, name: bytes, caller: Caller) -> EntryParam:
    """One more name of a file."""
    directory, dir_fd = vfs.changeable(parent, name)
    node = vfs.node(nodeid)
    with vfs.hold(node) as fd, vfs.cache.changes(node.source, names=[(directory, name)]):
        seen = vfs.lock.call(look_at, fd)
        needs = by_mode_of(vfs.lock, dir_fd), by_mode(seen), by_owner(seen)  # of the file: fs.protected_hardlinks
        linking = vfs.as_caller(caller, needs, (node, directory))
        linking.call(os.link, fd.path(), name, dst_dir_fd=dir_fd, follow_symlinks=True)
    return _made(vfs, directory, dir_fd, name)


def _creating(vfs: Vfs, directory: Node, dir_fd: Fd, mode: int, caller: Caller) -> AsCaller:
    """What is made in a directory is the caller's: owner, group, setgid, ACLs, quota. mode: of a file; 0 for others"""
    gid = _group(vfs, dir_fd, mode, caller)
    return vfs.as_caller(caller, (by_mode_of(vfs.lock, dir_fd),), (directory,), gid=gid, umask=caller.umask)


def _group(vfs: Vfs, dir_fd: Fd, mode: int, caller: Caller) -> int | None:
    """The group to make a set-group-ID file in: the bit stays if the caller may give that of the directory's group."""
    if not mode & stat.S_ISGID:
        return None
    directory = vfs.lock.call(look_at, dir_fd)
    is_given = directory.mode & stat.S_ISGID and keeps_group(caller, directory.uid, directory.gid)
    return directory.gid if is_given else None


def _made(vfs: Vfs, directory: Node, dir_fd: Fd, name: bytes) -> EntryParam:
    vfs.timeouts.changed(directory)
    known = vfs.see(directory, dir_fd, name)
    vfs.counted(known)
    return known


# Names that go, or change.


def unlink(vfs: Vfs, parent: int, name: bytes, caller: Caller) -> None:
    """Remove the name of what is no directory."""
    _remove(vfs, parent, name, os.unlink, caller)


def rmdir(vfs: Vfs, parent: int, name: bytes, caller: Caller) -> None:
    """Remove an empty directory; never more (ENOTEMPTY is what tools rely on)."""
    _remove(vfs, parent, name, os.rmdir, caller)


def _remove(vfs: Vfs, parent: int, name: bytes, act: Callable[..., None], caller: Caller) -> None:
    directory, dir_fd = vfs.changeable(parent, name)
    source, seen = _seen(vfs, dir_fd, name)
    removing = vfs.as_caller(caller, (by_mode_of(vfs.lock, dir_fd), by_owner(seen)), (directory,))
    with vfs.cache.changes(source, names=[(directory, name)]):
        removing.call(act, name, dir_fd=dir_fd)
    vfs.timeouts.changed(directory)
    _lost(vfs, source, seen, directory, name)


def rename(vfs: Vfs, old_parent: int, old: bytes, new_parent: int, new: bytes, flags: int, caller: Caller) -> None:
    """Rename, with the flags of renameat2(2): honoured or refused by the backing filesystem, never ignored.

    A directory's children hang on its node, not on its path: nothing is walked.
    """
    old_directory, old_fd = vfs.changeable(old_parent, old)
    new_directory, new_fd = vfs.changeable(new_parent, new)
    if old_directory is new_directory:
        _rename(vfs, old_fd, (old_directory, old), new_fd, (new_directory, new), flags, caller)
        return
    # Two directories at a time: neither must push out the other.
    with vfs.directories.hold(old_directory) as old_fd, vfs.directories.hold(new_directory) as new_fd:
        _rename(vfs, old_fd, (old_directory, old), new_fd, (new_directory, new), flags, caller)


def _rename(vfs: Vfs, old_fd: Fd, old: NameIn, new_fd: Fd, new: NameIn, flags: int, caller: Caller) -> None:
    source, seen = _seen(vfs, old_fd, old[1])
    found = vfs.find(new_fd, new[1])
    other = None if found is None else source_key(*found)
    sources = [source] if other is None else [source, other]
    needs = [by_mode_of(vfs.lock, old_fd), by_mode_of(vfs.lock, new_fd)]
    for one in [seen] if found is None else [seen, found[0]]:
        needs.append(by_owner(one))
        if one.is_directory() and old[0] is not new[0]:
            needs.append(by_mode(one))  # what is above it is written in it
    moving = vfs.as_caller(caller, needs, (old[0], new[0]))
    with vfs.cache.changes(*sources, names=[old, new]):
        moving.call(syscalls.renameat2, old_fd, old[1], new_fd, new[1], flags)
    vfs.timeouts.changed(old[0])
    if new[0] is not old[0]:
        vfs.timeouts.changed(new[0])
    places = (old, new) if flags & syscalls.RENAME_EXCHANGE else (old,)
    if any(trashd_dir.holds_trash(vfs.nodes, directory) for directory, _name in places):
        _come_back(vfs)
    if source == other:
        return  # two names of one file: the kernel leaves both
    if other is not None and found is not None:
        if flags & syscalls.RENAME_EXCHANGE:
            _moved(vfs, other, new, old)
        else:
            _lost(vfs, other, found[0], *new)
    _moved(vfs, source, old, new)


def _come_back(vfs: Vfs) -> None:
    """What lies in a store is about to be taken from there: a reaper may have worked on it behind the mount."""
    vfs.cache.metadata.clear()
    # Most often it is known anew by then (stored.py). But a thread may yet tell of what it saw before it was moved.
    if vfs.lock.is_slow or not vfs.stored.is_known_anew:
        vfs.timeouts.renew_in_trash(vfs.nodes)


def _moved(vfs: Vfs, source: SourceKey, from_: NameIn, to: NameIn) -> None:
    node = vfs.nodes.find(source)
    if node is not None:
        vfs.nodes.move(node, from_, to)
        vfs.timeouts.moved(node)
        vfs.stored.moved(to[0], node)


def _seen(vfs: Vfs, dir_fd: Fd, name: bytes) -> tuple[SourceKey, Attributes]:
    """Which incarnation has a name, and what it is."""
    seen, handle = vfs.identify(dir_fd, name)
    return source_key(seen, handle), seen


def _lost(vfs: Vfs, source: SourceKey, seen: Attributes, directory: Node, name: bytes) -> None:
    """An incarnation lost one name."""
    if stat.S_ISDIR(seen.mode) or seen.nlink == 1:
        vfs.cache.ended(source)
    node = vfs.nodes.find(source)
    if node is None:
        return
    vfs.nodes.take_away(node, directory, name)
    if node.is_directory or seen.nlink == 1:
        removed(vfs, node, seen)


def removed(vfs: Vfs, node: Node, seen: Attributes) -> None:
    """A node lost its last link: what it was is all that is told of it, but to those that have it open."""
    if not node.n_open:
        vfs.nodes.detach(node, seen)
    if node.is_directory:
        vfs.directories.drop(node)


# Attributes.


def setattr_(vfs: Vfs, nodeid: int, changes: Changes, fh: int | None, caller: Caller) -> EntryParam:
    """Change attributes, in an order in which none undoes another.

    changes  none: a write is about to come, and the kernel wants what setid_bits.take takes; or a chown without ids
    fh       a handle of it, for its size
    """
    node = vfs.node(nodeid)
    with vfs.cache.changes(node.source), vfs.hold(node) as fd, ExitStack() as stack:
        # Before anything is changed, as it may have to wait, and be done again.
        size = changes.size
        file = -1 if size is None else _to_cut(vfs, node, fd, fh, caller, stack)
        if changes == _NOTHING:
            setid_bits.take(vfs, node, fd, caller)
        if changes.uid is not None or changes.gid is not None:
            _change_owner(vfs, node, fd, changes, caller)
        if changes.mode is not None:
            _change_mode(vfs, node, fd, changes, caller)
        if size is not None:
            with setid_bits.kept(vfs.lock, fd, caller):
                vfs.lock.call(call_as, in_no_group(), os.truncate, file, size)
        elif changes.atime_ns is not None or changes.mtime_ns is not None:
            _change_times(vfs, node, fd, changes, caller)
    return vfs.known(node)


def _to_cut(vfs: Vfs, node: Node, fd: Fd, fh: int | None, caller: Caller, stack: ExitStack) -> int | bytes:
    """What to truncate: a handle; or the path of what the caller might open for writing, without a lease on it.

    By that path, for it is truncate(2) then, whose times differ from those of ftruncate(2).
    """
    if fh is not None:
        return vfs.handles.file(fh)
    seen = vfs.lock.call(look_at, fd)
    opened = vfs_files.open_patiently(vfs, node, fd, seen, os.O_WRONLY | os.O_CLOEXEC, caller)
    return stack.enter_context(vfs.lock.owned(opened)).path()


def _change_owner(vfs: Vfs, node: Node, fd: Fd, changes: Changes, caller: Caller) -> None:
    uid, gid = (-1 if one is None else one for one in (changes.uid, changes.gid))
    seen = vfs.lock.call(look_at, fd)
    given = seen.uid if uid < 0 else uid, seen.gid if gid < 0 else gid
    needs = [NeededCapability(Capability.CHOWN, *owned) for owned in ((seen.uid, seen.gid), given)]
    needs.append(by_owner_alone(seen))  # set-user-ID bits that go
    vfs.as_caller(caller, needs, (node,)).call(os.chown, fd.path(), uid, gid)


def _change_mode(vfs: Vfs, node: Node, fd: Fd, changes: Changes, caller: Caller) -> None:
    """A mode that comes with something else is the kernel's own: bits that go with that."""
    mode = stat.S_IMODE(changes.mode or 0)
    if changes._replace(mode=None) != _NOTHING:
        setid_bits.chmod(vfs.lock, fd, mode)
        return
    seen = vfs.lock.call(look_at, fd)
    gid = setid_bits.group_for(seen, caller) if mode & stat.S_ISGID else None
    try:
        vfs.as_caller(caller, (by_owner_alone(seen),), (node,), gid=gid).call(os.chmod, fd.path(), mode)
    except PermissionError:
        if not setid_bits.are_taken_by(vfs, node, fd, mode):
            raise
        setid_bits.chmod(vfs.lock, fd, mode)


def _change_times(vfs: Vfs, node: Node, fd: Fd, changes: Changes, caller: Caller) -> None:
    """To those of its owner's choice; to now for any that may write to it. (pyfuse3 does not say that now is meant.)"""
    times, seen = (changes.atime_ns, changes.mtime_ns), vfs.lock.call(look_at, fd)
    try:
        vfs.as_caller(caller, (by_owner_alone(seen),), (node,)).call(set_times, fd, *times)
    except PermissionError:
        if None in times or times[0] != times[1] or abs(time.time_ns() - (times[0] or 0)) > _NOW_NS:
            raise
        vfs.as_caller(caller, (by_mode(seen),), (node,)).call(set_times_to_now, fd)
