"""Late arrivals: the reaper keeps directories that other users moved into an orphan after the swap.

A process with an old fd or working directory in an orphan can move other users' directories into the orphan. Files need
no check: users who can rename a file can also unlink it. But a directory moves with its whole contents, and users can
move it if they can write to it, even if they can't delete these contents. A rename changes a directory's ctime, which
no process can set. So a directory is in doubt if it has changed since the tree came into the container, unless only the
requesting user and root can have moved it. A directory with an older ctime has the same entries as at that time, and so
have its parents.

The reaper also changes directories. It first makes each directory that it enters its own: the reaper's user owns the
directory, and no other user can write to it. Such a directory keeps other users out, and is not in doubt the next time.
Unless the reaper runs as root, it can't do this with other users' directories. If the reap stops in such a directory,
or can't empty it, the reaper notes the directory in the record. If the reaper is killed, the directory is in doubt.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from contextlib import suppress

from fusefs.core.names import join_path
from fusefs.core.record import MAX_ENTERED, Entered, Record
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import BTRFS_MAGIC, OTHERS_WRITE, Kernel
from fusefs.linux.machine_identity import boot_id
from fusefs.store.layout import TREE

_SUBVOLUME_INO = 256


_CLOCK_REALTIME_COARSE = 5
"""The clock that the kernel uses for ctimes (<linux/time.h>)."""
_TICKS, _TICK_S = 50, 0.001


class LateArrivals:
    """Decides whether a directory came into the container with the tree; if so, makes it the reaper's own."""

    def __init__(self, kernel: Kernel, container: Fd, uid: int, record: Record, *, without_doubt: bool = False) -> None:
        """uid: the user whose folder contains the container; the reaper runs as this user

        record         the container's record, which the requesting user may have written
        without_doubt  whether to accept every directory, because a user who could delete them all requests the removal
        """
        self._kernel = kernel
        self._without_doubt = without_doubt
        self._uid = uid
        # A directory that only root can move was moved by root, so it is accepted. If root has taken over a container,
        # a directory that only the container's former user can move is accepted, too.
        self._movers = frozenset({0, self._uid if record.taken_from is None else record.taken_from})
        # Only the container's user can write to it, so no other user can have put the top directories there.
        self._tops = frozenset({bytes(TREE)} if record.taken_from is None else {bytes(TREE), join_path(TREE, TREE)})
        self._since_ns = _since_ns(kernel, container, record)
        self._entered = dict(record.entered)
        self._device = kernel.fstat(container).st_dev
        self._has_subvolumes = kernel.filesystem(container) == BTRFS_MAGIC

    def admit(self, fd: Fd, path: bytes) -> bool:
        """Return whether a directory may be removed; if so, make it the reaper's own, as far as possible.

        path    the path of the directory, relative to the container
        Raises  OSError
        """
        st = self._kernel.fstat(fd)
        is_top = path in self._tops
        if not (is_top or self._without_doubt or self._is_from_tree(fd, st)):
            return False
        if st.st_uid != self._uid:
            if self._uid == 0 and not is_top:
                with suppress(OSError):  # a directory that can't be changed is in doubt the next time
                    self._kernel.chown(fd, 0, -1)
                    self._kernel.chmod(fd, stat.S_IRWXU)
        elif (st.st_mode & OTHERS_WRITE and not is_top) or st.st_mode & stat.S_IRWXU != stat.S_IRWXU:
            with suppress(OSError):
                self._kernel.chmod(fd, stat.S_IRWXU)
        return True

    def is_own(self, fd: Fd) -> bool:
        """Return whether a directory is the reaper's own, so that changes by the reaper don't put it in doubt."""
        return _is_own(self._kernel.fstat(fd), {self._uid})

    def is_lasting(self, fd: Fd, path: bytes) -> bool:
        """Return whether another process that later opens the admitted directory by its path will admit it, too."""
        is_known = self._without_doubt or path in self._tops
        return is_known or _is_own(self._kernel.fstat(fd), self._movers)

    def note(self, fds: Iterable[int]) -> tuple[Entered, ...]:
        """Return entries for the record about the directories that remain, so that the next reap accepts them.

        Raises  OSError
        """
        entered: list[Entered] = []
        for number in fds:
            if len(entered) == MAX_ENTERED:
                break
            fd = Fd(number)
            if not stat.S_ISDIR(self._kernel.fstat(fd).st_mode) or _is_own(self._kernel.fstat(fd), self._movers):
                continue
            ctime_ns, handle = self._last_change_ns(fd), self._kernel.identify(fd).handle
            if ctime_ns is not None and handle:
                entered.append(Entered(handle, ctime_ns))
        return tuple(entered)

    def _is_from_tree(self, fd: Fd, st: os.stat_result) -> bool:
        if _is_own(st, self._movers):
            return True
        if self._has_subvolumes and st.st_ino == _SUBVOLUME_INO and st.st_dev != self._device:
            return False  # its ctime proves nothing: a snapshot has its source's, and a renamed subvolume loses its own
        if st.st_ctime_ns < self._since_ns:
            return True
        return bool(self._entered) and self._entered.get(self._kernel.identify(fd).handle) == st.st_ctime_ns

    def _last_change_ns(self, fd: Fd) -> int | None:
        """Return a directory's ctime once the clock is past it, so that later changes get a different ctime.

        Return None if the clock does not get past it.
        """
        for _ in range(_TICKS):
            ctime_ns = self._kernel.fstat(fd).st_ctime_ns
            if ctime_ns < time.clock_gettime_ns(_CLOCK_REALTIME_COARSE):
                return ctime_ns
            time.sleep(_TICK_S)
        return None


def _is_own(st: os.stat_result, uids: AbstractSet[int]) -> bool:
    return st.st_uid in uids and not st.st_mode & OTHERS_WRITE


def _since_ns(kernel: Kernel, container: Fd, record: Record) -> int:
    """Return the time, on the filesystem's clock, from which any change puts a directory in doubt.

    If the wall clock has been set back since the tree was moved, the returned time is earlier by the same amount,
    because the ctimes of later moves are, too. A jump forward and back, or during an earlier boot, can't be detected.
    """
    if record.moved_ns is None:
        return kernel.statx(container, asks_server=True).btime_ns  # 0 (unknown): every directory counts as changed
    if record.boot_ns is None or record.boot != boot_id():
        return record.moved_ns
    then_ns = record.created_ns - record.boot_ns
    return record.moved_ns + min(0, kernel.now_ns() - kernel.boot_ns() - then_ns)
