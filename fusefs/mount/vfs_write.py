"""What changes the tree: each operation done on the backing filesystem first, then told to the table of nodes."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from typing import NamedTuple

from fusefs.core.attributes import Attributes
from fusefs.core.inodes import Node, SourceKey, source_key
from fusefs.linux import libc
from fusefs.linux.attributes import look_at, set_times
from fusefs.linux.caller import Caller, created_by, in_group, is_member
from fusefs.linux.fd import Fd
from fusefs.mount import trashdir
from fusefs.mount.vfs import Known, Vfs


class Changes(NamedTuple):
    """What setattr is to change; None: left as it is."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None


# New names.


def create(vfs: Vfs, parent: int, name: bytes, mode: int, flags: int, caller: Caller) -> tuple[int, Known]:
    """A new file and a handle of it.

    Raises  OSError ESTALE if somebody else has made it meanwhile: the kernel then looks again, and checks again
    """
    directory, dir_fd = vfs.changeable(parent, name)
    vfs.make_room()
    wanted = (flags & ~os.O_DIRECT & ~os.O_TRUNC) | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with created_by(caller, _group(vfs, dir_fd, mode, caller)), vfs.memory.changes(names=[(directory, name)]):
            fd = Fd(vfs.gate.call(os.open, name, wanted, stat.S_IMODE(mode), dir_fd=dir_fd))
    except FileExistsError as error:
        if flags & os.O_EXCL:
            raise
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE)) from error
    try:
        known = vfs.see_made(directory, dir_fd, name, fd)
    except BaseException:
        fd.close()
        raise
    vfs.counted(known)
    return vfs.opened(vfs.node(known.nodeid), fd), known


def mknod(vfs: Vfs, parent: int, name: bytes, mode: int, rdev: int, caller: Caller) -> Known:
    """A new file, FIFO, socket or device."""
    directory, dir_fd = vfs.changeable(parent, name)
    with created_by(caller, _group(vfs, dir_fd, mode, caller)), vfs.memory.changes(names=[(directory, name)]):
        vfs.gate.call(os.mknod, name, mode, rdev, dir_fd=dir_fd)
    return _made(vfs, directory, dir_fd, name)


def mkdir(vfs: Vfs, parent: int, name: bytes, mode: int, caller: Caller) -> Known:
    """A new directory."""
    directory, dir_fd = vfs.changeable(parent, name)
    with created_by(caller), vfs.memory.changes(names=[(directory, name)]):
        vfs.gate.call(os.mkdir, name, stat.S_IMODE(mode), dir_fd=dir_fd)
    return _made(vfs, directory, dir_fd, name)


def symlink(vfs: Vfs, parent: int, name: bytes, target: bytes, caller: Caller) -> Known:
    """A new symbolic link."""
    directory, dir_fd = vfs.changeable(parent, name)
    with created_by(caller), vfs.memory.changes(names=[(directory, name)]):
        vfs.gate.call(os.symlink, target, name, dir_fd=dir_fd)
    return _made(vfs, directory, dir_fd, name)


def link(vfs: Vfs, nodeid: int, parent: int, name: bytes) -> Known:
    """One more name of a file."""
    directory, dir_fd = vfs.changeable(parent, name)
    node = vfs.node(nodeid)
    with vfs.hold(node) as fd, vfs.memory.changes(node.source, names=[(directory, name)]):
        vfs.gate.call(os.link, b"/proc/self/fd/%d" % fd, name, dst_dir_fd=dir_fd, follow_symlinks=True)
    return _made(vfs, directory, dir_fd, name)


def _group(vfs: Vfs, dir_fd: Fd, mode: int, caller: Caller) -> int | None:
    """The group to make a set-group-ID file in: the bit stays if he is in the group that the directory gives it."""
    if not mode & stat.S_ISGID:
        return None
    directory = vfs.gate.call(look_at, dir_fd)
    is_given = directory.mode & stat.S_ISGID and is_member(caller, directory.gid)
    return directory.gid if is_given else None


def _made(vfs: Vfs, directory: Node, dir_fd: Fd, name: bytes) -> Known:
    known = vfs.see(directory, dir_fd, name)
    vfs.counted(known)
    return known


# Names that go, or change.


def unlink(vfs: Vfs, parent: int, name: bytes) -> None:
    """Remove the name of what is no directory."""
    _remove(vfs, parent, name, os.unlink)


def rmdir(vfs: Vfs, parent: int, name: bytes) -> None:
    """Remove an empty directory; never more (ENOTEMPTY is what tools rely on)."""
    _remove(vfs, parent, name, os.rmdir)


