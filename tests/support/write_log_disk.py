"""A volume whose every write and cache flush is logged, to rebuild later what a power cut would have left.

A FUSE daemon serves two files: `disk`, kept in memory, on which a loop device runs, and `ctl`, which takes
marks from the workload and dumps the log. The loop device has a write-back cache and no FUA: the kernel sends
each barrier of the filesystem as a flush, and a flush reaches us as FSYNC.

Limits: a write counts as complete when the daemon has it, in the order of arrival; the disk never lies.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import fcntl
import mmap
import os
import pickle
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.fuse_watchdog import fuse_mount
from tests.support.loop_devices import LoopDevice, loop_device, make_filesystem
from tests.support.trashd_command import support_program

MOUNTED = "mounted"  # the mark that ends mkfs and the first mount
STOPPING = "stopping"  # the mark that ends the body; what follows is the unmount

_MKFS: dict[str, tuple[str, ...]] = {
    # no lazy initialisation: its kernel thread would write into the log at random times
    "ext4": ("mkfs.ext4", "-q", "-F", "-E", "nodiscard,lazy_itable_init=0,lazy_journal_init=0"),
    "xfs": ("mkfs.xfs", "-q", "-f", "-K", "-d", "agcount=2"),
    "btrfs": ("mkfs.btrfs", "-q", "-f", "-K"),
}
# what is written and not flushed stays so for as long as a test may take, not for 5 or 30 s
_MOUNT_DATA = {"ext4": "commit=300", "xfs": "nouuid", "btrfs": "nodiscard,commit=300"}
_MNT_DETACH = 2
_PATIENCE_S = 20.0

_BTRFS_IOC_FORGET_DEV = 0x50009405  # linux/btrfs.h

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Write:
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Flush:
    pass


@dataclass(frozen=True, slots=True)
class Mark:
    text: str


Event = Write | Flush | Mark


@dataclass(frozen=True, slots=True)
class Log:
    size_bytes: int
    events: tuple[Event, ...]

    def to_bytes(self) -> bytes:
        """Plain tuples, pickled: the daemon's classes may be those of `__main__`, which its reader does not have."""
        return pickle.dumps((self.size_bytes, [dataclasses.astuple(event) for event in self.events]))

    @classmethod
    def from_bytes(cls, raw: bytes) -> Log:
        size_bytes, fields = pickle.loads(raw)
        return cls(size_bytes, tuple(_EVENT_BY_N_FIELDS[len(values)](*values) for values in fields))


_EVENT_BY_N_FIELDS: dict[int, Callable[..., Event]] = {0: Flush, 1: Mark, 2: Write}


# ---- mounts; crash_states.py uses them too


def mount_fs(fstype: str, device: Path, mountpoint: Path) -> None:
    """Mount by the system call itself: mount(8) would cost more than the mount. Raises OSError."""
    data = _MOUNT_DATA[fstype]
    if _libc.mount(os.fsencode(device), os.fsencode(mountpoint), fstype.encode(), 0, data.encode()):
        code = ctypes.get_errno()
        raise OSError(code, f"mount {fstype}: {os.strerror(code)}", str(mountpoint))


