"""What a rule leaves alone: directories with a `.trashd-keep`, what is locked by flock(2), live sockets, devices.

In a directory that many write in, anybody can make the file, and lock the directory who can read it. So a mark on a
directory counts only if its owner or root made it; another user's is reported.

Source  systemd-tmpfiles(8) and tmpreaper(8); docs/plan.md lists their exemptions, and what we do instead of some
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
RESTORED = "restored more recently than the age of the rule"
_LIVE, _DEVICE, _STICKY, _SYSTEMS = "a live socket", "a device", "its sticky bit is set", "belongs to the filesystem"
_LOST_FOUND = b"lost+found"
_OF_FILESYSTEM = frozenset({b".journal", b"aquota.user", b"aquota.group", b"quota.user", b"quota.group"})
_READING = os.O_RDONLY | os.O_NONBLOCK
"""To wait neither for a FIFO's writer nor for the holder of a lease."""
_NO_EXCLUSIVE = frozenset({errno.EBADF, errno.EINVAL, errno.EISDIR})
"""NFS makes of a flock one that wants an fd open for writing. Source  flock(2), NOTES"""
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})


def why_spared(
    kernel: Kernel, sides: BackingAndMount, *, holds: bool, since_ns: int | None = None
) -> str | ReportedMark | None:
    """Why a directory is left alone (sweep.request.SparesDirectory); None if it isn't.

    holds  it stays locked while it is listed, so that a program which locks it first has it whole; otherwise it is
           only looked at
    since_ns  what was restored then or later is left alone
    """
    kept = why_kept(kernel, sides.fd)
    if isinstance(kept, str):
        return kept
    restored = why_restored(sides.fd, kernel.fstat(sides.fd), since_ns)
    if restored is not None:
        return restored
    mark = find_lock(kernel, sides.fd, holds=holds)
    if mark is None and sides.mounted is not None:
        try:  # whether a process has a lock through a mount of ours
            with kernel.reopen(sides.mounted, _READING) as fd:
                mark = find_lock(kernel, fd, holds=False)
        except OSError as error:
            mark = _unsure(error)
    return mark or kept


def why_kept(kernel: Kernel, directory: Fd) -> str | ReportedMark | None:
    """Why an opened directory is left alone, with all that is in it, by what it is and holds; None if it isn't."""
    is_lost_found = os.path.basename(os.readlink(directory.path())) == _LOST_FOUND
    if is_lost_found and kernel.fstat(directory).st_uid == 0:
        return _SYSTEMS
    return find_keep_file(kernel, directory)


def find_keep_file(kernel: Kernel, directory: Fd) -> str | ReportedMark | None:
    """Whether there is something of that name in a directory, whatever it is, and whether it counts. Raises  OSError"""
    try:
        st = kernel.stat(directory, KEEP_FILE)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        return ReportedMark(KEPT_BY_OTHERS, is_left=False)  # users mount on files of their own, nobody else on this
    above = kernel.fstat(directory)
    # Who can write in the directory can link a file of its owner's there.
    is_link = st.st_nlink > 1 and not stat.S_ISDIR(st.st_mode) and bool(above.st_mode & OTHERS_WRITE)
    is_counted = _has_say(st.st_uid, above) and not is_link
    return KEPT if is_counted else ReportedMark(KEPT_BY_OTHERS, is_left=False)


def find_lock(kernel: Kernel, directory: Fd, *, holds: bool) -> str | ReportedMark | None:
    """Whether another process has a lock on a directory, and whether it has a say there; see `lock`.

    The list has the process that took a lock. One that is gone (flock(1) with a shell's fd) may have been anybody's.
    """
    if lock(kernel, directory, holds=holds):
        return None
    st = kernel.fstat(directory)
    holders = [uids_of(pid) for pid in flock_holders(st)]
    if any(uids and all(_has_say(uid, st) for uid in uids) for uids in holders):
        return LOCKED
    is_seen = bool(holders) and all(holders)
    return ReportedMark(LOCKED_BY_OTHERS, is_left=False) if is_seen else ReportedMark(LOCKED_BY_UNKNOWN, is_left=True)


def _has_say(uid: int, directory: os.stat_result) -> bool:
    return uid in (directory.st_uid, 0, os.geteuid())


