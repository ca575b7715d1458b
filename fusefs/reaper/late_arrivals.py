"""Which directories of a tree were there when it came into the store: only those were given to be deleted.

Who has an old fd or working directory in a victim can move directories of others into the orphan for as long as it
waits. Files need no care: who may rename one may unlink it. A directory is moved with all that is in it, by who may
write in it, and he need not be who may delete that. A rename changes a directory's ctime, which can't be set; so a
directory is in doubt if it was changed since the tree came, unless nobody but the asker and root can have moved it.
What has a ctime from before has the entries that it had then, and so on upwards.

The reaper changes directories too. What it enters becomes, first of all, its user's own where no other user writes:
that is in no doubt the next time, and keeps others out. Directories of others it can't make so (unless it is root's):
a reap that is told to stop, or fails in one, notes them. One that is killed leaves them in doubt.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from contextlib import suppress

from fusefs.core.names import join
from fusefs.core.record import MAX_ENTERED, Entered, Record
from fusefs.linux.boot_id import boot_id
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import BTRFS_MAGIC, OTHERS_WRITE, Kernel
from fusefs.store.layout import TREE

_SUBVOLUME_INO = 256
_CLOCK_REALTIME_COARSE = 5
"""What the kernel takes a time of change from, <linux/time.h>."""
_TICKS, _TICK_S = 50, 0.001


class LateArrivals:
    """Says of each directory that the reaper comes to whether it was given, and makes it the reaper's own."""

    def __init__(self, kernel: Kernel, container: Fd, uid: int, record: Record, *, without_doubt: bool = False) -> None:
        """Know what the record of a container tells: its user's word, at whose request it is deleted.

        uid     the user whose folder the container is in, and as whom the reaper runs
        without_doubt  all that is there is given: its user says so now, and could delete it now
        """
        self._kernel = kernel
        self._without_doubt = without_doubt
        self._uid = uid
        # What only root can move, root moved. Of a container that root took over, its user's own moves count.
        self._movers = frozenset({0, self._uid if record.taken_from is None else record.taken_from})
        # A container is its user's alone: no other user put this there.
        self._tops = frozenset({bytes(TREE)} if record.taken_from is None else {bytes(TREE), join(TREE, TREE)})
        self._since_ns = _since_ns(kernel, container, record)
        self._entered = dict(record.entered)
        self._device = kernel.fstat(container).st_dev
        self._has_subvolumes = kernel.filesystem(container) == BTRFS_MAGIC

    def takes(self, fd: Fd, path: bytes) -> bool:
        """Whether a directory was given; if so it is the reaper's own from now on, as far as it can be made that.

        path    below the container
        Raises  OSError
        """
        st = self._kernel.fstat(fd)
        is_top = path in self._tops
        if not (is_top or self._without_doubt or self._is_given(fd, st)):
            return False
        if st.st_uid != self._uid:
            if self._uid == 0 and not is_top:
                with suppress(OSError):  # what can't be had stays in doubt the next time
                    self._kernel.chown(fd, 0, -1)
                    self._kernel.chmod(fd, stat.S_IRWXU)
        elif (st.st_mode & OTHERS_WRITE and not is_top) or st.st_mode & stat.S_IRWXU != stat.S_IRWXU:
            with suppress(OSError):
                self._kernel.chmod(fd, stat.S_IRWXU)
        return True

    def is_own(self, fd: Fd) -> bool:
        """Whether a directory will be in no doubt, however the reaper changes it."""
        return _is_own(self._kernel.fstat(fd), {self._uid})

    def is_lasting(self, fd: Fd, path: bytes) -> bool:
        """Whether a directory that was given will be found to be so by whoever opens it by its path later."""
        is_known = self._without_doubt or path in self._tops
        return is_known or _is_own(self._kernel.fstat(fd), self._movers)

    def note(self, fds: Iterable[int]) -> tuple[Entered, ...]:
        """What the next reap has to be told of directories that this one leaves, half done or for good.

        Raises  OSError
        """
        noted: list[Entered] = []
        for number in fds:
            if len(noted) == MAX_ENTERED:
                break
            fd = Fd(number)
            if not stat.S_ISDIR(self._kernel.fstat(fd).st_mode) or _is_own(self._kernel.fstat(fd), self._movers):
                continue
            ctime_ns, handle = self._last_change_ns(fd), self._kernel.identify(fd).handle
            if ctime_ns is not None and handle:
                noted.append(Entered(handle, ctime_ns))
        return tuple(noted)

    def _is_given(self, fd: Fd, st: os.stat_result) -> bool:
        if _is_own(st, self._movers):
            return True
        if self._has_subvolumes and st.st_ino == _SUBVOLUME_INO and st.st_dev != self._device:
            return False  # a snapshot has the ctime of what it is one of, and a renamed subvolume forgets its own
        if st.st_ctime_ns < self._since_ns:
            return True
        return bool(self._entered) and self._entered.get(self._kernel.identify(fd).handle) == st.st_ctime_ns

    def _last_change_ns(self, fd: Fd) -> int | None:
        """The ctime of a directory, if the next change will give it another one: the clock must have moved on."""
        for _ in range(_TICKS):
            ctime_ns = self._kernel.fstat(fd).st_ctime_ns
            if ctime_ns < time.clock_gettime_ns(_CLOCK_REALTIME_COARSE):
                return ctime_ns
            time.sleep(_TICK_S)
        return None


def _is_own(st: os.stat_result, uids: AbstractSet[int]) -> bool:
    return st.st_uid in uids and not st.st_mode & OTHERS_WRITE


def _since_ns(kernel: Kernel, container: Fd, record: Record) -> int:
    """What was changed at this time or later is not as it was when the tree came; by the filesystem's clock.

    A wall clock that was set back since makes it as much earlier: what was moved then looks that much older. Jumps
    to and fro, and those of a boot that is over, can't be seen.
    """
    if record.moved_ns is None:
        return kernel.statx(container, asks=True).btime_ns  # 0: unknown, and all was changed since
    if record.boot_ns is None or record.boot != boot_id():
        return record.moved_ns
    then_ns = record.created_ns - record.boot_ns
    return record.moved_ns + min(0, kernel.now_ns() - kernel.boot_ns() - then_ns)
