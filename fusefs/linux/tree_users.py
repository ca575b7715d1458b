"""Files that other processes have open: the users of a tree, and deleted files whose space is not free yet.

Covers open fds, working and root directories, programs and mappings, and files that the kernel itself has open for
loop devices and swap, which no process's fds show. A filesystem that does not respond could block us so that not
even SIGKILL would help. So a link in /proc to a deleted file is checked in three steps. First, its text is read. Next,
the mount is found with an O_PATH fd, without contacting a server. The file is accessed only if it is on the volume.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from glob import glob
from pathlib import Path
from typing import NamedTuple

from fusefs.core.orphan_sums import STAT_BLOCK_BYTES
from fusefs.linux.fd import Fd, read_fdinfo
from fusefs.linux.mountinfo import FilesystemPath, Mount, find_place, mount_by_point, place_of, read_mounts, relative_to

SECTOR_BYTES = 512
"""The unit in /sys/block, whatever the device's sector size is."""
_DELETED = b" (deleted)"
_LINKS = ("cwd", "root", "exe")


class TreeHolder(NamedTuple):
    """One reference of a process, or of the kernel, to a tree.

    pid    0: the kernel
    command  the process's command, or the kernel's device (such as loop0) or `swap`
    kind   fd, cwd, root, exe or map; for the kernel, loop or swap
    path   the file's path relative to the tree; empty for the tree itself
    """

    pid: int
    uid: int
    command: str
    kind: str
    path: bytes


class Process(NamedTuple):
    """A process that we may inspect, and the mounts in its namespace.

    by_point  the topmost mount of each mount point
    devices   the device of each mount, by its ID
    """

    pid: str
    uid: int
    command: str
    by_point: dict[bytes, Mount]
    devices: dict[int, bytes]


def processes() -> Iterator[Process]:
    """Iterate over all processes that we may inspect, except those that end in the meantime."""
    tables: dict[str, tuple[dict[bytes, Mount], dict[int, bytes]]] = {}
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            namespace = os.readlink(f"/proc/{pid}/ns/mnt")
            if namespace not in tables:
                mounts = read_mounts(pid)
                tables[namespace] = {one.point: one for one in mounts}, {one.mnt_id: one.device for one in mounts}
            uid = os.stat(f"/proc/{pid}").st_uid
            with open(f"/proc/{pid}/comm", "rb") as comm:
                command = comm.read().rstrip(b"\n").decode("utf-8", "backslashreplace")
        except OSError:
            continue
        yield Process(pid, uid, command, *tables[namespace])


def find_holders(trees: list[FilesystemPath]) -> Iterator[tuple[FilesystemPath, TreeHolder]]:
    """Find each reference to a file in one of the trees.

    Links in /proc are read as text and resolved with the process's own mount table, which handles bind mounts and
    containers. Processes that end in the meantime, processes that we can't inspect, and this process are not reported.
    """
    for pid, uid, command, by_point, _devices in processes():
        if int(pid) == os.getpid():
            continue
        for kind, path in set(_links(pid)):
            mount = mount_by_point(path, by_point)
            place = None if mount is None else place_of(path, mount)
            for tree in trees:
                if place is not None and tree.holds(place):
                    yield tree, TreeHolder(int(pid), uid, command, kind, relative_to(place.path, tree.path))
    mounts = read_mounts()
    for hold in kernel_holds():
        place = find_place(hold.path, mounts)
        for tree in trees:
            if place is not None and tree.holds(place):
                yield tree, TreeHolder(0, 0, hold.device, hold.kind, relative_to(place.path, tree.path))


class KernelHold(NamedTuple):
    """A file that the kernel has open.

    device  a loop device such as loop0, or `swap`
    kind    loop or swap
    path    its path in this mount namespace; if it is deleted, the former path
    n_bytes  its length
    """

    device: str
    kind: str
    path: bytes
    n_bytes: int
    is_deleted: bool


def kernel_holds() -> Iterator[KernelHold]:
    """Find the files behind loop devices, and active swap files. Source  loop(4); proc_swaps(5)"""
    for device in glob("loop*", root_dir="/sys/block"):
        with suppress(OSError):  # most loop devices have no file
            path = Path(f"/sys/block/{device}/loop/backing_file").read_bytes().rstrip(b"\n")
            n_sectors = int(Path(f"/sys/block/{device}/size").read_text())
            is_deleted = path.endswith(_DELETED)
            yield KernelHold(device, "loop", path.removesuffix(_DELETED), n_sectors * SECTOR_BYTES, is_deleted)
    with suppress(OSError):
        for line in Path("/proc/swaps").read_bytes().splitlines()[1:]:
            escaped, kind, n_kib, *_ = line.rsplit(maxsplit=4)
            if kind == b"file":
                path = re.sub(rb"\\([0-7]{3})", lambda octal: bytes((int(octal[1], 8),)), escaped)
                yield KernelHold("swap", "swap", path, int(n_kib) << 10, is_deleted=False)


def serves_fuse(pid: int) -> bool:
    """Return whether a process serves a FUSE mount, and so has files open for others, which are reported themselves."""
    with suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{fd}") == "/dev/fuse":
                    return True
    return False


