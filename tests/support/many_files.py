"""Many entries at little cost: an empty file is one mknod."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.make_trees import deep_chain
from tests.support.real_filesystems import loop_volume, tmpfs_volume
from tests.support.store_verbs import init


@contextmanager
def roomy_volume(fs_type: str, n_inodes: int = 100_000) -> Iterator[Path]:
    """A volume of that type with a store and room for so many entries."""
    size_mb = 64 + n_inodes // 1000
    match fs_type:
        case "tmpfs":
            volume = tmpfs_volume(f"{size_mb}m", [f"nr_inodes={n_inodes + 1000}"])
        case "ext4":
            volume = loop_volume("ext4", size_mb, ["-b", "4096", "-N", str(n_inodes + 1000)])
        case "btrfs":
            volume = loop_volume("btrfs", size_mb + 400)  # or its metadata have no room, and it says that nothing has
        case _:
            volume = loop_volume(fs_type, size_mb)
    with volume as path:
        init(path)
        yield path


def fill(directory: Path, n_files: int, start: int = 0) -> Path:
    """Make empty files `f0`, `f1` and so on in a directory, which is made if missing, with those above it."""
    directory.mkdir(parents=True, exist_ok=True)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for i in range(start, start + n_files):
            os.mknod(b"f%d" % i, stat.S_IFREG | 0o644, dir_fd=fd)
    finally:
        os.close(fd)
    return directory


def bulky_tree(path: Path, n_directories: int = 20, n_files: int = 300, n_flat: int = 8000) -> Path:
    """A tree that keeps a reaper busy: `d0`… with `sub/` each, one directory `flat`, and one `chain`."""
    for i in range(n_directories):
        fill(fill(path / f"d{i}", n_files) / "sub", n_files)
    fill(path / "flat", n_flat)
    deep_chain(path / "chain", 150)
    return path
