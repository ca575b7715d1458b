"""Where the orphan goes, and where a swap must stop: mounts, subvolumes, quota projects, roots, links, stores."""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from fusefs.core.container_states import State
from fusefs.core.errors import (
    CrossesBoundary,
    IsMountPoint,
    IsStore,
    MountInside,
    NotADirectory,
    NotPermitted,
    Refused,
    TrashdError,
)
from fusefs.core.names import STORE
from fusefs.linux.kernel import Kernel
from fusefs.store.as_owner import swap_for_owner
from fusefs.store.backing_and_mount import BackingAndMount
from fusefs.store.make_store import unmake_store
from fusefs.store.stage import SwapOptions
from fusefs.store.swap import swap_path
from fusefs.store.victim import find_held_store
from tests.support.make_trees import APPEND_ONLY, IMMUTABLE, Dir, make_tree, remove_tree_hard, set_flags, snapshot
from tests.support.mount_namespaces import tmpfs_elsewhere
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
    recover_all,
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
@pytest.mark.parametrize("verb", [partial(swap, options=SwapOptions(accept_differences=True)), remove])
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


@pytest.fixture
def volume() -> Iterator[Path]:
    """A volume with a store, a victim, and a canary."""
    with tmpfs_volume() as path:
        init(path)
        make_tree(path / "job", {"results": "x", "sub": {"deeper": {}}})
        make_tree(path / "canary", {"secret": "s"})
        yield path


@pytest.fixture(scope="module")
def ext4() -> Iterator[Path]:
    """An ext4, which has inode flags."""
    with loop_volume("ext4", 64) as path:
        init(path)
        yield path


# Mounts


@pytest.mark.parametrize("where", ["sub", "sub/deeper"])
@pytest.mark.parametrize("verb", [swap, remove])
def test_a_mount_inside_is_refused_and_told(volume: Path, verb: Callable[[Path], object], where: str) -> None:
    with bind_mount(volume / "canary", volume / "job" / where):
        with pytest.raises(MountInside) as caught:
            verb(volume / "job")
        assert where in caught.value.hint
        assert (volume / "job" / where / "secret").exists()
    assert_silent(volume)


def test_a_file_mounted_inside_is_refused(volume: Path) -> None:
    with bind_mount(volume / "canary" / "secret", volume / "job" / "results"), pytest.raises(MountInside):
        swap(volume / "job")
    assert_silent(volume)


def test_a_mount_inside_is_seen_through_another_bind_mount(volume: Path) -> None:
    (volume / "window").mkdir()
    with (
        bind_mount(volume / "job", volume / "window"),
        bind_mount(volume / "canary", volume / "window" / "sub"),
        pytest.raises(MountInside),
    ):
        swap(volume / "job")
    assert_silent(volume)


def test_what_is_mounted_elsewhere_too_is_swapped(volume: Path) -> None:
    (volume / "window").mkdir()
    with bind_mount(volume / "job", volume / "window"):
        identifier = swap(volume / "job").id
        assert (volume / "window" / "results").exists()
        restore(volume, identifier)
    assert_silent(volume)


@pytest.mark.parametrize("verb", [swap, remove])
def test_a_mount_point_itself_is_refused(volume: Path, verb: Callable[[Path], object]) -> None:
    with bind_mount(volume / "canary", volume / "job"), pytest.raises(IsMountPoint):
        verb(volume / "job")
    with pytest.raises(IsMountPoint):
        verb(volume)
    assert_silent(volume)


@pytest.mark.parametrize("path", [b"/", b"//", b"/.", b"/..", b"/../.."])
def test_the_root_is_refused(path: bytes) -> None:
    with pytest.raises(Refused):
        swap_path(Kernel(), path, SwapOptions())


@pytest.mark.parametrize("where", [".", "sub"])
@pytest.mark.parametrize("verb", [swap, remove])
def test_root_refuses_what_holds_a_mount_of_another_namespace(
    volume: Path, verb: Callable[[Path], object], where: str
) -> None:
    with tmpfs_elsewhere(volume / "job" / where), pytest.raises(Refused, match="mount namespace of process"):
        verb(volume / "job")
    assert (volume / "job" / "results").exists()
    assert_silent(volume)


def test_a_mount_of_another_namespace_beside_the_victim_is_no_matter(volume: Path) -> None:
    with tmpfs_elsewhere(volume / "canary"):
        restore(volume, swap(volume / "job").id)
    assert_silent(volume)


# What is no directory


def test_a_link_to_a_directory_is_not_followed(volume: Path) -> None:
    (volume / "link").symlink_to("job")
    for path in (raw(volume / "link"), raw(volume / "link") + b"/"):
        with pytest.raises(NotADirectory):
            swap_path(Kernel(), path, SwapOptions())
    assert entries(volume) == []
    remove(volume / "link")
    assert not (volume / "link").is_symlink()
    assert (volume / "job" / "results").exists()
    assert_silent(volume)


# Stores


@pytest.mark.parametrize(
    "inside", ["", "u", "u/0", "u/0/orphans", "u/0/stage", "u/0/orphans/ID", "u/0/orphans/ID/tree"]
)
@pytest.mark.parametrize("verb", [swap, remove])
def test_the_store_and_what_is_in_it_are_refused(volume: Path, verb: Callable[[Path], object], inside: str) -> None:
    identifier = swap(volume / "job").id
    with pytest.raises(IsStore):
        verb(volume / ".trashd" / inside.replace("ID", identifier))
    assert_silent(volume)


