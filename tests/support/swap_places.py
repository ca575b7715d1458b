"""Places in which a directory can be, from the plainest to the oddest, and the exit code that a swap has there."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tests.support.make_trees import APPEND_ONLY, IMMUTABLE, Spec, make_tree, owned, set_flags
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
from tests.support.store_verbs import init
from tests.support.trashd_command import done_well

ALICE, BOB = 1001, 1002
TREE: Spec = {"file": "x", "below": {"deep": "y"}}


class SwapPlace(NamedTuple):
    """A directory to swap, the exit code that all commands have to have, and the user who runs them."""

    code: int
    victim: Callable[[], AbstractContextManager[Path]]
    uid: int = 0


def job(volume: Path) -> Path:
    return make_tree(volume / "job", TREE)


@contextmanager
def placed(
    volume: AbstractContextManager[Path], place: Callable[[Path], Path] = job, *, has_store: bool = False
) -> Iterator[Path]:
    with volume as path:
        if has_store:
            init(path)
        yield place(path)


def at(name: str) -> Callable[[Path], Path]:
    return lambda volume: volume / name


@contextmanager
def of_users(
    owner: int = ALICE, above: int = ALICE, modes: tuple[int, int] = (0o755, 0o755), *, group: int | None = None,
    has_store: bool = True, options: tuple[str, ...] = (),
) -> Iterator[Path]:  # fmt: skip
    """Modes and owners of a directory and of the one above it, in a volume of root's."""
    with tmpfs_volume(options=options) as volume:
        if has_store:
            init(volume)
        home = make_tree(volume / "home", {"job": TREE})
        owned(owned(home, above) / "job", owner)
        os.chown(home / "job", owner, owner if group is None else group)
        for path, mode in zip((home, home / "job"), modes, strict=True):
            path.chmod(mode)
        yield home / "job"


@contextmanager
def layers() -> Iterator[Path]:
    """An overlay with a job in its lower layer."""
    with overlay_volume(job) as overlay:
        yield overlay.path


@contextmanager
def read_only_mount(*, has_store: bool) -> Iterator[Path]:
    with tmpfs_volume() as volume, tmpfs_volume() as there:
        if has_store:
            init(volume)
        job(volume)
        with bind_mount(volume, there):
            subprocess.run(["mount", "-o", "remount,bind,ro", there], check=True)
            yield there / "job"


@contextmanager
def flagged(name: str, flag: int) -> Iterator[Path]:
    """A job of an ext4 where that is so flagged."""
    with loop_volume("ext4") as volume:
        init(volume)
        make_tree(volume / "log", {"job": TREE})
        set_flags(volume / name, flag)
        yield volume / "log/job"
        set_flags(volume / name, flag, on=False)


def few_inodes() -> AbstractContextManager[Path]:
    """An ext4 that few files fill."""
    return loop_volume("ext4", mkfs_options=("-N", "256"))


@contextmanager
def full_ext4(*, has_store: bool) -> Iterator[Path]:
    with few_inodes() as volume:
        victim = job(volume)
        if has_store:  # and so a reserve
            init(volume)
            done_well("restore", "--volume", volume, done_well("swap", "--json", victim).objects()[0]["id"])
        with full(volume):
            yield victim


@contextmanager
def room_for_a_store_alone() -> Iterator[Path]:
    with few_inodes() as volume:
        victim = job(volume)
        with full(volume, spare_kernel=False) as filling:
            file = filling / "blocks"
            os.truncate(file, file.stat().st_size - 16 * os.statvfs(volume).f_frsize)
            sync(volume)
            yield victim


@contextmanager
def inodes_left(n_inodes: int) -> Iterator[Path]:
    with tmpfs_volume(options=("nr_inodes=60",)) as volume:
        victim = job(volume)
        for number in range(os.statvfs(volume).f_ffree - n_inodes):
            (volume / str(number)).touch()
        yield victim


@contextmanager
def of_project(parent_project: int, job_project: int | None, volume_project: int | None = None) -> Iterator[Path]:
    with project_quota_volume("xfs") as volume:
        if volume_project is not None:
            set_project(volume, volume_project)
        init(volume)
        parent = volume / "other"
        parent.mkdir()
        if job_project is not None:
            (parent / "job").mkdir()
        set_project(parent, parent_project)
        if job_project is None:
            job(parent)
        else:
            set_project(parent / "job", job_project)
        yield parent / "job"


@contextmanager
def control_group() -> Iterator[Path]:
    with mounted("cgroup2") as groups:
        group = groups / "trashd-test"
        group.mkdir()
        yield group
        group.rmdir()
        assert not list(groups.glob(".trashd*"))


@contextmanager
def with_a_mount_inside() -> Iterator[Path]:
    with tmpfs_volume() as volume, tmpfs_volume() as other, bind_mount(other, job(volume) / "below"):
        yield volume / "job"


