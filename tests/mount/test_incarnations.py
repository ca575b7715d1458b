"""Files that come and go by the thousand, each with the inode number of one before it: none is ever read as another.

Clients, and in a shared mount one behind it, replace and remove the same few names. Each file is whole when it gets its
name and never changes, and every word of it tells which one it is; open or mapped it reads as that, however
long it is gone. A plain directory keeps that law too: it is the first of the places.

TRASHD_TEST_INCARNATIONS  that each client makes (make soak-mount: many)
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
from collections import deque
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest

from fusefs.core.metadata_cache import ROOT
from fusefs.linux.fd import Fd
from fusefs.linux.syscalls import AT_FDCWD, RENAME_EXCHANGE, handle_of, renameat2
from tests.support.background_processes import finish, workers
from tests.support.mount_and_backing import CLIENTS_ON, directory_for, tops_for_clients
from tests.support.real_filesystems import gives_numbers_again
from tests.support.vfs_without_mount import Names, Somebody, vfs_at

pytestmark = pytest.mark.needs("root", "fuse", "loop")

N_MADE = int(os.environ.get("TRASHD_TEST_INCARNATIONS", "200"))
LIMIT_S = max(100.0, N_MADE / 10)
N_LOOKS = 20_000
N_NAMES, N_HELD = 5, 8
N_WORDS = 1500
"""At most: three pages."""
WORD = struct.Struct("=IIQ")
"""The client that made it, its number there, and how many words it has."""


class Held(NamedTuple):
    """A file that is open, mapped, and perhaps gone."""

    fd: int
    mapped: mmap.mmap
    content: bytes

    def check(self) -> None:
        """Raises  OSError ERANGE: it is another"""
        size = os.fstat(self.fd).st_size
        if not self.content == os.pread(self.fd, size + 1, 0) == self.mapped[:]:
            raise OSError(errno.ERANGE, os.strerror(errno.ERANGE))

    def close(self) -> None:
        self.check()
        self.mapped.close()
        os.close(self.fd)


def held(path: Path) -> Held:
    """Raises  OSError: ERANGE: what is read is not one file, whole; ENOENT"""
    fd = os.open(path, os.O_RDONLY)
    size = os.fstat(fd).st_size
    mapped = mmap.mmap(fd, size, prot=mmap.PROT_READ)
    content = os.pread(fd, size + 1, 0)
    _who, _number, n_words = WORD.unpack_from(content)
    if content != content[: WORD.size] * n_words:
        raise OSError(errno.ERANGE, os.strerror(errno.ERANGE))
    return Held(fd, mapped, content)


def work(gives_again: bool, who: int, top: Path) -> None:
    """gives_again: the filesystem gives a free inode number to the next file

    Raises  OSError: ERANGE: see Held; any that a plain directory does not give
    """
    random, mine, numbers = Random(who), top / f"made-{who}", set()
    held_now: deque[Held] = deque()
    for number in range(N_MADE):
        path = top / f"name{random.randrange(N_NAMES)}"
        n_words = random.randrange(1, N_WORDS)
        mine.write_bytes(WORD.pack(who, number, n_words) * n_words)
        numbers.add(mine.stat().st_ino)
        mine.rename(path)
        try:
            held_now.append(held(top / f"name{random.randrange(N_NAMES)}"))
            random.choice(held_now).check()
            if random.random() < 0.5:
                path.unlink()
        except FileNotFoundError:
            continue
        finally:
            if len(held_now) > N_HELD:
                held_now.popleft().close()
    for one in held_now:
        one.close()
    if gives_again and len(numbers) > N_MADE / 2:
        raise OSError(errno.E2BIG, "numbers are not given again")


def test_what_is_seen_of_a_name_is_all_of_one_file(volume: Path) -> None:
    """Two are exchanged behind the mount: the attributes of one and the handle of the other never belong together."""
    right = {}
    for size, name in enumerate(("one", "two")):
        (volume / name).write_bytes(bytes(size))
        right[size] = handle_of(AT_FDCWD, os.fsencode(volume / name))

    def exchange() -> None:
        with Fd(os.open(volume, os.O_PATH)) as top:
            while True:
                renameat2(top, b"one", top, b"two", RENAME_EXCHANGE)

    with vfs_at(volume, max_fds=0, is_shared=True) as vfs, workers([exchange]):
        for _ in range(N_LOOKS):
            found = Names(vfs).lookup(ROOT, b"one", Somebody(0, 0, os.getpid(), 0o022))
            node = vfs.nodes.get(found.nodeid)
            assert node is not None
            assert right[found.attributes.size] == node.source[1]


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("where", [where for where in CLIENTS_ON if "slow, by" not in where])
def test_nobody_reads_another_file_than_the_one_he_opened(volume: Path, where: str) -> None:
    gives_again = gives_numbers_again(volume)
    with tops_for_clients(directory_for(volume, where), where, LIMIT_S) as tops:
        finish([partial(work, gives_again, *one) for one in enumerate(tops)])
