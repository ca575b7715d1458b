"""Protects devices, live sockets, locked files, and directories that contain a `.trashd-keep`, from rules.

In a shared directory, any user can create a `.trashd-keep`, and any reader can lock the directory with flock(2). So
such a mark on a directory counts only if the directory's owner or root made it; other users' marks are reported.

Source  systemd-tmpfiles(8) and tmpreaper(8)
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Sequence
from contextlib import ExitStack

from fusefs.core.names import Name
from fusefs.core.results import KEPT_BY_OTHERS, LOCKED_BY_OTHERS, LOCKED_BY_UNKNOWN, ReportedMark
from fusefs.linux.fd import Fd
from fusefs.linux.file_locks import flock_holders, uids_of
from fusefs.linux.kernel import OTHERS_WRITE, Kernel
from fusefs.linux.xattrs import restored_ns
from fusefs.store.backing_and_mount import BackingAndMount
from fusefs.sweep.request import Action, ActionPlace, ActionResult

KEEP_FILE = Name(b".trashd-keep")
LOCKED, KEPT = "locked", f"contains {KEEP_FILE.decode()}"
RESTORED = "restored too recently for the rule's age"
_LIVE, _DEVICE, _STICKY, _SYSTEMS = "a socket in use", "a device", "its sticky bit is set", "belongs to the filesystem"
_LOST_FOUND = b"lost+found"
_OF_FILESYSTEM = frozenset({b".journal", b"aquota.user", b"aquota.group", b"quota.user", b"quota.group"})
_READING = os.O_RDONLY | os.O_NONBLOCK
"""An open with these flags waits neither for a FIFO's writer nor for the holder of a lease."""
_NO_EXCLUSIVE = frozenset({errno.EBADF, errno.EINVAL, errno.EISDIR})
"""Errors of an exclusive flock on NFS, which needs an fd that is open for writing. Source  flock(2), NOTES"""
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})


def why_spared(
    kernel: Kernel, sides: BackingAndMount, *, holds: bool, since_ns: int | None = None
) -> str | ReportedMark | None:
    """Return the reason why a rule must not touch a directory, or None (see sweep.request.SparesDirectory).

    holds     keep the directory locked while it is listed, so that no program can lock it after the rule has taken a
              part of it; if False, only check for a lock
    since_ns  directories that were restored at this time or later are spared
    """
    kept = why_kept(kernel, sides.fd)
    if isinstance(kept, str):
        return kept
    restored = why_restored(sides.fd, kernel.fstat(sides.fd), since_ns)
    if restored is not None:
        return restored
    mark = find_lock(kernel, sides.fd, holds=holds)
    if mark is None and sides.mounted is not None:
        try:  # a process may hold a lock through a trashd mount
            with kernel.reopen(sides.mounted, _READING) as fd:
                mark = find_lock(kernel, fd, holds=False)
        except OSError as error:
            mark = _unsure(error)
    return mark or kept


def why_kept(kernel: Kernel, directory: Fd) -> str | ReportedMark | None:
    """Return the reason why a directory is spared because of its name or a `.trashd-keep`, or None."""
    is_lost_found = os.path.basename(os.readlink(directory.path())) == _LOST_FOUND
    if is_lost_found and kernel.fstat(directory).st_uid == 0:
        return _SYSTEMS
    return find_keep_file(kernel, directory)


def find_keep_file(kernel: Kernel, directory: Fd) -> str | ReportedMark | None:
    """Return KEPT if a `.trashd-keep` of any file type protects a directory, or a ReportedMark if it does not count.

    Returns  None if there is no such file
    Raises   OSError
    """
    try:
        st = kernel.stat(directory, KEEP_FILE)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        return ReportedMark(KEPT_BY_OTHERS, is_spared=False)  # a mount on the file: only a user would do that
    above = kernel.fstat(directory)
    # Users who can write in the directory can create a hard link to a file of its owner there.
    is_link = st.st_nlink > 1 and not stat.S_ISDIR(st.st_mode) and bool(above.st_mode & OTHERS_WRITE)
    is_counted = _has_say(st.st_uid, above) and not is_link
    return KEPT if is_counted else ReportedMark(KEPT_BY_OTHERS, is_spared=False)


def find_lock(kernel: Kernel, directory: Fd, *, holds: bool) -> str | ReportedMark | None:
    """Return LOCKED if another process's lock protects a directory, or a ReportedMark if the lock does not count.

    /proc/locks names the process that took a lock. If that process has ended (flock(1) with a shell's fd), its user is
    unknown, and the directory is spared.
    holds    as in `lock`
    Returns  None if no other process has locked the directory
    """
    if lock(kernel, directory, holds=holds):
        return None
    st = kernel.fstat(directory)
    holders = [uids_of(pid) for pid in flock_holders(st)]
    if any(uids and all(_has_say(uid, st) for uid in uids) for uids in holders):
        return LOCKED
    is_seen = bool(holders) and all(holders)
    return (
        ReportedMark(LOCKED_BY_OTHERS, is_spared=False) if is_seen else ReportedMark(LOCKED_BY_UNKNOWN, is_spared=True)
    )


def _has_say(uid: int, directory: os.stat_result) -> bool:
    return uid in (directory.st_uid, 0, os.geteuid())


