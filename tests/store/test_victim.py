"""Where the orphan goes: quota projects, subvolumes, overlays, bind mounts, and volumes whose root is not ours."""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from fusefs.core.container_states import State
from fusefs.core.errors import CrossesBoundary, TrashdError
from fusefs.core.names import STORE
from fusefs.linux.kernel import Kernel
from fusefs.store.as_owner import swap_for_owner
from fusefs.store.backing_and_mount import BackingAndMount
from fusefs.store.make_store import unmake_store
from fusefs.store.stage import SwapOptions
from tests.support.make_trees import Dir, make_tree, snapshot
from tests.support.other_users import as_user
from tests.support.real_filesystems import (
    bind_mount,
    btrfs_subvolume,
    loop_volume,
    overlay_volume,
    project_of,
    project_quota_volume,
    set_project,
    tmpfs_volume,
)
from tests.support.store_verbs import (
    assert_silent,
    calls_of,
    entries,
    folder_of,
    init,
    place,
    raw,
    reap_now,
    remove,
    restore,
    swap,
    users_own,
)

pytestmark = pytest.mark.needs("root")

ALICE = 1001
NOGROUP = 65534


@pytest.fixture
def xfs() -> Iterator[Path]:
    """An xfs of project 1 with a store, and a directory of project 7: no rename leads from one into the other."""
    with project_quota_volume("xfs") as path:
        set_project(path, 1)
        init(path)
        (path / "project").mkdir()
        set_project(path / "project", 7)
        make_tree(path / "project" / "home", Dir(owner=(ALICE, NOGROUP)))
        yield path


@pytest.fixture
def btrfs() -> Iterator[Path]:
    with loop_volume("btrfs") as path:
        init(path)
        btrfs_subvolume(path, "sub").chmod(0o755)
        make_tree(path / "sub" / "home", Dir(owner=(ALICE, NOGROUP)))
        yield path


@pytest.fixture
def alices() -> Iterator[Path]:
    """A volume whose root is root's, without a store, and a directory of Alice's."""
    with tmpfs_volume() as path:
        make_tree(path / "home", {})
        make_tree(path / "home" / "alice", Dir(owner=(ALICE, ALICE)))
        yield path


def inode_numbers(tree: Path) -> list[int]:
    return [tree.stat().st_ino, *(path.lstat().st_ino for path in sorted(tree.rglob("*")))]


# Project quotas


@pytest.mark.needs("loop", "xfs")
@pytest.mark.parametrize("verb", [swap, remove])
def test_across_a_quota_project_a_lower_store_takes_it(xfs: Path, verb: Callable[[Path], object]) -> None:
    job = xfs / "project" / "job"
    make_tree(job, {"results": "x"})
    inos = inode_numbers(job)
    verb(job)
    [entry] = entries(xfs)
    # An exchange may work where a rename doesn't: the fresh directory is of project 7 too.
    assert verb is swap or entry.path.startswith(raw(xfs / "project" / ".trashd"))
    assert inode_numbers(place(xfs, entry.id) / "tree") == inos, "it was moved, never copied"
    restore(xfs, entry.id)
    assert (job / "results").read_text() == "x"
    assert project_of(job).project_id == 7
    remove(job)
    [entry] = entries(xfs)
    assert reap_now(xfs, entry.id).report.n_failed == 0
    assert_silent(xfs)
    assert_silent(xfs / "project")


@pytest.mark.needs("loop", "xfs")
@pytest.mark.parametrize("says", [b"../..", b"/etc", b"", b"x" * 5000, b"nowhere", b"project/home", b"a\0b"])
def test_a_forged_pointer_leads_nowhere_else(xfs: Path, says: bytes) -> None:
    as_user(ALICE, lambda: make_tree(xfs / "project" / "home" / "first", {}))
    identifier = as_user(ALICE, lambda: str(remove(xfs / "project" / "home" / "first").id))
    pointer = folder_of(xfs, ALICE) / "pointers" / ("0" * 32)
    pointer.write_bytes(says)
    os.chown(pointer, ALICE, ALICE)
    assert [entry.id for entry in entries(xfs)] == [identifier]
    reap_now(xfs, identifier)
    pointer.unlink()
    assert_silent(xfs)


@pytest.mark.needs("loop", "xfs")
def test_a_project_boundary_at_the_victim_itself_is_a_clear_error_and_leaves_nothing(xfs: Path) -> None:
    make_tree(xfs / "outer", {"inner": {"job": {"results": "x"}}})
    set_project(xfs / "outer" / "inner" / "job", 9)
    before = snapshot(xfs / "outer")
    for verb in (swap, remove):
        with suppress(CrossesBoundary):
            restore(xfs, verb(xfs / "outer" / "inner" / "job").id)
        assert (xfs / "outer" / "inner" / "job" / "results").read_text() == "x"
    assert snapshot(xfs / "outer") == before
    assert_silent(xfs)


