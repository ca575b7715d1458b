"""One volume as the service opens it: what must be true before anything is claimed there. Blocking: for threads.

A user's own store is named in that user's registry, and not read or written by root: its owner can put anything into it
at any moment. So root's service holds its directories open and has them watched; every look into a file, and every
change, is a process of its owner's, as everywhere below a user's folder (I13).

Where a filesystem has one kernel alone, `reaper.lock` keeps two services apart. Elsewhere each node that serves the
volume has its beat, which is its lock too: `nodes/<host>.<boot id>` in the directory that a service has for itself
there: the store of root's service, a user's own folder of that user's. Of another user's making nothing is believed:
who could write a beat could only have us look more often, but he has no business here.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from typing import NamedTuple, Self

from fusefs.core.errors import Busy, NoStore, NotPermitted, TrashdError, Untrusted
from fusefs.core.identity import Likelihood, compare
from fusefs.core.names import STORE, Name, whose_store
from fusefs.core.node_beats import BEAT_BYTES, NodeBeat, beat_name, decode_beat, encode_beat, is_beat_name
from fusefs.core.printable_names import printable, shell_word
from fusefs.core.service_status import UNSEEN, VolumePhase, VolumeStatus
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import OTHERS_WRITE, Kernel
from fusefs.linux.machine_identity import boot_id
from fusefs.linux.mount_calls import is_claimed
from fusefs.linux.mountinfo import Disk, Mount, MountView, disk_of, find_mount, find_place, read_mounts, views
from fusefs.linux.runtime_directories import SYSTEM_RUNTIME
from fusefs.linux.untrusted_path import open_way
from fusefs.service.state_files import served_volumes
from fusefs.store.backing_and_mount import ABSENT, FILE_TO_LOCK, READABLE, BackingAndMount
from fusefs.store.find_stores import mount_points
from fusefs.store.layout import (
    FOLDER_MODE,
    NODES,
    REAPER_LOCK,
    Store,
    UserFolder,
    Volume,
    open_areas,
    open_own_store,
    open_store,
    read_small,
    read_volume,
    trusted_owners,
)
from fusefs.store.make_folder import look_first
from fusefs.store.mounted_paths import open_shown, refuse_mounted
from fusefs.store.registry_lines import RegistryLine, way_out
from fusefs.store.root_squash import refuse_squashed
from fusefs.store.store_registry import LineOf
from fusefs.store.swap import own_folder
from fusefs.store.tidy_folder import discard_emptied
from fusefs.store.user_folders import NOT_MADE, FolderCensus, is_remembered, is_vouched, open_user, take_census

_MOST_NODES = 1000
_TRIES = 3


class HeldBeat:
    """Our beat on an opened volume, locked: no other service of this machine works on it.

    Threads that write it may hang, and be left to themselves: its fds stay open for them. A number that is free again
    may be another file's, and what was meant for the beat would cut that to its size.
    """

    def __init__(self, kernel: Kernel, nodes: Fd, fd: Fd, name: bytes) -> None:
        self._kernel = kernel
        self._nodes = nodes
        self._fd = fd
        self.name = name
        self._text = bytes(BEAT_BYTES)
        self._mutex = threading.Lock()
        self._n_using = 0
        self._is_closed = False

    def __enter__(self) -> Self:
        """Own it for the block."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Close it, at the latest when the last thread that uses it is back."""
        with self._mutex:
            self._is_closed = True
        self._close_unused()

    @contextmanager
    def _using(self) -> Iterator[None]:
        with self._mutex:
            if self._is_closed:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            self._n_using += 1
        try:
            yield
        finally:
            with self._mutex:
                self._n_using -= 1
            self._close_unused()

    def _close_unused(self) -> None:
        with self._mutex:
            if self._is_closed and self._n_using == 0:
                self._n_using = -1  # once
                self._fd.close()
                self._nodes.close()

    def write(self, beat: NodeBeat) -> None:
        """Say that we live, durably. Raises  OSError"""
        self._text = encode_beat(beat)
        self.write_again()

    def write_again(self) -> None:
        """Say it once more, which is nothing but a small durable write. Raises  OSError"""
        with self._using():
            self._kernel.write(self._fd, self._text)
            self._kernel.fsync(self._fd)

    def all(self) -> dict[bytes, NodeBeat | None]:
        """All beats by their names, ours too, each read by a fresh open; None for what is not understood."""
        kernel = self._kernel
        found: dict[bytes, NodeBeat | None] = {}
        with self._using():
            for name in islice(filter(is_beat_name, kernel.list_anew(self._nodes)), _MOST_NODES):
                with suppress(FileNotFoundError):
                    found[name] = _read(kernel, self._nodes, name)
        return found

    def remove(self, name: bytes) -> None:
        """Take a beat away. Raises  OSError"""
        with self._using():
            self._kernel.unlink(self._nodes, name)


