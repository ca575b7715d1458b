"""The ordinary commands on paths in a mount of ours: the store's work behind it, the renames on its names."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from fusefs.core.errors import NoBacking
from fusefs.core.selection import Selection
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.reaper.reap import reap
from fusefs.store.as_owner import swap_for_owner
from fusefs.store.mounted_paths import refuse_mounted
from fusefs.store.stage import SwapOptions
from fusefs.store.swap import own_folder
from fusefs.store.victim import find_scope
from fusefs.sweep.request import Request, ToTrash
from fusefs.sweep.run import run
from tests.support.background_processes import reading
from tests.support.crash_scenarios import DyingAfter
from tests.support.foreground_mount import Mounted
from tests.support.make_trees import snapshot
from tests.support.mount_and_backing import ALICE, NOGROUP, STAGED, both, hers, opened
from tests.support.open_files import held
from tests.support.other_users import as_user
from tests.support.store_verbs import (
    DyingAt,
    entries,
    in_child,
    raw,
    reap_now,
    recover_all,
    remove,
    restore,
    swap,
    tree_of,
)
from tests.support.store_verbs import opened as opened_store

pytestmark = pytest.mark.needs("root", "fuse")


# Swap and rm


def test_exchange_is_one_of_the_mounts_own_names_whichever_path_was_typed(mount: Mounted, job: Path) -> None:
    for path in both(mount, job):
        with opened(job) as where:
            swapped = swap(path)
            assert where() == str(mount.path / STAGED / swapped.id / "tree")


def test_removal_is_one_of_the_mounts_own_names_and_comes_back_at_once(mount: Mounted, job: Path) -> None:
    before = snapshot(job)
    with opened(job) as where:
        removed = remove(job)
        assert where() == str(mount.path / STAGED / removed.id / "tree")
        assert not job.exists()
        restore(mount.path, removed.id)
        assert where() == str(job)
    assert snapshot(job) == before


def test_all_of_the_stores_work_is_done_behind_the_mount(mount: Mounted, job: Path) -> None:
    device = os.stat(mount.path).st_dev
    seen = set()

    class Watching(Kernel):
        def lock(self, fd: int) -> bool:
            seen.add(os.fstat(fd).st_dev)
            return super().lock(fd)

        def fsync(self, fd: int) -> None:
            seen.add(os.fstat(fd).st_dev)
            super().fsync(fd)

        def mkdir(self, dir_fd: int, name: bytes, mode: int = 0o700) -> None:
            seen.add(os.fstat(dir_fd).st_dev)
            super().mkdir(dir_fd, name, mode)

    identifier = swap(job, Watching()).id
    restore(mount.path, identifier, Watching())
    assert seen
    assert device not in seen


def test_a_container_that_the_kernel_can_t_move_at_the_moment_is_looked_for_again(mount: Mounted, job: Path) -> None:
    device = os.stat(mount.path).st_dev

    class Crowded(Kernel):
        """Another process renames in the mount at the first looks: the kernel says ESTALE then (fs/dcache.c)."""

        left = 3

        def open_beneath(self, dir_fd: int, path: bytes, flags: int = os.O_PATH | os.O_NOFOLLOW) -> Fd:
            if self.left and b"/stage/" in path and os.fstat(dir_fd).st_dev == device:
                self.left -= 1
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return super().open_beneath(dir_fd, path, flags)

    kernel = Crowded()
    swap(job, kernel)
    assert kernel.left == 0
    assert os.listdir(job) == []


# Restore


def test_a_restored_tree_is_there_at_once(mount: Mounted, job: Path) -> None:
    before = snapshot(job)
    for volume in both(mount, mount.path):
        swapped = swap(job)
        with opened(tree_of(swapped)) as where:
            restore(volume, swapped.id)
            assert where() == str(job)
        assert snapshot(job) == before


@pytest.mark.parametrize("side", [0, 1])
def test_restore_to_another_name(mount: Mounted, job: Path, side: int) -> None:
    before = snapshot(job)
    swapped = swap(job)
    with opened(tree_of(swapped)) as where:
        restore(mount.path, swapped.id, to=both(mount, mount.path / "job2")[side])
        assert where() == str(mount.path / "job2")
    assert snapshot(mount.path / "job2") == before


def test_a_part_is_restored(mount: Mounted, job: Path) -> None:
    swapped = swap(job)
    with opened(tree_of(swapped) / "deep") as where:
        restore(mount.path, swapped.id, inside=b"deep")
        assert where() == str(job / "deep")
    assert os.listdir(job) == ["deep"]
    restore(mount.path, swapped.id, inside=b"results", to=mount.path / "file")
    assert (mount.path / "file").read_text() == "x"


# Users


@pytest.mark.parametrize("mode", [0o755, 0o555, 0o000])
@pytest.mark.usefixtures("job")
def test_a_user_swaps_and_restores(mount: Mounted, mode: int) -> None:
    her_job = hers(mount, mode)
    before = snapshot(her_job)
    swapped = as_user(ALICE, lambda: swap(her_job))
    assert snapshot(her_job) == before[:1]
    assert snapshot(tree_of(swapped)) == before
    as_user(ALICE, lambda: restore(mount.path, swapped.id))
    assert snapshot(her_job) == before


@pytest.mark.usefixtures("job")
def test_root_restores_a_users_orphan_as_that_user(mount: Mounted) -> None:
    her_job = hers(mount)
    before = snapshot(her_job)
    swapped = as_user(ALICE, lambda: swap(her_job))
    with opened(tree_of(swapped)) as where:
        restore(mount.path, swapped.id)
        assert where() == str(her_job)
    assert snapshot(her_job) == before


@pytest.mark.usefixtures("job")
def test_root_restores_a_users_orphan_elsewhere_by_root_s_own_rename(mount: Mounted) -> None:
    her_job = hers(mount)
    swapped = as_user(ALICE, lambda: remove(her_job))
    with opened(tree_of(swapped)) as where:
        restore(mount.path, swapped.id, to=mount.path / "job2")
        assert where() == str(mount.path / "job2")


@pytest.mark.usefixtures("job")
def test_root_swaps_for_the_owner(mount: Mounted) -> None:
    her_job = hers(mount)
    os.chown(her_job, ALICE, NOGROUP)
    with opened(her_job) as where:
        swapped = swap_for_owner(Kernel(), raw(her_job), SwapOptions())
        # Root may have looked at her folder, and moved it, by now: the kernel goes by the names that it saw.
        ways = (mount.path / f".trashd/{area}/{ALICE}/stage" / swapped.id / "tree" for area in ("u", "new"))
        assert where() in map(str, ways)
    assert os.listdir(her_job) == []


# Reaping


def test_an_orphan_is_reaped_behind_the_mount(mount: Mounted, job: Path) -> None:
    identifier = swap(job).id
    device = os.stat(mount.path).st_dev
    gone: list[int] = []

    class Watching(Kernel):
        def rmdir(self, dir_fd: int, name: bytes) -> None:
            gone.append(os.fstat(dir_fd).st_dev)
            super().rmdir(dir_fd, name)

    assert reap_now(mount.path, identifier, Watching()).report.n_failed == 0
    assert gone
    assert device not in gone
    assert entries(mount.path) == []


@pytest.mark.usefixtures("job")
def test_the_reaper_refuses_a_directory_of_a_mount(mount: Mounted) -> None:
    kernel = Kernel()
    identifier = swap(mount.path / "job").id
    # Opened by its path in the mount, as no command does.
    with opened_store(mount.path) as store, own_folder(store) as folder, pytest.raises(NoBacking):
        reap(folder, identifier)
    with kernel.open_path(raw(mount.path)) as mounted, pytest.raises(NoBacking, match="nothing is reaped through it"):
        refuse_mounted(kernel, mounted)
    with kernel.open_path(raw(mount.backing)) as backing:
        refuse_mounted(kernel, backing)


def test_a_container_that_mv_takes_out_through_the_mount_is_whole(mount: Mounted, job: Path) -> None:
    container = tree_of(swap(job)).parent
    os.truncate(container / "record.json", 40)
    rescued = mount.path / "rescued"
    os.rename(container, rescued)
    assert sorted(os.listdir(rescued)) == ["record.json", "tree"]
    assert snapshot(rescued) == snapshot(mount.backing / "rescued")
    remove(rescued)


# Sweep


def test_what_is_open_follows_into_the_store_as_the_mount_shows_it(mount: Mounted, job: Path) -> None:
    with opened(job / "deep") as where:
        swept = run(Kernel(), Request(raw(job), Selection(types=frozenset("d")), ToTrash()))
        assert where() == str(mount.path / f".trashd/u/0/stage/{swept.orphan}/tree/deep")
    assert not (job / "deep").exists()


def test_directory_has_both_sides_whichever_path_was_typed(mount: Mounted, job: Path) -> None:
    for path in both(mount, job):
        with find_scope(Kernel(), raw(path)) as scope:
            assert scope.sides.mounted is not None
            assert os.fstat(scope.sides.fd).st_dev == (mount.backing / "job").stat().st_dev


# swap --keep: clients see what is kept all the time, with its right number of links


KEEP = SwapOptions(keep=("results", "deep"))


def seen(path: Path) -> dict[str, tuple[int, int]]:
    """The inode and the number of links of each name, as a client of the mount is told."""
    return {name: ((st := (path / name).lstat()).st_ino, st.st_nlink) for name in sorted(os.listdir(path))}


def test_clients_see_what_is_kept_and_how_many_links_it_has(mount: Mounted, job: Path) -> None:
    for path in both(mount, job):
        # Once the kernel has forgotten a file, it may get another inode number: one that a deleted file had till then.
        with held(job / "results", job / "deep"):
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
