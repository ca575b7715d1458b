"""The trees that removers are compared on: what each is made of, and the volume that it needs."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from bench.support import make_flat, make_tree

_SMALL = b"x" * (10 << 10)
_LARGE_BYTES = 1 << 30
# A million directories take 4 GiB of an ext4; the size decides the journal's too, so it is the same for most.
_SIZE_MB = 8 << 10


class Shape(NamedTuple):
    """One kind of tree."""

    name: str
    description: str
    n_files: int  # or directories, in the chain
    make: Callable[[Path, int], int]
    size_mb: int = _SIZE_MB


def make_nested(path: Path, n_directories: int) -> int:
    """A chain of empty directories, each in the one before; their number."""
    path.mkdir()
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for _ in range(n_directories - 1):
            os.mkdir(b"d", dir_fd=fd)
            below = os.open(b"d", os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
            os.close(fd)
            fd = below
    finally:
        os.close(fd)
    return n_directories


def make_large(path: Path, n_files: int) -> int:
    """One directory of files of 1 GiB each, allocated and not written; their number."""
    path.mkdir()
    for number in range(n_files):
        fd = os.open(path / f"f{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            os.posix_fallocate(fd, 0, _LARGE_BYTES)
        finally:
            os.close(fd)
    return n_files


SHAPES = MappingProxyType(
    {
        shape.name: shape
        for shape in (
            Shape("tree", "1,000 x 1,000 files", 1_000_000, make_tree),
            Shape("flat-1m", "1,000,000 files in one directory", 1_000_000, make_flat),
            Shape("flat-400k", "400,000 files in one directory", 400_000, make_flat),
            Shape("chain", "1,000,000 nested directories", 1_000_000, make_nested),
            Shape("small", "100 x 1,000 files of 10 KiB", 100_000, partial(make_tree, content=_SMALL)),
            Shape("large", "20 files of 1 GiB", 20, make_large, 24 << 10),
        )
    }
)
