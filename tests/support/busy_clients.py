"""A tree of one file, and clients that never let a daemon come to rest."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.real_filesystems import tmpfs_volume

_N_CLIENTS = 3

# Asks for names that are not there, as fast as it can, and lists, until the mount is gone.
_HAMMER = """
import itertools, os, sys
for number in itertools.count():
    try:
        os.stat(f"{sys.argv[1]}/missing-{os.getpid()}-{number}")
    except FileNotFoundError:
        pass
    if number % 50 == 0:
        os.listdir(sys.argv[1])
"""


@contextmanager
def one_file() -> Iterator[Path]:
    """A directory with one file, in a filesystem of its own."""
    with tmpfs_volume("64m") as volume:
        path = volume / "source"
        path.mkdir()
        (path / "file").write_text("content")
        yield path


@contextmanager
def hammered(path: Path) -> Iterator[None]:
    """Clients that never let the daemon come to rest."""
    clients = [
        subprocess.Popen([sys.executable, "-c", _HAMMER, path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        for _ in range(_N_CLIENTS)
    ]
    try:
        yield
    finally:
        for client in clients:
            client.kill()
            client.communicate()


def stat_missing_names(path: Path, n: int, first: int = 0) -> None:
    """Stat names that do not exist, each once, so that no answer is cached and the daemon gets each request."""
    for number in range(first, first + n):
        with suppress(FileNotFoundError):
            os.stat(f"{path}/missing{number}")


def work(top: Path) -> None:
    """All kinds of operations, and what they must give; the names in a directory begin with its own."""
    assert (top / f"{top.name}-0").read_bytes() == b"content"
    assert f"{top.name}-1" in os.listdir(top)
    with os.scandir(top) as entries:
        assert sum(entry.stat().st_size for entry in entries if entry.is_file()) > 0
    made, renamed, linked, directory = (top / f"{top.name}-{what}" for what in ("made", "renamed", "linked", "inner"))
    with made.open("wb", buffering=0) as file:
        file.write(b"made")
        os.ftruncate(file.fileno(), 2)
        os.fsync(file.fileno())
    assert made.read_bytes() == b"ma"
    os.setxattr(made, "user.x", b"1")
    assert os.listxattr(made) == ["user.x"]
    os.removexattr(made, "user.x")
    made.chmod(0o600)
    os.utime(made, ns=(1, 2))
    assert made.stat().st_mtime_ns == 2
    made.rename(renamed)
    os.link(renamed, linked)
    directory.mkdir()
    directory.rmdir()
    linked.unlink()
    renamed.unlink()
    assert not made.exists()
    linked.symlink_to("target")
    assert os.readlink(linked) == "target"
    linked.unlink()
    os.mkfifo(linked)
    linked.unlink()
    assert os.statvfs(top).f_bsize
