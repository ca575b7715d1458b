"""Real filesystems for a test, each gone at the end of its `with`: unmounted, and its loop device free.

mount(8) makes the loop devices, so the kernel frees them with the last unmount, even if the test is killed.
The image behind one has no name any more as soon as it is mounted.
"""

import contextlib
import ctypes
import errno
import fcntl
import itertools
import os
import re
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest

from tests.support.loop_devices import OWN_SEED, loop_device, make_filesystem, with_new_uuid

# What a device of these filesystems has to have at least, mkfs's own limits.
MIN_SIZE_MB = MappingProxyType({"ext4": 2, "xfs": 300, "btrfs": 128})
_MKFS = MappingProxyType(
    {
        "ext4": ("mkfs.ext4", "-q", "-F", "-m", "0", "-O", OWN_SEED, "-E", "lazy_itable_init=0,nodiscard"),
        "xfs": ("mkfs.xfs", "-q", "-f", "-K"),
        "btrfs": ("mkfs.btrfs", "-q", "-f", "-K"),
    }
)
_SHM = Path("/dev/shm")
_MNT_DETACH = 2
_UMOUNT_NOFOLLOW = 8
_MS_BIND = 4096
_N_TRIES, _PAUSE_S = 20, 0.005  # who looks what others have open has it open himself for a moment
_FS_IOC_FSGETXATTR = 0x801C581F
_FS_IOC_FSSETXATTR = 0x401C5820
FSXATTR = struct.Struct("=IIIII8x")  # xflags, extent size, extents, project id, CoW extent size
_XFLAG_PROJINHERIT = 0x200
_N_EMPTY_MAX = 200_000
_INLINE_SIZE_BYTES = 1900  # btrfs keeps files up to 2 KiB in its metadata

_libc = ctypes.CDLL(None, use_errno=True)


class Unsupported(Exception):
    """This kernel can't do it, whatever the rights; a test may skip on it, naming the reason."""


class MountEntry(NamedTuple):
    """A line of /proc/self/mountinfo."""

    mount_id: int
    minor: int
    mount_point: bytes
    fs_type: str
    source: bytes
    options: frozenset[str]  # of the mount and of the superblock


class Project(NamedTuple):
    """An inode's project id, and whether what is made in it gets the same."""

    project_id: int
    is_inherited: bool


@dataclass(frozen=True, slots=True)
class Overlay:
    """A mounted overlay and the directories that it is made of."""

    path: Path
    lower: Path
    upper: Path


def mounts() -> list[MountEntry]:
    """All mounts of this namespace, in the kernel's order: the last on a mount point is the visible one."""
    entries = []
    for line in Path("/proc/self/mountinfo").read_bytes().split(b"\n")[:-1]:
        before, _, after = line.partition(b" - ")
        mount_id, _, device, _, mount_point, options, *_ = before.split(b" ")
        fs_type, source, super_options = after.split(b" ", 2)
        entries.append(
            MountEntry(
                int(mount_id),
                int(device.partition(b":")[2]),
                _unescape(mount_point),
                os.fsdecode(fs_type),
                _unescape(source),
                frozenset(os.fsdecode(options + b"," + super_options).split(",")),
            )
        )
    return entries


def _unescape(field: bytes) -> bytes:
    return re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), field)


def mount_of(mount_point: Path) -> MountEntry | None:
    """The visible mount on exactly this path, or None; never touches the filesystem mounted there."""
    wanted = os.fsencode(mount_point)
    return next((entry for entry in reversed(mounts()) if entry.mount_point == wanted), None)


def gives_numbers_again(volume: Path) -> bool:
    """Whether the filesystem gives a free inode number to one of the next files; a tmpfs counts up."""
    mount = mount_of(volume)
    assert mount is not None
    return mount.fs_type == "ext4"


def unmount(mount_point: bytes | Path) -> bool:
    """Unmount; lazily, with everything mounted below, if it is busy.

    Returns   whether it was busy; nothing mounted there (any more) is no error
    """
    for n_left in range(_N_TRIES, -1, -1):
        if _libc.umount2(os.fsencode(mount_point), _UMOUNT_NOFOLLOW | (0 if n_left else _MNT_DETACH)) == 0:
            return not n_left
        number = ctypes.get_errno()
        if number in (errno.EINVAL, errno.ENOENT):
            return False
        if number != errno.EBUSY:
            break
        time.sleep(_PAUSE_S)
    raise OSError(number, os.strerror(number), os.fspath(mount_point))


def sync(path: Path) -> None:
    """Have on its disk all that was written to this filesystem; not to others, of which a test may want it lost."""
    fd = os.open(path, os.O_RDONLY)
    try:
        if _libc.syncfs(fd):
            raise OSError(ctypes.get_errno(), "syncfs", os.fspath(path))
    finally:
        os.close(fd)