def test_what_is_in_a_store_is_refused_through_a_bind_mount_too(volume: Path) -> None:
    identifier = swap(volume / "job").id
    (volume / "window").mkdir()
    with bind_mount(place(volume, identifier), volume / "window"), pytest.raises(IsStore):
        swap(volume / "window" / "tree")
    assert_silent(volume)


def test_a_refusal_makes_nothing() -> None:
    with tmpfs_volume() as bare:
        (bare / "file").write_text("x")
        make_tree(bare / "job", {"sub": {}})
        with bind_mount(bare / "job", bare / "job" / "sub"):
            for path in (bare / "file", bare / "job", bare):
                with pytest.raises(Refused):
                    swap(path)
        assert sorted(os.listdir(bare)) == ["file", "job"]


# Modes and flags


@pytest.mark.parametrize("mode", [0o555, 0o000, 0o111, 0o333, 0o444, 0o700, 0o1500, 0o1555])
@pytest.mark.parametrize("verb", [swap, remove])
@pytest.mark.parametrize("restorer", [0, ALICE])
def test_a_users_own_directory_of_any_mode_goes_and_comes_back(
    volume: Path, verb: Callable[[Path], object], mode: int, restorer: int
) -> None:
    make_tree(volume / "home", Dir(owner=(ALICE, ALICE)))
    job = volume / "home" / "job"

    def act() -> None:
        make_tree(job, Dir({"results": "hers"}, mode=mode))
        verb(job)

    as_user(ALICE, act)
    [entry] = entries(volume)
    assert (place(volume, entry.id) / "tree").stat().st_mode & 0o7777 == mode
    assert verb is remove or job.stat().st_mode & 0o7777 == mode
    restore(volume, entry.id) if restorer == 0 else as_user(ALICE, lambda: restore(volume, entry.id))
    assert job.stat().st_mode & 0o7777 == mode
    assert (job / "results").read_text() == "hers"
    assert_silent(volume)


@pytest.mark.parametrize("verb", [swap, remove])
def test_set_group_id_that_a_loan_would_lose_is_refused_unchanged(volume: Path, verb: Callable[[Path], object]) -> None:
    make_tree(volume / "home", Dir(owner=(ALICE, ALICE)))
    make_tree(volume / "home" / "job", Dir({"results": "hers"}, mode=0o2555, owner=(ALICE, 4242)))
    before = snapshot(volume / "home" / "job")
    with pytest.raises(NotPermitted, match="set-group-ID"):
        as_user(ALICE, lambda: verb(volume / "home" / "job"))
    recover_all(volume)
    assert snapshot(volume / "home" / "job") == before
    assert_silent(volume)


@pytest.mark.parametrize("mode", [0o2555, 0o2770])
def test_set_group_id_of_ones_own_group_is_kept(volume: Path, mode: int) -> None:
    make_tree(volume / "home", Dir(owner=(ALICE, ALICE)))
    make_tree(volume / "home" / "job", Dir({"results": "hers"}, mode=mode, owner=(ALICE, 4242)))
    before = snapshot(volume / "home" / "job")
    swapped = as_user(ALICE, lambda: swap(volume / "home" / "job"), groups=[4242])
    assert swapped.unlike == ()
    assert snapshot(volume / "home" / "job") == before[:1]
    as_user(ALICE, lambda: restore(volume, swapped.id), groups=[4242])
    assert snapshot(volume / "home" / "job") == before
    assert_silent(volume)


@pytest.mark.needs("loop")
@pytest.mark.parametrize("flag", [IMMUTABLE, APPEND_ONLY])
@pytest.mark.parametrize("verb", [swap, remove])
def test_an_immutable_or_append_only_victim_is_a_clear_error(
    ext4: Path, verb: Callable[[Path], object], flag: int
) -> None:
    make_tree(ext4 / "job", {"results": "x"})
    set_flags(ext4 / "job", flag)
    before = snapshot(ext4 / "job")
    with pytest.raises(NotPermitted) as caught:
        verb(ext4 / "job")
    assert "lsattr" in caught.value.hint
    assert snapshot(ext4 / "job") == before
    remove_tree_hard(ext4 / "job")
    assert_silent(ext4)


@pytest.mark.needs("loop")
def test_an_immutable_victim_of_a_users_is_a_clear_error_too(ext4: Path) -> None:
    make_tree(ext4 / "home", Dir(owner=(ALICE, ALICE)))
    make_tree(ext4 / "home" / "job", Dir({}, mode=0o555, owner=(ALICE, ALICE)))
    set_flags(ext4 / "home" / "job", IMMUTABLE)
    with pytest.raises(NotPermitted) as caught:
        as_user(ALICE, lambda: swap(ext4 / "home" / "job"))
    assert "lsattr" in caught.value.hint
    remove_tree_hard(ext4 / "home")
    recover_all(ext4)
    assert_silent(ext4)


def test_names_that_hold_many_names_of_stores_cost_one_look_each(volume: Path) -> None:
    (victim := volume / "victim").mkdir()
    for number in range(20):
        (victim / (f"{number}" + ".trashd-1" * 25)).touch()
    with Kernel().open_path(raw(victim)) as fd:
        assert calls_of(lambda kernel: find_held_store(kernel, fd, b"")).count("stat") <= 22
