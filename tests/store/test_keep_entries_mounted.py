"""`swap --keep` in a mount of ours: its clients see what is kept all the time, with its right number of links."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fusefs.linux.kernel import Kernel
from fusefs.store.stage import SwapOptions
from tests.support.background_processes import reading
from tests.support.crash_scenarios import DyingAfter
from tests.support.foreground_mount import Mounted
from tests.support.make_trees import snapshot
from tests.support.mount_and_backing import both
from tests.support.store_verbs import DyingAt, in_child, recover_all, restore, swap, tree_of

pytestmark = pytest.mark.needs("root", "fuse")

KEEP = SwapOptions(keep=("results", "deep"))


def seen(path: Path) -> dict[str, tuple[int, int]]:
    """The inode and the number of links of each name, as a client of the mount is told."""
    return {name: ((st := (path / name).lstat()).st_ino, st.st_nlink) for name in sorted(os.listdir(path))}


def test_clients_see_what_is_kept_and_how_many_links_it_has(mount: Mounted, job: Path) -> None:
    for path in both(mount, job):
        before = seen(job)
        swapped = swap(path, options=KEEP)
        assert seen(job) == {**before, "results": (before["results"][0], 2)}
        assert (job / "deep/er").read_text() == "y"
        restore(mount.path, swapped.id)
        assert seen(job) == before


def test_open_file_is_the_one_that_is_kept(job: Path) -> None:
    with (job / "results").open("r+") as file, (job / "deep/er").open("r+") as deep:
        swapped = swap(job, options=KEEP)
        file.write("new")
        deep.write("new")
        file.flush()
        deep.flush()
        assert [(job / name).read_text() for name in ("results", "deep/er")] == ["new", "new"]
        assert (tree_of(swapped) / "results").read_text() == "new"


def test_client_that_opens_it_all_the_time_never_misses_it_in_a_swap(mount: Mounted, job: Path) -> None:
    for _ in range(10):
        with reading(job / "results"):
            swapped = swap(job, options=KEEP)
        # Not beside a restore: who has just found the fresh directory may ask it for the name when that has gone.
        restore(mount.path, swapped.id)


def test_recovery_completes_it_for_clients_too(mount: Mounted, job: Path) -> None:
    before = snapshot(job)
    killed = in_child(lambda: swap(job, Kernel(DyingAfter("exchange")), KEEP))
    assert killed == DyingAt.EXIT_CODE
    assert os.listdir(job) == ["results"]
    assert recover_all(mount.backing) == []
    assert sorted(os.listdir(job)) == ["deep", "results"]
    assert (job / "deep/er").read_text() == "y"
    [orphan] = (mount.backing / ".trashd/u/0/orphans").iterdir()
    restore(mount.path, orphan.name)
    assert snapshot(job) == before