def _run_command(*command: str | Path) -> str:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(errno.EIO, f"{' '.join(map(str, command))}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _mount_by_call(fs_type: str, source: str | Path, target: Path, flags: int, data: str) -> None:
    """As mount(8) does it, which would be a process for each of thousands of tests."""
    words = (os.fsencode(source), os.fsencode(target), os.fsencode(fs_type))
    if _libc.mount(*words, ctypes.c_ulong(flags), os.fsencode(data)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), os.fspath(target))


@contextlib.contextmanager
def _mounted(fs_type: str, source: str | Path, target: Path, options: Sequence[str]) -> Iterator[Path]:
    if all("=" in option for option in options):
        _mount_by_call(fs_type, source, target, 0, ",".join(options))
    elif options == ("bind",):
        _mount_by_call(fs_type, source, target, _MS_BIND, "")
    else:
        _run_command("mount", "-t", fs_type, *(("-o", ",".join(options)) if options else ()), source, target)
    try:
        yield target
    finally:
        unmount(target)


@contextlib.contextmanager
def _scratch(parent: Path | None = None) -> Iterator[Path]:
    """A directory that every user may pass through (mkdtemp's own is 0700)."""
    path = Path(tempfile.mkdtemp(prefix="trashd-volume-", dir=parent)).resolve()
    path.chmod(0o755)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _image_parent(size_bytes: int) -> Path:
    if os.access(_SHM, os.W_OK):
        stat = os.statvfs(_SHM)
        if stat.f_bavail * stat.f_frsize > size_bytes + (64 << 20):
            return _SHM
    return Path(tempfile.gettempdir())


@contextlib.contextmanager
def loop_volume(
    fs_type: str,
    size_mb: int | None = None,
    mkfs_options: Sequence[str] = (),
    mount_options: Sequence[str] = (),
) -> Iterator[Path]:
    """The mount point of a fresh ext4 (without blocks reserved for root), xfs or btrfs in a file.

    An ext4 is a copy of one that was made once, with a UUID of its own; xfs and btrfs have theirs in every block.

    size_mb   in MiB; raised to the least that mkfs accepts
    Raises    OSError: mkfs or mount failed
    """
    size_bytes = max(size_mb or 64, MIN_SIZE_MB[fs_type]) << 20
    mkfs = (*_MKFS[fs_type], *mkfs_options)
    with _scratch() as scratch, contextlib.ExitStack() as stack:
        target = scratch / "volume"
        target.mkdir()
        with tempfile.NamedTemporaryFile(prefix="trashd-image-", dir=_image_parent(size_bytes), buffering=0) as image:
            image.truncate(size_bytes)
            if fs_type == "ext4" and "-O" not in mkfs_options:
                for offset, page in make_filesystem(mkfs, size_bytes):
                    os.pwrite(image.fileno(), page if offset else with_new_uuid(page), offset)
            else:
                _run_command(*mkfs, image.name)
            with loop_device(image.fileno()) as device:
                stack.enter_context(_mounted(fs_type, device.path, target, mount_options))
        yield target


@contextlib.contextmanager
def mounted_image(fs_type: str, image: Path, target: Path) -> Iterator[Path]:
    """A filesystem in a file that exists, mounted on a directory."""
    with _mounted(fs_type, image, target, ("loop",)):
        yield target


@contextlib.contextmanager
def tmpfs_volume(size: str = "64m", options: Sequence[str] = ()) -> Iterator[Path]:
    """The mount point of a fresh tmpfs, its root 0755; options: mount(8)'s, such as nr_inodes=100."""
    with _scratch() as scratch:
        target = scratch / "volume"
        target.mkdir()
        with _mounted("tmpfs", "tmpfs", target, (f"size={size}", "mode=0755", *options)):
            yield target


@contextlib.contextmanager
def tmpfs_over(path: Path, mode: str = "0755") -> Iterator[Path]:
    """An empty tmpfs over a directory of the system's, which only our mount namespace sees."""
    with _mounted("tmpfs", "tmpfs", path, ("size=64m", f"mode={mode}")):
        yield path


@contextlib.contextmanager
def overlay_volume(populate: Callable[[Path], object] | None = None) -> Iterator[Overlay]:
    """An overlay on a tmpfs; `populate` fills the lower directory before it is mounted."""
    with tmpfs_volume() as base:
        lower = base / "lower"
        lower.mkdir()
        if populate is not None:
            populate(lower)
        with overlay_on(lower) as overlay:
            yield overlay


@contextlib.contextmanager
def volume_of(fs_type: str) -> Iterator[Path]:
    """The mount point of a fresh volume: `overlay`, `ext4` (in a loop device), or else a tmpfs."""
    with contextlib.ExitStack() as stack:
        match fs_type:
            case "overlay":
                yield stack.enter_context(overlay_volume()).path
            case "ext4":
                yield stack.enter_context(loop_volume("ext4", 64))
            case _:
                yield stack.enter_context(tmpfs_volume())


