"""Open a volume for the service, with the checks that precede any claim. These functions block: call them in threads.

A user's own store is listed in that user's registry. Root neither reads nor writes files in it, because its owner can
put anything into it at any time. Root's service only keeps the store's directories open, and watches them. A process
that runs as the owner reads every file and makes every change, as everywhere below a user's folder (I13).

On a local filesystem, `reaper.lock` keeps two services apart. On others, each node that serves the volume has a
heartbeat file, which is also its lock: `nodes/<host>.<boot id>`. It is in a directory that only this service writes to:
the store for root's service, the user's own folder for a user's service. Heartbeats written by other users are not
trusted, although they could only cause more frequent checks.
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
from fusefs.core.identity import IdentityMatch, compare
from fusefs.core.names import STORE, Name, parse_user_store_name
from fusefs.core.node_heartbeats import (
    HEARTBEAT_BYTES,
    Heartbeat,
    decode_heartbeat,
    encode_heartbeat,
    heartbeat_name,
    is_heartbeat_name,
)
from fusefs.core.printable_names import printable, shell_word
from fusefs.core.service_status import HIDDEN, VolumePhase, VolumeStatus
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import OTHERS_WRITE, Kernel
from fusefs.linux.machine_identity import boot_id
from fusefs.linux.mount_calls import is_mount_point_claimed
from fusefs.linux.mountinfo import (
    Disk,
    Mount,
    MountView,
    disk_of,
    find_mount,
    find_place,
    find_rule_path,
    is_inside,
    read_mounts,
    trashd_views,
)
from fusefs.linux.runtime_directories import MOUNTS_RUNTIME, SYSTEM_RUNTIME
from fusefs.linux.untrusted_path import open_untrusted
from fusefs.service.state_files import served_volumes
from fusefs.store.backing_and_mount import ABSENT_ERRNOS, FILE_TO_LOCK, READABLE, BackingAndMount
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
from fusefs.store.make_folder import inspect_new_folders
from fusefs.store.mounted_paths import open_both_sides, refuse_mounted
from fusefs.store.registry_lines import RegistryLine, hint_for_unknown_maker
from fusefs.store.root_squash import refuse_squashed
from fusefs.store.store_registry import UserLine
from fusefs.store.swap import open_own_folder
from fusefs.store.tidy_folder import discard_emptied
from fusefs.store.user_folders import (
    NOT_MADE,
    FolderCensus,
    inspect_folders,
    is_registered_store,
    is_vouched,
    open_user_folder,
)

StoreInode = tuple[int, int, str]
"""The device and inode of a store, and its volume ID, since another disk may get the same device number later."""
_MOST_NODES = 1000
_TRIES = 3


class HeldBeat:
    """Our heartbeat file on an opened volume; its lock keeps other services of this machine away from the volume.

    A thread that writes the file may hang and be abandoned, so its fds stay open. If they were closed, their numbers
    could be reused for another file, and a late heartbeat would overwrite that file.
    """

    def __init__(self, kernel: Kernel, nodes: Fd, fd: Fd, name: bytes) -> None:
        self._kernel = kernel
        self._nodes = nodes
        self._fd = fd
        self.name = name
        self._text = bytes(HEARTBEAT_BYTES)
        self._mutex = threading.Lock()
        self._n_using = 0
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        """Close the file once no thread is using it."""
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
                self._n_using = -1  # only once
                self._fd.close()
                self._nodes.close()

    def write(self, beat: Heartbeat) -> None:
        """Write a heartbeat durably. Raises  OSError"""
        self._text = encode_heartbeat(beat)
        self.write_again()

    def write_again(self) -> None:
        """Write the last heartbeat again: a small durable write that serves as a probe. Raises  OSError"""
        with self._using():
            self._kernel.write(self._fd, self._text)
            self._kernel.fsync(self._fd)

    def read_all(self) -> dict[bytes, Heartbeat | None]:
        """Return all heartbeats by name, including ours, each from a newly opened file; None for an invalid one."""
        kernel = self._kernel
        beats: dict[bytes, Heartbeat | None] = {}
        with self._using():
            for name in islice(filter(is_heartbeat_name, kernel.list_reopened(self._nodes)), _MOST_NODES):
                with suppress(FileNotFoundError):
                    beats[name] = _read(kernel, self._nodes, name)
        return beats

    def remove(self, name: bytes) -> None:
        with self._using():
            self._kernel.unlink(self._nodes, name)


def own_beat_name() -> bytes:
    return heartbeat_name(os.uname().nodename, boot_id())


def hold_beat(kernel: Kernel, hold: Fd) -> HeldBeat | None:
    """Lock our heartbeat file in the directory `hold`; create it if missing.

    Returns None if another service of this machine has the lock.
    Raises  OSError; Untrusted: other users can write to `nodes/`
    """
    name = own_beat_name()
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
            if kernel.is_named(fd, nodes, name):  # otherwise, a node that considered us dead has just removed it
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


def _read(kernel: Kernel, nodes: Fd, name: bytes) -> Heartbeat | None:
    """Read a heartbeat; return None if it is invalid. Raises  FileNotFoundError"""
    try:
        text = read_small(kernel, nodes, name, 2 * HEARTBEAT_BYTES, trusted_owners(os.geteuid()))
    except FileNotFoundError:
        raise
    except OSError:
        return None  # a link, or a file that the server is just replacing
    return None if text is None else decode_heartbeat(text)


_LET_GO = (VolumePhase.ELSEWHERE, VolumePhase.GONE)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
ROOTS = (0,)
"""The users whose links and mounts root's service follows."""
_OTHERS_LIST = 0o005
_STEP = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OF_ID = 8


