"""Loop devices, and what mkfs writes on one: made once, and copied for each test."""

import contextlib
import errno
import fcntl
import functools
import os
import stat
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_PATIENCE_S = 20.0
_PIECE_BYTES = 1 << 12

# linux/loop.h, linux/fs.h
_LOOP_CTL_GET_FREE = 0x4C82
_LOOP_CONFIGURE = 0x4C0A
_LOOP_CONFIG = struct.Struct("<II5Q4I64s64s32s2Q8Q")
_LO_FLAGS_AUTOCLEAR = 4
_BLKFLSBUF = 0x1261

OWN_SEED = "metadata_csum_seed"
"""The feature of an ext4 whose checksums do not begin with its UUID, which can be changed then."""
_SUPERBLOCK, _UUID, _CHECKSUM = slice(1024, 2048), slice(0x68, 0x78), slice(0x3FC, 0x400)  # struct ext4_super_block
_CASTAGNOLI = 0x82F6_3B78


@dataclass(frozen=True, slots=True)
class LoopDevice:
    path: Path
    fd: int

    def drop_cache(self) -> None:
        """Forget the cached pages of the device, after its backing file was changed from outside."""
        fcntl.ioctl(self.fd, _BLKFLSBUF, 0)

    def wait_unused(self) -> None:
        """Wait until it is not mounted any more; Raises OSError, EBUSY for longer than a moment.

        A mount namespace that was made meanwhile has a copy of our mount: until that is gone, the next
        mount of the device would be the same filesystem, with what it remembers of the content before.
        """
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                os.close(os.open(self.path, os.O_RDWR | os.O_EXCL))
            except OSError as error:
                if error.errno != errno.EBUSY or time.monotonic() > deadline:
                    raise
                time.sleep(0.001)
            else:
                return


@contextlib.contextmanager
def loop_device(backing_fd: int) -> Iterator[LoopDevice]:
    """A loop device on an open file. It detaches itself at its last close, after a kill too."""
    fd, path = _configure_loop(backing_fd)
    try:
        yield LoopDevice(path, fd)
    finally:
        os.close(fd)


def _configure_loop(backing_fd: int) -> tuple[int, Path]:
    config = _LOOP_CONFIG.pack(
        backing_fd, 0, *[0] * 5, 0, 0, 0, _LO_FLAGS_AUTOCLEAR, b"trashd tests", b"", b"", *[0] * 2, *[0] * 8
    )
    control = os.open("/dev/loop-control", os.O_RDWR)
    try:
        for _ in range(100):
            number = fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
            path = Path(f"/dev/loop{number}")
            if not path.exists():  # a private /dev does not get the nodes of new devices
                with contextlib.suppress(FileExistsError):
                    os.mknod(path, 0o600 | stat.S_IFBLK, os.makedev(7, number))
            fd = os.open(path, os.O_RDWR)
            try:
                fcntl.ioctl(fd, _LOOP_CONFIGURE, config)
            except OSError as error:
                os.close(fd)
                if error.errno != errno.EBUSY:  # EBUSY: another process was faster; take the next free one
                    raise
                continue
            return fd, path
    finally:
        os.close(control)
    raise OSError(errno.EBUSY, "no free loop device after 100 attempts")


@functools.cache
def make_filesystem(mkfs: Sequence[str], size_bytes: int) -> Sequence[tuple[int, bytes]]:
    """Make an empty filesystem; return the offset and the content of each page that is not zero. Raises  OSError"""
    with tempfile.NamedTemporaryFile(prefix="mkfs-", dir="/dev/shm") as file:
        file.truncate(size_bytes)
        done = subprocess.run([*mkfs, file.name], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(errno.EIO, f"{mkfs[0]}: {done.stderr.strip() or done.returncode}")
        return [*_find_content(file.fileno())]


def with_new_uuid(first_page: bytes) -> bytes:
    """Return the first page of an ext4 with another UUID, by which the kernel tells filesystems apart (statfs)."""
    superblock = bytearray(first_page[_SUPERBLOCK])
    superblock[_UUID] = os.urandom(16)
    superblock[_CHECKSUM] = struct.pack("<I", _crc32c(bytes(superblock[: _CHECKSUM.start])))
    return first_page[: _SUPERBLOCK.start] + superblock + first_page[_SUPERBLOCK.stop :]


def _crc32c(data: bytes) -> int:
    crc = 0xFFFF_FFFF
    for byte in data:
        crc = crc >> 8 ^ _crc_table()[(crc ^ byte) & 0xFF]
    return crc


@functools.cache
def _crc_table() -> Sequence[int]:
    table = list(range(256))
    for _bit in range(8):
        table = [crc >> 1 ^ (_CASTAGNOLI if crc & 1 else 0) for crc in table]
    return table


def _find_content(fd: int) -> Iterator[tuple[int, bytes]]:
    zeros, end = bytes(_PIECE_BYTES), 0
    with contextlib.suppress(OSError):  # ENXIO: there is no more data
        while True:
            begin = os.lseek(fd, end, os.SEEK_DATA)
            end = os.lseek(fd, begin, os.SEEK_HOLE)
            for offset in range(begin, end, _PIECE_BYTES):
                if (piece := os.pread(fd, _PIECE_BYTES, offset)) != zeros:
                    yield offset, piece
