"""What holds a removal up: an inner store with content, directories that came late, a server's outage.

A store that holds nothing, and what a third user made to look like one, is removed like everything else: no user can
make another's orphan last for ever.

A process with an old fd or working directory in a victim can move directories of others into the orphan for as long as
it waits. Files need no care: a user who may rename one may unlink it. A directory is moved with all that is in it, by a
user who may write in it, who need not be one who may delete that. A rename changes a directory's ctime, which can't be
set; so a directory is in doubt if it was changed since the tree came, unless nobody but the asker and root can have
moved it. What has a ctime from before has the entries that it had then, and so on upwards.

The reaper changes directories too. What it enters becomes, first of all, its user's own where no other user writes:
that is in no doubt the next time, and keeps others out. Directories of others it can't make so (unless it is root's):
a reap that is asked to stop, or fails in one, notes them. One that is killed leaves them in doubt.

Outages are waited for off local filesystems only. Any error of that kind may be about one entry, or about what one of
many servers keeps: so the container is asked for a name that no cache knows. If that is answered, the failure is one in
doubt: all else goes, and what is left over in the end is tried again. If its error says that nobody answers, that goes
on to the limit; after EIO and ESTALE, which an entry may have for good, twice. After each wait nothing is believed that
was open before: the container is claimed anew by its name, with its lock, and all below it is opened again.
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
from fusefs.core.names import RelPath, join
from fusefs.core.record import MAX_ENTERED, RECORD_MAX_BYTES, Entered, Record
from fusefs.core.record_decoding import decode
from fusefs.core.results import PINNED, STORE, Report, Stops
from fusefs.engine.pace import GLANCE_S
from fusefs.linux.children import ChildLost, call_as
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import BTRFS_MAGIC, OTHERS_WRITE, Kernel
from fusefs.linux.machine_identity import boot_id
from fusefs.store.backing_and_mount import READABLE
from fusefs.store.container import open_record
from fusefs.store.layout import TREE, is_stores_own
from fusefs.store.victim import Thing, things_in

_BEGINS = ".trashd"

"""What the names of stores begin with: cheaper to ask, for each directory, than `is_stores_own`."""


_MAY_BE_PINNED = (State.ORPHANS, State.STAGE, State.RESTORING)


class InnerStoreStop(NamedTuple):
    """Why a directory is not entered: what of it stands against that, below the directory that it is in."""

    way: RelPath
    why: str


class InnerStores:
    """Says of directories whether they are such stores, in one container's removal."""

    def __init__(self, kernel: Kernel, container: Fd, *, with_stores: bool = False) -> None:
        """with_stores: a person said that they go too; what is pinned in them stays all the same."""
        self._kernel = kernel
        self._with_stores = with_stores
        self._owners = {0, os.geteuid()}
        if os.geteuid() == 0:
            # Root, taking over another's tree, takes that user's stores with it.
            with suppress(OSError):  # gone, or mounted over: the remover says so
                self._owners.add(kernel.stat(container, TREE).st_uid)

    def stop_at(self, dir_fd: Fd, path: bytes, name: str) -> InnerStoreStop | None:
        """Why a directory is not entered; None if it is none of that kind.

        path    of the directory that it is in, below the container
        Raises  OSError that says nothing of it
        """
        if not (name.startswith(_BEGINS) or not path):
            return None
        raw = os.fsencode(name)
        if path and not is_stores_own(raw):
            return None
        if self._with_stores:
            pinned = next(_pinned_in(self._kernel, dir_fd, raw, self._owners), None)
            return None if pinned is None else InnerStoreStop(join(raw, pinned.way()), PINNED)
        if next(things_in(self._kernel, dir_fd, raw, self._owners), None) is None:
            return None
        return InnerStoreStop(RelPath(raw), STORE)


def _pinned_in(kernel: Kernel, dir_fd: int, name: bytes, owners: Collection[int]) -> Iterator[Thing]:
    """What of `things_in` has no term, or may have none, as its record can't be read; its owner's process reads it."""
    by_folder: dict[tuple[int, RelPath], list[Thing]] = {}
    for thing in things_in(kernel, dir_fd, name, owners):
        if not thing.name:
            yield thing
        elif thing.state in _MAY_BE_PINNED:
            by_folder.setdefault((thing.uid, thing.folder), []).append(thing)
    for (uid, _folder), things in by_folder.items():
        yield from _pinned_of(kernel, dir_fd, name, uid, things)


def _pinned_of(kernel: Kernel, dir_fd: int, name: bytes, uid: int, things: list[Thing]) -> list[Thing]:
    with kernel.open_beneath(dir_fd, join(name, things[0].folder), READABLE) as folder:

        def flags() -> bytes:
            return bytes(_may_be_pinned(kernel, folder, thing) for thing in things)

        if uid == os.geteuid():
            found = flags()
        else:
            try:
                found = call_as(uid, lambda _ask: flags())
            except ChildLost:
                found = b"\1"  # its user stopped it: unknown
    if len(found) != len(things):
        return things
    return [thing for thing, is_pinned in zip(things, found, strict=True) if is_pinned]


