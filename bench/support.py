"""What benchmarks and the demo share: trees made quickly, commands timed, volumes to do it on."""

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.volumes import loop_volume, tmpfs_volume

PYTHON = sys.executable
TRASHD = str(Path(sys.executable).with_name("trashd"))
FILES_PER_DIRECTORY = 1000
# Enough for a million empty files and the directories that hold them.
SIZE_MB = 3072
N_INODES = 1_250_000


@contextlib.contextmanager
def compiled() -> Iterator[None]:
    """Let Python keep its bytecode, as an installed package does, whatever this environment says."""
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="trashd-pycache-") as cache:
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = cache
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


@contextlib.contextmanager
def volume(filesystem: str) -> Iterator[Path]:
    """A fresh volume with room for a million files.

    filesystem  tmpfs, ext4, xfs, btrfs, or `plain`: a directory of the disk, for who may not mount
    Raises      OSError: this machine or user can't mount it
    """
    if filesystem == "plain":
        with tempfile.TemporaryDirectory(prefix="trashd-bench-", dir="/var/tmp") as directory:
            yield Path(directory)
    elif filesystem == "tmpfs":
        with tmpfs_volume(f"{SIZE_MB}m", [f"nr_inodes={2 * N_INODES}"]) as path:
            yield path
    else:
        options = ("-N", str(N_INODES)) if filesystem == "ext4" else ()
        with loop_volume(filesystem, SIZE_MB, options) as path:
            yield path


def make_files(parent: Path, n_files: int) -> int:
    """Put empty files into a directory; the number."""
    fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for number in range(n_files):
            os.close(os.open(b"f%d" % number, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=fd))
    finally:
        os.close(fd)
    return n_files


def make_tree(path: Path, n_files: int) -> int:
    """A tree of directories with at most a thousand files each; the number of files."""
    path.mkdir()
    n_made = 0
    while n_made < n_files:
        number = n_made // FILES_PER_DIRECTORY
        directory = path / f"{number // 10}" / f"{number % 10}"
        directory.mkdir(parents=True)
        n_made += make_files(directory, min(FILES_PER_DIRECTORY, n_files - n_made))
    return n_made


def make_flat(path: Path, n_files: int) -> int:
    """One directory with all the files; their number."""
    path.mkdir()
    return make_files(path, n_files)


def make_chain(path: Path, n_files: int) -> int:
    """A chain of directories, each in the one before, with ten files in each; the number of files."""
    path.mkdir()
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for n_made in range(n_files):
            if n_made % 10 == 0:
                os.mkdir(b"d", dir_fd=fd)
                below = os.open(b"d", os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
                os.close(fd)
                fd = below
            os.close(os.open(b"f%d" % n_made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=fd))
    finally:
        os.close(fd)
    return n_files


def time_command(command: Sequence[str | Path], stdin: Path = Path("/dev/null")) -> float:
    """Wall seconds of a command whose output nobody reads.

    Raises  OSError if it fails
    """
    arguments = [os.fspath(word) for word in command]
    redirected = [
        (os.POSIX_SPAWN_OPEN, 0, os.fspath(stdin), os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0),
    ]
    began = time.perf_counter()
    pid = os.posix_spawnp(arguments[0], arguments, os.environ, file_actions=redirected)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    seconds = time.perf_counter() - began
    if code:
        raise OSError(code, f"exit code {code}", " ".join(arguments))
    return seconds
