"""The ordinary commands on paths in a mount of ours: where the store is, what is refused, killed before any call."""

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusefs.cli.holders import holders_of, holders_of_path
from fusefs.core.errors import IsMountPoint, MountInside, NoBacking, NotFound, Refused
from fusefs.core.selection import Selection
from fusefs.linux import mountinfo
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.reaper.reap import reap
from fusefs.store.as_owner import swap_for_owner
from fusefs.store.check_swap import check_swap
from fusefs.store.mounted_paths import refuse_mounted
from fusefs.store.orphans import list_all_containers
from fusefs.store.stage import SwapOptions
from fusefs.store.swap import open_own_folder
from fusefs.store.victim import find_scope
from fusefs.sweep.request import Request, ToTrash
from fusefs.sweep.run_sweep import run_request
from tests.support.background_processes import reading
from tests.support.crash_scenarios import DyingAfter, assert_nothing_lost, deaths, home, settle
from tests.support.foreground_mount import SHARED_LIMIT_S, Mounted, trashd_mount
from tests.support.make_trees import Dir, make_tree, snapshot
from tests.support.mount_and_backing import ALICE, NOGROUP, STAGED, TREE, both, hers, opened
from tests.support.mount_namespaces import tmpfs_elsewhere
from tests.support.open_files import held
from tests.support.other_users import as_user
from tests.support.real_filesystems import bind_mount, project_quota_volume, set_project, tmpfs_volume
from tests.support.store_verbs import (
    DyingAt,
    assert_silent,
    entries,
    in_child,
    init,
    raw,
    reap_now,
    recover_all,
    remove,
    restore,
    swap,
    tree_of,
)
from tests.support.store_verbs import opened as opened_store
from tests.support.verb_scenarios import SCENES

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
    with opened_store(mount.path) as store, open_own_folder(store) as folder, pytest.raises(NoBacking):
        reap(folder, identifier)
    with (
        kernel.open_path(raw(mount.path)) as mounted,
        pytest.raises(NoBacking, match="orphans can't be reaped through a mount"),
    ):
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
        swept = run_request(Kernel(), Request(raw(job), Selection(types=frozenset("d")), ToTrash()))
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


# Where the store is


def test_a_user_gets_a_store_where_he_may_make_one() -> None:
    with tmpfs_volume() as path:
        make_tree(path / "source", {"home": Dir({"job": Dir(TREE, owner=(ALICE, ALICE))}, owner=(ALICE, ALICE))})
        with trashd_mount(path / "source") as bare:
            shutil.rmtree(bare.backing / ".trashd")  # as if it could not be made at the mount's start
            job = bare.path / "home" / "job"
            before = snapshot(job)
            swapped = as_user(ALICE, lambda: swap(job))
            assert swapped.volume == raw(bare.backing / "home")  # which is there when the mount is gone
            assert swapped.store == raw(bare.path / f"home/.trashd-{ALICE}/u/{ALICE}")
            with opened(tree_of(swapped)) as where:
                as_user(ALICE, lambda: restore(bare.path / "home", swapped.id))
                assert where() == str(job)
            assert snapshot(job) == before


@pytest.mark.needs("loop")
def test_across_a_quota_project_a_lower_store_takes_it() -> None:
    with project_quota_volume("xfs") as path:
        set_project(path, 1)
        init(path)
        make_tree(path / "project", {})
        set_project(path / "project", 7)
        point = path.with_name("mounted")
        point.mkdir()
        with trashd_mount(path, point) as bare:
            job = make_tree(bare.path / "project" / "job", TREE)
            before = snapshot(job)
            removed = remove(job)
            assert removed.store == raw(bare.path / "project/.trashd/u/0")
            assert not job.exists()
            with opened(tree_of(removed)) as where:
                restore(bare.path, removed.id)
                assert where() == str(job)
            assert snapshot(job) == before
        assert_silent(path)


