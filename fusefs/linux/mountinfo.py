"""Mounts as listed in /proc/PID/mountinfo: the mount of a file, mounts inside a directory, changes of mounts."""

from __future__ import annotations

import errno
import os
import select
import stat
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple, Self

from fusefs.core.printable_names import unescape
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.machine_identity import boot_id

TRASHD_FSTYPE = b"fuse.trashd"
"""The type of trashd's own mounts; their source is the path of the backing tree."""
TOP = b".trashd@"
"""The name of the backing tree's top in the root of a trashd filesystem: see mount/life/root_inode.py."""
MERGERFS = b"fuse.mergerfs"
DAEMON_GONE = (errno.ENOTCONN, errno.ECONNABORTED, errno.ECANCELED)
"""Errors in a FUSE mount whose daemon has ended; the last one occurs if the daemon used io_uring."""
_USER_ID = b"user_id="
_FUSE = (b"fuse", b"fuseblk")


class Mount(NamedTuple):
    """One line of mountinfo.

    device  `major:minor` of the superblock
    root    the path in the filesystem that is mounted; for trashd mounts, the path in the backing tree
    point   the mount point, as seen by the process whose mountinfo it is
    options, super_options  the options of this mount, and those of the filesystem, wherever it is mounted
    owner   UID of the user who mounted it, if it is a FUSE mount
    Source  proc_pid_mountinfo(5); mount.fuse(8) for `user_id`, which fusermount3 sets itself
    """

    mnt_id: int
    parent_id: int
    device: bytes
    root: bytes
    point: bytes
    fstype: bytes
    source: bytes
    options: bytes
    owner: int = 0
    super_options: bytes = b""

    def is_trashd(self) -> bool:
        return self.fstype == TRASHD_FSTYPE

    def is_fuse(self) -> bool:
        return self.fstype.partition(b".")[0] in _FUSE

    def flags(self) -> frozenset[str]:
        """Return all options of this mount and its filesystem, by mount(8)'s names."""
        return frozenset(os.fsdecode(self.options + b"," + self.super_options).split(","))

    def connection(self) -> int:
        """Return the number of a FUSE mount's connection in /sys/fs/fuse/connections: its minor device number."""
        return int(self.device.partition(b":")[2])

    def st_dev(self) -> int:
        major, _, minor = self.device.partition(b":")
        return os.makedev(int(major), int(minor))


class FilesystemPath(NamedTuple):
    """A directory, identified by a superblock and a path in it: the same in all namespaces and for all bind mounts."""

    device: bytes
    path: bytes

    def holds(self, other: FilesystemPath) -> bool:
        """Return whether the other directory is this one or inside it."""
        return self.device == other.device and is_inside(other.path, self.path)


def read_mounts(pid: str = "self") -> list[Mount]:
    """Read the mounts in a process's namespace, in the order of mounting."""
    with open(f"/proc/{pid}/mountinfo", "rb") as table:
        return list(_parse_mounts(table.read()))


@lru_cache(maxsize=2)
def _parse_mounts(table: bytes) -> tuple[Mount, ...]:
    """Parse a mount table. The result is cached, because a command reads the same table several times.

    The kernel escapes blanks, tabs and newlines in names, but not carriage returns or form feeds. So lines are split at
    blanks only: a user must not be able to add fields by mounting at a path with such a character.
    """
    mounts = []
    for line in table.split(b"\n")[:-1]:
        fields = line.split(b" ")
        kind = fields.index(b"-", 6) + 1
        fstype, super_options = fields[kind], fields[-1]
        root, point, source = (unescape(fields[n], b"\\", 3, 8) for n in (3, 4, kind + 1))
        if fstype == TRASHD_FSTYPE and is_inside(root, b"/" + TOP):
            root = b"/" + relative_to(root, b"/" + TOP)
        owner = 0
        if fstype.partition(b".")[0] in _FUSE:
            uids = (one.removeprefix(_USER_ID) for one in super_options.split(b",") if one.startswith(_USER_ID))
            uid = next(uids, b"")
            owner = int(uid) if uid.isdigit() else -1  # an owner who is never trusted
        ids = int(fields[0]), int(fields[1])
        mounts.append(Mount(*ids, fields[2], root, point, fstype, source, fields[5], owner, super_options))
    return tuple(mounts)


def find_mount(kernel: Kernel, fd: int, mounts: Iterable[Mount]) -> Mount | None:
    """Find the mount of an fd; None if that mount is not visible here (in a chroot). Raises  OSError"""
    mnt_id = kernel.statx(fd).mnt_id
    return next((mount for mount in mounts if mount.mnt_id == mnt_id), None)


