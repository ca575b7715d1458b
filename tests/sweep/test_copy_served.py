"""Copies from and to a filesystem that fails, that has no unnamed files, or that is a mount of ours."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusefs.sweep.request import IfExists
from tests.support.foreground_mount import trashd_mount
from tests.support.fuse_bad_rename import Mode, lying_volume
from tests.support.make_trees import HardLink, Spec, Symlink, make_tree, snapshot
from tests.support.move_entries import move
from tests.support.real_filesystems import tmpfs_volume
from tests.support.sshfs_volumes import sshfs_volume
from tests.support.store_calls import init

pytestmark = pytest.mark.needs("root", "fuse")

TREE: Spec = {"a": {"file": b"text" * 50_000, "link": Symlink("x")}, "small": b""}


@pytest.fixture
def near() -> Iterator[Path]:
    with tmpfs_volume() as path:
        yield path


def test_a_read_error_keeps_the_original(near: Path) -> None:
    with lying_volume(Mode.HONEST, [f"read:EIO:{n}" for n in range(1, 100)]) as served:
        make_tree(served.backing / "job", {"file": b"text" * 50_000})
        archive = make_tree(near / "archive", {})
        assert move(served.path / "job", archive, copy=True) == {"file": errno.EIO}
        assert os.listdir(archive) == []
        assert (served.backing / "job/file").stat().st_size == 200_000


@pytest.mark.parametrize("fault", ["write:EIO:1", "write:ENOSPC:1", "fsync:EIO:1", "setattr:EIO:1", "rename:EIO:1"])
def test_a_write_error_keeps_the_original(near: Path, fault: str) -> None:
    with lying_volume(Mode.HONEST, [fault]) as served:
        job = make_tree(near / "job", {"file": b"text" * 50_000})
        (served.backing / "archive").mkdir()
        refused = move(job, served.path / "archive", copy=True)
        assert refused == {"file": getattr(errno, fault.split(":")[1])}
        assert (job / "file").stat().st_size == 200_000
        assert not (served.backing / "archive/file").exists()


@pytest.mark.parametrize("mode", [Mode.HONEST, Mode.EINVAL, Mode.ENOSYS])
def test_without_unnamed_files_and_rename_flags_copies_arrive_too(near: Path, mode: Mode) -> None:
    with lying_volume(mode) as served:
        job = make_tree(near / "job", TREE)
        wanted = snapshot(job)
        archive = make_tree(served.backing / "archive", {})
        assert move(job, served.path / "archive", copy=True) == {}
        assert snapshot(archive)[1:] == wanted[1:]


def test_without_rename_flags_a_taken_name_is_not_replaced() -> None:
    with lying_volume(Mode.EINVAL) as served:
        make_tree(served.backing / "job", {"file": b"new", "other": b"other"})
        make_tree(served.backing / "archive", {"file": b"old"})
        assert move(served.path / "job", served.path / "archive") == {"file": errno.EEXIST}
        assert move(served.path / "job", served.path / "archive", if_exists=IfExists.NUMBER) == {}
        assert (served.backing / "archive/file").read_bytes() == b"old"
        assert (served.backing / "archive/file.1").read_bytes() == b"new"


def test_a_move_in_a_mount_is_seen_in_it_at_once(near: Path) -> None:
    source = make_tree(near / "source", {"job": TREE, "archive": {}})
    (near / "mounted").mkdir()
    init(source)
    with trashd_mount(source, near / "mounted", limit_s=60) as mount:
        wanted = snapshot(mount.path / "job")
        snapshot(mount.path / "archive")
        assert move(mount.path / "job", mount.path / "archive") == {}
        assert snapshot(mount.path / "archive")[1:] == wanted[1:]
        assert not (mount.path / "job/small").exists()


def test_copies_into_a_mount_and_out_of_it_are_seen_in_it_at_once(near: Path) -> None:
    source = make_tree(near / "source", {"job": {**TREE, "second": HardLink("job/a/file")}, "archive": {}})
    (near / "mounted").mkdir()
    init(source)
    with trashd_mount(source, near / "mounted", limit_s=60) as mount, tmpfs_volume() as other:
        far = make_tree(other / "far", {})
        wanted = snapshot(mount.path / "job")
        snapshot(mount.path / "archive")
        assert move(mount.path / "job", far, copy=True) == {}
        assert snapshot(far)[1:] == wanted[1:]
        assert not (mount.path / "job/small").exists()
        assert move(far, mount.path / "archive", copy=True) == {}
        assert snapshot(mount.path / "archive")[1:] == wanted[1:]


# Filesystems that tell less of a file than a disk does.


def test_files_with_more_names_that_nobody_can_tell_apart_are_copied_each(near: Path) -> None:
    with lying_volume(Mode.HONEST) as served:  # without birth times, as most of FUSE
        job = make_tree(served.backing / "job", {"x": {"a": b"one"}, "y": {"b": b"two"}})
        (served.backing / "kept").mkdir()
        for path in (job / "x/a", job / "y/b"):
            os.utime(path, (10**9, 10**9))
            os.link(path, f"{path}2")
            os.link(path, served.backing / "kept" / path.name)
        archive = make_tree(near / "archive", {})
        assert move(served.path / "job", archive, copy=True) == {}
        found = {str(path.relative_to(archive)): path.read_bytes() for path in archive.rglob("*") if path.is_file()}
        assert found == {"x/a": b"one", "x/a2": b"one", "y/b": b"two", "y/b2": b"two"}


@pytest.mark.needs("sshfs")
@pytest.mark.parametrize("if_exists", IfExists)
@pytest.mark.parametrize("is_from", [True, False])
def test_a_file_is_not_taken_for_a_copy_of_itself_where_its_change_time_is_another(
    if_exists: IfExists, is_from: bool
) -> None:
    with sshfs_volume() as served:
        job = make_tree(served.backing / "job", {"file": b"the only one"})
        os.utime(job / "file", (10**9, 10**9))  # as from an archive: sshfs has whole seconds, and no change time
        there, here = (served.path / "job", job) if is_from else (job, served.path / "job")
        assert move(there, here, copy=True, if_exists=if_exists) == {"file": errno.EINVAL}
        assert [path.read_bytes() for path in job.iterdir()] == [b"the only one"]


@pytest.mark.needs("sshfs")
@pytest.mark.parametrize("copy", [True, False])
def test_flat_replaces_no_match_by_another_where_change_times_say_nothing(near: Path, copy: bool) -> None:
    with sshfs_volume() as served:
        job = make_tree((near if copy else served.backing) / "job", {str(n): {"core": str(n)} for n in range(10)})
        for path in job.rglob("core"):
            os.utime(path, (10**9, 10**9))
        archive = make_tree(served.backing / "archive", {"core": "old"})
        source = job if copy else served.path / "job"
        refused = move(source, served.path / "archive", flat=True, if_exists=IfExists.REPLACE, copy=copy)
        texts = [path.read_text() for place in (job, archive) for path in place.rglob("core")]
        assert sorted(texts) == sorted(str(n) for n in range(10))
        assert list(refused.values()) == [errno.EEXIST] * 9
