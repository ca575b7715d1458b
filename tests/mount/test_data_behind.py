"""Files that both sides of a shared mount change at a time: what is read, and how long they are, is right on both."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from fusefs.linux.syscalls import fallocate
from tests.support.background_processes import clients, ends
from tests.support.foreground_mount import SHARED_LIMIT_S, Mounted, trashd_mount, until
from tests.support.open_files import opened, waits_in_the_kernel
from tests.support.proc_stat import stop

pytestmark = pytest.mark.needs("root", "fuse", "loop")

N_ROUNDS = 30


class File(NamedTuple):
    """One, on both sides."""

    mounted: Mounted
    seen: Path
    behind: Path


@pytest.fixture(scope="module", params=["auto", "off"])
def mounted(volume: Path, request: pytest.FixtureRequest) -> Iterator[Mounted]:
    options = ["coherence=shared", f"passthrough={request.param}"]
    with trashd_mount(volume / request.param, options=options, limit_s=SHARED_LIMIT_S) as mounted:
        yield mounted


@pytest.fixture
def file(mounted: Mounted, request: pytest.FixtureRequest) -> File:
    name = request.node.name
    (mounted.backing / name).touch()
    return File(mounted, mounted.path / name, mounted.backing / name)


def be_told(fd: int, size: int) -> None:
    """How long a file is. Raises  OSError: it is not"""
    if os.fstat(fd).st_size != size:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


@pytest.mark.needs("passthrough")
@pytest.mark.takes_engine
def test_who_was_told_how_long_a_file_is_copies_to_its_end(volume: Path) -> None:
    """That is not asked for when something is copied: the kernel takes what it has, and it has what it was told."""
    with trashd_mount(volume / "source", options=["coherence=shared"]) as mounted:
        (mounted.backing / "file").touch()
        with opened(mounted.path / "file", os.O_RDWR) as fd, opened(mounted.backing / "file", os.O_RDWR) as behind:
            for _ in range(N_ROUNDS):
                os.ftruncate(fd, 100)
                assert os.fstat(fd).st_size == 100
                stop(mounted.pid)
                fallocate(behind, 0, 0, 5000)
                with clients([partial(be_told, fd, 5000)]) as (pid,):
                    assert until(lambda: waits_in_the_kernel(pid))
                    os.kill(mounted.pid, signal.SIGCONT)
                    assert ends(pid) == 0
                assert os.copy_file_range(fd, fd, 4000, 1000, 6000) == 4000
                assert os.fstat(fd).st_size == os.fstat(behind).st_size == 10_000


def copy_all(fd: int, to: int, size: int) -> int:
    return os.copy_file_range(fd, to, size, 0, 0)


def send_all(fd: int, to: int, size: int) -> int:
    return os.sendfile(to, fd, 0, size)


def read_all(fd: int, _to: int, size: int) -> int:
    return len(os.pread(fd, size, 0))


@pytest.mark.parametrize("act", [copy_all, send_all, read_all])
def test_what_was_added_behind_is_there_for_who_has_seen_how_long_it_is(
    file: File, act: Callable[[int, int, int], int]
) -> None:
    with opened(file.seen, os.O_RDWR) as fd, opened(file.behind, os.O_RDWR) as behind:
        os.pwrite(fd, b"begun", 0)
        to = os.open(file.seen.with_name("copy"), os.O_RDWR | os.O_CREAT)
        os.pwrite(behind, b"and added", 5)
        is_there = until(lambda: os.fstat(fd).st_size == 14 and act(fd, to, 100) == 14)
        os.close(to)
        assert is_there