def unmount(mountpoint: Path, *, lazy: bool = False) -> None:
    """Unmount; Raises OSError, EBUSY while it is open.

    For longer than a moment: a look at what others have open, as some of our commands take, has it open itself.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while _libc.umount2(os.fsencode(mountpoint), _MNT_DETACH if lazy else 0):
        code = ctypes.get_errno()
        if code != errno.EBUSY or time.monotonic() > deadline:
            raise OSError(code, f"umount: {os.strerror(code)}", str(mountpoint))
        time.sleep(0.001)


def forget_btrfs_devices() -> None:
    """Make the kernel forget unmounted btrfs devices: it refuses another one with the same fsid."""
    with contextlib.suppress(OSError):
        fd = os.open("/dev/btrfs-control", os.O_RDWR)
        try:
            fcntl.ioctl(fd, _BTRFS_IOC_FORGET_DEV, bytearray(4096))  # of every path
        finally:
            os.close(fd)


# ---- the volume


@dataclass(frozen=True, slots=True)
class LoggedVolume:
    """A mounted filesystem on a logged disk. stop() ends it, once, and gives the log."""

    fstype: str
    mountpoint: Path
    ctl: Path
    device: Path
    _dump: Path

    def mark(self, text: str) -> None:
        self.ctl.write_bytes(b"mark " + text.encode())

    def stop(self) -> Log:
        """Unmount, so that all that was pending is in the log too, and return the log."""
        self.mark(STOPPING)
        unmount(self.mountpoint)
        self.ctl.write_bytes(b"dump " + os.fsencode(self._dump))
        return Log.from_bytes(self._dump.read_bytes())


@contextlib.contextmanager
def logged_volume(fstype: str, size_mb: int, *, limit_s: float = 120.0) -> Iterator[LoggedVolume]:
    """A fresh filesystem on a logged disk, mounted; everything is gone afterwards, after an exception too.

    limit_s   the watchdog (a process of its own) aborts the FUSE connection then: I/O fails, nothing hangs
    """
    with tempfile.TemporaryDirectory(prefix="logdisk-") as scratch_name, contextlib.ExitStack() as stack:
        scratch = Path(scratch_name)
        served, mountpoint = scratch / "served", scratch / "volume"
        served.mkdir()
        mountpoint.mkdir()
        stack.enter_context(fuse_mount(support_program("write_log_disk", served, str(size_mb)), served, limit_s))
        with (served / "disk").open("r+b", buffering=0) as disk:
            for offset, data in make_filesystem(_MKFS[fstype], size_mb << 20):
                disk.seek(offset)
                disk.write(data)
        device = stack.enter_context(_loop_on(served / "disk"))
        mount_fs(fstype, device.path, mountpoint)
        stack.callback(_leave, mountpoint)
        volume = LoggedVolume(fstype, mountpoint, served / "ctl", device.path, scratch / "log")
        volume.mark(MOUNTED)
        yield volume


@contextlib.contextmanager
def _loop_on(backing: Path) -> Iterator[LoopDevice]:
    """A loop device on `backing`; at the end the kernel has let go of it, which frees the FUSE mount."""
    with contextlib.ExitStack() as stack:
        fd = os.open(backing, os.O_RDWR)
        try:
            device = stack.enter_context(loop_device(fd))
        finally:
            os.close(fd)
        shown = Path(f"/sys/block/{device.path.name}/loop/backing_file")
        ours = shown.read_text()
        try:
            yield device
        finally:
            stack.close()
            deadline = time.monotonic() + 2
            with contextlib.suppress(OSError):  # no such file: the device is free
                while shown.read_text() == ours and time.monotonic() < deadline:
                    time.sleep(0.001)


def _leave(mountpoint: Path) -> None:
    """Unmount whatever happened: lazily if it is still open."""
    if mountpoint.is_mount():
        try:
            unmount(mountpoint)
        except OSError:
            unmount(mountpoint, lazy=True)
    forget_btrfs_devices()  # its fsid is about to be mounted again by the replay, from another device


# ---- the daemon

_ROOT, _DISK, _CTL = 1, 2, 3
_NAMES = {b"disk": _DISK, b"ctl": _CTL}


@dataclass(slots=True)
class _Recorder:
    """What the daemon knows: the disk as it is now, and all that happened to it."""

    size_bytes: int
    disk: mmap.mmap
    events: list[Event] = field(default_factory=list)

    def read(self, nodeid: int, offset: int, n_bytes: int) -> bytes:
        return self.disk[offset : offset + n_bytes] if nodeid == _DISK else b""

    def write(self, nodeid: int, offset: int, data: bytes) -> int:
        if nodeid == _DISK:
            self.disk[offset : offset + len(data)] = data
            self.events.append(Write(offset, data))
            return len(data)
        verb, _, rest = data.partition(b" ")
        if verb == b"mark":
            self.events.append(Mark(rest.decode().strip()))
        elif verb == b"dump":
            Path(os.fsdecode(rest.strip())).write_bytes(Log(self.size_bytes, tuple(self.events)).to_bytes())
        else:
            raise ValueError(f"unknown command for ctl: {verb!r}")
        return len(data)

    def flush(self, nodeid: int) -> None:
        if nodeid == _DISK:
            self.events.append(Flush())


def serve(mountpoint: str, size_mb: int) -> None:
    """Serve `disk` and `ctl` below mountpoint until it is unmounted."""
    import pyfuse3  # here, so that reading logs needs no libfuse
    import trio

    size_bytes = size_mb << 20
    recorder = _Recorder(size_bytes, mmap.mmap(-1, size_bytes))

    class Operations(pyfuse3.Operations):
        """No handler has a checkpoint, so the order of the log is the order of arrival."""

        async def getattr(self, inode: int, ctx: object = None) -> pyfuse3.EntryAttributes:
            attributes = pyfuse3.EntryAttributes()
            attributes.st_ino = pyfuse3.InodeT(inode)
            mode = stat.S_IFDIR | 0o700 if inode == _ROOT else stat.S_IFREG | 0o600
            attributes.st_mode = pyfuse3.ModeT(mode)
            attributes.st_size = size_bytes if inode == _DISK else 0
            attributes.st_nlink = 1
            attributes.entry_timeout = attributes.attr_timeout = 3600
            return attributes

        async def lookup(self, parent_inode: int, name: bytes, ctx: object = None) -> pyfuse3.EntryAttributes:
            if name not in _NAMES:
                raise pyfuse3.FUSEError(errno.ENOENT)
            return await self.getattr(_NAMES[name])

        async def setattr(self, inode: int, *_: object) -> pyfuse3.EntryAttributes:
            return await self.getattr(inode)  # O_TRUNC on ctl

        async def open(self, inode: int, flags: int, ctx: object) -> pyfuse3.FileInfo:
            return pyfuse3.FileInfo(fh=pyfuse3.FileHandleT(inode), direct_io=True)

        async def read(self, fh: int, off: int, size: int) -> bytes:
            return recorder.read(fh, off, size)

        async def write(self, fh: int, off: int, buf: bytes) -> int:
            try:
                return recorder.write(fh, off, bytes(buf))
            except (ValueError, OSError) as error:
                raise pyfuse3.FUSEError(errno.EINVAL) from error

        async def fsync(self, fh: int, datasync: bool) -> None:
            recorder.flush(fh)

        async def flush(self, fh: int) -> None:
            pass

        async def release(self, fh: int) -> None:
            pass

    pyfuse3.init(Operations(), mountpoint, {*pyfuse3.default_options, "fsname=logdisk"})
    try:
        trio.run(pyfuse3.main)
    finally:
        pyfuse3.close(unmount=True)


def main() -> None:
    serve(sys.argv[1], int(sys.argv[2]))


if __name__ == "__main__":
    main()
