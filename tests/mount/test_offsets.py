"""Offsets as far as they go, and a byte on: what is refused there, and what is not, is as on the filesystem below."""

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from fusefs.linux.syscalls import FALLOC_FL_KEEP_SIZE, fallocate
from tests.support.foreground_mount import trashd_mount
from tests.support.mount_and_backing import CLIENTS_ON, directory_for
from tests.support.open_files import opened
from tests.support.oracle_subjects import outcome
from tests.support.real_filesystems import WITH_XFS

pytestmark = [pytest.mark.needs("root", "fuse", "loop"), pytest.mark.takes_engine, WITH_XFS]

TOP = 1 << 63
OFFSETS = [(1 << 44) - 1, 1 << 44, TOP - 4097, TOP - 4096, TOP - 2, TOP - 1]
CONTENT = b"content" * 1000
PUNCH_HOLE = FALLOC_FL_KEEP_SIZE | 2
MOUNTS = ("exclusive", "exclusive, by the daemon", "shared", "shared, by the daemon")


def map_end(fd: int, offset: int) -> bytes:
    os.ftruncate(fd, offset)
    with mmap.mmap(fd, 1, offset=(offset - 1) // mmap.PAGESIZE * mmap.PAGESIZE) as mapped:
        mapped[0] = 120
        return mapped[:]


def send_from(fd: int, offset: int) -> int:
    reads, writes = os.pipe()
    try:
        return os.sendfile(writes, fd, offset, 100)
    finally:
        os.close(reads)
        os.close(writes)


ACTS: dict[str, Callable[[int, int], object]] = {
    "read": lambda fd, offset: os.pread(fd, 8192, offset),
    "write": lambda fd, offset: os.pwrite(fd, b"x", offset),
    "write much": lambda fd, offset: os.pwrite(fd, b"x" * 8192, offset),
    "write parts": lambda fd, offset: os.pwritev(fd, [b"x", b"yz"], offset),
    "cut": os.ftruncate,
    "cut by path": lambda fd, offset: os.truncate(f"/proc/self/fd/{fd}", offset),
    "allocate": lambda fd, offset: fallocate(fd, 0, offset, 1),
    "allocate much": lambda fd, offset: fallocate(fd, FALLOC_FL_KEEP_SIZE, offset, 8192),
    "punch": lambda fd, offset: fallocate(fd, PUNCH_HOLE, offset, 4096),
    "go": lambda fd, offset: os.lseek(fd, offset, os.SEEK_SET),
    "go to data": lambda fd, offset: os.lseek(fd, offset, os.SEEK_DATA),
    "go to a hole": lambda fd, offset: os.lseek(fd, offset, os.SEEK_HOLE),
    "copy there": lambda fd, offset: os.copy_file_range(fd, fd, 3, 0, offset),
    "copy much there": lambda fd, offset: os.copy_file_range(fd, fd, 7000, 0, offset),
    "copy from there": lambda fd, offset: os.copy_file_range(fd, fd, 3, offset, 5000),
    "send": send_from,
    "map": map_end,
}


UNLIMITED = ("go", "send")
"""A seek beyond the largest file is no error in a mount; below it, it is (docs/explain/mount-semantics.md)."""


class Told(NamedTuple):
    """What something answers, how long the file is then, what one byte more answers, and how the file begins."""

    answer: str
    size: int
    more: str | None
    content: bytes


def is_free(case: tuple[str, int], below: Told) -> bool:
    """Whether a mount may answer otherwise."""
    return case[0] in UNLIMITED and below.answer in ("EINVAL", "EOVERFLOW")


def played(file: Path, flags: int) -> dict[tuple[str, int], Told]:
    """What each act tells at each offset."""
    told = {}
    for name, act in ACTS.items():
        for offset in OFFSETS:
            file.write_bytes(CONTENT)
            with opened(file, os.O_RDWR | flags) as fd:
                told[name, offset] = Told(
                    outcome(act, fd, offset),
                    os.fstat(fd).st_size,
                    outcome(os.write, fd, b"x") if flags else None,
                    os.pread(fd, 10_000, 0)[:7000],
                )
            file.unlink()
    return told


@pytest.mark.parametrize(("how", "flags"), [*((how, 0) for how in MOUNTS), ("shared, by the daemon", os.O_APPEND)])
def test_what_is_far_out_is_answered_as_below(volume: Path, how: str, flags: int) -> None:
    source = directory_for(volume, f"{how} {flags}")
    right = played(source / "below", flags)
    with trashd_mount(source, options=CLIENTS_ON[how][0]) as mounted:
        seen = played(mounted.path / "file", flags)
    unlike = {case: seen[case][:3] for case, one in right.items() if seen[case] != one and not is_free(case, one)}
    assert not unlike, {case: right[case][:3] for case in unlike}
