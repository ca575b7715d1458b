"""Several users of one service: each with their own rights, in their own stores, and none in another's way."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusefs.core.container_states import State
from fusefs.core.names import user_store_name
from fusefs.core.service_status import VolumePhase
from fusefs.linux.kernel import Kernel
from fusefs.store.as_owner import swap_for_owner
from fusefs.store.registry_lines import XATTR
from fusefs.store.stage import SwapOptions
from tests.support.crash_scenarios import DyingAfter, end_of
from tests.support.make_trees import IMMUTABLE, Dir, File, fill, make_tree, remove_tree_hard, roomy_volume, set_flags
from tests.support.other_users import as_user
from tests.support.proc_stat import status_of
from tests.support.real_filesystems import btrfs_subvolume, loop_volume, project_quota_volume, set_project, tmpfs_volume
from tests.support.service_process import QUICK, SLOW, begin_large, is_begun, outwait, service
from tests.support.small_orphans import EXPIRED, ids, orphan_in, orphan_of
from tests.support.store_verbs import entries, init, raw, remove, swap
from tests.support.user_homes import own_stores

pytestmark = pytest.mark.needs("root")


ALICE, BOB = 12101, 12102


def home_of(uid: int, volume: Path) -> Path:
    return make_tree(volume / f"home-{uid}", Dir(owner=(uid, uid)))


def large_of(uid: int, volume: Path, n_files: int, options: SwapOptions = EXPIRED) -> str:
    large = home_of(uid, volume) / "large"
    return as_user(uid, lambda: str(swap(fill(large, n_files), options=options).id))


def orphan_with_a_file_of_roots(uid: int, volume: Path) -> str:
    tree = Dir({"mine": "1", "roots": Dir({"a": "1"})}, owner=(uid, uid))
    job = make_tree(home_of(uid, volume) / "job", tree)
    return as_user(uid, lambda: str(swap(job, options=EXPIRED).id))


def uids_of(pids: list[int]) -> set[tuple[str, ...]]:
    """Real, effective, saved and filesystem uids."""
    return {tuple(status_of(pid)["Uid"]) for pid in pids}


def test_each_users_orphans_are_reaped_by_processes_of_his(base: Path) -> None:
    with roomy_volume("tmpfs") as volume:
        for uid in (ALICE, BOB):
            large_of(uid, volume, 20_000)
        with service(base, volume, config=SLOW) as running:
            everybody = {(str(uid),) * 4 for uid in (0, ALICE, BOB)}  # root has a folder too
            running.until(lambda: uids_of(running.children()) == everybody)
            running.until(lambda: len(running.volume(volume).current) == 2)
            assert uids_of(running.children()) == everybody


def test_what_a_user_can_not_delete_is_quarantined_and_others_go_on(base: Path, volume: Path) -> None:
    kept = orphan_with_a_file_of_roots(ALICE, volume)
    orphan_of(BOB, volume, EXPIRED)
    with service(base, volume) as running:
        running.until(lambda: running.volume(volume).n_quarantined and ids(volume) == {kept})
    (entry,) = entries(volume)
    assert entry.state is State.QUARANTINE
    assert Path(os.fsdecode(entry.path), "tree/roots/a").exists()


def test_small_orphan_does_not_wait_behind_anothers_large_one(base: Path) -> None:
    with roomy_volume("tmpfs") as volume:
        large = large_of(ALICE, volume, 50_000)
        with service(base, volume, config=SLOW) as running:
            running.until(lambda: is_begun(volume, large, 50_000))
            small = large_of(BOB, volume, 10)
            running.until(lambda: small not in ids(volume))
            assert large in ids(volume)


def test_small_orphan_does_not_wait_behind_ones_own_large_one(base: Path) -> None:
    with roomy_volume("tmpfs") as volume, service(base, volume, config=SLOW) as running:
        large = begin_large(running, volume)
        outwait(running, volume)
        assert large in ids(volume)


@pytest.mark.needs("loop")
def test_small_files_do_not_wait_behind_anothers_huge_one(base: Path) -> None:
    with loop_volume("ext4", 600) as volume:
        init(volume)
        tree = make_tree(
            home_of(ALICE, volume) / "huge", Dir({"file": File(owner=(ALICE, ALICE))}, owner=(ALICE, ALICE))
        )
        with (tree / "file").open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, 500 << 20)
        huge = as_user(ALICE, lambda: str(swap(tree, options=EXPIRED).id))
        with service(base, volume, config='[defaults]\nmax_bytes = "20M/s"\n') as running:
            running.until(lambda: running.volume(volume).freed_bytes)
            small = orphan_of(BOB, volume, EXPIRED).id
            running.until(lambda: small not in ids(volume))
            assert huge in ids(volume)


def test_what_a_killed_root_left_of_a_swap_for_its_owner_is_given_to_him(base: Path, volume: Path) -> None:
    job = make_tree(home_of(ALICE, volume) / "job", Dir({"a": "1"}, owner=(ALICE, ALICE)))
    end_of(lambda: swap_for_owner(Kernel(DyingAfter("exchange")), raw(job), SwapOptions()))
    assert [entry.state for entry in entries(volume)] == [State.STAGE]
    with service(base, volume) as running:
        running.until(lambda: [(entry.uid, entry.state) for entry in entries(volume)] == [(ALICE, State.ORPHANS)])


@pytest.mark.parametrize("has_worked", [False, True])
def test_user_who_comes_to_an_idle_volume_is_served(base: Path, volume: Path, has_worked: bool) -> None:
    if has_worked:
        orphan_in(volume, options=EXPIRED)
    with service(base, volume) as running:
        running.until(lambda: not ids(volume))
        running.until_phase(volume, VolumePhase.IDLE)
        orphan_of(BOB, volume, EXPIRED)
        running.until(lambda: not ids(volume))


@pytest.mark.needs("loop", "btrfs")
def test_lower_store_on_a_subvolume_is_served(base: Path) -> None:
    with loop_volume("btrfs") as volume:
        init(volume)
        btrfs_subvolume(volume, "sub").chmod(0o755)
        home = home_of(ALICE, volume / "sub")
        with service(base, volume) as running:
            before = as_user(ALICE, lambda: swap(make_tree(home / "job", {"a": "1"}), options=EXPIRED))
            assert before.store.startswith(os.fsencode(volume / "sub"))
            running.until(lambda: not ids(volume))
            as_user(ALICE, lambda: swap(make_tree(home / "again", {"a": "1"}), options=EXPIRED))
            running.until(lambda: not ids(volume))


@pytest.mark.needs("loop", "xfs")
def test_lower_store_of_a_project_is_served(base: Path) -> None:
    with project_quota_volume("xfs") as volume:
        set_project(volume, 1)
        init(volume)
        project = make_tree(volume / "project", Dir(owner=(ALICE, ALICE)))
        set_project(project, 7)
        removed = as_user(ALICE, lambda: remove(make_tree(project / "job", {"a": "1"}), options=EXPIRED))
        assert removed.store.startswith(os.fsencode(project))
        with service(base, volume) as running:
            running.until(lambda: not ids(volume))


AS_ROOT = '[defaults]\ndelete_as = "root"\nusers = ["{uid}"]\n'


def test_with_roots_authority_what_the_user_could_not_delete_goes(base: Path, volume: Path) -> None:
    orphan_with_a_file_of_roots(ALICE, volume)
    with service(base, volume, config=AS_ROOT.format(uid=ALICE)) as running:
        running.until(lambda: not ids(volume))


def test_roots_authority_is_for_those_alone_who_are_listed(base: Path, volume: Path) -> None:
    kept = orphan_with_a_file_of_roots(BOB, volume)
    orphan_with_a_file_of_roots(ALICE, volume)
    with service(base, volume, config=AS_ROOT.format(uid=ALICE)) as running:
        running.until(lambda: [(entry.id, entry.state) for entry in entries(volume)] == [(kept, State.QUARANTINE)])


def immutable_orphan(uid: int, volume: Path) -> str:
    job = make_tree(home_of(uid, volume) / "job", Dir({"sub": Dir({"a": "1"}, owner=(uid, uid))}, owner=(uid, uid)))
    set_flags(job / "sub/a", IMMUTABLE)
    return as_user(uid, lambda: str(swap(job, options=EXPIRED).id))


@pytest.fixture
def ext4() -> Iterator[Path]:
    """An ext4 with a store, on which files can be immutable; what is left goes with it."""
    with loop_volume("ext4", 16) as path:
        init(path)
        yield path
        remove_tree_hard(path / ".trashd")


@pytest.mark.needs("loop")
def test_flags_stay_without_clears_flags(base: Path, ext4: Path) -> None:
    immutable_orphan(ALICE, ext4)
    with service(base, ext4, config=AS_ROOT.format(uid=ALICE)) as running:
        running.until(lambda: {entry.uid for entry in entries(ext4) if entry.state is State.QUARANTINE} == {0})


@pytest.mark.needs("loop")
def test_flags_are_cleared_with_clears_flags(base: Path, ext4: Path) -> None:
    immutable_orphan(ALICE, ext4)
    with service(base, ext4, config=AS_ROOT.format(uid=ALICE) + "clears_flags = true\n") as running:
        running.until(lambda: not ids(ext4))


NOBODYS = 61234
"""A user whom the accounts don't list, and who has no home that could have a registry."""
OFTEN = f'poll = "1s"\n{QUICK}'


