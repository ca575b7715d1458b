"""A disk that can't write what some files hold, for a time: its image has holes there, in a tmpfs that is full."""

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from tests.support.real_filesystems import tmpfs_volume, unmount

SIZE = 64 << 10
"""Of its files."""
_IMAGE_BYTES, _TMPFS = 24 << 20, "32m"
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_MKFS = ("mkfs.ext4", "-q", "-F", "-m", "0", "-b", "4096", "-E", "lazy_itable_init=0,nodiscard")

_libc = ctypes.CDLL(None, use_errno=True)


class FaultyDisk(NamedTuple):
    """An ext4 on such a disk, which is good yet."""

    path: Path
    image: Path

    def put(self, path: Path) -> None:
        """A file with blocks of its own, written to the disk."""
        with path.open("wb") as file:
            file.write(os.urandom(SIZE))
            file.flush()
            os.fsync(file.fileno())

    @contextmanager
    def fails(self, path: Path) -> Iterator[None]:
        """Meanwhile no block of a file can be written."""
        self._punch(path.read_bytes())
        filling = self.image.with_name("filling")
        with filling.open("wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(1 << 20)):
                pass
        assert not os.statvfs(filling).f_bfree
        yield
        filling.unlink()

    def _punch(self, content: bytes) -> None:
        image = self.image.read_bytes()
        with self.image.open("rb+") as file:
            for at in range(0, SIZE, 4096):
                place = ctypes.c_long(image.index(content[at : at + 4096]))
                assert not _libc.fallocate(file.fileno(), _KEEP_SIZE | _PUNCH_HOLE, place, ctypes.c_long(4096))


@contextmanager
def faulty_disk() -> Iterator[FaultyDisk]:
    """One, mounted."""
    with tmpfs_volume(_TMPFS) as memory:
        image, path = memory / "image", memory / "volume"
        path.mkdir()
        image.touch()
        os.truncate(image, _IMAGE_BYTES)
        subprocess.run([*_MKFS, image], check=True)
        with image.open("rb+") as file:
            os.posix_fallocate(file.fileno(), 0, _IMAGE_BYTES)  # mkfs leaves holes
        subprocess.run(["mount", "-o", "loop", image, path], check=True)
        try:
            yield FaultyDisk(path, image)
        finally:
            unmount(path)
