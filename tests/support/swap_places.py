"""Places in which a directory can be, from the plainest to the oddest, and the exit code that a swap has there."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.support.make_trees import APPEND_ONLY, IMMUTABLE, Spec, make_tree, set_flags
from tests.support.real_filesystems import (
    bind_mount,
    btrfs_subvolume,
    full,
    loop_volume,
    overlay_volume,
    project_quota_volume,
    set_project,
    sync,
    tmpfs_volume,
    unmount,
)
from tests.support.store_calls import init
from tests.support.trashd_command import done_well

ALICE, BOB = 1001, 1002
TREE: Spec = {"file": "x", "below": {"deep": "y"}}


class Case(NamedTuple):
    """Who would swap what, and the exit code that both commands have to have."""

    victim: Path
    code: int
    uid: int = 0


Scene = Callable[[], AbstractContextManager[Case]]
SCENES: dict[str, Scene] = {}


def scene(make: Callable[[], Iterator[Case]]) -> None:
    SCENES[make.__name__] = contextmanager(make)


def owned(path: Path, uid: int) -> Path:
    for one in (path, *path.rglob("*")):
        os.chown(one, uid, uid)
    return path


def make_lower(lower: Path) -> None:
    make_tree(lower / "job", TREE)


@scene
def a_tmpfs_without_a_store() -> Iterator[Case]:
    with tmpfs_volume() as volume:
        yield Case(make_tree(volume / "job", TREE), 0)


@scene
def a_tmpfs_with_a_store() -> Iterator[Case]:
    with tmpfs_volume() as volume:
        init(volume)
        yield Case(make_tree(volume / "job", TREE), 0)


@scene
def a_users_own_below_a_store_of_roots() -> Iterator[Case]:
    with tmpfs_volume() as volume:
        init(volume)
        home = owned(make_tree(volume / "alice", {"job": TREE}), ALICE)
        yield Case(home / "job", 0, ALICE)


@scene
def a_users_own_without_a_store() -> Iterator[Case]:
    with tmpfs_volume() as volume:
        home = owned(make_tree(volume / "alice", {"job": TREE}), ALICE)
        yield Case(home / "job", 0, ALICE)


@scene
def a_users_own_that_he_may_not_write() -> Iterator[Case]:
    with tmpfs_volume() as volume:
        init(volume)
        home = owned(make_tree(volume / "alice", {"job": TREE}), ALICE)
        (home / "job").chmod(0o555)
        yield Case(home / "job", 0, ALICE)


@scene
def anothers_in_his_own_directory() -> Iterator[Case]:
    with tmpfs_volume() as volume:
        init(volume)
        home = owned(make_tree(volume / "bob", {"job": TREE}), BOB)
        yield Case(home / "job", 3, ALICE)


@scene
def anothers_that_he_may_write() -> Iterator[Case]:
    with tmpfs_volume() as volume:
        init(volume)
        shared = make_tree(volume / "shared", {"job": TREE})
        for path in (shared, owned(shared / "job", BOB)):
            path.chmod(0o777)
        yield Case(shared / "job", 3, ALICE)


@scene
def anothers_without_a_store() -> Iterator[Case]:
    with tmpfs_volume() as volume:
        home = owned(make_tree(volume / "bob", {"job": TREE}), BOB)
        yield Case(home / "job", 6, ALICE)


@scene
def anothers_closed_directory() -> Iterator[Case]:
    with tmpfs_volume() as volume:
        init(volume)
        home = owned(make_tree(volume / "bob", {"job": TREE}), BOB)
        (home / "job").chmod(0o700)
        yield Case(home / "job", 4, ALICE)


@scene
def anothers_in_a_sticky_directory() -> Iterator[Case]:
    with tmpfs_volume() as volume:
        init(volume)
        shared = make_tree(volume / "tmp", {"job": TREE})
        shared.chmod(0o1777)
        (owned(shared / "job", BOB)).chmod(0o777)
        yield Case(shared / "job", 3, ALICE)


@scene
def a_file() -> Iterator[Case]:
    with tmpfs_volume() as volume:
        yield Case(make_tree(volume / "job", TREE) / "file", 3)


@scene
def what_is_missing() -> Iterator[Case]:
    with tmpfs_volume() as volume:
        yield Case(volume / "missing", 5)


@scene
def a_mount_point() -> Iterator[Case]:
    with tmpfs_volume() as volume:
        yield Case(volume, 3)


@scene
def a_store_itself() -> Iterator[Case]:
    with tmpfs_volume() as volume:
        init(volume)
        yield Case(volume / ".trashd", 3)


@scene
def a_kernels_directory() -> Iterator[Case]:
    yield Case(Path("/sys/class"), 6)  # where nothing is ever mounted


@scene
def a_lower_layer() -> Iterator[Case]:
    with overlay_volume(make_lower) as overlay:
        yield Case(overlay.path / "job", 6)


@scene
def a_lower_layer_where_a_store_is() -> Iterator[Case]:
    with overlay_volume(make_lower) as overlay:
        init(overlay.path)
        yield Case(overlay.path / "job", 6)


@scene
def an_upper_layer() -> Iterator[Case]:
    with overlay_volume() as overlay:
        yield Case(make_tree(overlay.path / "job", TREE), 0)


@scene
def a_read_only_mount_without_a_store() -> Iterator[Case]:
    with tmpfs_volume() as volume, tmpfs_volume() as there:
        make_tree(volume / "job", TREE)
        with bind_mount(volume, there, ("ro",)):
            subprocess.run(["mount", "-o", "remount,bind,ro", there], check=True)
            yield Case(there / "job", 11)


@scene
def a_read_only_mount_with_a_store() -> Iterator[Case]:
    with tmpfs_volume() as volume, tmpfs_volume() as there:
        init(volume)
        make_tree(volume / "job", TREE)
        with bind_mount(volume, there):
            subprocess.run(["mount", "-o", "remount,bind,ro", there], check=True)
            yield Case(there / "job", 11)


@scene
def an_immutable_directory() -> Iterator[Case]:
    with loop_volume("ext4") as volume:
        init(volume)
        victim = make_tree(volume / "job", TREE)
        set_flags(victim, IMMUTABLE)
        yield Case(victim, 4)
        set_flags(victim, IMMUTABLE, on=False)


@scene
def a_directory_in_one_where_nothing_may_go() -> Iterator[Case]:
    with loop_volume("ext4") as volume:
        init(volume)
        parent = make_tree(volume / "log", {"job": TREE})
        set_flags(parent, APPEND_ONLY)
        yield Case(parent / "job", 4)
        set_flags(parent, APPEND_ONLY, on=False)


@scene
def an_ext4_that_is_full_and_has_a_reserve() -> Iterator[Case]:
    with loop_volume("ext4") as volume:
        init(volume)
        victim = make_tree(volume / "job", TREE)
        done_well("restore", "--volume", volume, done_well("swap", "--json", victim).objects()[0]["id"])
        with full(volume):
            yield Case(victim, 0)


@scene
def an_ext4_that_is_full_without_a_store() -> Iterator[Case]:
    with loop_volume("ext4") as volume:
        victim = make_tree(volume / "job", TREE)
        with full(volume):
            yield Case(victim, 11)


@scene
def another_project() -> Iterator[Case]:
    with project_quota_volume("xfs") as volume:
        set_project(volume, 1)
        init(volume)
        parent = volume / "other"
        parent.mkdir()
        set_project(parent, 7)
        yield Case(make_tree(parent / "job", TREE), 0)


@scene
def a_subvolume() -> Iterator[Case]:
    with loop_volume("btrfs") as volume:
        init(volume)
        yield Case(btrfs_subvolume(volume, "job"), 0)


@scene
def a_directory_of_a_subvolume() -> Iterator[Case]:
    with loop_volume("btrfs") as volume:
        init(volume)
        yield Case(make_tree(btrfs_subvolume(volume, "sub") / "job", TREE), 0)


@scene
def a_directory_of_proc() -> Iterator[Case]:
    yield Case(Path("/proc/sys/kernel"), 6)


@scene
def a_control_group() -> Iterator[Case]:
    with mounted("tmpfs") as top, mounted("cgroup2", top / "groups") as groups:
        group = groups / "trashd-test"
        group.mkdir()
        yield Case(group, 6)
        group.rmdir()
        assert not list(groups.glob(".trashd*"))


@scene
def where_no_name_may_have_a_dot() -> Iterator[Case]:
    with mounted("tmpfs") as top, mounted("bpf", top / "bpf") as volume:
        (volume / "job").mkdir()
        yield Case(volume / "job", 3)


@scene
def a_directory_with_a_mount_inside() -> Iterator[Case]:
    with tmpfs_volume() as volume, tmpfs_volume() as other:
        victim = make_tree(volume / "job", TREE)
        with bind_mount(other, victim / "below"):
            yield Case(victim, 3)


@scene
def a_directory_mounted_elsewhere_too() -> Iterator[Case]:
    with tmpfs_volume() as volume, tmpfs_volume() as there:
        victim = make_tree(volume / "job", TREE)
        with bind_mount(victim, there):
            yield Case(victim, 0)


@scene
def a_part_of_a_volume_mounted_elsewhere() -> Iterator[Case]:
    with tmpfs_volume() as volume, tmpfs_volume() as there:
        init(volume)
        with bind_mount(make_tree(volume / "part", {"job": TREE}), there):
            yield Case(there / "job", 0)


@scene
def a_directory_with_a_store_inside() -> Iterator[Case]:
    with tmpfs_volume() as volume:
        victim = make_tree(volume / "job", TREE)
        init(victim)
        yield Case(victim, 3)


@scene
def where_nothing_may_be_executed() -> Iterator[Case]:
    with tmpfs_volume(options=("noexec", "nosuid", "nodev")) as volume:
        home = owned(make_tree(volume / "alice", {"job": TREE}), ALICE)
        yield Case(home / "job", 0, ALICE)


@scene
def his_own_in_a_sticky_directory() -> Iterator[Case]:
    with tmpfs_volume() as volume:
        shared = make_tree(volume / "tmp", {"job": TREE})
        shared.chmod(0o1777)
        yield Case(owned(shared / "job", ALICE), 0, ALICE)


@scene
def his_own_where_he_may_not_list() -> Iterator[Case]:
    with tmpfs_volume() as volume:
        home = owned(make_tree(volume / "alice", {"job": TREE}), ALICE)
        home.chmod(0o300)
        yield Case(home / "job", 0, ALICE)


@scene
def his_own_of_a_group_that_is_not_his() -> Iterator[Case]:
    with tmpfs_volume() as volume:
        init(volume)
        home = owned(make_tree(volume / "alice", {"job": TREE}), ALICE)
        os.chown(home / "job", ALICE, BOB)
        yield Case(home / "job", 3, ALICE)


@scene
def a_name_of_a_store_that_is_a_file() -> Iterator[Case]:
    with tmpfs_volume() as volume:
        (volume / ".trashd").touch()
        yield Case(make_tree(volume / "job", TREE), 6)


@scene
def a_project_inside_another_one() -> Iterator[Case]:
    with project_quota_volume("xfs") as volume:
        init(volume)
        parent = volume / "other"
        (parent / "job").mkdir(parents=True)
        set_project(parent, 5)
        set_project(parent / "job", 7)
        yield Case(parent / "job", 6)


@scene
def a_snapshot_that_is_read_only() -> Iterator[Case]:
    with read_only_snapshot() as snapshot:
        yield Case(snapshot, 11)


@scene
def a_directory_of_a_snapshot_that_is_read_only() -> Iterator[Case]:
    with read_only_snapshot() as snapshot:
        yield Case(snapshot / "job", 11)


@contextmanager
def read_only_snapshot() -> Iterator[Path]:
    with loop_volume("btrfs") as volume:
        init(volume)
        make_tree(btrfs_subvolume(volume, "sub") / "job", TREE)
        snapshot = volume / "snapshot"
        subprocess.run(
            ["btrfs", "-q", "subvolume", "snapshot", "-r", volume / "sub", snapshot],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        yield snapshot


@scene
def a_merged_directory_of_layers() -> Iterator[Case]:
    with overlay_volume(make_lower) as overlay:
        (overlay.path / "job" / "new").touch()
        yield Case(overlay.path / "job", 6)


@scene
def what_took_the_place_of_a_lower_layer() -> Iterator[Case]:
    with overlay_volume(make_lower) as overlay:
        shutil.rmtree(overlay.path / "job")
        yield Case(make_tree(overlay.path / "job", TREE), 0)


@scene
def a_store_that_has_lost_its_exchange() -> Iterator[Case]:
    with tmpfs_volume() as volume, tmpfs_volume() as there:
        init(volume)
        make_tree(volume / "job", TREE)
        with served(there, "bindfs", volume):
            yield Case(there / "job", 0)


@scene
def where_all_may_write_all() -> Iterator[Case]:
    with tmpfs_volume() as volume, tmpfs_volume() as there:
        make_tree(volume / "job", TREE)
        with served(there, "bindfs", "-p", "0777", volume):
            yield Case(there / "job", 6)


@scene
def a_mount_of_ours() -> Iterator[Case]:
    with loop_volume("ext4") as volume, shown(volume) as there:
        make_tree(volume / "job", TREE)
        yield Case(there / "job", 0)


@scene
def a_mount_of_ours_that_is_read_only() -> Iterator[Case]:
    with loop_volume("ext4") as volume:
        make_tree(volume / "job", TREE)
        with shown(volume, "-o", "ro") as there:
            yield Case(there / "job", 11)


@scene
def another_branch_than_the_stores() -> Iterator[Case]:
    with branches("epmfs") as (_first, second, there):
        init(there)
        for branch in (_first, second):
            if not (branch / ".trashd").exists():
                make_tree(branch / "job", TREE)
        yield Case(there / "job", 6)


@scene
def another_branch_where_any_will_do() -> Iterator[Case]:
    with branches("mfs") as (_first, second, there):
        make_tree(second / "job", TREE)
        yield Case(there / "job", 0)


@scene
def a_branch_that_is_read_only() -> Iterator[Case]:
    with branches("mfs", "RO") as (_first, second, there):
        make_tree(second / "job", TREE)
        yield Case(there / "job", 11)


@scene
def a_directory_on_two_branches() -> Iterator[Case]:
    with branches("mfs") as (first, second, there):
        for branch in (first, second):
            make_tree(branch / "job", TREE)
        yield Case(there / "job", 6)


@scene
def branches_that_count_as_full() -> Iterator[Case]:
    with branches("epmfs", minfreespace="4G") as (first, _second, there):
        make_tree(first / "job", TREE)
        yield Case(there / "job", 11)


def inodes_left(n_inodes: int, code: int) -> None:
    def left() -> Iterator[Case]:
        with tmpfs_volume(options=("nr_inodes=60",)) as volume:
            victim = make_tree(volume / "job", TREE)
            for number in range(os.statvfs(volume).f_ffree - n_inodes):
                (volume / str(number)).touch()
            yield Case(victim, code)

    left.__name__ = f"a_tmpfs_with_{n_inodes}_inodes"
    scene(left)


inodes_left(8, 11)
inodes_left(18, 11)
inodes_left(40, 0)


@scene
def an_ext4_with_room_for_a_store_alone() -> Iterator[Case]:
    with loop_volume("ext4") as volume:
        victim = make_tree(volume / "job", TREE)
        with full(volume, spare_kernel=False) as filling:
            file = filling / "blocks"
            os.truncate(file, file.stat().st_size - 16 * os.statvfs(volume).f_frsize)
            sync(volume)
            yield Case(victim, 11)


@contextmanager
def mounted(fs_type: str, there: Path | None = None) -> Iterator[Path]:
    """A filesystem of the kernel's own, as it comes."""
    if there is None:
        with tmpfs_volume() as volume:
            yield volume
        return
    there.mkdir()
    subprocess.run(["mount", "-t", fs_type, "none", there], check=True)
    try:
        yield there
    finally:
        unmount(there)


@contextmanager
def served(there: Path, *words: str | Path) -> Iterator[None]:
    """A FUSE filesystem of somebody else's, for the block."""
    subprocess.run([*words, there], check=True)
    try:
        yield
    finally:
        unmount(there)


@contextmanager
def shown(volume: Path, *words: str) -> Iterator[Path]:
    with tmpfs_volume() as there:
        done_well("mount", *words, volume, there)
        try:
            yield there
        finally:
            done_well("umount", there)


@contextmanager
def branches(policy: str, mode: str = "RW", minfreespace: str = "0") -> Iterator[tuple[Path, Path, Path]]:
    """Two branches, the second in that mode, and the mergerfs of them; policy: for what is created"""
    with tmpfs_volume() as first, tmpfs_volume() as second, tmpfs_volume() as there:
        options = f"minfreespace={minfreespace},category.create={policy}"
        with served(there, "mergerfs", "-o", options, f"{first}=RW:{second}={mode}"):
            yield first, second, there
