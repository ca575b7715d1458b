"""What a reap needs does not grow with the tree: 128 fds a process, and 64 MiB above a bare interpreter for all of
them together."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.make_trees import deep_chain
from tests.support.many_files import fill, roomy_volume
from tests.support.peak_usage import bare_interpreter_kib, watch
from tests.support.reap_process import state_of
from tests.support.store_verbs import assert_silent, swap
from tests.support.trashd_command import TRASHD

pytestmark = pytest.mark.needs("root")

MAX_FDS = 128
MAX_KIB = 64 << 10


def chain(path: Path) -> None:
    deep_chain(path, 20_000)


def flat(path: Path) -> None:
    fill(path, 200_000)


def long(path: Path) -> None:
    """One directory whose names are as long as they can be, in bytes and in Python's memory."""
    fd = os.open(fill(path, 0), os.O_RDONLY)
    for i in range(70_000):
        # One byte that is no UTF-8 makes each letter of a str two bytes; every further one costs a handler's call.
        os.mknod((b"%d\xff" % i).ljust(255, b"x"), dir_fd=fd)
    os.close(fd)


def wide(path: Path) -> None:
    for i in range(20_000):
        fill(path / f"{i}", 1)


def stairs(path: Path) -> None:
    """A chain on each level of which many directories wait: all of them are open work at once."""
    fd = os.open(fill(path, 1), os.O_RDONLY)
    for _ in range(300):
        for i in range(60):
            os.mkdir(f"side-{i}", dir_fd=fd)
        os.mkdir("down", dir_fd=fd)
        above, fd = fd, os.open("down", os.O_RDONLY, dir_fd=fd)
        os.close(above)
    os.close(fd)


def assert_bounded(fs_type: str, shape: Callable[[Path], None], *options: str) -> None:
    """Reaped by the command, a tree of that shape needs no more than a reap may."""
    with roomy_volume(fs_type, 205_000) as volume:
        shape(volume / "job")
        identifier = swap(volume / "job").id
        code, peak = watch([TRASHD, "reap", "--now", *options, "--volume", str(volume), identifier], MAX_FDS)
        told = f"{shape.__name__} on {fs_type}: {peak}, a bare interpreter {bare_interpreter_kib()} KiB"
        assert code == 0, told
        assert state_of(volume, identifier) is None
        assert_silent(volume)
        assert peak.n_processes > 0, told
        assert peak.n_fds <= MAX_FDS, told
        assert peak.largest_kib - bare_interpreter_kib() <= MAX_KIB, told
        assert peak.memory_kib - bare_interpreter_kib() <= MAX_KIB, told


LOOP, EVERY = pytest.mark.needs("loop"), pytest.mark.every
SHAPES = [
    pytest.param("tmpfs", chain),
    pytest.param("ext4", chain, marks=[LOOP, EVERY]),
    pytest.param("tmpfs", wide, marks=EVERY),
    pytest.param("ext4", wide, marks=LOOP),
    pytest.param("tmpfs", stairs),
    pytest.param("ext4", stairs, marks=[LOOP, EVERY]),
]
"""What a reap has in memory is the same on each filesystem, which may list a directory in another order."""


@pytest.mark.parametrize(("fs_type", "shape"), SHAPES)
def test_memory_and_fds_stay_bounded_whatever_the_shape(fs_type: str, shape: Callable[[Path], None]) -> None:
    assert_bounded(fs_type, shape)


def test_memory_stays_bounded_in_one_directory_of_very_many_files() -> None:
    """On tmpfs; ext4 has one directory of long names."""
    assert_bounded("tmpfs", flat)


@pytest.mark.parametrize("fs_type", [pytest.param("tmpfs", marks=EVERY), pytest.param("ext4", marks=LOOP)])
def test_memory_stays_bounded_with_as_many_workers_as_a_large_machine_has(fs_type: str) -> None:
    """Of long names, of which each worker has its own; fewer workers have fewer."""
    assert_bounded(fs_type, long, "--threads", "8")