class Elsewhere(Busy):
    """Another reaper serves the volume"""

    problem = "another reaper serves this volume"


class Unproven(NotPermitted):
    """There is no proof of who created the trash store, so the service reaps nothing in it"""

    problem = "untrusted trash store, so nothing in it is reaped"


class VolumeSpace(NamedTuple):
    """The space of a volume: free for ordinary users, and in total. Inodes are None if the filesystem counts none."""

    free_bytes: int
    total_bytes: int
    free_inodes: int | None
    total_inodes: int | None

    def free_share(self) -> float | None:
        """Return the free share of the blocks, 0 to 1; None if the size of the volume is 0."""
        return self.free_bytes / self.total_bytes if self.total_bytes else None

    def free_inode_share(self) -> float | None:
        """Return the free share of the inodes, 0 to 1; None if inodes are not counted."""
        if not self.total_inodes or self.free_inodes is None:
            return None
        return self.free_inodes / self.total_inodes


class OpenVolume(NamedTuple):
    """A volume that the service may work on while this object is open.

    filesystem  its type
    hold        our directory on it, which the probe writes to: the store, or the user's own folder
    beat        our heartbeat file, which is also this machine's lock, if other machines may have the filesystem mounted
    own         the registry line, if root's service works on a user's own store: root writes nothing there, neither a
                lock nor a probe, and takes nothing over
    public_path  the part of such a store's path that every user may see
    """

    store: Store
    filesystem: str
    hold: Fd
    owned: ExitStack
    own: UserLine | None = None
    public_path: bytes = b""
    beat: HeldBeat | None = None
    disk: Disk = Disk("", is_block=False)

    def is_shared(self) -> bool:
        """Return whether other machines may have the filesystem mounted; inotify does not report their changes."""
        return not self.store.kernel.is_local(self.store.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        """Close the volume, so that it can be unmounted."""
        self.owned.close()

    def users(self, resting: Collection[int] = ()) -> FolderCensus:
        """Return the users whose folders the service must serve, and the folders that it refuses.

        resting  users whose new folders are not checked now
        Raises   OSError: a part of the store that only its owner can write to can't be read
        """
        if self.own is not None:
            return inspect_folders(self.store, self.own.uid, plain_only=True)
        unread = inspect_new_folders(self.store, resting) if self.store.is_ours_as_root() else []
        census = inspect_folders(self.store, os.geteuid() or None)
        return census._replace(unread=census.unread + unread)

    def check(self) -> None:
        """Check the parts of the store that only its owner can write to.

        Raises  TrashdError; OSError: ESTALE if the store now belongs to another volume
        """
        store, kernel = self.store, self.store.kernel
        if read_volume(kernel, store.fd, store.base_path, (store.owner,)).id != store.volume.id:
            raise OSError(errno.ESTALE, "volume.json belongs to another volume")
        kernel.is_empty(store.areas.u_fd)
        if kernel.is_read_only(store.fd):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def folder(self, uid: int) -> UserFolder | None:
        return open_user_folder(self.store, uid, plain_only=self.own is not None)

    def space(self) -> VolumeSpace:
        return space_at(self.store.base.fd)


def space_at(where: int | bytes) -> VolumeSpace:
    """Return the current space of the filesystem of an fd or path. Raises  OSError"""
    st = os.statvfs(where)
    inodes = (st.f_favail, st.f_files) if st.f_files else (None, None)
    return VolumeSpace(st.f_bavail * st.f_frsize, st.f_blocks * st.f_frsize, *inodes)


def split_place(path: bytes) -> tuple[bytes, Name]:
    """Split a volume loop's path into the directory and the name of its store.

    The path of a directory stands for the first store in it that is ours to serve; a user's own store has its own path.
    """
    base, name = os.path.split(path)
    return (path, STORE) if parse_user_store_name(name) is None else (base, Name(name))


def _open_place(kernel: Kernel, path: bytes, mounts: list[Mount]) -> Store | None:
    """Open the store at a loop's path. Raises  Untrusted; NoBacking; BrokenStore; OSError"""
    base, name = split_place(path)
    try:
        store = open_store(kernel, open_both_sides(kernel, base, mounts), base, name)
    except Untrusted:
        store = None if name != STORE else open_own_store(kernel, open_both_sides(kernel, base, mounts), base)
        if store is None:
            raise
    if store is None and name == STORE:
        store = open_own_store(kernel, open_both_sides(kernel, base, mounts), base)
    return store


def open_volume(kernel: Kernel, path: bytes) -> OpenVolume:
    """Open and lock a volume, given the path of its store, or of the directory that holds the store.

    Raises  NoStore; Untrusted; NoBacking: only a trashd mount is reachable there; Elsewhere; RootSquashed; OSError
    """
    mounts = read_mounts()
    with ExitStack() as owned:
        _refuse_resting_automount(path, mounts)
        store = _open_place(kernel, path, mounts)
        if store is None:
            raise NoStore(path)
        owned.enter_context(store)
        refuse_mounted(kernel, store.fd)
        _refuse_served_by_root(store)
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
        store.base.close_mounted()  # if a session held it, the mount could not be unmounted
        store = store._replace(base=BackingAndMount(store.base.fd))
        return OpenVolume(store, _type_of(mount), hold, owned.pop_all(), beat=beat, disk=disk_of(mount))


def open_own(kernel: Kernel, line_of: UserLine) -> OpenVolume:
    """Open a user's own store for root's service, without a lock.

    Raises  NoStore; Untrusted; OSError
    """
    mounts = read_mounts()
    with ExitStack() as owned:
        store = _open_vouched(kernel, line_of, mounts, owned)
        hold = owned.enter_context(kernel.open_dir(store.fd))
        public_path, mount = find_public_path(store.base.fd, line_of), find_mount(kernel, store.fd, mounts)
        return OpenVolume(store, _type_of(mount), hold, owned.pop_all(), line_of, public_path, disk=disk_of(mount))


def own_space(kernel: Kernel, line_of: UserLine) -> VolumeSpace:
    """Return the current space of the filesystem that holds a user's own store. Raises  OSError"""
    with (
        open_base(kernel, line_of, read_mounts()) as base,
        kernel.open_beneath(base, line_of.line.name, READABLE) as fd,
    ):
        return space_at(fd)


def _type_of(mount: Mount | None) -> str:
    return "" if mount is None else printable(mount.fstype)


def _refuse_resting_automount(path: bytes, mounts: list[Mount]) -> None:
    """Refuse an automount point that is not mounted, so as not to trigger the mount. Raises  NoStore"""
    top = next((mount for mount in reversed(mounts) if mount.point == path), None)
    if top is not None and top.fstype == b"autofs":
        raise NoStore(
            path,
            "nothing is mounted at this automount point; if volumes are mounted below it, configure their directories",
        )


def _refuse_served_by_root(store: Store) -> None:
    """Refuse a store that root's service serves, since a second service would report everything twice.

    Raises  Elsewhere
    """
    if os.geteuid() == 0:
        return
    served: tuple[VolumeStatus, ...] = ()
    with suppress(TrashdError, OSError):  # a status of another version: then only claims keep the two services apart
        served = served_volumes(SYSTEM_RUNTIME)
    # Ids are not secret: another user's own store may have the same one.
    same_store = (one for one in served if one.id == store.volume.id and (one.owner or 0) == store.owner)
    if any(one.phase not in _LET_GO for one in same_store):
        raise Elsewhere(store.base_path)


def _refuse_unproven(store: Store) -> None:
    """Refuse a user's own store that is not in that user's registry, because it may be a copy or a backup.

    As root, also refuse a store that another user may have created.
    Raises  Unproven
    """
    if store.is_ours_as_root() and store.has_unknown_maker():
        raise Unproven(f"{printable(store.base_path)} ({NOT_MADE})", hint_for_unknown_maker(store.base_path))
    is_own = not store.is_common() and store.owner == os.geteuid()
    if is_own and not is_registered_store(store) and (store.name == STORE or not is_vouched(store)):
        raise Unproven(
            store.base_path, f"if it is not a copy, register it with trashd init {shell_word(store.base_path)}"
        )


def _open_hold(kernel: Kernel, store: Store) -> Fd:
    if os.geteuid() == 0:
        return kernel.open_dir(store.fd)
    with open_own_folder(store) as folder:  # created if missing, so that arrivals in it are noticed
        return kernel.open_dir(folder.fd)


def _lock(kernel: Kernel, hold: Fd, path: bytes, owned: ExitStack) -> None:
    """Lock a volume. Other users must not be able to open the lock file: they could lock it and keep the reaper out.

    If there is no space for the file, only claims keep two reapers apart (I5). Raises  Elsewhere; OSError
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
    """Lock our heartbeat file, which is next to those of other machines; return None if there is no space for it.

    Raises  Elsewhere; OSError
    """
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
    """Return the views of trashd mounts, latest first, including earlier ones that are about to be mounted again.

    `trashd mount --replace` detaches the dead mount before it mounts the new one. In between, the directory under the
    mount point must not become a different volume with different rules, since the path still belongs to the daemon.
    earlier  the result of the previous call
    """
    now = trashd_views(mounts, trusted_owners(os.geteuid()))
    points = {view.mount.point for view in now}
    return now + [
        view for view in earlier if view.mount.point not in points and is_mount_point_claimed(view.mount.point)
    ]


def volume_paths(mounts: list[Mount], our_views: Iterable[MountView]) -> list[bytes]:
    """Return the mount points that may have a store to serve, each as the path to which rules apply.

    A directory shown by a trashd mount is known by the path of that mount, even if its daemon is dead or hangs. Under
    its backing path it would be a different volume, without its rules and pauses. To serve the backing path, name it in
    the configuration. A clone in /run/trashd may stand for a moment longer than its mount, and is never a volume.
    """
    shown = {view.backing for view in our_views}
    paths = (path for path in mount_points(mounts) if not is_inside(path, MOUNTS_RUNTIME))
    return [path for path in paths if find_place(path, mounts) not in shown]


def registered_paths(lines: Iterable[RegistryLine], mounts: list[Mount], our_views: list[MountView]) -> list[bytes]:
    """Return the paths of the stores in our own registry, for those in a trashd mount their paths there."""
    return [find_rule_path(line.path, mounts, our_views).path for line in lines]


def find_stores(kernel: Kernel, path: bytes, mounts: list[Mount]) -> dict[bytes, StoreInode]:
    """Return the device, inode and volume ID of each store in a directory that is ours to serve, by path.

    The first store has the directory's path; our own store next to root's has its own path.
    """
    stores: dict[bytes, StoreInode] = {}
    for opener in (open_store, open_own_store):
        with suppress(OSError, TrashdError):  # `trashd doctor PATH` prints the reason
            _refuse_resting_automount(path, mounts)
            store = opener(kernel, open_both_sides(kernel, path, mounts), path)
            if store is not None:
                with store:
                    st = kernel.fstat(store.fd)
                    stores[store.path() if stores else path] = st.st_dev, st.st_ino, store.volume.id
    return stores


def find_id(kernel: Kernel, path: bytes, mounts: list[Mount]) -> str:
    """Return the id of the volume whose store is in a directory; empty if there is no store that we can use."""
    with suppress(OSError, TrashdError):
        _refuse_resting_automount(path, mounts)
        store = open_store(kernel, open_both_sides(kernel, path, mounts), path)
        if store is not None:
            with store:
                return store.volume.id
    return ""


def open_base(kernel: Kernel, line_of: UserLine, mounts: Sequence[Mount]) -> Fd:
    """Open the directory of a registry line, without following users' links or mounts. Raises  OSError"""
    return open_untrusted(kernel, line_of.line.path, mounts, ROOTS)


def is_own(kernel: Kernel, line_of: UserLine, mounts: Sequence[Mount]) -> bool:
    """Return whether a user's registry line leads to that user's own store. Root's stores may be listed, too.

    May block forever.
    """
    try:
        with open_base(kernel, line_of, mounts) as base:
            return kernel.stat(base, line_of.line.name).st_uid == line_of.uid
    except OSError:
        return False


def _open_vouched(kernel: Kernel, line_of: UserLine, mounts: Sequence[Mount], owned: ExitStack) -> Store:
    """Open the store of a registry line if it is the one that its owner registered.

    Raises  NoStore: it is gone or was replaced; Untrusted: other users may write to it; OSError
    """
    base, where = owned.enter_context(open_base(kernel, line_of, mounts)), printable(line_of.line.path)
    try:
        fd = owned.enter_context(kernel.open_beneath(base, line_of.line.name, READABLE))
        areas = owned.enter_context(open_areas(kernel, fd, line_of.line.name))
    except OSError as error:
        if error.errno == errno.EXDEV:
            raise Untrusted(f"{where} (something is mounted over the store)") from error
        if error.errno in ABSENT_ERRNOS:
            raise NoStore(line_of.line.path) from error
        raise
    dev = kernel.fstat(base).st_dev
    for opened in (fd, *(area for _name, area in areas.all() if area is not areas.new_fd)):
        st = kernel.fstat(opened)
        if st.st_uid != line_of.uid or st.st_mode & OTHERS_WRITE or st.st_dev != dev:
            raise Untrusted(f"{where} (uid {line_of.uid} registered it, but other users can change it)")
    if line_of.line.name != STORE and stat.S_IMODE(kernel.fstat(fd).st_mode) != FOLDER_MODE:
        raise Untrusted(f"{where} (its mode is not {FOLDER_MODE:04o})")
    if compare(kernel.identify(fd), line_of.line.identity) is IdentityMatch.OTHER:
        raise NoStore(line_of.line.path, "it is not the store that its owner registered")
    # The rest of its volume.json is read by the owner's process (service/forker.py).
    volume = Volume(line_of.line.volume, False, 0)
    kind = kernel.filesystem(fd)
    sides, name = BackingAndMount(base), line_of.line.name
    return Store(kernel, sides, line_of.line.path, fd, areas, volume, line_of.uid, kind, name=name)


def placeholder_path(line_of: UserLine) -> bytes:
    """Return a placeholder for the path of a store that may be private: the beginning of the store's id."""
    return b"/" + HIDDEN + line_of.line.volume[:_OF_ID].encode()


def find_public_path(base: Fd, line_of: UserLine) -> bytes:
    """Return the part of an opened directory's path that every user may see, for the status that every user may read.

    The rest of the path, from the first name in a directory that others may not list, is replaced with the beginning of
    the store's id, which distinguishes the store from others. Raises  OSError
    """
    real = os.readlink(b"/proc/self/fd/%d" % base)
    shown = b""
    with ExitStack() as owned:
        above = owned.enter_context(Fd(os.open(b"/", _STEP)))
        for name in real.strip(b"/").split(b"/"):
            if os.fstat(above).st_mode & _OTHERS_LIST != _OTHERS_LIST:
                return shown + placeholder_path(line_of)
            above = owned.enter_context(Fd(os.open(name or b".", _STEP, dir_fd=above)))
            shown += b"/" + name
    return shown