def why_exempt(found: Fd, st: os.stat_result, name: bytes) -> str | None:
    """Return the reason why a file is spared because of its type, mode or name; None for all other files.

    found  the file, opened at least with O_PATH
    """
    if stat.S_ISDIR(st.st_mode):
        return None
    if st.st_mode & stat.S_ISVTX:
        return _STICKY
    if st.st_uid == 0 and name in _OF_FILESYSTEM:
        return _SYSTEMS
    if stat.S_ISBLK(st.st_mode) or stat.S_ISCHR(st.st_mode):
        return _DEVICE
    return _LIVE if stat.S_ISSOCK(st.st_mode) and is_live(found) else None


def why_restored(found: Fd, st: os.stat_result, since_ns: int | None) -> str | None:
    """Return RESTORED if a file was restored at `since_ns` or later, otherwise None. A restore changes the ctime."""
    if since_ns is None or st.st_ctime_ns < since_ns or restored_ns(found) < since_ns:
        return None
    return RESTORED


def is_live(found: Fd) -> bool:
    """Return whether a process is bound to a unix socket; True if that is unknown.

    The check connects a datagram socket, which the other process does not notice: the kernel refuses a socket of
    another type, and otherwise only records the peer. /proc/net/unix is not a substitute: it lists names as they were
    bound, even relative ones, and only those of one network namespace. A connect uses the inode, in every namespace.
    Source  unix_find_bsd() in net/unix/af_unix.c
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as asking:
        try:
            asking.connect(found.path())
        except OSError as error:
            return error.errno not in (errno.ECONNREFUSED, errno.ENOENT)
    return True


def lock(kernel: Kernel, fd: Fd, *, holds: bool) -> bool:
    """Return whether no other process has a flock, shared or exclusive, on a file; True if flock is not supported.

    holds   keep an exclusive lock of our own as long as the fd is open
    Raises  OSError
    """
    try:
        if not kernel.lock(fd):
            return False
    except OSError as error:
        if error.errno in _NO_EXCLUSIVE:
            return not _is_locked_exclusively(fd)
        if error.errno not in _NO_LOCKS:
            raise
        return True
    if not holds:
        fcntl.flock(fd, fcntl.LOCK_UN)
    return True


def _is_locked_exclusively(fd: Fd) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(fd, fcntl.LOCK_UN)
    except OSError as error:
        return error.errno == errno.EWOULDBLOCK
    return False


class Locking(Action):
    """An action that spares files that another process has locked, and locks the others while it acts on them."""

    def __init__(self, action: Action, *, holds: bool, is_guarded: bool = False, since_ns: int | None = None) -> None:
        """action: what to do with the files that are not spared.

        holds       False in a dry run, which only checks for locks
        is_guarded  the directories have already been checked, and may be locked by us
        since_ns    files that were restored at this time or later are spared, too
        """
        self.takes_dirs, self.is_single, self.avoided = action.takes_dirs, action.is_single, action.avoided
        self._action = action
        self._holds = holds
        self._is_guarded = is_guarded
        self._since_ns = since_ns

    def take(self, here: ActionPlace, names: Sequence[str]) -> ActionResult:
        if here.are_dirs and self._is_guarded:
            return self._action.take(here, names)
        with ExitStack() as locks:
            spared = [(name, why) for name in names if (why := self._find_reason(here, name, locks)) is not None]
            if not spared:
                return self._action.take(here, names)
            left_alone = {name for name, _why in spared}
            free = [name for name in names if name not in left_alone]
            taken = self._action.take(here, free) if free else ActionResult()
            return taken._replace(spared=(*taken.spared, *spared))

    def _find_reason(self, here: ActionPlace, name: str, locks: ExitStack) -> str | None:
        """Return the reason why a file is spared, or lock the file until `locks` closes and return None."""
        there = Name(os.fsencode(name))
        kept = locks if self._holds else None
        why = why_locked(here.kernel, here.sides.fd, there, kept, self._since_ns)
        if why is None and here.sides.mounted is not None:
            # A lock taken through a trashd mount exists only in that mount: the kernel keeps such locks itself.
            why = why_locked(here.kernel, here.sides.mounted, there, kept)
        return why


def why_locked(
    kernel: Kernel, directory: Fd, path: bytes, locks: ExitStack | None = None, since_ns: int | None = None
) -> str | None:
    """Return the reason why a file or directory is spared, such as a lock; None if it isn't spared or no longer exists.

    locks  receives our own lock on the file or directory; if None, only check whether it is locked
    """
    try:
        with kernel.open_beneath(directory, path) as found:
            st = kernel.fstat(found)
            exempt = why_exempt(found, st, os.path.basename(path)) or why_restored(found, st, since_ns)
            return exempt or why_held(kernel, found, st, locks)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EXDEV):
            return None  # the action will get the same error
        return _unsure(error)


def why_held(kernel: Kernel, found: Fd, st: os.stat_result, locks: ExitStack | None = None) -> str | None:
    """Return the reason why an open file or directory is spared because of a lock, or None; see `why_locked`."""
    if not stat.S_ISREG(st.st_mode) and not stat.S_ISDIR(st.st_mode):
        return None  # opening a tape would rewind it; a symbolic link can't be locked
    # A file with several names is not locked: under its other name it would look locked by another process.
    holds = locks is not None and st.st_nlink == 1
    try:
        with ExitStack() as owned:
            fd = owned.enter_context(kernel.reopen(found, _READING))
            if not lock(kernel, fd, holds=holds):
                return LOCKED
            if locks is not None and holds:
                locks.push(owned.pop_all())
    except OSError as error:
        return LOCKED if error.errno == errno.EWOULDBLOCK else _unsure(error)  # another process has a lease
    return None


def _unsure(error: OSError) -> str:
    return f"can't check for locks: {error.strerror}"