# Subvolumes


@pytest.mark.needs("loop", "btrfs")
def test_a_lower_orphan_for_its_owner_is_found_through_his_pointer(btrfs: Path) -> None:
    make_tree(btrfs / "sub" / "given", Dir({"results": "hers"}, owner=(ALICE, NOGROUP)))
    swapped = swap_for_owner(Kernel(), raw(btrfs / "sub" / "given"), SwapOptions())
    assert swapped.volume is None  # root's registry names it, and hers will
    identifier = swapped.id
    assert [entry.id for entry in as_user(ALICE, lambda: entries(btrfs))] == [identifier]
    assert reap_now(btrfs, identifier).report.n_failed == 0
    assert_silent(btrfs)


@pytest.mark.needs("loop", "btrfs")
@pytest.mark.parametrize("verb", [swap, remove])
def test_in_a_subvolume_a_lower_store_takes_it(btrfs: Path, verb: Callable[[Path], object]) -> None:
    job = btrfs / "sub" / "job"
    before, inos = snapshot(make_tree(job, {"results": "x"})), inode_numbers(job)
    verb(job)
    [entry] = entries(btrfs)
    assert inode_numbers(place(btrfs, entry.id) / "tree") == inos, "it was moved, never copied"
    assert entry.path.startswith(raw(btrfs / "sub" / ".trashd"))
    assert [pointer.read_bytes() for pointer in (folder_of(btrfs, 0) / "pointers").iterdir()] == [b"sub"]
    restore(btrfs, entry.id)
    assert snapshot(job) == before
    identifier = swap(job).id
    assert reap_now(btrfs, identifier).report.n_failed == 0
    job.rmdir()
    assert_silent(btrfs)
    assert_silent(btrfs / "sub")


@pytest.mark.needs("loop", "btrfs")
@pytest.mark.parametrize("verb", [partial(swap, options=SwapOptions(unlike=True)), remove])
def test_a_subvolume_itself_goes_and_comes_back(btrfs: Path, verb: Callable[[Path], object]) -> None:
    name = "removed" if verb is remove else "swapped"
    make_tree(btrfs_subvolume(btrfs, name) / "job", {"results": "x"})
    before = snapshot(btrfs / name)
    verb(btrfs / name)
    [entry] = entries(btrfs)
    restore(btrfs, entry.id)
    assert snapshot(btrfs / name) == before
    remove(btrfs / name)
    [entry] = entries(btrfs)
    assert reap_now(btrfs, entry.id).report.n_failed == 0
    assert_silent(btrfs)


@pytest.mark.needs("loop", "btrfs")
def test_in_a_subvolume_of_a_subvolume_only_the_store_that_takes_it_is_left(btrfs: Path) -> None:
    deeper = btrfs_subvolume(btrfs / "sub", "deeper")
    identifier = swap(make_tree(deeper / "job", {"results": "x"})).id
    assert sorted(path.parent for path in btrfs.rglob(".trashd")) == [btrfs, deeper]
    assert [entry.id for entry in entries(btrfs)] == [identifier]
    restore(btrfs, identifier)
    assert (deeper / "job" / "results").read_text() == "x"
    assert_silent(btrfs)


@pytest.mark.needs("loop", "btrfs")
def test_what_a_user_could_not_have_deleted_root_does_not_reap_for_him_in_his_own_store(btrfs: Path) -> None:
    job = btrfs / "sub" / "home" / "job"
    as_user(ALICE, lambda: make_tree(job, {"results": "hers"}))
    make_tree(job / "roots", {"kept": "k"})
    identifier = as_user(ALICE, lambda: str(swap(job).id))
    assert users_own(btrfs / "sub" / "home", ALICE).stat().st_uid == ALICE
    assert reap_now(btrfs, identifier).report.n_failed > 0
    [entry] = entries(btrfs)
    assert (entry.uid, entry.state) == (ALICE, State.QUARANTINE)
    assert (place(btrfs, identifier) / "tree" / "roots" / "kept").read_text() == "k"
    restore(btrfs, identifier)
    assert (job / "roots" / "kept").stat().st_uid == 0
    assert_silent(btrfs)


# Overlays


def fill_lower(lower: Path) -> None:
    make_tree(lower / "a", {"b": {"job": {"results": "x"}}})


