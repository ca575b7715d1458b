"""A tree of which the kernel knows each name, swapped through its mount: at once for clients, and for nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fusefs.linux.kernel import Kernel
from tests.support.foreground_mount import Mounted, trashd_mount
from tests.support.real_filesystems import tmpfs_volume
from tests.support.store_verbs import init, recover_all, swap

pytestmark = [pytest.mark.needs("root", "fuse"), pytest.mark.timeout(120)]

N_FEW, N_MANY = 10, 2000


@pytest.fixture(params=["exclusive", "shared"])
def mount(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    with tmpfs_volume() as volume:
        source = volume / "source"
        source.mkdir()
        init(source)
        # Attributes and names grow old by time alone: no part of what is counted here.
        with trashd_mount(source, options=[f"coherence={request.param}", "timeout=3600"]) as mounted:
            yield mounted


def make_known(victim: Path, n: int) -> Path:
    victim.mkdir()
    for number in range(n):
        (victim / f"f{number}").touch()
    with os.scandir(victim) as entries:
        assert sum(entry.stat().st_nlink for entry in entries) == n
    return victim


def by_swap(_mount: Mounted, victim: Path) -> None:
    swap(victim)
    assert os.listdir(victim) == []


def by_mv(mount: Mounted, victim: Path) -> None:
    victim.rename(mount.path / ".trashd" / "drop" / victim.name)
    assert not victim.exists()


@pytest.mark.parametrize("way", [by_swap, by_mv])
def test_the_daemon_is_asked_no_more_for_a_large_tree(mount: Mounted, way: Callable[[Mounted, Path], None]) -> None:
    asked = []
    for name, n in (("first", N_FEW), ("few", N_FEW), ("many", N_MANY)):
        victim = make_known(mount.path / name, n)
        before = mount.n_requests()
        way(mount, victim)
        asked.append(mount.n_requests() - before)
    _first, few, many = asked
    assert many < few + N_MANY / 20  # attributes of directories grow old: the slower it goes, the more
    assert recover_all(mount.backing) == []


def test_the_directory_is_empty_for_clients_when_the_exchange_returns(mount: Mounted) -> None:
    victim = make_known(mount.path / "victim", N_MANY)
    seen = []

    class Watched(Kernel):
        def exchange(self, old_dir: int, old: bytes, new_dir: int, new: bytes) -> None:
            super().exchange(old_dir, old, new_dir, new)
            seen.append((os.listdir(victim), (victim / "f0").exists()))

    with os.scandir(victim) as entries:
        next(entries)
        swap(victim, Watched())
        assert len(list(entries)) == N_MANY - 1  # who has begun to list goes on in the old tree
    assert seen == [([], False)]
