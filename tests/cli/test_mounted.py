"""Every command through the real console script on a mounted tree: what people type, and what they are told."""

import os
from collections.abc import Iterator

import pytest

from tests.support.foreground_mount import Mounted, trashd_mount
from tests.support.make_trees import make_tree, snapshot
from tests.support.real_filesystems import bind_mount, tmpfs_volume
from tests.support.store_verbs import assert_silent, init
from tests.support.trashd_command import done_well, swapped, trashd

pytestmark = pytest.mark.needs("root", "fuse")


@pytest.fixture(params=["elsewhere", "over itself"])
def mount(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """A mounted tmpfs with a directory `job`."""
    with tmpfs_volume() as path:
        init(path)
        make_tree(path / "job", {"file": "content", "below": {"deep": "more"}})
        point = path if request.param == "over itself" else path.with_name("mounted")
        point.mkdir(exist_ok=True)
        with trashd_mount(path, point) as mounted:
            yield mounted
        assert_silent(path)


def test_swap_list_and_restore(mount: Mounted) -> None:
    job = mount.path / "job"
    before = snapshot(job)
    identifier = swapped(job)["id"]
    assert os.listdir(job) == []
    listed = done_well("list", "--json", "--volume", mount.path).objects()
    assert [(entry["id"], entry["origin"]) for entry in listed] == [(identifier, str(job))]
    done_well("restore", "--volume", mount.path, identifier)
    assert snapshot(job) == before


def test_the_command_that_is_told_takes_it_back(mount: Mounted) -> None:
    job = mount.path / "job"
    before = snapshot(job)
    (undo,) = [line for line in done_well("swap", job).out.splitlines() if line.startswith("  undo  trashd ")]
    done_well(*undo.split()[2:])
    assert snapshot(job) == before


def test_holders_check_and_doctor(mount: Mounted) -> None:
    fd = os.open(mount.path / "job" / "file", os.O_RDONLY)
    (held,) = done_well("holders", "--json", mount.path / "job").objects()
    os.close(fd)
    assert {(one["pid"], one["path"]) for one in held["holders"]} == {(os.getpid(), "file")}
    (checked,) = done_well("check", "--json", mount.path / "job").objects()
    assert (checked["store"], checked["refusals"]) == (str(mount.path / ".trashd"), [])
    assert done_well("doctor", mount.path).out == ""


def test_init_of_a_mounted_volume_finds_what_the_mount_has_made() -> None:
    with tmpfs_volume() as path:
        (path / "source").mkdir()
        with trashd_mount(path / "source") as mounted:
            assert "exists" in done_well("init", mounted.path).out
            assert (path / "source" / ".trashd" / "volume.json").exists()
            assert (mounted.path / ".trashd" / "volume.json").exists()
            assert os.listdir(mounted.path) == []
        assert_silent(path / "source")


def test_without_the_backing_path_the_hint_is_mv(mount: Mounted) -> None:
    if mount.path == mount.backing:
        return
    with tmpfs_volume() as other, bind_mount(other, mount.backing):
        commands = [("swap", mount.path / "job"), ("rm", mount.path / "job"), ("init", mount.path)]
        for words in [*commands, ("list", "--volume", mount.path), ("reap", "--volume", mount.path / "job")]:
            told = trashd(*words)
            assert (told.code, f"hint: mv DIR {mount.path}/.trashd/drop/" in told.err) == (6, True)
        assert os.listdir(other) == []
    assert sorted(os.listdir(mount.path / "job")) == ["below", "file"]
