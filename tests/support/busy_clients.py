"""What tests of the seam share: a tree of one file, and clients that never let a daemon come to rest."""

from __future__ import annotations

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


def ask_for_missing_names(path: Path, n: int, first: int = 0) -> None:
    """Each name once: the daemon has to answer."""
    for number in range(first, first + n):
        with suppress(FileNotFoundError):
            os.stat(f"{path}/missing{number}")
