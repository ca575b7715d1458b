"""Full volumes and used-up quotas: the reserve pays for one swap, reaping needs nothing and gives all back."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from io import FileIO
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest

from fusefs.cli.main import run
from fusefs.core.errors import KernelRefused
from fusefs.store.reserve import is_stocked
from tests.support.make_trees import Dir, make_tree, snapshot
from tests.support.other_users import as_user
from tests.support.real_filesystems import (
    Unsupported,
    btrfs_subvolume,
    full,
    limit_group,
    limit_project,
    limit_user,
    loop_volume,
    quota_volume,
    set_project,
    sync,
    tmpfs_volume,
)
from tests.support.store_verbs import (
    assert_silent,
    entries,
    init,
    own,
    recover_all,
    remove,
    restore,
    swap,
    tree_of,
)

pytestmark = pytest.mark.needs("root")


R = TypeVar("R")
USER = 12001
BOTH: dict[str, bool] = {}
BLOCKS, INODES = {"inodes": False}, {"blocks": False}
FULLNESS = [
    pytest.param("tmpfs", BOTH, id="tmpfs"),
    pytest.param("tmpfs", BLOCKS, id="tmpfs-blocks"),
    pytest.param("tmpfs", INODES, id="tmpfs-inodes"),
    pytest.param("ext4", BOTH, id="ext4"),
    pytest.param("ext4", BLOCKS, id="ext4-blocks"),
    pytest.param("ext4", INODES, id="ext4-inodes"),
    pytest.param("xfs", BOTH, id="xfs", marks=pytest.mark.needs("xfs")),
    pytest.param("btrfs", BLOCKS, id="btrfs-data", marks=pytest.mark.needs("btrfs")),
]
on_full_volumes = pytest.mark.parametrize(("fs_type", "fullness"), FULLNESS)
by_both = pytest.mark.parametrize("uid", [0, USER])


@contextmanager
def volume_of(fs_type: str) -> Iterator[Path]:
    """A small volume with a store and two victims in a user's home."""
    volume = tmpfs_volume("4m", ("nr_inodes=200",)) if fs_type == "tmpfs" else loop_volume(fs_type, 16)
    with volume as path:
        init(path)
        home = Dir({"job": owned_by(USER), "next": owned_by(USER)}, owner=(USER, USER))
        make_tree(path / "home", home)
        assert as_user(USER, partial(is_ready, path))
        yield path


def owned_by(uid: int) -> Dir:
    return Dir({"a": b"x" * 200_000, "b": b"y" * 200_000}, owner=(uid, uid))


def leaves_room(fs_type: str, fullness: dict[str, bool]) -> bool:
    """Whether there is room for another swap: a record needs few of the reserve's blocks, which may make inodes."""
    return fs_type in ("xfs", "btrfs") or not fullness.get("inodes", True)


def is_ready(volume: Path) -> bool:
    with own(volume) as folder:
        return is_stocked(folder)


def by(uid: int, body: Callable[[], R]) -> R:
    """What the body returns, run by that user, or by us with all that root may."""
    return as_user(uid, body) if uid else body()


def refuse(path: Path) -> int:
    """The errno of a swap that is refused, with a hint."""
    with pytest.raises(KernelRefused) as caught:
        swap(path)
    assert "trashd reap" in caught.value.hint
    return caught.value.errno


@pytest.mark.needs("loop")
@on_full_volumes
@by_both
def test_full_volume_is_helped_by_one_swap_and_a_reap(fs_type: str, fullness: dict[str, bool], uid: int) -> None:
    """Which is all of it: the swap by the reserve, the refusal of a second, the reap, and the new reserve."""
    with volume_of(fs_type) as path:
        with full(path, **fullness):
            job, other = path / "home/job", path / "home/next"
            before, seen = snapshot(job)[1:], snapshot(other)
            swapped = by(uid, partial(swap, job))
            assert swapped.warnings == ()
            assert os.listdir(job) == []
            assert snapshot(tree_of(swapped))[1:] == before

            if not leaves_room(fs_type, fullness):
                assert by(uid, partial(refuse, other)) == errno.ENOSPC
                assert snapshot(other) == seen
            assert [entry.id for entry in entries(path)] == [swapped.id]

            command = ["reap", "--now", "--volume", str(path), swapped.id]
            assert by(uid, partial(run, command)) == 0
            assert entries(path) == []
            assert by(uid, partial(is_ready, path))
            by(uid, partial(swap, other))
        recover_all(path)
        assert_silent(path)


@pytest.mark.needs("loop")
@pytest.mark.parametrize("fs_type", ["tmpfs", "ext4"])
def test_rm_and_restore_work_on_a_full_volume(fs_type: str) -> None:
    with volume_of(fs_type) as path:
        job = path / "home/job"
        before = snapshot(job)
        with full(path):
            removed = remove(job)
            assert not job.exists()
            restore(path, removed.id)
            assert snapshot(job) == before
        recover_all(path)
        assert_silent(path)


@pytest.mark.needs("loop")
@pytest.mark.needs("xfs")
@pytest.mark.parametrize("fs_type", ["ext4", "xfs"])
def test_full_volume_takes_a_swap_beside_many_orphans_with_long_names(fs_type: str) -> None:
    with volume_of(fs_type) as path:
        for i in range(40):
            swap(make_tree(path / f"{i}-{'n' * 200}", {}))
        with full(path):
            assert swap(path / "home/job").warnings == ()
        recover_all(path)
        assert_silent(path)


