"""The engine where each entry is a server's answer: slices as long as they say, and threads that share a directory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import pytest

from fusefs.core.pacing import AT_ONCE, SLICE_S, NamesPerLook, SliceBudget, Speed
from fusefs.core.slices import SlicePlan, SliceWork
from fusefs.engine.strategy import AllocationGroups, Workers, choose
from fusefs.linux.kernel import Kernel
from fusefs.reaper.reap import RemovalWishes
from fusefs.reaper.removal_stops import InnerStores
from fusefs.reaper.remove_slice import SliceRemover
from tests.support.fuse_slow import SlowVolume, slow_volume
from tests.support.many_files import fill
from tests.support.real_filesystems import tmpfs_volume
from tests.support.reap_process import all_given, empty_container

pytestmark = pytest.mark.needs("root")

_DELAY_US = 10_000
_A_FEW_S = 0.4
"""The calls of one entry, and what a busy machine may be late."""


class _Notes:
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


class _Ghosts(Kernel):
    """Lists names that nothing has beside those that there are."""

    def __init__(self, n_ghosts: int) -> None:
        super().__init__()
        self.n_listings = 0
        with tempfile.TemporaryDirectory() as elsewhere:
            for number in range(n_ghosts):
                Path(elsewhere, f"ghost{number}").touch()
            with os.scandir(elsewhere) as found:
                self._ghosts = list(found)

    @contextmanager
    def scan(self, dir_fd: int) -> Iterator[Iterator[os.DirEntry[str]]]:
        with super().scan(dir_fd) as entries:
            self.n_listings += 1
            yield chain(self._ghosts, entries)


def test_listing_in_parts_that_tells_names_which_nothing_has_comes_to_an_end() -> None:
    with tmpfs_volume() as volume:
        fill(volume / "container" / "tree", 500)
        kernel = _Ghosts(1000)
        with kernel.open_path(os.fsencode(volume / "container"), os.O_RDONLY | os.O_DIRECTORY) as fd:
            strategy = choose(kernel, fd, 1)._replace(workers=Workers.THREADS)
            given, stores = all_given(kernel, fd), InnerStores(kernel, fd)
            remover = SliceRemover(kernel, fd, strategy, AllocationGroups(kernel, None), given, stores, NamesPerLook())
            plan = SlicePlan(1, splits_names=False)
            plan.add(fd, b"", SliceWork(names=["tree"]))
            while work := plan.next():
                for finished in plan.done(work, remover.run(work, SliceBudget(0.0))):
                    os.close(finished.fd)
                assert kernel.n_listings < 100
        assert os.listdir(volume / "container") == []
