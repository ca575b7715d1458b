"""Commands on a mounted tree: where the store is, what is refused, which process holds what."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from fusefs.cli.holders import holders_of, holders_of_path
from fusefs.core.errors import IsMountPoint, MountInside, NoBacking, NotFound, Refused
from fusefs.linux import mountinfo
from fusefs.linux.kernel import Kernel
from fusefs.store.check_swap import preflight
from fusefs.store.orphans import all_entries
from tests.support.foreground_mount import Mounted, trashd_mount
from tests.support.make_trees import Dir, make_tree, snapshot
from tests.support.mount_and_backing import ALICE, STAGED, TREE, both, hers, opened
from tests.support.mount_namespaces import tmpfs_elsewhere
from tests.support.other_users import as_user
from tests.support.real_filesystems import bind_mount, project_quota_volume, set_project, tmpfs_volume
from tests.support.store_verbs import (
    assert_silent,
    entries,
    init,
    raw,
    remove,
    restore,
    swap,
    tree_of,
)

pytestmark = pytest.mark.needs("root", "fuse")


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
    assert [entry.origin for entry in all_entries(Kernel(), []) if entry.id == swapped.id] == [raw(job)]


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
    with pytest.raises(NoBacking, match=f"mounted by uid {ALICE}"):
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
    found = preflight(Kernel(), raw(job))
    assert found.filesystem in ("tmpfs", "ext4")
    assert (found.store, found.method, found.refusals) == (raw(mount.path / ".trashd"), "exchange", ())
