"""A sweep of a directory in a mount of ours: a process that looks there sees its names go, and come back, at once."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fusefs.core.selection import Selection
from fusefs.linux.kernel import Kernel
from fusefs.store.victim import find_scope
from fusefs.sweep.request import Request, ToTrash
from fusefs.sweep.run import run
from tests.support.foreground_mount import Mounted
from tests.support.make_trees import snapshot
from tests.support.mount_and_backing import both, opened
from tests.support.store_verbs import entries, raw, restore
from tests.support.trash_without_walk import gather

pytestmark = pytest.mark.needs("root", "fuse")


def looked_up(job: Path) -> Callable[[], list[str]]:
    """Every name below, remembered by the kernel now; and those that it finds there later, asked by name alone."""
    paths = [path for path in (job, *sorted(job.rglob("*"))) if path.stat()]
    return lambda: [str(path.relative_to(job)) for path in paths if path.exists()]


@pytest.mark.parametrize("side", [0, 1], ids=["mounted", "backing"])
def test_names_vanish_at_once_and_come_back_at_once(mount: Mounted, job: Path, side: int) -> None:
    before, there = snapshot(job), looked_up(job)
    gathered = gather(both(mount, job)[side], ["results", "deep/er"])
    assert gathered.refused == ()
    assert there() == [".", "deep"]
    assert [sorted(os.listdir(path)) for path in both(mount, job)] == [["deep"], ["deep"]]
    restore(mount.path, gathered.orphan or "")
    assert there() == [".", "deep", "deep/er", "results"]
    assert [snapshot(path) for path in both(mount, job)] == [before, before]


def test_what_is_open_follows_into_the_store_as_the_mount_shows_it(mount: Mounted, job: Path) -> None:
    with opened(job / "deep") as where:
        swept = run(Kernel(), Request(raw(job), Selection(types=frozenset("d")), ToTrash()))
        assert where() == str(mount.path / f".trashd/u/0/stage/{swept.orphan}/tree/deep")
    assert not (job / "deep").exists()


def test_restore_of_a_part_is_seen_at_once(mount: Mounted, job: Path) -> None:
    gathered = gather(job, ["deep/er", "deep"])
    there = looked_up(job)
    assert not (job / "deep").exists()
    restore(mount.path, gathered.orphan or "", inside=b"deep/er")
    assert (job / "deep/er").read_text() == "y"
    assert there() == [".", "results"]
    assert entries(mount.path) == []


def test_what_is_taken_in_the_mount_meanwhile_is_told(mount: Mounted, job: Path) -> None:
    gathered = gather(job, ["results", "deep/er"])
    (job / "results").write_text("new")
    done = restore(mount.path, gathered.orphan or "")
    assert [(one.name, one.errno) for one in done.left] == [(b"results", errno.EEXIST)]
    assert (job / "results").read_text() == "new"
    (job / "results").unlink()
    assert restore(mount.path, gathered.orphan or "").n_left == 0
    assert (job / "results").read_text() == "x"


def test_mounts_root_is_swept(mount: Mounted, job: Path) -> None:
    gathered = gather(mount.path, ["job/results"])
    [entry] = entries(mount.path)
    assert (entry.origin, gathered.volume) == (raw(mount.path), None)
    restore(mount.path, entry.id)
    assert (job / "results").exists()


def test_directory_has_both_sides_whichever_path_was_typed(mount: Mounted, job: Path) -> None:
    for path in both(mount, job):
        with find_scope(Kernel(), raw(path)) as scope:
            assert scope.sides.mounted is not None
            assert os.fstat(scope.sides.fd).st_dev == (mount.backing / "job").stat().st_dev