def _may_be_pinned(kernel: Kernel, folder: Fd, thing: Thing) -> bool:
    assert thing.state is not None
    try:
        with (
            kernel.open_dir(folder, join(thing.state.value.encode(), thing.name)) as container,
            open_record(kernel, container, thing.uid) as record,
        ):
            return decode(kernel.read(record, RECORD_MAX_BYTES + 1)).expires_ns() is None
    except (OSError, BadRecord):
        return True


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

"""They say that nobody answers."""


DOUBTFUL = frozenset({errno.EIO, errno.EREMOTEIO, errno.ESTALE})

"""The server is away, or this entry can't be had."""


COMMAND_LIMIT_S = 120.0

"""Somebody looks at it. NFS's grace (90 s) and the restart of a server, or its replacement, are shorter."""


DOUBT_PAUSES_S = (0.5, 2.0)

"""Before what failed in doubt is tried again."""


_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0


class OutageWishes(NamedTuple):
    """How long a server is waited for, and who is told.

    limit_s         since it did something for us
    tells           called with the errno when the wait begins, with None when something was removed again
    waits           for so many seconds, or less
    doubt_pauses_s  before each further attempt at what failed in doubt
    """

    limit_s: float = COMMAND_LIMIT_S
    tells: Callable[[int | None], None] = lambda _number: None
    waits: Callable[[float], None] = time.sleep
    doubt_pauses_s: tuple[float, ...] = DOUBT_PAUSES_S


class ServerWasAway(Exception):
    """The server was away, or may have been: the container has to be claimed anew."""

    def __init__(self, report: Report, entered: tuple[Entered, ...]) -> None:
        """What was done before, and what has to be told the next time."""
        super().__init__()
        self.report = report
        self.entered = entered


class ServerOutage:
    """The outages in one reap."""

    def __init__(self, kernel: Kernel, wishes: OutageWishes, stops: Stops) -> None:
        """stops: asked while it waits"""
        self._kernel = kernel
        self._wishes = wishes
        self._stops = stops
        self._since_s: float | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._n_doubts = 0

    def has_gone_on(self) -> None:
        """Something was removed."""
        if self._since_s is not None:
            self._since_s = None
            self._pause_s = _FIRST_PAUSE_S
            self._wishes.tells(None)

    def wait(self, number: int, fd: int) -> bool:
        """Wait until what an fd holds can be asked again; False: told to stop.

        Raises  ServerAway
        """
        if self._since_s is None:
            self._since_s = time.monotonic()
            if self._wishes.limit_s > 0:
                self._wishes.tells(number)
        while True:
            if time.monotonic() - self._since_s >= self._wishes.limit_s:
                limit_s = round(self._wishes.limit_s)
                waited = f" (waited {format_duration(limit_s)})" if self._wishes.limit_s else ""
                raise ServerAway(f"{os.strerror(number)}{waited}", number=number)
            if not self._rest(self._pause_s):
                return False
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            # What is stale itself has to be found again, by its name.
            if asked(self._kernel, fd) in (0, errno.ESTALE):
                return True

    def wait_in_doubt(self) -> bool:
        """Wait a little before what failed is tried again; False: it was, or it is to stop."""
        if self._n_doubts >= len(self._wishes.doubt_pauses_s):
            return False
        self._n_doubts += 1
        return self._rest(self._wishes.doubt_pauses_s[self._n_doubts - 1])

    def wait_after(self, error: OSError, fd: int) -> bool:
        """Wait after a call that failed beside the slices: whether to go on; False: told to stop.

        Raises  ServerAway; the error, if it is none of a server or does not pass
        """
        number = error.errno or errno.EIO
        if number in CUT_OFF or (number in DOUBTFUL and asked(self._kernel, fd)):
            return self.wait(number, fd)
        if number not in DOUBTFUL or not (self.wait_in_doubt() or self._stops()):
            raise error
        return not self._stops()

    def _rest(self, seconds: float) -> bool:
        ends_s = time.monotonic() + seconds
        while (left_s := ends_s - time.monotonic()) > 0:
            if self._stops():
                return False
            self._wishes.waits(min(left_s, GLANCE_S))
        return not self._stops()


def may_be_away(kernel: Kernel, fd: int) -> bool:
    """Whether it is a server that keeps what an fd holds. Raises  OSError"""
    try:
        return not kernel.is_local(fd)
    except OSError as error:
        if error.errno in CUT_OFF:
            return True
        raise


def asked(kernel: Kernel, fd: int) -> int:
    """Why a directory can't be asked, as an errno; 0 if it can, be it that this is not permitted."""
    try:
        kernel.free_bytes(fd)
        kernel.stat(fd, os.urandom(8).hex().encode())
    except OSError as error:
        return error.errno if error.errno in CUT_OFF | DOUBTFUL else 0
    return 0