@contextmanager
def mounted_elsewhere_too() -> Iterator[Path]:
    with tmpfs_volume() as volume, tmpfs_volume() as there, bind_mount(job(volume), there):
        yield volume / "job"


@contextmanager
def part_mounted_elsewhere() -> Iterator[Path]:
    with tmpfs_volume() as volume, tmpfs_volume() as there:
        init(volume)
        with bind_mount(make_tree(volume / "part", {"job": TREE}), there):
            yield there / "job"


def with_a_store_inside(volume: Path) -> Path:
    init(job(volume))
    return volume / "job"


def beside_a_file_with_a_stores_name(volume: Path) -> Path:
    (volume / ".trashd").touch()
    return job(volume)


def merged(layered: Path) -> Path:
    (layered / "job/new").touch()
    return layered / "job"


def in_place_of_a_lower_layer(layered: Path) -> Path:
    shutil.rmtree(layered / "job")
    return job(layered)


@contextmanager
def read_only_snapshot() -> Iterator[Path]:
    with loop_volume("btrfs") as volume:
        init(volume)
        job(btrfs_subvolume(volume, "sub"))
        words: list[str | Path] = ["btrfs", "-q", "subvolume", "snapshot", "-r", volume / "sub", volume / "snapshot"]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        yield volume / "snapshot"


@contextmanager
def through_bindfs(*words: str, has_store: bool = False) -> Iterator[Path]:
    with tmpfs_volume() as volume, tmpfs_volume() as there:
        if has_store:
            init(volume)
        job(volume)
        with served(there, "bindfs", *words, volume):
            yield there / "job"


@contextmanager
def mount_of_ours(*words: str) -> Iterator[Path]:
    with loop_volume("ext4") as volume, tmpfs_volume() as there:
        job(volume)
        done_well("mount", *words, volume, there)
        try:
            yield there / "job"
        finally:
            done_well("umount", there)


@contextmanager
def mounted(fs_type: str) -> Iterator[Path]:
    """A filesystem of the kernel's own, as it comes."""
    with tmpfs_volume() as top:
        there = top / fs_type
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
def branches(policy: str, on: str, mode: str = "RW", minfreespace: str = "0") -> Iterator[Path]:
    """A job of a mergerfs of two branches, the second in that mode.

    Args:
        policy: for what is created
        on: the branches that have the job, by number; "other": that without the store
    """
    with tmpfs_volume() as first, tmpfs_volume() as second, tmpfs_volume() as there:
        options = f"minfreespace={minfreespace},category.create={policy}"
        with served(there, "mergerfs", "-o", options, f"{first}=RW:{second}={mode}"):
            if on == "other":
                init(there)
            for number, branch in (("1", first), ("2", second)):
                if number in on or (on == "other" and not (branch / ".trashd").exists()):
                    job(branch)
            yield there / "job"


def btrfs() -> AbstractContextManager[Path]:
    return loop_volume("btrfs")