def own_name() -> bytes:
    """What our own beat is called."""
    return beat_name(os.uname().nodename, boot_id())


def hold_beat(kernel: Kernel, hold: Fd) -> HeldBeat | None:
    """Our beat in a directory of ours, made if missing; None if another service of this machine has it.

    Raises  OSError; Untrusted if others can write there
    """
    name = own_name()
    with ExitStack() as owned:
        nodes = owned.enter_context(_open_nodes(kernel, hold))
        for _ in range(_TRIES):
            is_new = False
            with suppress(FileExistsError):
                kernel.create(nodes, name).close()
                is_new = True
            fd = owned.enter_context(kernel.open_beneath(nodes, name, FILE_TO_LOCK))
            if not kernel.lock(fd):
                return None
            if is_new:
                kernel.fsync(nodes)
            if kernel.is_named(fd, nodes, name):  # else whoever took us for dead has removed it just now
                owned.pop_all()
                return HeldBeat(kernel, nodes, fd, name)
    return None


def _open_nodes(kernel: Kernel, hold: Fd) -> Fd:
    with suppress(FileExistsError):
        kernel.mkdir(hold, NODES)
    nodes = kernel.open_beneath(hold, NODES, READABLE)
    st = kernel.fstat(nodes)
    if st.st_uid not in trusted_owners(os.geteuid()) or st.st_mode & OTHERS_WRITE:
        nodes.close()
        raise Untrusted(f"{NODES.decode()}/ (owner {st.st_uid}, mode {st.st_mode & 0o7777:04o})")
    return nodes


def _read(kernel: Kernel, nodes: Fd, name: bytes) -> NodeBeat | None:
    """Raises  FileNotFoundError"""
    try:
        text = read_small(kernel, nodes, name, 2 * BEAT_BYTES, trusted_owners(os.geteuid()))
    except FileNotFoundError:
        raise
    except OSError:
        return None  # a link; or its server replaces it just now
    return None if text is None else decode_beat(text)


_LET_GO = (VolumePhase.ELSEWHERE, VolumePhase.GONE)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
ROOTS = (0,)
"""The users whose links and mounts root's service goes through."""
_OTHERS_LOOK = 0o005
_STEP = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OF_ID = 8


class Elsewhere(Busy):
    """Another reaper serves the volume"""

    problem = "another reaper serves this volume"


class Unproven(NotPermitted):
    """There is no proof of who created the trash store, so the service reaps nothing in it"""

    problem = "untrusted trash store, so nothing in it is reaped"


class VolumeSpace(NamedTuple):
    """What a volume has, and what of it ordinary users may take; no total of inodes where they are not counted."""

    free_bytes: int
    total_bytes: int
    free_inodes: int | None
    total_inodes: int | None

    def free_share(self) -> float | None:
        """Of the blocks, 0 to 1."""
        return self.free_bytes / self.total_bytes if self.total_bytes else None

    def free_inode_share(self) -> float | None:
        """Of the inodes, 0 to 1; None where they are not counted."""
        if not self.total_inodes or self.free_inodes is None:
            return None
        return self.free_inodes / self.total_inodes