@contextlib.contextmanager
def overlay_on(lower: Path, base: Path | None = None) -> Iterator[Overlay]:
    """An overlay on a directory, what is written to it in a new directory, or on a tmpfs."""
    with contextlib.nullcontext(base) if base else tmpfs_volume() as base:
        base.mkdir(exist_ok=True)
        upper, work, merged = (base / name for name in ("upper", "work", "merged"))
        for directory in (upper, work, merged):
            directory.mkdir()
        options = (f"lowerdir={lower}", f"upperdir={upper}", f"workdir={work}")
        with _mounted("overlay", "overlay", merged, options):
            yield Overlay(merged, lower, upper)


@contextlib.contextmanager
def bind_mount(source: Path, target: Path, options: Sequence[str] = ()) -> Iterator[Path]:
    """`source` seen at `target` too, for the time of the `with`."""
    with _mounted("none", source, target, ("bind", *options)):
        yield target


def btrfs_subvolume(parent: Path, name: str, limit_bytes: int | None = None) -> Path:
    """A fresh subvolume; with a limit, writing more gives EDQUOT, to root too, on every kernel."""
    path = parent / name
    _run_command("btrfs", "subvolume", "create", path)
    if limit_bytes is not None:
        _run_command("btrfs", "quota", "enable", path)
        _run_command(
            "btrfs", "quota", "rescan", "-W", path
        )  # until the kernel has counted, it calls its sums inconsistent
        _run_command("btrfs", "qgroup", "limit", str(limit_bytes), path)
    return path


@contextlib.contextmanager
def project_quota_volume(fs_type: str, size_mb: int | None = None) -> Iterator[Path]:
    """An ext4 or xfs on which directories can have project ids, and a limit each if the kernel has quotas.

    Without quotas in the kernel an xfs keeps ids all the same, and refuses renames across them.
    Raises    Unsupported: an ext4, and the kernel has no CONFIG_QFMT_V2
    """
    with contextlib.ExitStack() as stack:
        mkfs = ("-O", "quota,project", "-E", "quotatype=usrquota:prjquota") if fs_type == "ext4" else ()
        try:
            path = stack.enter_context(loop_volume(fs_type, size_mb, mkfs, ("prjquota",)))
        except OSError as error:
            if fs_type != "xfs":
                raise Unsupported(f"this kernel mounts no {fs_type} with project quotas") from error
            path = stack.enter_context(loop_volume(fs_type, size_mb))
        yield path


@contextlib.contextmanager
def quota_volume(fs_type: str, option: str, size_mb: int | None = None) -> Iterator[Path]:
    """An ext4 or xfs that enforces limits. option: `usrquota`, `grpquota`, `prjquota`

    Raises    Unsupported: the kernel has no CONFIG_QFMT_V2 (ext4) or CONFIG_XFS_QUOTA
    """
    with contextlib.ExitStack() as stack:
        mkfs = ("-O", "quota,project", "-E", f"quotatype={option}") if fs_type == "ext4" else ()
        try:
            path = stack.enter_context(loop_volume(fs_type, size_mb, mkfs, (option,)))
        except OSError as error:
            raise Unsupported(f"this kernel mounts no {fs_type} with {option}") from error
        yield path


def limit_user(volume: Path, uid: int, size_kib: int = 0, n_inodes: int = 0) -> None:
    """Set a user's hard limits; 0 is none. Root keeps above a limit only with CAP_SYS_RESOURCE."""
    _set_quota("-u", "usrquota", volume, uid, size_kib, n_inodes)


def limit_group(volume: Path, gid: int, size_kib: int = 0, n_inodes: int = 0) -> None:
    """Set a group's hard limits; 0 is none."""
    _set_quota("-g", "grpquota", volume, gid, size_kib, n_inodes)


def limit_project(volume: Path, project_id: int, size_kib: int = 0, n_inodes: int = 0) -> None:
    """Set a project's hard limits; 0 is none.

    Raises    Unsupported: the volume keeps ids only
    """
    _set_quota("-P", "prjquota", volume, project_id, size_kib, n_inodes)


def _set_quota(kind: str, option: str, volume: Path, of: int, size_kib: int, n_inodes: int) -> None:
    entry = mount_of(volume)
    if entry is None or option not in entry.options:
        raise Unsupported(f"{volume} is mounted without {option}")
    _run_command("setquota", kind, str(of), "0", str(size_kib), "0", str(n_inodes), volume)


def project_of(path: Path) -> Project:
    flags, _, _, project_id, _ = FSXATTR.unpack(fsxattr(path))
    return Project(project_id, bool(flags & _XFLAG_PROJINHERIT))