def _remove(vfs: Vfs, parent: int, name: bytes, act: Callable[..., None]) -> None:
    directory, dir_fd = vfs.changeable(parent, name)
    source, seen = _seen(vfs, dir_fd, name)
    with vfs.memory.changes(source, names=[(directory, name)]):
        vfs.gate.call(act, name, dir_fd=dir_fd)
    _lost(vfs, source, seen, directory, name)


def rename(vfs: Vfs, old_parent: int, old: bytes, new_parent: int, new: bytes, flags: int) -> None:
    """Rename, with the flags of renameat2(2): honoured or refused by the backing filesystem, never ignored.

    A directory's children hang on its node, not on its path: nothing is walked.
    """
    old_directory, new_directory = vfs.changeable(old_parent, old)[0], vfs.changeable(new_parent, new)[0]
    # Two directories at a time: the second must not push out the first.
    with vfs.directories.hold(old_directory) as old_fd, vfs.directories.hold(new_directory) as new_fd:
        source, _ = _seen(vfs, old_fd, old)
        try:
            other, other_seen = _seen(vfs, new_fd, new)
        except FileNotFoundError:
            other, other_seen = None, None
        sources = [source] if other is None else [source, other]
        with vfs.memory.changes(*sources, names=[(old_directory, old), (new_directory, new)]):
            vfs.gate.call(libc.renameat2, old_fd, old, new_fd, new, flags)
        if trashdir.is_coming_back(old_directory):
            vfs.memory.cache.clear()
        if source == other:
            return  # two names of one file: the kernel leaves both
        node = vfs.nodes.find(source)
        if node is not None:
            node.take_away(old_directory, old)
        if other is not None and other_seen is not None:
            if flags & libc.RENAME_EXCHANGE:
                _moved(vfs, other, new_directory, new, old_directory, old)
            else:
                _lost(vfs, other, other_seen, new_directory, new)
        if node is not None:
            node.put(new_directory, new, is_linked=True)


def _moved(vfs: Vfs, source: SourceKey, from_: Node, old: bytes, to: Node, new: bytes) -> None:
    node = vfs.nodes.find(source)
    if node is not None:
        node.take_away(from_, old)
        node.put(to, new, is_linked=True)


def _seen(vfs: Vfs, dir_fd: Fd, name: bytes) -> tuple[SourceKey, Attributes]:
    """Which incarnation has a name, and what it is."""
    seen, handle = vfs.identify(dir_fd, name)
    return source_key(seen, handle), seen


def _lost(vfs: Vfs, source: SourceKey, seen: Attributes, directory: Node, name: bytes) -> None:
    """An incarnation lost one name."""
    if stat.S_ISDIR(seen.mode) or seen.nlink == 1:
        vfs.memory.ended(source)
    node = vfs.nodes.find(source)
    if node is None:
        return
    node.take_away(directory, name)
    if node.is_directory:
        vfs.directories.drop(node)
    if (node.is_directory or seen.nlink == 1) and not node.n_open:
        vfs.nodes.detach(node, seen)


# Attributes.


def setattr_(vfs: Vfs, nodeid: int, changes: Changes, fh: int | None, caller: Caller) -> Known:
    """Change attributes, in an order in which none undoes another; fh: a handle of it, for its size."""
    node = vfs.node(nodeid)
    with vfs.memory.changes(node.source), vfs.hold(node) as fd:
        call = vfs.gate.call
        path = b"/proc/self/fd/%d" % fd
        if changes.uid is not None or changes.gid is not None:
            call(os.chown, path, -1 if changes.uid is None else changes.uid, -1 if changes.gid is None else changes.gid)
        if changes.mode is not None:
            _chmod(vfs, fd, changes.mode)
        if changes.size is not None:
            before = call(look_at, fd).mode if caller.uid == 0 else 0
            call(os.truncate, path if fh is None else vfs.file(fh), changes.size)
            if before & (stat.S_ISUID | stat.S_ISGID):
                _chmod(vfs, fd, before)  # root's truncation leaves them; ours, without CAP_FSETID, has not
        if changes.atime_ns is not None or changes.mtime_ns is not None:
            call(set_times, fd, changes.atime_ns, changes.mtime_ns)
    return vfs.known(node)


def _chmod(vfs: Vfs, fd: Fd, mode: int) -> None:
    """The kernel has decided about set-group-ID; below it would be asked whether the daemon is in that group."""
    with in_group(vfs.gate.call(look_at, fd).gid):
        vfs.gate.call(os.chmod, b"/proc/self/fd/%d" % fd, stat.S_IMODE(mode))
