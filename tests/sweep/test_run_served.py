"""Sweeps of what a daemon serves: a filesystem as slow as a network's, by threads; and a mount of ours, both sides."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusefs.core.results import SweepSums
from fusefs.core.selection import Selection, SizeBound
from fusefs.sweep.request import Act, SweepWishes, ToCount, ToDelete, ToMove, ToTrash
from tests.support.foreground_mount import Mounted, trashd_mount
from tests.support.fuse_slow import SlowVolume, slow_volume
from tests.support.make_trees import make_tree
from tests.support.many_files import fill
from tests.support.real_filesystems import bind_mount, tmpfs_volume
from tests.support.run_sweep import ALL, EVERY_KIND, names, printed, sweep
from tests.support.store_verbs import restore

pytestmark = pytest.mark.needs("root", "fuse")

EMPTY_FILES = Selection(types=frozenset("f"), sizes=(SizeBound(0, 0),))
FULL_FILES = Selection(types=frozenset("f"), sizes=(SizeBound(1),))


@pytest.fixture
def slow() -> Iterator[SlowVolume]:
    with tmpfs_volume() as source, slow_volume(source, delay_us=300) as volume:
        yield volume


@pytest.fixture
def mount(volume: Path) -> Iterator[Mounted]:
    (volume / "source").mkdir()
    with trashd_mount(volume / "source") as mounted:
        yield mounted


def wide(top: Path) -> Path:
    """Twelve directories with ten empty files and one that is not."""
    return make_tree(top, {f"d{n}": {"full": "1", "sub": {f"f{m}": "" for m in range(10)}} for n in range(12)})


# As slow as a network's


def test_threads_wait_beside_each_other_and_share_what_one_would_do(slow: SlowVolume) -> None:
    wide(slow.backing / "top")
    slow.forget_max()
    assert sweep(slow.path / "top", EMPTY_FILES).sums.n_done == 120
    assert slow.max_under_way > 2
    assert names(slow.backing / "top") == {f"d{n}{rest}" for n in range(12) for rest in ("", "/full", "/sub")}


@pytest.mark.parametrize("n_workers", [1, 8])
@pytest.mark.parametrize("lists", [True, False])
def test_threads_choose_what_one_would(slow: SlowVolume, n_workers: int, lists: bool) -> None:
    wide(slow.backing / "top")
    paths = [b"d%d/full" % n for n in range(12)] + [b"d0/no"] if lists else None
    swept = sweep(slow.path / "top", FULL_FILES, n_workers=n_workers, names=paths)
    assert (swept.sums.n_done, swept.sums.n_missing, swept.sums.n_failed) == (12, int(lists), 0)


def test_threads_trash_and_it_comes_back(slow: SlowVolume) -> None:
    top = wide(slow.backing / "top")
    before = names(top)
    swept = sweep(slow.path / "top", EMPTY_FILES, ToTrash())
    assert (swept.sums.n_done, swept.sums.n_failed) == (120, 0)
    assert swept.orphan is not None
    restore(slow.path, swept.orphan)
    assert names(slow.path / "top") == before


def test_threads_move_each_once(slow: SlowVolume) -> None:
    make_tree(slow.backing / "top", {f"d{n}": {f"f{n}-{m}": "" for m in range(10)} for n in range(12)})
    (slow.backing / "to").mkdir()
    swept = sweep(slow.path / "top", ALL, ToMove(os.fsencode(slow.path / "to")))
    assert (swept.sums.n_done, swept.sums.n_failed) == (120, 0)
    moved = {name for name in names(slow.backing / "to") if "f" in name}
    assert moved == {f"d{n}/f{n}-{m}" for n in range(12) for m in range(10)}


def test_stopped_among_threads_it_gives_back_all_fds_and_the_next_does_the_rest(slow: SlowVolume) -> None:
    for n in range(4):
        fill(slow.backing / f"top/{n}", 1000)
    before = len(os.listdir("/proc/self/fd"))
    done: list[SweepSums] = []
    first = sweep(slow.path / "top", ALL, wishes=SweepWishes(progress=done.append, stops=lambda: len(done) > 2))
    assert (first.is_stopped, len(os.listdir("/proc/self/fd"))) == (True, before)
    second = sweep(slow.path / "top", ALL)
    assert first.sums.n_done + second.sums.n_done == 4000


# A mount of ours


@pytest.mark.parametrize("n_workers", [1, 2])
def test_what_a_sweep_takes_in_a_mount_is_gone_on_both_sides_at_once(mount: Mounted, n_workers: int) -> None:
    wide(mount.backing / "top")
    assert len(names(mount.path / "top")) == 12 * 13  # which the kernel and the daemon remember
    assert sweep(mount.path / "top", EMPTY_FILES, n_workers=n_workers).sums.n_done == 120
    left = {f"d{n}{rest}" for n in range(12) for rest in ("", "/full", "/sub")}
    assert names(mount.path / "top") == names(mount.backing / "top") == left


@pytest.mark.parametrize("side", ["mounted", "source"])
def test_what_is_trashed_in_a_mount_comes_back_on_both_sides(mount: Mounted, side: str) -> None:
    wide(mount.backing / "top")
    before = names(mount.path / "top")
    top = (mount.path if side == "mounted" else mount.backing) / "top"
    swept = sweep(top, EVERY_KIND, ToTrash())
    assert (names(mount.path / "top"), names(mount.backing / "top"), swept.sums.n_failed) == (set(), set(), 0)
    assert swept.orphan is not None
    restore(mount.path, swept.orphan)
    assert names(mount.path / "top") == names(mount.backing / "top") == before


def test_what_is_moved_in_a_mount_is_seen_where_it_is_and_no_more_where_it_was(mount: Mounted) -> None:
    wide(mount.backing / "top")
    (mount.backing / "to").mkdir()
    assert names(mount.path / "to") == set()
    swept = sweep(mount.path / "top", FULL_FILES, ToMove(os.fsencode(mount.path / "to")))
    assert swept.sums.n_done == 12
    assert {name for name in names(mount.path / "to") if "/" in name} == {f"d{n}/full" for n in range(12)}
    assert not [name for name in names(mount.path / "top") if name.endswith("full")]


def test_what_a_mount_shows_is_chosen_by_what_is_there(mount: Mounted) -> None:
    wide(mount.backing / "top")
    found = sorted(printed(mount.path / "top", FULL_FILES))
    assert found == sorted(printed(mount.backing / "top", FULL_FILES)) == sorted(b"d%d/full" % n for n in range(12))
    listed = sweep(mount.path / "top", FULL_FILES, names=[b"d1/full", bytes(mount.path / "top/d2/full"), b"d1/no"])
    assert (listed.sums.n_done, listed.sums.n_missing) == (2, 1)


@pytest.mark.parametrize("act", [ToDelete(), ToTrash(), ToCount(ToDelete())])
@pytest.mark.parametrize("where", ["in the mount", "behind it"])
def test_what_is_mounted_in_a_mount_or_behind_it_is_skipped(volume: Path, mount: Mounted, act: Act, where: str) -> None:
    make_tree(mount.backing / "top", {"d": {"on": "1", "mnt": {}, "f": ""}})
    make_tree(volume / "other", {"f": ""})
    top = (mount.path if where == "in the mount" else mount.backing) / "top"
    with bind_mount(volume / "other", top / "d/mnt"), bind_mount(volume / "other/f", top / "d/on"):
        swept = sweep(mount.path / "top", ALL, act)
        assert (swept.sums.n_done, swept.sums.n_mounts, swept.sums.n_failed) == (1, 2, 0)
    assert names(volume / "other") == {"f"}