@pytest.mark.parametrize("verb", [swap, remove])
def test_a_lower_layer_of_an_overlay_is_a_clear_error_and_stays(verb: Callable[[Path], object]) -> None:
    with overlay_volume(fill_lower) as overlay:
        job = overlay.path / "a" / "b" / "job"
        whole = snapshot(overlay.path)
        with pytest.raises(CrossesBoundary) as caught:
            verb(job)
        assert "overlayfs" in caught.value.hint
        assert os.listdir(overlay.path) == ["a"], "no store is left that could not take it"
        assert snapshot(overlay.path) == whole


def test_a_store_that_somebody_uses_by_now_is_not_even_hidden_for_a_moment(alices: Path) -> None:
    init(alices)
    make_tree(alices / "home" / "alice" / "job", Dir({}, owner=(ALICE, ALICE)))
    identifier = as_user(ALICE, lambda: str(swap(alices / "home" / "alice" / "job").id))

    def unmake(kernel: Kernel) -> None:
        with kernel.open_path(raw(alices)) as base_fd:
            unmake_store(kernel, BackingAndMount(base_fd), raw(alices), STORE)

    assert "renameat2" not in calls_of(unmake)
    assert [entry.id for entry in entries(alices)] == [identifier]
    assert_silent(alices)


# Bind mounts


def test_a_bind_mounted_volume_has_one_store(alices: Path) -> None:
    init(alices)
    make_tree(alices / "window", {})
    make_tree(alices / "job", {"results": "x"})
    with tmpfs_volume() as elsewhere:
        (elsewhere / "view").mkdir()
        with bind_mount(alices, elsewhere / "view") as view:
            identifier = swap(view / "job").id
            assert [entry.id for entry in entries(alices)] == [identifier]
            restore(alices, identifier)
            assert (view / "job" / "results").read_text() == "x"
    assert_silent(alices)


def test_a_bind_mounted_part_keeps_its_orphans_in_itself(alices: Path) -> None:
    make_tree(alices / "part", {"job": {"results": "x"}})
    with tmpfs_volume() as elsewhere:
        (elsewhere / "view").mkdir()
        with bind_mount(alices / "part", elsewhere / "view") as view:
            identifier = swap(view / "job").id
            assert [entry.id for entry in entries(view)] == [identifier]
            restore(view, identifier)
            assert_silent(view)
    assert (alices / "part" / "job" / "results").read_text() == "x"


# Whose root it is


def test_who_may_not_write_at_the_root_gets_a_store_further_down(alices: Path) -> None:
    job = alices / "home" / "alice" / "job"
    as_user(ALICE, lambda: make_tree(job, {"results": "hers"}))
    swapped = as_user(ALICE, lambda: swap(job))
    assert swapped.volume == raw(alices / "home" / "alice")
    assert users_own(alices / "home" / "alice", ALICE).stat().st_uid == ALICE
    assert [path.parent for path in alices.rglob(".trashd*")] == [alices / "home" / "alice"]
    as_user(ALICE, lambda: restore(alices / "home" / "alice", swapped.id))
    assert (job / "results").read_text() == "hers"
    as_user(ALICE, lambda: assert_silent(alices / "home" / "alice"))


def test_who_may_write_nowhere_above_is_refused_and_nothing_is_made(alices: Path) -> None:
    make_tree(alices / "home" / "given", Dir({"results": "hers"}, owner=(ALICE, ALICE)))
    before = snapshot(alices)
    with pytest.raises(TrashdError):
        as_user(ALICE, lambda: swap(alices / "home" / "given"))
    assert snapshot(alices) == before


def test_a_store_that_an_administrator_made_further_down_is_used(alices: Path) -> None:
    init(alices / "home")
    make_tree(alices / "home" / "job", {"results": "x"})
    swapped = swap(alices / "home" / "job")
    assert swapped.store.startswith(raw(alices / "home" / ".trashd"))
    assert not (alices / ".trashd").exists()
    restore(alices / "home", swapped.id)
    assert_silent(alices / "home")


def test_of_two_stores_the_highest_is_used(alices: Path) -> None:
    init(alices / "home")
    init(alices)
    make_tree(alices / "home" / "job", {"results": "x"})
    assert swap(alices / "home" / "job").store.startswith(raw(alices / ".trashd"))
    assert_silent(alices)
    assert_silent(alices / "home")


def test_a_closed_store_of_somebody_else_sends_nobody_astray(alices: Path) -> None:
    make_tree(alices / ".trashd", Dir(mode=0o700))
    job = alices / "home" / "alice" / "job"
    as_user(ALICE, lambda: make_tree(job, {}))
    swapped = as_user(ALICE, lambda: swap(job))
    assert swapped.volume == raw(alices / "home" / "alice")
    as_user(ALICE, lambda: assert_silent(alices / "home" / "alice"))
