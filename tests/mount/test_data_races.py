"""Clients that write, map, cut, extend and copy one file at a time, on both sides of the mount.

Each offset has a byte of its own, so each write there writes that: whatever is read must be that or 0, at any time,
and in the end both sides have the same. A plain directory keeps that law too: it is the first of the places.

TRASHD_TEST_CHANGES  what each client does (make soak-mount: many)
"""

import errno
import mmap
import os
from functools import partial
from pathlib import Path
from random import Random

import pytest

from fusefs.linux.syscalls import FALLOC_FL_KEEP_SIZE, fallocate
from tests.support.background_processes import finish
from tests.support.foreground_mount import until
from tests.support.mount_and_backing import CLIENTS_ON, directory_for, tops_for_clients
from tests.support.open_files import opened
from tests.support.real_filesystems import WITH_XFS

pytestmark = [pytest.mark.needs("root", "fuse", "loop"), WITH_XFS]

N_CHANGES = int(os.environ.get("TRASHD_TEST_CHANGES", "150"))
LIMIT_S = max(100.0, N_CHANGES / 10)
SIZE = 256 << 10
PART = 20 << 10
OWN = Random("bytes").randbytes(SIZE).replace(b"\0", b"\1")
"""Of each offset."""
PUNCH_HOLE, ZERO_RANGE = FALLOC_FL_KEEP_SIZE | 2, 16


def is_right(seen: bytes, offset: int) -> bool:
    """Whether all is what may have been written there."""
    own = OWN[offset : offset + len(seen)]
    return len(own) == len(seen) and all(byte in (0, right) for byte, right in zip(seen, own, strict=True))


class Client:
    """One client, at work on a file by its name, and by an fd of its own."""

    def __init__(self, path: Path, seed: str) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDWR)
        self._all = os.open(path.with_name("all"), os.O_RDONLY)
        self._random = Random(seed)
        self._acts = (self._write, self._write, self._map, self._map, self._cut, self._block, self._copy, self._read)

    def work(self) -> None:
        """Raises  OSError ERANGE: what it read was never written"""
        for _ in range(N_CHANGES):
            act = self._random.choice(self._acts)
            act(self._random.randrange(SIZE - PART), self._random.randrange(1, PART))

    def _write(self, offset: int, size: int) -> None:
        os.pwrite(self._fd, OWN[offset : offset + size], offset)

    def _map(self, offset: int, size: int) -> None:
        """By a system call, which says EFAULT where the file ends by now; a touch would end the process."""
        try:
            mapped = mmap.mmap(self._fd, 0)
        except ValueError:
            return  # it was empty, or has been cut meanwhile
        with mapped, memoryview(mapped) as view, view[offset : offset + size] as part:
            try:
                if part and self._random.random() < 0.5:
                    os.preadv(self._all, [part], offset)
                elif part:
                    self._check(self._through_a_pipe(part[:4096]), offset)
            except OSError as error:
                if error.errno != errno.EFAULT:
                    raise

    def _through_a_pipe(self, part: memoryview) -> bytes:
        reads, writes = os.pipe()
        try:
            return os.read(reads, os.write(writes, part))
        finally:
            os.close(reads)
            os.close(writes)

    def _cut(self, offset: int, _size: int) -> None:
        if self._random.random() < 0.5:
            os.ftruncate(self._fd, offset)
        else:
            os.truncate(self._path, offset)

    def _block(self, offset: int, size: int) -> None:
        try:
            fallocate(self._fd, self._random.choice((0, PUNCH_HOLE, ZERO_RANGE)), offset, size)
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:  # tmpfs has no zeros
                raise

    def _copy(self, offset: int, size: int) -> None:
        os.copy_file_range(self._all, self._fd, size, offset, offset)

    def _read(self, offset: int, size: int) -> None:
        self._check(os.pread(self._fd, size, offset), offset)
        with opened(self._path, os.O_RDONLY) as fd:
            self._check(os.pread(fd, size, offset), offset)

    def _check(self, seen: bytes, offset: int) -> None:
        if not is_right(seen, offset):
            raise OSError(errno.ERANGE, os.strerror(errno.ERANGE))


@pytest.mark.takes_engine
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("where", [where for where in CLIENTS_ON if not where.endswith("slow")])
def test_nobody_reads_what_nobody_wrote_there_and_in_the_end_all_read_the_same(volume: Path, where: str) -> None:
    source = directory_for(volume, where)
    (source / "all").write_bytes(OWN)
    (source / "file").touch()
    with tops_for_clients(source, where, LIMIT_S) as tops:
        seen = tops[0] / "file"
        finish(
            [partial(lambda who, top: Client(top / "file", f"{where} {who}").work(), *one) for one in enumerate(tops)]
        )
        right = (source / "file").read_bytes()
        assert is_right(right, 0)
        assert until(lambda: seen.read_bytes() == right)
        assert seen.stat().st_size == len(right)