class OpenVolume(NamedTuple):
    """A volume that is ours to work on for as long as this is open.

    filesystem  its type
    hold        a directory of ours on it, which the probe writes to: the store, or the user's own folder
    beat        where several machines may have the filesystem mounted: ours, which is the lock of this machine there
    own         what its owner vouches for, of a user's own store that root's service works on: there root makes
                nothing, neither a lock nor what a probe writes, and takes nothing over
    told_path   so much of such a store's path as every user may see
    disk        what its filesystem lies on
    """

    store: Store
    filesystem: str
    hold: Fd
    owned: ExitStack
    own: LineOf | None = None
    told_path: bytes = b""
    beat: HeldBeat | None = None
    disk: Disk = Disk("", is_block=False)

    def is_shared(self) -> bool:
        """Whether other machines may have it mounted: what they do no inotify tells."""
        return not self.store.kernel.is_local(self.store.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        """Let go of it, so that it can be unmounted."""
        self.owned.close()

    def users(self, resting: Collection[int] = ()) -> FolderCensus:
        """Those who have a folder there, as far as they are ours to serve, and what is refused of theirs.

        resting  users whose new folders are not looked at now
        Raises   OSError of what no other user can write
        """
        if self.own is not None:
            return take_census(self.store, self.own.uid, plain_only=True)
        unread = look_first(self.store, resting) if self.store.is_roots_to_keep() else []
        census = take_census(self.store, os.geteuid() or None)
        return census._replace(unread=census.unread + unread)

    def check(self) -> None:
        """Look whether what nobody but the store's owner can write still is what it was.

        Raises  TrashdError; OSError: ESTALE if it is another volume's now
        """
        store, kernel = self.store, self.store.kernel
        if read_volume(kernel, store.fd, store.base_path, (store.owner,)).id != store.volume.id:
            raise OSError(errno.ESTALE, "volume.json is of another volume")
        kernel.is_empty(store.areas.u_fd)
        if kernel.is_read_only(store.fd):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def folder(self, uid: int) -> UserFolder | None:
        """A user's folder; None if it is gone."""
        return open_user(self.store, uid, plain_only=self.own is not None)

    def space(self) -> VolumeSpace:
        """What it has now. Raises  OSError"""
        return space_at(self.store.base.fd)


def space_at(where: int | bytes) -> VolumeSpace:
    """What the filesystem of an fd or path has now. Raises  OSError"""
    st = os.statvfs(where)
    inodes = (st.f_favail, st.f_files) if st.f_files else (None, None)
    return VolumeSpace(st.f_bavail * st.f_frsize, st.f_blocks * st.f_frsize, *inodes)


def split_place(path: bytes) -> tuple[bytes, Name]:
    """The directory and the name of the store that a loop keeps by that path: a directory's own path means its first
    one for us, that of a user's own store the store.
    """
    base, name = os.path.split(path)
    return (path, STORE) if whose_store(name) is None else (base, Name(name))


def _open_place(kernel: Kernel, path: bytes, mounts: list[Mount]) -> Store | None:
    """The store of a place. Raises  Untrusted; NoBacking; BrokenStore; OSError"""
    base, name = split_place(path)
    try:
        store = open_store(kernel, open_shown(kernel, base, mounts), base, name)
    except Untrusted:
        store = None if name != STORE else open_own_store(kernel, open_shown(kernel, base, mounts), base)
        if store is None:
            raise
    if store is None and name == STORE:
        store = open_own_store(kernel, open_shown(kernel, base, mounts), base)
    return store


def open_volume(kernel: Kernel, path: bytes) -> OpenVolume:
    """The volume whose store is in a directory, or has that path itself, locked.

    Raises  NoStore; Untrusted; NoBacking if only a mount of ours is seen there; Elsewhere; RootSquashed; OSError
    """
    mounts = read_mounts()
    with ExitStack() as owned:
        _let_sleep(path, mounts)
        store = _open_place(kernel, path, mounts)
        if store is None:
            raise NoStore(path)
        owned.enter_context(store)
        refuse_mounted(kernel, store.fd)
        _leave_to_root(store)
        refuse_squashed(store.kernel, store.fd, store.base_path)
        _refuse_unproven(store)
        discard_emptied(store)
        hold = owned.enter_context(_open_hold(kernel, store))
        beat = None
        if kernel.is_local(store.fd):
            _lock(kernel, hold, path, owned)
        else:
            beat = _beat(kernel, hold, path, owned)
        mount = find_mount(kernel, store.fd, mounts)
        return OpenVolume(store, _type_of(mount), hold, owned.pop_all(), beat=beat, disk=disk_of(mount))


def open_own(kernel: Kernel, wanted: LineOf) -> OpenVolume:
    """A user's own store as root's service works on it, without a lock.

    Raises  NoStore; Untrusted; OSError
    """
    mounts = read_mounts()
    with ExitStack() as owned:
        store = _open_vouched(kernel, wanted, mounts, owned)
        hold = owned.enter_context(kernel.open_dir(store.fd))
        told, mount = seen_by_all(store.base.fd, wanted), find_mount(kernel, store.fd, mounts)
        return OpenVolume(store, _type_of(mount), hold, owned.pop_all(), wanted, told, disk=disk_of(mount))


def own_space(kernel: Kernel, wanted: LineOf) -> VolumeSpace:
    """What the filesystem of a user's own store has now. Raises  NoStore; OSError"""
    with open_base(kernel, wanted, read_mounts()) as base:
        return space_at(base)


def _type_of(mount: Mount | None) -> str:
    return "" if mount is None else printable(mount.fstype)


def _let_sleep(path: bytes, mounts: list[Mount]) -> None:
    """An automount that rests is not woken by us. Raises  NoStore"""
    top = next((mount for mount in reversed(mounts) if mount.point == path), None)
    if top is not None and top.fstype == b"autofs":
        raise NoStore(path, "its automount is not mounted; name the directory behind it in the configuration")


def _leave_to_root(store: Store) -> None:
    """A user's own service leaves alone what root's serves: two would tell everything twice. Raises  Elsewhere"""
    if os.geteuid() == 0:
        return
    served: tuple[VolumeStatus, ...] = ()
    with suppress(TrashdError, OSError):  # of another version: then claims keep the two apart
        served = served_volumes(SYSTEM_RUNTIME)
    # An id is no secret: another user's own store may have the same.
    ours = (one for one in served if one.id == store.volume.id and (one.owner or 0) == store.owner)
    if any(one.phase not in _LET_GO for one in ours):
        raise Elsewhere(store.base_path)


def _refuse_unproven(store: Store) -> None:
    """A user's own store may be a copy or a backup, unless that user's registry names it; root's, another user's work.

    Raises  Unproven
    """
    if store.is_roots_to_keep() and store.is_unknown():
        raise Unproven(f"{printable(store.base_path)} ({NOT_MADE})", way_out(store.base_path))
    is_own = not store.is_common() and store.owner == os.geteuid()
    if is_own and not is_remembered(store) and (store.name == STORE or not is_vouched(store)):
        raise Unproven(
            store.base_path, f"if it is not a copy, register it with trashd init {shell_word(store.base_path)}"
        )


def _open_hold(kernel: Kernel, store: Store) -> Fd:
    if os.geteuid() == 0:
        return kernel.open_dir(store.fd)
    with own_folder(store) as folder:  # made if missing: what comes into it is to be seen
        return kernel.open_dir(folder.fd)


def _lock(kernel: Kernel, hold: Fd, path: bytes, owned: ExitStack) -> None:
    """Lock a volume. No other user may open the file: who can, can hold it and keep the reaper out.

    Without room for that file claims alone keep two reapers apart (I5). Raises  Elsewhere; OSError
    """
    with suppress(FileExistsError):
        try:
            kernel.create(hold, REAPER_LOCK).close()
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            return
    fd = owned.enter_context(kernel.open_beneath(hold, REAPER_LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK))
    if not kernel.lock(fd):
        raise Elsewhere(path)


def _beat(kernel: Kernel, hold: Fd, path: bytes, owned: ExitStack) -> HeldBeat | None:
    """Our beat, locked: other machines have their own. None without room for one. Raises  Elsewhere; OSError"""
    try:
        beat = hold_beat(kernel, hold)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        return None
    if beat is None:
        raise Elsewhere(path)
    return owned.enter_context(beat)


def all_views(mounts: list[Mount], earlier: Iterable[MountView]) -> list[MountView]:
    """What mounts of ours show, the latest first; and what one showed that is to stand there again in a moment.

    `trashd mount --replace` detaches the dead mount before the new one stands. What it shows is no other volume
    meanwhile, and has no other rules: the mount point is its daemon's all the time.
    earlier  what this returned the last time
    """
    now = views(mounts, trusted_owners(os.geteuid()))
    points = {view.mount.point for view in now}
    return now + [view for view in earlier if view.mount.point not in points and is_claimed(view.mount.point)]


def volume_paths(mounts: list[Mount], seen: Iterable[MountView]) -> list[bytes]:
    """The mount points where there may be a store to serve, each by the path that rules know it by.

    What a mount of ours shows is known by that mount's path, be its daemon dead or hung: by the backing one it would be
    another volume, for which neither its rules nor its pauses hold. To have that path served, name it.
    """
    shown = {view.backing for view in seen}
    return [path for path in mount_points(mounts) if find_place(path, mounts) not in shown]


def registered_paths(lines: Iterable[RegistryLine], mounts: list[Mount], seen: Iterable[MountView]) -> list[bytes]:
    """Where our own registry says that there is a store to serve: as above not within what a mount of ours shows."""
    shown = [view.backing for view in seen]
    places = ((line.path, find_place(line.path, mounts)) for line in lines)
    return [path for path, place in places if place is not None and not any(one.holds(place) for one in shown)]


def find_stores(kernel: Kernel, path: bytes, mounts: list[Mount]) -> dict[bytes, tuple[int, int]]:
    """The places of the stores in a directory that are ours to serve, each with what tells it from others (its device
    and inode now): the first one by the directory's path, our own beside root's by its own.
    """
    found: dict[bytes, tuple[int, int]] = {}
    for opener in (open_store, open_own_store):
        with suppress(OSError, TrashdError):  # `trashd doctor PATH` says why
            _let_sleep(path, mounts)
            store = opener(kernel, open_shown(kernel, path, mounts), path)
            if store is not None:
                with store:
                    st = kernel.fstat(store.fd)
                    found[store.path() if found else path] = st.st_dev, st.st_ino
    return found


def find_id(kernel: Kernel, path: bytes, mounts: list[Mount]) -> str:
    """The id of the volume whose store is in a directory; empty if there is none for us."""
    with suppress(OSError, TrashdError):
        _let_sleep(path, mounts)
        store = open_store(kernel, open_shown(kernel, path, mounts), path)
        if store is not None:
            with store:
                return store.volume.id
    return ""


def open_base(kernel: Kernel, wanted: LineOf, mounts: Sequence[Mount]) -> Fd:
    """The directory that a line names, gone to through nothing that a user could have put there. Raises  OSError"""
    return open_way(kernel, wanted.line.path, mounts, ROOTS)


def is_own(kernel: Kernel, wanted: LineOf, mounts: Sequence[Mount]) -> bool:
    """Whether there is something of the user's own: his registry names stores of root's too, which are no less served.

    May take for ever.
    """
    try:
        with open_base(kernel, wanted, mounts) as base:
            return kernel.stat(base, wanted.line.name).st_uid == wanted.uid
    except OSError:
        return False


def _open_vouched(kernel: Kernel, wanted: LineOf, mounts: Sequence[Mount], owned: ExitStack) -> Store:
    """The store in the directory that a line names, if it is the one that its owner vouches for.

    Raises  NoStore if it is gone, or another one; Untrusted if others may write in it; OSError
    """
    base, where = owned.enter_context(open_base(kernel, wanted, mounts)), printable(wanted.line.path)
    try:
        fd = owned.enter_context(kernel.open_beneath(base, wanted.line.name, READABLE))
        areas = owned.enter_context(open_areas(kernel, fd, wanted.line.name))
    except OSError as error:
        if error.errno == errno.EXDEV:
            raise Untrusted(f"{where} (something is mounted over the store)") from error
        if error.errno in ABSENT:
            raise NoStore(wanted.line.path) from error
        raise
    dev = kernel.fstat(base).st_dev
    for opened in (fd, *(area for _name, area in areas.all() if area is not areas.new_fd)):
        st = kernel.fstat(opened)
        if st.st_uid != wanted.uid or st.st_mode & OTHERS_WRITE or st.st_dev != dev:
            raise Untrusted(f"{where} (uid {wanted.uid} registered it, but other users can change it)")
    if wanted.line.name != STORE and stat.S_IMODE(kernel.fstat(fd).st_mode) != FOLDER_MODE:
        raise Untrusted(f"{where} (its mode is not {FOLDER_MODE:04o})")
    if compare(kernel.identify(fd), wanted.line.identity) is Likelihood.OTHER:
        raise NoStore(wanted.line.path, "it is not the store that its owner registered")
    # What else its volume.json says his process reads (service/forker.py).
    volume = Volume(wanted.line.volume, False, 0)
    kind = kernel.filesystem(fd)
    sides, name = BackingAndMount(base), wanted.line.name
    return Store(kernel, sides, wanted.line.path, fd, areas, volume, wanted.uid, kind, name=name)


def unseen(wanted: LineOf) -> bytes:
    """What stands for a path where nobody has looked who may see it: some of the store's id."""
    return b"/" + UNSEEN + wanted.line.volume[:_OF_ID].encode()


def seen_by_all(base: Fd, wanted: LineOf) -> bytes:
    """So much of the path of an opened directory as everybody may see, for a status that everybody may read.

    A name in a directory that others may not list stands for nothing but some of the store's id, which tells it from
    others. Raises  OSError
    """
    real = os.readlink(b"/proc/self/fd/%d" % base)
    shown = b""
    with ExitStack() as owned:
        above = owned.enter_context(Fd(os.open(b"/", _STEP)))
        for name in real.strip(b"/").split(b"/"):
            if os.fstat(above).st_mode & _OTHERS_LOOK != _OTHERS_LOOK:
                return shown + unseen(wanted)
            above = owned.enter_context(Fd(os.open(name or b".", _STEP, dir_fd=above)))
            shown += b"/" + name
    return shown