def set_project(path: Path, project_id: int, *, is_inherited: bool = True) -> None:
    """Give a directory a project id that all made in it inherits: no rename leads in from another project."""
    flags, extent, n_extents, _, cow_extent = FSXATTR.unpack(fsxattr(path))
    flags = flags | _XFLAG_PROJINHERIT if is_inherited else flags & ~_XFLAG_PROJINHERIT
    fsxattr(path, FSXATTR.pack(flags, extent, n_extents, project_id, cow_extent))


def fsxattr(path: Path, new: bytes | None = None) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if new is not None:
            return fcntl.ioctl(fd, _FS_IOC_FSSETXATTR, new)
        return fcntl.ioctl(fd, _FS_IOC_FSGETXATTR, bytes(FSXATTR.size))
    finally:
        os.close(fd)


@contextlib.contextmanager
def full(volume: Path, *, blocks: bool = True, inodes: bool = True, spare_kernel: bool = True) -> Iterator[Path]:
    """A volume where no user, root included, gets one more block and/or inode; what fills it goes at the end.

    inodes        on xfs and btrfs, which make them from blocks, only together with `blocks`; without it a
                  btrfs is out of data, and has metadata left for names
    spare_kernel  leave ext4 the 2 % that it keeps for its own extent trees and gives to no file; statvfs
                  shows some blocks free then, as it does on xfs (4) and btrfs, where no user gets them either
    Yields        the directory with the filling; what is removed from it is free again
    Hazard        a btrfs as full as that refuses rename and truncate too, until something is unlinked
    """
    entry = mount_of(volume)
    if entry is None:
        raise ValueError(f"{volume} is no mount point")
    has_fixed_inodes = entry.fs_type in ("ext4", "tmpfs")
    if inodes and not blocks and not has_fixed_inodes:
        raise ValueError(f"{entry.fs_type} makes inodes from blocks")
    reserve = Path("/sys/fs/ext4", Path(os.fsdecode(entry.source)).name, "reserved_clusters")
    if entry.fs_type == "ext4" and not spare_kernel:
        reserve.write_text("0")
    filling = Path(tempfile.mkdtemp(prefix=".filling-", dir=volume))
    try:
        fd = os.open(filling / "blocks", os.O_RDWR | os.O_CREAT)
        try:
            if inodes and has_fixed_inodes:
                _fill_with_files(filling, b"")
            if blocks:
                _fill_blocks(fd)
            if blocks and inodes and entry.fs_type == "btrfs":
                _fill_with_files(filling, bytes(_INLINE_SIZE_BYTES))
            if inodes and not has_fixed_inodes:
                _fill_with_files(filling, b"")
            if blocks:
                _fill_blocks(fd)
        finally:
            os.close(fd)
        yield filling
    finally:
        shutil.rmtree(filling, ignore_errors=True)


def _fill_with_files(filling: Path, content: bytes) -> None:
    """Make files until there is no inode, or no block for a name or the content."""
    for i in itertools.count():
        if i == _N_EMPTY_MAX:
            raise ValueError(f"over {_N_EMPTY_MAX} inodes: too slow; use mkfs -N or nr_inodes=")
        path = f"{filling}/{len(content)}-{i}"
        try:
            if content:
                Path(path).write_bytes(content)
            else:
                os.mknod(path)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return


def _fill_blocks(fd: int) -> None:
    """Take ever smaller pieces, down to one block, allocated, then written (btrfs gives more to that)."""
    os.fsync(fd)
    stat = os.fstatvfs(fd)
    block = stat.f_frsize
    for take, piece in ((_allocate, max(stat.f_bfree, 1) * block), (_append, 64 * block)):
        while piece >= block:
            try:
                take(fd, piece)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                piece = piece // 2 // block * block


def _allocate(fd: int, size_bytes: int) -> None:
    os.posix_fallocate(fd, os.fstat(fd).st_size, size_bytes)


def _append(fd: int, size_bytes: int) -> None:
    offset = os.fstat(fd).st_size
    if os.pwrite(fd, os.urandom(size_bytes), offset) < size_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(fd)


ON_DISK = [
    pytest.param("ext4", marks=pytest.mark.needs("loop")),
    pytest.param("xfs", marks=pytest.mark.needs("loop", "xfs")),
    pytest.param("btrfs", marks=pytest.mark.needs("loop", "btrfs")),
]
WITH_XFS = pytest.mark.parametrize(
    "volume", ["tmpfs", "ext4", pytest.param("xfs", marks=pytest.mark.needs("xfs"))], indirect=True, scope="module"
)
"""Of tests of the mount, whose `volume` is a tmpfs or an ext4 by itself."""
ALL_FILESYSTEMS = ["tmpfs", *ON_DISK]