def is_inside(path: bytes, directory: bytes) -> bool:
    """Return whether an absolute path is the directory or below it; both must be normalized."""
    return directory == b"/" or path == directory or path.startswith(directory + b"/")


def relative_to(path: bytes, directory: bytes) -> bytes:
    """Return the path relative to a directory that contains it; empty for the directory itself."""
    return path[len(directory) :].lstrip(b"/")


def mount_of(path: bytes, mounts: Iterable[Mount]) -> Mount | None:
    """Find the mount that contains a path (absolute, without links): the topmost one at the mount point.

    To check whether the mount was replaced, compare the whole Mount: after an unmount, the kernel soon reuses the ID.
    """
    best: Mount | None = None
    for mount in mounts:
        if is_inside(path, mount.point) and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def mount_by_point(path: bytes, by_point: Mapping[bytes, Mount]) -> Mount | None:
    """Do as `mount_of`, in a time that does not grow with the number of mounts. by_point: the topmost mount of each"""
    while path and path not in by_point:
        path = path.rpartition(b"/")[0]
    return by_point.get(path or b"/")


def covering_mount_id(path: bytes, mounts: Iterable[Mount]) -> int:
    """Return the ID of the mount that contains a path (absolute, without links); 0 if none does."""
    mount = mount_of(path, mounts)
    return 0 if mount is None else mount.mnt_id


def place_of(path: bytes, mount: Mount) -> FilesystemPath:
    """Return the place (superblock, and path in it) of a path on this mount."""
    return place_below(FilesystemPath(mount.device, mount.root), relative_to(path, mount.point))


def find_place(path: bytes, mounts: Iterable[Mount]) -> FilesystemPath | None:
    """Return the place of a path (absolute, without links); None if no mount contains it."""
    mount = mount_of(path, mounts)
    return None if mount is None else place_of(path, mount)


def place_below(directory: FilesystemPath, path: bytes) -> FilesystemPath:
    """Return the place of a path relative to a directory; an empty path is the directory itself."""
    return FilesystemPath(directory.device, directory.path.rstrip(b"/") + b"/" + path if path else directory.path)


class MountView(NamedTuple):
    """A trashd mount, the place of its backing directory, and the place of its root in the mounted filesystem."""

    mount: Mount
    backing: FilesystemPath
    shown: FilesystemPath


def trashd_views(mounts: Iterable[Mount], owners: Container[int]) -> list[MountView]:
    """Return the trashd mounts, the latest first.

    Only mountinfo is read: if a source's path leads elsewhere from here, the place of the backing directory is wrong.
    owners  the users whose mounts count: a user's daemon may claim any source
    """
    table = list(mounts)
    result = []
    for mount in reversed([mount for mount in table if mount.is_trashd() and mount.owner in owners]):
        source = find_place(mount.source, table)
        if source is not None:
            backing = place_below(source, mount.root.lstrip(b"/"))
            result.append(MountView(mount, backing, FilesystemPath(mount.device, mount.root)))
    return result


def every_place(place: FilesystemPath, mount_views: Iterable[MountView]) -> list[FilesystemPath]:
    """Return all places where a directory appears: on its backing filesystem, and in trashd mounts that show it."""
    ours = list(mount_views)
    backing = next((_translate(place, view.shown, view.backing) for view in ours if view.shown.holds(place)), place)
    shown = (_translate(backing, view.backing, view.shown) for view in ours if view.backing.holds(backing))
    return list(dict.fromkeys((backing, *shown)))


def _translate(place: FilesystemPath, old: FilesystemPath, new: FilesystemPath) -> FilesystemPath:
    return place_below(new, relative_to(place.path, old.path))


class RulePath(NamedTuple):
    """The path with which rules and pauses refer to a directory, and the mount point of its filesystem."""

    path: bytes
    point: bytes


def find_rule_path(path: bytes, mounts: Iterable[Mount], mount_views: Iterable[MountView]) -> RulePath:
    """Return the path with which rules refer to a directory: its path in a trashd mount, if it is visible in one."""
    place = find_place(path, mounts)
    for view in mount_views:
        if place is not None and view.backing.holds(place):
            point = view.mount.point
            return RulePath(os.path.join(point, relative_to(place.path, view.backing.path)).rstrip(b"/"), point)
    mount = mount_of(path, mounts)
    return RulePath(path, b"/" if mount is None else mount.point)