SCENES = {
    "a_tmpfs_without_a_store": SwapPlace(0, lambda: placed(tmpfs_volume())),
    "a_tmpfs_with_a_store": SwapPlace(0, lambda: placed(tmpfs_volume(), has_store=True)),
    "a_users_own_below_a_store_of_roots": SwapPlace(0, of_users, ALICE),
    "a_users_own_without_a_store": SwapPlace(0, lambda: of_users(has_store=False), ALICE),
    "a_users_own_that_he_may_not_write": SwapPlace(0, lambda: of_users(modes=(0o755, 0o555)), ALICE),
    "anothers_in_his_own_directory": SwapPlace(3, lambda: of_users(BOB, BOB), ALICE),
    "anothers_that_he_may_write": SwapPlace(3, lambda: of_users(BOB, 0, (0o777, 0o777)), ALICE),
    "anothers_without_a_store": SwapPlace(6, lambda: of_users(BOB, BOB, has_store=False), ALICE),
    "anothers_closed_directory": SwapPlace(4, lambda: of_users(BOB, BOB, (0o755, 0o700)), ALICE),
    "anothers_in_a_sticky_directory": SwapPlace(3, lambda: of_users(BOB, 0, (0o1777, 0o777)), ALICE),
    "his_own_in_a_sticky_directory": SwapPlace(0, lambda: of_users(ALICE, 0, (0o1777, 0o755), has_store=False), ALICE),
    "his_own_where_he_may_not_list": SwapPlace(0, lambda: of_users(modes=(0o300, 0o755), has_store=False), ALICE),
    "his_own_of_a_group_that_is_not_his": SwapPlace(3, lambda: of_users(group=BOB), ALICE),
    "where_nothing_may_be_executed": SwapPlace(
        0, lambda: of_users(has_store=False, options=("noexec", "nosuid", "nodev")), ALICE
    ),
    "a_file": SwapPlace(3, lambda: placed(tmpfs_volume(), lambda volume: job(volume) / "file")),
    "what_is_missing": SwapPlace(5, lambda: placed(tmpfs_volume(), at("missing"))),
    "a_mount_point": SwapPlace(3, tmpfs_volume),
    "a_store_itself": SwapPlace(3, lambda: placed(tmpfs_volume(), at(".trashd"), has_store=True)),
    "a_kernels_directory": SwapPlace(6, lambda: nullcontext(Path("/sys/class"))),  # where nothing is ever mounted
    # Other tests mount in /proc/sys/kernel.
    "a_directory_of_proc": SwapPlace(6, lambda: nullcontext(Path("/proc/sys/vm"))),
    "a_control_group": SwapPlace(6, control_group),
    "where_no_name_may_have_a_dot": SwapPlace(
        3, lambda: placed(mounted("bpf"), lambda bpf: make_tree(bpf / "job", {}))
    ),
    "a_lower_layer": SwapPlace(6, lambda: placed(layers(), at("job"))),
    "a_lower_layer_where_a_store_is": SwapPlace(6, lambda: placed(layers(), at("job"), has_store=True)),
    "an_upper_layer": SwapPlace(0, lambda: placed(layers(), lambda layered: make_tree(layered / "new", TREE))),
    "a_merged_directory_of_layers": SwapPlace(6, lambda: placed(layers(), merged)),
    "what_took_the_place_of_a_lower_layer": SwapPlace(0, lambda: placed(layers(), in_place_of_a_lower_layer)),
    "a_read_only_mount_without_a_store": SwapPlace(11, partial(read_only_mount, has_store=False)),
    "a_read_only_mount_with_a_store": SwapPlace(11, partial(read_only_mount, has_store=True)),
    "an_immutable_directory": SwapPlace(4, partial(flagged, "log/job", IMMUTABLE)),
    "a_directory_in_one_where_nothing_may_go": SwapPlace(4, partial(flagged, "log", APPEND_ONLY)),
    "an_ext4_that_is_full_and_has_a_reserve": SwapPlace(0, partial(full_ext4, has_store=True)),
    "an_ext4_that_is_full_without_a_store": SwapPlace(11, partial(full_ext4, has_store=False)),
    "an_ext4_with_room_for_a_store_alone": SwapPlace(11, room_for_a_store_alone),
    **{
        f"a_tmpfs_with_{n_inodes}_inodes": SwapPlace(code, partial(inodes_left, n_inodes))
        for n_inodes, code in ((8, 11), (18, 11), (40, 0))
    },
    "another_project": SwapPlace(0, partial(of_project, 7, None, volume_project=1)),
    "a_project_inside_another_one": SwapPlace(6, partial(of_project, 5, 7)),
    "a_subvolume": SwapPlace(3, lambda: placed(btrfs(), lambda top: btrfs_subvolume(top, "job"), has_store=True)),
    "a_directory_of_a_subvolume": SwapPlace(
        0, lambda: placed(btrfs(), lambda top: job(btrfs_subvolume(top, "sub")), has_store=True)
    ),
    "a_snapshot_that_is_read_only": SwapPlace(3, read_only_snapshot),
    "a_directory_of_a_snapshot_that_is_read_only": SwapPlace(11, lambda: placed(read_only_snapshot(), at("job"))),
    "a_directory_with_a_mount_inside": SwapPlace(3, with_a_mount_inside),
    "a_directory_mounted_elsewhere_too": SwapPlace(0, mounted_elsewhere_too),
    "a_part_of_a_volume_mounted_elsewhere": SwapPlace(0, part_mounted_elsewhere),
    "a_directory_with_a_store_inside": SwapPlace(3, lambda: placed(tmpfs_volume(), with_a_store_inside)),
    "a_name_of_a_store_that_is_a_file": SwapPlace(6, lambda: placed(tmpfs_volume(), beside_a_file_with_a_stores_name)),
    "a_store_that_has_lost_its_exchange": SwapPlace(0, partial(through_bindfs, has_store=True)),
    "where_all_may_write_all": SwapPlace(6, partial(through_bindfs, "-p", "0777")),
    "a_mount_of_ours": SwapPlace(0, mount_of_ours),
    "a_mount_of_ours_that_is_read_only": SwapPlace(11, partial(mount_of_ours, "-o", "ro")),
    "another_branch_than_the_stores": SwapPlace(6, partial(branches, "epmfs", "other")),
    "another_branch_where_any_will_do": SwapPlace(0, partial(branches, "mfs", "2")),
    "a_branch_that_is_read_only": SwapPlace(11, partial(branches, "mfs", "2", "RO")),
    "a_directory_on_two_branches": SwapPlace(6, partial(branches, "mfs", "12")),
    "branches_that_count_as_full": SwapPlace(11, partial(branches, "epmfs", "1", minfreespace="4G")),
}
