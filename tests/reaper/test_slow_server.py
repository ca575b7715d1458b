"""The engine where each entry is a server's answer: slices as long as they say, and threads that share a directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fusefs.core.slice_budget import AT_ONCE, SLICE_S, Speed
from fusefs.linux.kernel import Kernel
from fusefs.reaper.remove_tree import RemovalWishes
from tests.support.fuse_slow import SlowVolume, slow_volume
from tests.support.many_files import fill
from tests.support.real_filesystems import tmpfs_volume
from tests.support.reap_process import empty_container

pytestmark = pytest.mark.needs("root")

_DELAY_US = 10_000
_A_FEW_S = 0.4
"""The calls of one entry, and what a busy machine may be late."""


class _Notes:
    """Full speed, and how long each slice took."""

    def __init__(self) -> None:
        self.busy_s: list[float] = []
        self.n_entries: list[int] = []

    def tempo(self) -> Speed:
        return AT_ONCE

    def done(self, n_entries: int, n_bytes: int, busy_s: float) -> None:
        self.busy_s.append(busy_s)
        self.n_entries.append(n_entries)

    def wait(self, seconds: float) -> None:
        raise AssertionError


@contextmanager
def slow_container(n_files: int) -> Iterator[tuple[SlowVolume, Path]]:
    """A container with one flat directory, every call about which takes its time."""
    with tmpfs_volume() as source, slow_volume(source, _DELAY_US) as slow:
        (source / "container").mkdir()
        fill(source / "container" / "tree", n_files)
        slow.delay_all()
        yield slow, slow.path / "container"


def empty(container: Path, wishes: RemovalWishes) -> int:
    kernel = Kernel()
    with kernel.open_path(os.fsencode(container), os.O_RDONLY | os.O_DIRECTORY) as fd:
        return empty_container(kernel, fd, wishes).removed


def test_slice_is_as_long_as_it_says() -> None:
    notes = _Notes()
    with slow_container(60) as (_slow, container):
        assert empty(container, RemovalWishes(n_workers=1, pace=notes)) == 61
    # 128 names at a time would take four seconds.
    assert max(notes.busy_s) < SLICE_S + _A_FEW_S, notes.busy_s
    assert len(notes.busy_s) > 10


def test_listing_is_no_longer_than_its_slice_either() -> None:
    notes = _Notes()
    with slow_container(3000) as (slow, container):
        stops = iter([False] * 4)
        empty(container, RemovalWishes(n_workers=1, pace=notes, stops=lambda: next(stops, True)))
        n_read = slow.n_messages["readdir"]
    # The whole directory is more than forty answers.
    assert max(notes.busy_s) < SLICE_S + _A_FEW_S, notes.busy_s
    assert n_read < 20


def test_all_threads_are_at_one_flat_directory() -> None:
    notes = _Notes()
    with slow_container(120) as (slow, container):
        slow.forget_max()
        assert empty(container, RemovalWishes(n_workers=4, pace=notes)) == 121
        assert slow.max_under_way == 4