def test_of_two_mounts_the_one_that_was_typed_is_gone_through(mount: Mounted, job: Path) -> None:
    other = mount.backing.parent / "other-mount"
    other.mkdir()
    with trashd_mount(mount.backing, other):
        for typed in (job, other / "job"):
            with opened(typed) as where:
                swapped = swap(typed)
                assert where() == str(typed.parent / STAGED / swapped.id / "tree")
            restore(typed.parent, swapped.id)
            assert [sorted(os.listdir(path)) for path in (typed, mount.backing / "job")] == [sorted(TREE)] * 2


def test_all_volumes_name_a_mounted_one_by_its_mount(mount: Mounted, job: Path) -> None:
    swapped = swap(mount.backing / "job")
    assert [entry.origin for entry in list_all_containers(Kernel(), []) if entry.id == swapped.id] == [raw(job)]


def test_a_bind_mount_of_a_part_of_the_mount_has_its_own_store(mount: Mounted) -> None:
    make_tree(mount.path / "part", {"job": TREE})
    (mount.backing.parent / "view").mkdir()
    with bind_mount(mount.path / "part", mount.backing.parent / "view") as view:
        before = snapshot(view / "job")
        swapped = swap(view / "job")
        assert swapped.store == raw(view / ".trashd/u/0")
        assert (os.listdir(mount.path / "part" / "job"), os.listdir(view / "job")) == ([], [])
        restore(view, swapped.id)
        assert snapshot(mount.path / "part" / "job") == before


# What is refused


@pytest.mark.parametrize("typed", [0, 1])
@pytest.mark.parametrize("mounted", [0, 1])
@pytest.mark.parametrize("where", [".", "deep"])
def test_what_holds_a_mount_on_either_side_is_refused(
    mount: Mounted, job: Path, typed: int, mounted: int, where: str
) -> None:
    other = make_tree(mount.backing.parent / "other", {})
    with bind_mount(other, both(mount, job)[mounted] / where), pytest.raises((MountInside, IsMountPoint)):
        swap(both(mount, job)[typed])
    other.rmdir()
    assert sorted(os.listdir(job)) == sorted(TREE)


@pytest.mark.parametrize("typed", [0, 1])
@pytest.mark.parametrize("mounted", [0, 1])
def test_what_holds_a_mount_of_another_namespace_is_refused(
    mount: Mounted, job: Path, typed: int, mounted: int
) -> None:
    with (
        tmpfs_elsewhere(both(mount, job)[mounted] / "deep"),
        pytest.raises(Refused, match="mount namespace of process"),
    ):
        swap(both(mount, job)[typed])


def test_a_backing_path_that_is_something_else_is_told_without_any_store_too() -> None:
    with tmpfs_volume() as path, tmpfs_volume() as other:
        make_tree(path / "source", {"job": TREE})
        make_tree(other / "job", TREE)
        with trashd_mount(path / "source") as bare:
            for verb in (swap, remove):
                with bind_mount(other, path / "source"), pytest.raises(NoBacking):
                    verb(bare.path / "job")
        for place in (other, path / "source"):
            assert sorted(os.listdir(place / "job")) == sorted(TREE)
        assert entries(other) == []


def test_a_backing_path_that_leads_to_the_mount_itself_is_told(mount: Mounted, job: Path) -> None:
    with bind_mount(mount.path, mount.backing), pytest.raises(NoBacking):
        swap(job)
    assert sorted(os.listdir(job)) == sorted(TREE)


@pytest.mark.usefixtures("job")
def test_a_backing_path_that_one_may_not_enter_is_told(mount: Mounted) -> None:
    her_job = hers(mount)
    mount.backing.parent.chmod(0o700)
    try:
        with pytest.raises(NoBacking) as caught:
            as_user(ALICE, lambda: swap(her_job))
    finally:
        mount.backing.parent.chmod(0o755)
    assert ".trashd/drop/" in caught.value.hint