def mounts_inside(directory: FilesystemPath, mounts: Iterable[Mount]) -> Iterator[Mount]:
    """Find the mounts whose mount point is the directory or inside it, even in a bind mount of the directory."""
    by_id = {mount.mnt_id: mount for mount in mounts}
    for mount in by_id.values():
        parent = by_id.get(mount.parent_id)
        if parent is None or parent is mount or not is_inside(mount.point, parent.point):
            continue  # the root of the visible tree, or a mount point that a chroot hides
        if directory.holds(place_of(mount.point, parent)):
            yield mount


def other_namespaces() -> Iterator[tuple[str, list[Mount]]]:
    """Iterate over the other mount namespaces that we may inspect (root: all); each with a pid and its mounts."""
    namespaces = {os.readlink("/proc/self/ns/mnt")}
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            namespace = os.readlink(f"/proc/{pid}/ns/mnt")
            if namespace not in namespaces:
                namespaces.add(namespace)
                yield pid, read_mounts(pid)
        except OSError:
            continue  # it has ended, or we can't inspect it (see docs/explain/security.md)


_MOUNTINFO = "/proc/self/mountinfo"


class MountWatch:
    """A watch that becomes readable when mounts in our namespace have changed since the last `acknowledge`.

    A separate thread waits for the kernel's notification, because the first poll consumes it. An event loop would lose
    changes, since it (or its epoll) polls when it begins to wait, and again when it wakes up.
    Source  proc_pid_mounts(5): poll(2) reports a change with POLLPRI
    """

    def __init__(self) -> None:
        self._file = Fd(os.open(_MOUNTINFO, os.O_RDONLY | os.O_CLOEXEC))
        self._changed = Fd(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        self._end = Fd(os.eventfd(0, os.EFD_CLOEXEC))
        self._poll = select.poll()
        self._poll.register(self._file, select.POLLPRI)
        self._poll.register(self._end, select.POLLIN)
        self._poll.poll(0)  # ignore earlier changes
        from threading import Thread  # imported late: a plain swap does not need it

        self._thread = Thread(target=self._watch, name="mountwatch", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        return int(self._changed)

    def acknowledge(self) -> None:
        """Start waiting for the next change."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._changed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        os.eventfd_write(self._end, 1)
        self._thread.join()
        for fd in (self._file, self._changed, self._end):
            fd.close()

    def _watch(self) -> None:
        while all(fd != self._end for fd, _event in self._poll.poll()):
            os.eventfd_write(self._changed, 1)


_UTAB = "/run/mount/utab"


class Disk(NamedTuple):
    """The identity of a filesystem's disk; valid until the machine is rebooted or the medium is exchanged.

    name      boot ID, device, and number of the medium (`diskseq`; kernels before 5.15 have none)
    is_block  whether it is a block device; never true for FUSE mounts, since any user can make them
    is_users  whether a user mounted it, through udisks or a line in fstab with `user`
    """

    name: str
    is_block: bool
    is_users: bool = False


def disk_of(mount: Mount | None) -> Disk:
    """Return the disk of a mount. Its name is empty, and must not be compared, if no mount is visible (in a chroot)."""
    if mount is None:
        return Disk("", is_block=False)
    device = mount.device.decode()
    if device.startswith("0:") and mount.source.startswith(b"/dev/"):
        # btrfs has a separate device number for each superblock, which changes with each mount.
        with suppress(OSError):
            st = os.stat(mount.source)
            if stat.S_ISBLK(st.st_mode):
                device = f"{os.major(st.st_rdev)}:{os.minor(st.st_rdev)}"
    is_block = not mount.is_fuse() and os.path.isdir(f"/sys/dev/block/{device}")
    return Disk(f"{boot_id()} {device} {_medium(device)}", is_block, is_block and _is_user_mount(mount.point))


def _is_user_mount(point: bytes) -> bool:
    """Return whether libmount recorded that a user requested the mount. Source  mount(8), `uhelper` and `user`"""
    with suppress(OSError), open(_UTAB, "rb") as lines:
        for line in lines:
            fields = dict(field.partition(b"=")[::2] for field in line.split())
            if unescape(fields.get(b"TARGET", b""), b"\\", 3, 8) == point:
                options = fields.get(b"OPTS", b"").split(b",")
                return any(option == b"user" or option.startswith((b"user=", b"uhelper=")) for option in options)
    return False


def _medium(device: str) -> str:
    """Return the kernel's number for the medium in a device (or in a partition's disk); "" if unknown."""
    for place in (f"/sys/dev/block/{device}", f"/sys/dev/block/{device}/.."):
        with suppress(OSError), open(f"{place}/diskseq", encoding="ascii") as file:
            return file.read(32).strip()
    return ""