@pytest.fixture
def shared() -> Iterator[Path]:
    with tmpfs_volume(options=("mode=1777",)) as volume:
        yield volume


def own(volume: Path) -> Path:
    return volume / os.fsdecode(user_store_name(NOBODYS))


def thrown(volume: Path) -> Path:
    """The container of what the user threw away, due at once."""
    path = make_tree(volume / "job", Dir({"file": "x"}, owner=(NOBODYS, NOBODYS)))
    swapped = as_user(NOBODYS, lambda: swap(path, options=EXPIRED))
    path.rmdir()
    return Path(os.fsdecode(swapped.store), "orphans", str(swapped.id))  # a service may have deleted it already


def test_it_is_served_without_a_registry_before_and_after_roots_init(shared: Path, base: Path) -> None:
    first = thrown(shared)
    assert first.is_relative_to(own(shared))
    with service(base, config=OFTEN) as running:
        running.until(lambda: not first.exists())
        second = thrown(shared)
        running.until(lambda: not second.exists())
        running.until(lambda: {one.owner for one in own_stores(running)} == {NOBODYS})
        third = thrown(shared)
        init(shared)
        fourth = thrown(shared)
        assert not fourth.is_relative_to(own(shared))
        running.until(lambda: not third.exists() and not fourth.exists())
    assert {path.lstat().st_uid for path in (own(shared), *own(shared).rglob("*"))} == {NOBODYS}
    assert XATTR not in os.listxattr(own(shared))


def test_a_copy_is_not(shared: Path, base: Path) -> None:
    thrown(shared)
    subprocess.run(["cp", "-a", own(shared), shared / "copy"], check=True)
    shutil.rmtree(own(shared))
    (shared / "copy").rename(own(shared))
    with tmpfs_volume(options=("mode=1777",)) as other, service(base, config=OFTEN) as running:
        one = thrown(other)
        running.until(lambda: not one.exists())
        assert list(own(shared).glob(f"u/{NOBODYS}/orphans/*"))


def test_one_that_others_may_enter_is_not(shared: Path, base: Path) -> None:
    kept = thrown(shared)
    own(shared).chmod(0o750)
    with tmpfs_volume(options=("mode=1777",)) as other, service(base, config=OFTEN) as running:
        one = thrown(other)
        running.until(lambda: not one.exists())
        assert kept.exists()
