"""Reasons to stop a removal or to keep something: inner stores with content, late arrivals, server outages.

The reaper removes an inner store that is empty, or that a third user only made to look like a store. So users can't
make each other's orphans last for ever.

While an orphan waits, a process with an old fd or working directory in it can move other users' directories into it.
Files need no check: users who may rename a file may unlink it. But a directory moves with its whole contents, and the
user who moves it only has to be allowed to write to it, not to delete these contents. A rename changes a directory's
ctime, which no process can set. So a directory is in doubt if it has changed since the tree came into the container,
unless only the requesting user and root can have moved it. If its ctime is older, it has the same entries as then, and
the same holds for its parents.

The reaper changes directories, too. It first makes each directory that it enters its user's own, and denies others
write access. Such a directory is not in doubt the next time, and keeps other users out. The reaper can't do this with
other users' directories (unless it runs as root): if a reap is stopped, or fails in one, it notes them in the record.
A killed reap leaves them in doubt.

The reaper waits for outages only on network filesystems. An error may affect only one entry, or only one of many
servers. So the reaper stats a random name in the container, which no cache can know. If the server answers, the failure
is in doubt: the reaper removes everything else, and tries the rest again at the end. It retries errors that mean "no
answer" up to the time limit, but EIO and ESTALE, which may be permanent for an entry, only twice. After each wait, it
trusts no open fd: it claims the container anew by its name, with its lock, and opens everything below it again.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import NamedTuple

from fusefs.core.container_states import State
from fusefs.core.errors import BadRecord, ServerAway
from fusefs.core.human_units import format_duration
from fusefs.core.names import RelPath, join_path
from fusefs.core.record import MAX_ENTERED, RECORD_MAX_BYTES, Entered, Record
from fusefs.core.record_decoding import decode_record
from fusefs.core.results import PINNED, STORE, Report, ShouldStop
from fusefs.engine.pace import REACTION_S
from fusefs.linux.children import ChildLost, call_in_child_as
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import BTRFS_MAGIC, OTHERS_WRITE, Kernel
from fusefs.linux.machine_identity import boot_id
from fusefs.store.backing_and_mount import READABLE
from fusefs.store.container import open_record
from fusefs.store.layout import TREE, is_store_name
from fusefs.store.victim import StoreItem, list_items

_BEGINS = ".trashd"

"""Prefix of all store names: checking this for each directory is cheaper than `is_store_name`."""


_MAY_BE_PINNED = (State.ORPHANS, State.STAGE, State.RESTORING)


class InnerStoreStop(NamedTuple):
    """The reason not to enter a directory. path: the obstacle's path, relative to that directory's parent"""

    path: RelPath
    why: str


class InnerStores:
    """Checks whether directories in a container are inner stores with content."""

    def __init__(self, kernel: Kernel, container: Fd, *, with_stores: bool = False) -> None:
        """with_stores: whether the user asked for their removal; even then, their pinned orphans stay"""
        self._kernel = kernel
        self._with_stores = with_stores
        self._owners = {0, os.geteuid()}
        if os.geteuid() == 0:
            # If root takes over another user's tree, it also takes that user's stores in it.
            with suppress(OSError):  # gone, or covered by a mount: the remover reports it
                self._owners.add(kernel.stat(container, TREE).st_uid)

    def stop_at(self, dir_fd: Fd, path: bytes, name: str) -> InnerStoreStop | None:
        """Return the reason not to enter a directory; None if it is not an inner store with content.

        path    its parent directory's path below the container
        Raises  OSError; then nothing is known about its contents
        """
        if not (name.startswith(_BEGINS) or not path):
            return None
        raw = os.fsencode(name)
        if path and not is_store_name(raw):
            return None
        if self._with_stores:
            pinned = next(_pinned_in(self._kernel, dir_fd, raw, self._owners), None)
            return None if pinned is None else InnerStoreStop(join_path(raw, pinned.relative_path()), PINNED)
        if next(list_items(self._kernel, dir_fd, raw, self._owners), None) is None:
            return None
        return InnerStoreStop(RelPath(raw), STORE)


def _pinned_in(kernel: Kernel, dir_fd: int, name: bytes, owners: Collection[int]) -> Iterator[StoreItem]:
    """Yield an inner store's orphans that are pinned or have unreadable records; their owner's process reads these."""
    by_folder: dict[tuple[int, RelPath], list[StoreItem]] = {}
    for thing in list_items(kernel, dir_fd, name, owners):
        if not thing.name:
            yield thing
        elif thing.state in _MAY_BE_PINNED:
            by_folder.setdefault((thing.uid, thing.folder), []).append(thing)
    for (uid, _folder), things in by_folder.items():
        yield from _pinned_of(kernel, dir_fd, name, uid, things)


def _pinned_of(kernel: Kernel, dir_fd: int, name: bytes, uid: int, things: list[StoreItem]) -> list[StoreItem]:
    with kernel.open_beneath(dir_fd, join_path(name, things[0].folder), READABLE) as folder:

        def flags() -> bytes:
            return bytes(_may_be_pinned(kernel, folder, thing) for thing in things)

        if uid == os.geteuid():
            pinned_flags = flags()
        else:
            try:
                pinned_flags = call_in_child_as(uid, lambda _ask: flags())
            except ChildLost:
                pinned_flags = b"\1"  # its user stopped it: as nothing is known, all count as pinned
    if len(pinned_flags) != len(things):
        return things
    return [thing for thing, is_pinned in zip(things, pinned_flags, strict=True) if is_pinned]


def _may_be_pinned(kernel: Kernel, folder: Fd, thing: StoreItem) -> bool:
    assert thing.state is not None
    try:
        with (
            kernel.open_dir(folder, join_path(thing.state.value.encode(), thing.name)) as container,
            open_record(kernel, container, thing.uid) as record,
        ):
            return decode_record(kernel.read(record, RECORD_MAX_BYTES + 1)).expires_ns() is None
    except (OSError, BadRecord):
        return True


_SUBVOLUME_INO = 256


_CLOCK_REALTIME_COARSE = 5

"""The clock that the kernel uses for ctimes (<linux/time.h>)."""


_TICKS, _TICK_S = 50, 0.001


class LateArrivals:
    """Decides whether a directory was in the tree when it came into the container; if so, makes it the reaper's own."""

    def __init__(self, kernel: Kernel, container: Fd, uid: int, record: Record, *, without_doubt: bool = False) -> None:
        """Use a container's record, which may have been written by the user at whose request the tree is deleted.

        uid     the user whose folder contains the container; the reaper runs as this user
        without_doubt  whether everything may be deleted, as the user, who could delete it, is asking for this now
        """
        self._kernel = kernel
        self._without_doubt = without_doubt
        self._uid = uid
        # A directory that only root can move was moved by root. If root took over the container, moves by its former
        # user count, too.
        self._movers = frozenset({0, self._uid if record.taken_from is None else record.taken_from})
        # Only its user can write to a container, so no other user can have put the top directories there.
        self._tops = frozenset({bytes(TREE)} if record.taken_from is None else {bytes(TREE), join_path(TREE, TREE)})
        self._since_ns = _since_ns(kernel, container, record)
        self._entered = dict(record.entered)
        self._device = kernel.fstat(container).st_dev
        self._has_subvolumes = kernel.filesystem(container) == BTRFS_MAGIC

    def admit(self, fd: Fd, path: bytes) -> bool:
        """Return whether a directory may be removed; if so, make it the reaper's own, as far as possible.

        path    its path below the container
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
        """Return whether it stays certain that a directory is the reaper's own, whatever the reaper changes in it."""
        return _is_own(self._kernel.fstat(fd), {self._uid})

    def is_lasting(self, fd: Fd, path: bytes) -> bool:
        """Return whether another process that later opens the directory by its path will decide the same."""
        is_known = self._without_doubt or path in self._tops
        return is_known or _is_own(self._kernel.fstat(fd), self._movers)

    def note(self, fds: Iterable[int]) -> tuple[Entered, ...]:
        """Return data for the record about directories that this reap leaves, so that the next reap accepts them.

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
            return False  # a snapshot has its source's ctime, and a renamed subvolume loses its own
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
    """Return the time from which a change puts a directory in doubt, on the filesystem's clock.

    If the wall clock has been set back since, this time is earlier by the same amount, as are the ctimes of directories
    that were moved afterwards. Jumps forward and back, and jumps during an earlier boot, can't be detected.
    """
    if record.moved_ns is None:
        return kernel.statx(container, asks_server=True).btime_ns  # 0 (unknown): every directory counts as changed
    if record.boot_ns is None or record.boot != boot_id():
        return record.moved_ns
    then_ns = record.created_ns - record.boot_ns
    return record.moved_ns + min(0, kernel.now_ns() - kernel.boot_ns() - then_ns)


CUT_OFF = frozenset(
    {
        errno.ENOTCONN,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.ECANCELED,
        errno.ECOMM,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ESHUTDOWN,
        errno.ETIMEDOUT,
    }
)

"""Errors that mean that no server is answering."""


DOUBTFUL = frozenset({errno.EIO, errno.EREMOTEIO, errno.ESTALE})

"""Errors that mean that either the server is away, or this entry is unreadable."""


COMMAND_LIMIT_S = 120.0

"""How long commands at a terminal wait: more than NFS's grace period (90 s) and a server's failover take."""


DOUBT_PAUSES_S = (0.5, 2.0)

"""The pauses before the retries of failures in doubt."""


_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0


class OutageOptions(NamedTuple):
    """How long to wait for a server, and the callbacks.

    limit_s         how long to wait without progress
    on_outage       called with the errno when the wait begins, and with None when entries are removed again
    sleep           waits for this many seconds or less
    doubt_pauses_s  the pause before each retry of failures in doubt
    """

    limit_s: float = COMMAND_LIMIT_S
    on_outage: Callable[[int | None], None] = lambda _number: None
    sleep: Callable[[float], None] = time.sleep
    doubt_pauses_s: tuple[float, ...] = DOUBT_PAUSES_S


class ServerWasAway(Exception):
    """The server was away, or may have been: the container must be claimed anew."""

    def __init__(self, report: Report, entered: tuple[Entered, ...]) -> None:
        """report: the removal so far. entered: what the next attempt needs from `LateArrivals.note`"""
        super().__init__()
        self.report = report
        self.entered = entered


class ServerOutage:
    """Waits out server outages during a reap."""

    def __init__(self, kernel: Kernel, options: OutageOptions, stops: ShouldStop) -> None:
        """stops: called during waits; whether to stop"""
        self._kernel = kernel
        self._options = options
        self._stops = stops
        self._since_s: float | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._n_doubts = 0

    def note_progress(self) -> None:
        """End the outage, since something has been removed."""
        if self._since_s is not None:
            self._since_s = None
            self._pause_s = _FIRST_PAUSE_S
            self._options.on_outage(None)

    def wait(self, number: int, fd: int) -> bool:
        """Wait until the server answers again for an fd. Return False if asked to stop. Raises  ServerAway"""
        if self._since_s is None:
            self._since_s = time.monotonic()
            if self._options.limit_s > 0:
                self._options.on_outage(number)
        while True:
            if time.monotonic() - self._since_s >= self._options.limit_s:
                limit_s = round(self._options.limit_s)
                waited = f" (waited {format_duration(limit_s)})" if self._options.limit_s else ""
                raise ServerAway(f"{os.strerror(number)}{waited}", number=number)
            if not self._rest(self._pause_s):
                return False
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            # The caller must open a stale fd again by its name.
            if probe_server(self._kernel, fd) in (0, errno.ESTALE):
                return True

    def wait_in_doubt(self) -> bool:
        """Wait a little before a retry of failures in doubt. Return False after the last retry, or if asked to stop."""
        if self._n_doubts >= len(self._options.doubt_pauses_s):
            return False
        self._n_doubts += 1
        return self._rest(self._options.doubt_pauses_s[self._n_doubts - 1])

    def wait_after(self, error: OSError, fd: int) -> bool:
        """Wait after a failed call outside of slices. Return whether to continue; False if asked to stop.

        Raises  ServerAway; the error itself if the server does not cause it, or if it persists
        """
        number = error.errno or errno.EIO
        if number in CUT_OFF or (number in DOUBTFUL and probe_server(self._kernel, fd)):
            return self.wait(number, fd)
        if number not in DOUBTFUL or not (self.wait_in_doubt() or self._stops()):
            raise error
        return not self._stops()

    def _rest(self, seconds: float) -> bool:
        ends_s = time.monotonic() + seconds
        while (remaining_s := ends_s - time.monotonic()) > 0:
            if self._stops():
                return False
            self._options.sleep(min(remaining_s, REACTION_S))
        return not self._stops()


def may_be_away(kernel: Kernel, fd: int) -> bool:
    """Return whether an fd is on a network filesystem, whose server may be away. Raises  OSError"""
    try:
        return not kernel.is_local(fd)
    except OSError as error:
        if error.errno in CUT_OFF:
            return True
        raise


def probe_server(kernel: Kernel, fd: int) -> int:
    """Check whether a server answers. Return 0 if it does, even with "permission denied"; otherwise the errno."""
    try:
        kernel.free_bytes(fd)
        kernel.stat(fd, os.urandom(8).hex().encode())
    except OSError as error:
        return error.errno if error.errno in CUT_OFF | DOUBTFUL else 0
    return 0
