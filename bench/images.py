"""Volumes that all start from the same state: one image is filled once, and every turn gets a mounted copy.

The images lie in /var/tmp, on a disk where /tmp and /dev/shm are memory. A copy has no name any more as soon as it
is mounted, and mount(8) makes the loop device: with the unmount, the kernel frees both.
"""

import contextlib
import errno
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from tests.support.fuse_slow import slow_volume
from tests.support.real_filesystems import mount_of, tmpfs_volume, unmount

_SLOW_LIMIT_S = 7200.0
FILESYSTEMS = ("tmpfs", "ext4", "xfs", "btrfs")
Fill = Callable[[Path], None]
Fresh = Callable[[], AbstractContextManager[Path]]


@contextlib.contextmanager
def equal_volumes(filesystem: str, size_mb: int, n_inodes: int, fill: Fill) -> Iterator[Fresh]:
    """What mounts a volume, filled as all the others, for each `with`; one at a time.

    Two at a time would have the same UUID, which xfs and btrfs refuse.
    Raises  OSError: mkfs, mount or `fill` failed
    """
    if filesystem == "tmpfs":
        yield partial(_filled_tmpfs, size_mb, n_inodes, fill)
        return
    with tempfile.TemporaryDirectory(prefix="trashd-bench-", dir="/var/tmp") as name:
        image = _filled(filesystem, size_mb, n_inodes, fill, Path(name))
        yield partial(_copied, filesystem, image, image.parent)


@contextlib.contextmanager
def equal_slow_volumes(filesystem: str, size_mb: int, n_inodes: int, fill: Fill, delay_us: int) -> Iterator[Fresh]:
    """Volumes as of equal_volumes, on a disk each of whose requests takes so long, many of them at a time.

    It is a loop device, past the caches, over a file in memory seen through a slow FUSE filesystem. Filled and mounted
    in no time.
    """
    with tmpfs_volume(f"{3 * size_mb}m") as backing, slow_volume(backing, 0, limit_s=_SLOW_LIMIT_S) as slow:
        slow.delay_all()
        image = _filled(filesystem, size_mb, n_inodes, fill, backing)

        @contextlib.contextmanager
        def fresh() -> Iterator[Path]:
            with _copied(filesystem, image, slow.path) as root:
                device = mount_of(root)
                assert device is not None
                _run_command("losetup", "--direct-io=on", os.fsdecode(device.source))
                slow.delay(delay_us)
                try:
                    yield root
                finally:
                    slow.delay(0)

        yield fresh


def _filled(filesystem: str, size_mb: int, n_inodes: int, fill: Fill, scratch: Path) -> Path:
    image = scratch / "image"
    with image.open("wb") as file:
        file.truncate(size_mb << 20)
    _run_command(*_mkfs(filesystem, n_inodes), image)
    with _mounted(filesystem, image, scratch / "master") as root:
        fill(root)
    return image


@contextlib.contextmanager
def _filled_tmpfs(size_mb: int, n_inodes: int, fill: Fill) -> Iterator[Path]:
    with tmpfs_volume(f"{size_mb}m", [f"nr_inodes={n_inodes}"]) as root:
        fill(root)
        yield root


@contextlib.contextmanager
def _copied(filesystem: str, image: Path, image_directory: Path) -> Iterator[Path]:
    """image_directory: the directory of the image, as it is or through the slow filesystem"""
    copy, target = image.with_name("copy"), image.with_name("volume")
    with contextlib.ExitStack() as stack:
        try:
            # cp passes over holes; the copy is as sparse as the image.
            _run_command("cp", image, copy)
            root = stack.enter_context(_mounted(filesystem, image_directory / copy.name, target))
        finally:
            copy.unlink(missing_ok=True)
        yield root


def _mkfs(filesystem: str, n_inodes: int) -> tuple[str, ...]:
    """What mkfs makes without being asked, but no work that the kernel would do later, while others are timed."""
    match filesystem:
        case "ext4":
            return ("mkfs.ext4", "-q", "-F", "-N", str(n_inodes), "-E", "lazy_itable_init=0,nodiscard")
        case "xfs":
            return ("mkfs.xfs", "-q", "-f", "-K")
        case "btrfs":
            return ("mkfs.btrfs", "-q", "-f", "-K")
    raise ValueError(filesystem)


@contextlib.contextmanager
def _mounted(filesystem: str, image: Path, target: Path) -> Iterator[Path]:
    target.mkdir(exist_ok=True)
    try:
        # In here, since an interrupted mount(8) may have mounted; where nothing is, unmount does nothing.
        _run_command("mount", "-t", filesystem, "-o", "loop", image, target)
        yield target
    finally:
        was_busy = unmount(target)
    if was_busy:
        raise OSError(errno.EBUSY, "somebody still works in it", str(target))


def _run_command(*command: str | Path) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(errno.EIO, f"{' '.join(map(str, command))}: {done.stderr.strip() or done.returncode}")