@contextmanager
def limited_volume() -> Iterator[Path]:
    """A btrfs subvolume with a quota, a store and two victims."""
    with loop_volume("btrfs") as volume:
        path = btrfs_subvolume(volume, "limited", 8 << 20)
        init(path)
        for name in ("job", "next"):
            make_tree(path / name, {"f": os.urandom(1 << 20)})
        sync(path)
        yield path
        (path / "filling").unlink()
        sync(path)
        recover_all(path)
        assert_silent(path)


@pytest.mark.needs("loop")
@pytest.mark.needs("btrfs")
def test_swap_and_reap_work_at_a_quotas_limit() -> None:
    with limited_volume() as path:
        use_up(path)
        swapped = swap(path / "job")
        assert os.listdir(path / "job") == []
        assert (tree_of(swapped) / "f").stat().st_size == 1 << 20
        assert run(["reap", "--now", "--volume", str(path), swapped.id]) == 0
        assert entries(path) == []


@pytest.mark.needs("loop")
@pytest.mark.needs("btrfs")
def test_swap_beyond_a_quota_and_without_a_reserve_changes_nothing() -> None:
    with limited_volume() as path:
        shutil.rmtree(path / ".trashd/u/0/reserve")
        (path / ".trashd/u/0/reserve").mkdir(0o700)
        use_up(path)
        before = snapshot(path / "job")
        assert refuse(path / "job") == errno.EDQUOT
        assert snapshot(path / "job") == before
        assert entries(path) == []


def use_up(subvolume: Path) -> None:
    with (subvolume / "filling").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(os.urandom(1 << 16))
                os.fsync(file.fileno())
        except OSError as error:
            assert error.errno == errno.EDQUOT  # noqa: PT017  any other errno is a broken machine


ALICE, PROJECT = 12101, 4711
SIZE_KIB, N_INODES = 4096, 200
USED_UP = (errno.EDQUOT, errno.ENOSPC)  # the second is what xfs says of a project


class Quota(NamedTuple):
    """What a limit is for: the mount's option, and what sets it."""

    option: str
    limit: Callable[..., None]
    of: int


OF_USER, OF_GROUP, OF_PROJECT = (
    Quota("usrquota", limit_user, ALICE), Quota("grpquota", limit_group, ALICE),
    Quota("prjquota", limit_project, PROJECT),
)  # fmt: skip
on_quotas = pytest.mark.parametrize("quota", [OF_USER, OF_GROUP, OF_PROJECT], ids=lambda quota: str(quota.option))
on_filesystems = pytest.mark.parametrize("fs_type", ["ext4", pytest.param("xfs", marks=pytest.mark.needs("xfs"))])


@contextmanager
def limited(fs_type: str, quota: Quota) -> Iterator[Path]:
    """A directory with a store and two victims of Alice's, who, or whose group or project, can have no more."""
    with ExitStack() as stack:
        try:
            volume = stack.enter_context(quota_volume(fs_type, quota.option))
        except Unsupported as reason:
            pytest.skip(str(reason))
        home = make_tree(volume / "home", Dir(owner=(ALICE, ALICE)))
        if quota is OF_PROJECT:  # no rename leads into a project, so its store is in it
            set_project(home, PROJECT)
        init(home if quota is OF_PROJECT else volume)
        for name in ("job", "next"):
            as_user(ALICE, partial(make_tree, home / name, {"f": os.urandom(1 << 20), "sub": {"g": ""}}))
        as_user(ALICE, partial(stock, home if quota is OF_PROJECT else volume))
        quota.limit(volume, quota.of, SIZE_KIB, N_INODES)
        as_user(ALICE, partial(use_up_quota, home))
        yield home


def stock(volume: Path) -> None:
    with own(volume) as folder:
        assert is_stocked(folder)


def use_up_quota(home: Path) -> None:
    with (home / "filling").open("wb", buffering=0) as file:
        assert errno_of(partial(write, file)) in USED_UP
    assert errno_of(partial(make_many, home)) in USED_UP


def write(file: FileIO) -> None:
    while True:
        file.write(os.urandom(1 << 16))
        os.fsync(file.fileno())


def make_many(home: Path) -> None:
    for n in range(N_INODES + 1):
        (home / f"empty{n}").touch()


def errno_of(act: Callable[[], None]) -> int | None:
    """What the kernel says to it in the end; None if nothing."""
    try:
        act()
    except OSError as error:
        return error.errno
    return None


def store_of(home: Path) -> Path:
    return home if (home / ".trashd").exists() else home.parent


@on_filesystems
@on_quotas
def test_a_swap_and_its_restore_work_where_a_quota_is_used_up(fs_type: str, quota: Quota) -> None:
    with limited(fs_type, quota) as home:
        swapped = as_user(ALICE, partial(swap, home / "job"))
        assert os.listdir(home / "job") == []
        as_user(ALICE, partial(restore, store_of(home), swapped.id))
        assert (home / "job/f").stat().st_size == 1 << 20
        recover_all(store_of(home))
        assert_silent(store_of(home))


@on_filesystems
@on_quotas
def test_a_reap_gives_back_what_a_quota_counted(fs_type: str, quota: Quota) -> None:
    with limited(fs_type, quota) as home:
        swapped = as_user(ALICE, partial(swap, home / "job"))
        command = ["reap", "--now", "--volume", str(store_of(home)), swapped.id]
        assert as_user(ALICE, partial(run, command)) == 0
        assert entries(store_of(home)) == []
        as_user(ALICE, lambda: (home / "next/new").write_bytes(bytes(1 << 18)))