def test_a_user_s_mount_is_no_way_for_others(mount: Mounted, job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parse = mountinfo._parse_mounts
    hers = lambda table: tuple(one._replace(owner=ALICE) if one.is_fuse() else one for one in parse(table))  # noqa: E731
    monkeypatch.setattr(mountinfo, "_parse_mounts", hers)
    with pytest.raises(NoBacking, match=f"uid {ALICE} mounted it"):
        swap(job)
    with opened(job) as where:
        swap(mount.backing / "job")
        assert where() == str(job)  # the exchange was not its mount's


def test_the_backing_path_of_a_dead_mount_is_worked_on_directly() -> None:
    with tmpfs_volume() as path:
        make_tree(path / "source", {"job": TREE})
        init(path / "source")
        with trashd_mount(path / "source", expect_end=True) as mounted:
            mounted.fuse.abort()
            swapped = swap(path / "source" / "job")
            restore(path / "source", swapped.id)
            with pytest.raises((NoBacking, NotFound, OSError)):
                swap(mounted.path / "job")
        assert sorted(os.listdir(path / "source" / "job")) == sorted(TREE)
        assert_silent(path / "source")


@pytest.mark.parametrize("asked", [0, 1])
def test_holders_of_an_orphan_are_found_on_both_sides(mount: Mounted, job: Path, asked: int) -> None:
    pids = []
    for path in both(mount, job):
        pid = os.fork()
        if pid == 0:
            os.chdir(path / "deep")
            os.kill(os.getpid(), 19)
            os._exit(0)
        pids.append(pid)
        os.waitpid(pid, os.WUNTRACED)
    try:
        assert {holder.pid for holder in holders_of_path(Kernel(), raw(both(mount, job)[asked])).holders} == set(pids)
        swapped = swap(job)
        [entry] = entries(both(mount, mount.path)[asked])
        [held] = holders_of([os.path.join(entry.path, b"tree")])
        assert {(holder.pid, holder.kind, holder.path) for holder in held.holders} == {
            (pid, "cwd", b"deep") for pid in pids
        }
        assert entry.id == swapped.id
    finally:
        for pid in pids:
            os.kill(pid, 9)
            os.waitpid(pid, 0)


def test_preflight_tells_of_the_backing_filesystem(mount: Mounted, job: Path) -> None:
    found = check_swap(Kernel(), raw(job))
    assert found.filesystem in ("tmpfs", "ext4")
    assert (found.store, found.method, found.refusals) == (raw(mount.path / ".trashd"), "exchange", ())


NAMES = [
    "swap",
    "swap-two-rename-lent",
    "swap-for-owner",
    "rm",
    "restore-late",
    "restore-parts",
    "restore-inside-free",
    "recover-swap-in-the-gap",
    "recover-restore-in-the-gap",
]


@pytest.fixture(scope="module")
def killed_mount() -> Iterator[Mounted]:
    """A mounted tmpfs, which the scenes know by its backing path: they look at the store's files there."""
    with tmpfs_volume() as path:
        (path / "source").mkdir()
        with trashd_mount(path / "source", options=["timeout=0"], limit_s=SHARED_LIMIT_S) as mounted:
            yield mounted


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_lost_by_a_kill_before_any_call(killed_mount: Mounted, name: str) -> None:
    """tests/crash/test_killed.py has all calls of each; here every other one shows what the mount makes of it."""
    scene = SCENES[name]
    for n, before in deaths(scene, killed_mount.backing, NAMES.index(name), 2):
        try:
            if scene.is_gapless:
                assert home(killed_mount.path).is_dir(), "the name does not resolve (I1)"
            settle(killed_mount.backing)
            assert_nothing_lost(scene, killed_mount.backing, before)
            seen = [sorted(os.listdir(home(path).parent)) for path in (killed_mount.path, killed_mount.backing)]
            assert seen[0] == seen[1]
            if home(killed_mount.backing).is_dir():
                assert os.listdir(home(killed_mount.path)) == os.listdir(home(killed_mount.backing))
        except BaseException as error:
            error.add_note(f"killed before call {n}")
            raise