def _links(pid: str) -> Iterator[tuple[str, bytes]]:
    for kind in _LINKS:
        yield from _link(kind, f"/proc/{pid}/{kind}")
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            yield from _link("fd", f"/proc/{pid}/fd/{fd}")
        with open(f"/proc/{pid}/maps", "rb") as lines:
            for line in lines:
                path = line.rstrip(b"\n").split(maxsplit=5)[5:]
                if path and path[0].startswith(b"/"):
                    yield "map", path[0].replace(b"\\012", b"\n").removesuffix(_DELETED)
    except OSError:
        return


def _link(kind: str, link: str) -> Iterator[tuple[str, bytes]]:
    try:
        path = os.readlink(os.fsencode(link))
    except OSError:
        return
    if path.startswith(b"/"):
        yield kind, path.removesuffix(_DELETED)


class DeletedFile(NamedTuple):
    """A deleted file or directory that a process, or the kernel (pid 0), keeps open.

    inode    st_dev and st_ino; None if only the path is known; st_dev is 0 if only a mapping could be read
    n_bytes  the size of its blocks, or the length of its mapping if only that could be read
    path     its former path, from the kernel; empty if it is too long
    """

    pid: int
    uid: int
    command: str
    inode: tuple[int, int] | None
    n_bytes: int
    path: bytes


def find_device(fd: int) -> bytes | None:
    """Return `major:minor` of an fd's superblock, as in mountinfo; None if that is not mounted in this namespace."""
    return _device_of_fd(fd, {mount.mnt_id: mount.device for mount in read_mounts()})


def find_deleted(device: bytes, is_included: Callable[[bytes], bool]) -> Iterator[DeletedFile]:
    """Find deleted files that are kept open by processes that we may inspect; each file once per process.

    device     the filesystem, from `find_device`; files that the kernel itself has open are not filtered by it, since
               only their path is known
    is_included  called with each path; files without a path are always included
    """
    for pid, uid, command, _by_point, devices in processes():
        with suppress(OSError):  # the process has ended
            for inode, (n_bytes, path) in _deleted_files_of(pid, device, devices, is_included).items():
                yield DeletedFile(int(pid), uid, command, inode, n_bytes, path)
    for hold in kernel_holds():
        if hold.is_deleted and is_included(hold.path):
            yield DeletedFile(0, 0, hold.device, None, hold.n_bytes, hold.path)


def _deleted_files_of(
    pid: str, device: bytes, devices: dict[int, bytes], is_included: Callable[[bytes], bool]
) -> dict[tuple[int, int], tuple[int, bytes]]:
    files: dict[tuple[int, int], tuple[int, bytes]] = {}
    for link in _kept_links(pid):
        with suppress(OSError):
            path = _deleted_path(link)
            if path is None or (path and not is_included(path)):
                continue
            with Fd(os.open(link, os.O_PATH | os.O_CLOEXEC)) as fd:
                if _device_of_fd(fd, devices) == device:
                    st = os.fstat(fd)
                    if st.st_nlink == 0:
                        files[st.st_dev, st.st_ino] = st.st_blocks * STAT_BLOCK_BYTES, path
    inodes = {ino for _dev, ino in files}
    for ino, n_bytes, path in _deleted_mappings(pid, device):
        if ino not in inodes and is_included(path):
            files[0, ino] = files.get((0, ino), (0, path))[0] + n_bytes, path
    return files


def _kept_links(pid: str) -> Iterator[str]:
    yield from (f"/proc/{pid}/{link}" for link in _LINKS)
    for directory in (f"/proc/{pid}/fd", f"/proc/{pid}/map_files"):
        with suppress(OSError):
            yield from (f"{directory}/{name}" for name in os.listdir(directory))


def _deleted_path(link: str) -> bytes | None:
    """Return the deleted file's path from a link's text, empty if it is too long; None if the file is not deleted."""
    try:
        text = os.readlink(os.fsencode(link))
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return b""
        raise
    return text.removesuffix(_DELETED) if text.endswith(_DELETED) else None


def _device_of_fd(fd: int, devices: dict[int, bytes]) -> bytes | None:
    """Find the superblock of an fd through its mount ID, without access to the filesystem."""
    return devices.get(int(read_fdinfo(fd)["mnt_id"]))


def _deleted_mappings(pid: str, device: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Return inode number, length and path of each mapping of a deleted file, for users who can't open map_files."""
    major, _, minor = device.partition(b":")
    with suppress(OSError), open(f"/proc/{pid}/maps", "rb") as lines:
        for line in lines:
            fields = line.rstrip(b"\n").split(maxsplit=5)
            if len(fields) < 6 or not fields[5].endswith(_DELETED):
                continue
            of_major, _, of_minor = fields[3].partition(b":")
            if (int(of_major, 16), int(of_minor, 16)) == (int(major), int(minor)):
                start, _, end = fields[0].partition(b"-")
                path = fields[5].removesuffix(_DELETED).replace(b"\\012", b"\n")
                yield int(fields[4]), int(end, 16) - int(start, 16), path