def why_exempt(found: Fd, st: os.stat_result, name: bytes) -> str | None:
    """Why something that is no directory is left alone, by what it is; None if it isn't.

    found  open, if only for its path (O_PATH)
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
    """Why something is left alone that was restored lately; None if it wasn't. A restore changes the ctime."""
    if since_ns is None or st.st_ctime_ns < since_ns or restored_ns(found) < since_ns:
        return None
    return RESTORED


def is_live(found: Fd) -> bool:
    """Whether a process has bound a unix socket's name; yes if that can't be known.

    A datagram socket is connected to it, which its owner does not notice: the kernel refuses that if it is of another
    kind, and otherwise only remembers the name. /proc/net/unix has names as they were bound, relative ones among them,
    and of one network namespace; this goes by the inode, which containers have in common.
    Source  unix_find_bsd() in net/unix/af_unix.c
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as asking:
        try:
            asking.connect(found.path())
        except OSError as error:
            return error.errno not in (errno.ECONNREFUSED, errno.ENOENT)
    return True


def lock(kernel: Kernel, fd: Fd, *, holds: bool) -> bool:
    """Whether no other process has a flock, of either kind, on what an fd holds; none has where there are no locks.

    holds   now we have one ourselves, as long as the fd is open
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
    """An action that leaves files that another process has locked, and holds a lock itself on those that it takes."""

    def __init__(self, action: Action, *, holds: bool, is_guarded: bool = False, since_ns: int | None = None) -> None:
        """action: before which it stands, and which ends by itself.

        holds       False where that is only told what it would take
        is_guarded  directories have been asked for already, and may be held
        since_ns    what was restored then or later is left alone, too
        """
        self.takes_dirs, self.is_single, self.avoided = action.takes_dirs, action.is_single, action.avoided
        self._action = action
        self._holds = holds
        self._is_guarded = is_guarded
        self._since_ns = since_ns

    def take(self, here: ActionPlace, names: Sequence[str]) -> ActionResult:
        """See Action."""
        if here.are_dirs and self._is_guarded:
            return self._action.take(here, names)
        with ExitStack() as locks:
            spared = [(name, why) for name in names if (why := self._look(here, name, locks)) is not None]
            if not spared:
                return self._action.take(here, names)
            left_alone = {name for name, _why in spared}
            free = [name for name in names if name not in left_alone]
            taken = self._action.take(here, free) if free else ActionResult()
            return taken._replace(spared=(*taken.spared, *spared))

    def _look(self, here: ActionPlace, name: str, locks: ExitStack) -> str | None:
        """Why something is left alone; None if it isn't, and then it is locked as long as `locks` are."""
        there = Name(os.fsencode(name))
        kept = locks if self._holds else None
        why = why_locked(here.kernel, here.sides.fd, there, kept, self._since_ns)
        if why is None and here.sides.mounted is not None:
            # What is locked through a mount of ours is locked in the mount alone: the kernel keeps these locks itself.
            why = why_locked(here.kernel, here.sides.mounted, there, kept)
        return why


def why_locked(
    kernel: Kernel, directory: Fd, path: bytes, locks: ExitStack | None = None, since_ns: int | None = None
) -> str | None:
    """Why something should be left alone, if only as a process has a lock on it; None if it isn't, or is gone.

    locks  takes our own lock on it; None: it is only looked at
    """
    try:
        with kernel.open_beneath(directory, path) as found:
            st = kernel.fstat(found)
            exempt = why_exempt(found, st, os.path.basename(path)) or why_restored(found, st, since_ns)
            return exempt or why_held(kernel, found, st, locks)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EXDEV):
            return None  # acting on it meets the same
        return _unsure(error)


def why_held(kernel: Kernel, found: Fd, st: os.stat_result, locks: ExitStack | None = None) -> str | None:
    """Why a file or directory that is open, if only for its path (O_PATH), should be left alone; as `why_locked`."""
    if not stat.S_ISREG(st.st_mode) and not stat.S_ISDIR(st.st_mode):
        return None  # to open a tape would rewind it; and a link can't be locked
    # One with more names is not held: by its other name it would look locked by another.
    holds = locks is not None and st.st_nlink == 1
    try:
        with ExitStack() as owned:
            fd = owned.enter_context(kernel.reopen(found, _READING))
            if not lock(kernel, fd, holds=holds):
                return LOCKED
            if locks is not None and holds:
                locks.push(owned.pop_all())
    except OSError as error:
        return LOCKED if error.errno == errno.EWOULDBLOCK else _unsure(error)  # by a lease
    return None


def _unsure(error: OSError) -> str:
    return f"its locks can't be checked: {error.strerror}"
