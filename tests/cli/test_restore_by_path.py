"""`trashd restore PATH`: what came from there, whoever names it, and never another's for root's."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.foreground_mount import Mounted, trashd_mount
from tests.support.make_trees import Spec, make_tree, snapshot
from tests.support.other_users import as_user
from tests.support.real_filesystems import bind_mount, tmpfs_volume
from tests.support.store_verbs import assert_silent, init
from tests.support.terminals import Terminal
from tests.support.trashd_command import done_well, swapped, trashd

pytestmark = pytest.mark.needs("root")

USER = 65_534
TREE: Spec = {"file": "content", "below": {"deep": "more"}}


def make(path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    return make_tree(path, TREE)


def test_what_came_from_a_path_comes_back_there(volume: Path) -> None:
    job = make(volume / "job")
    before = snapshot(job)
    identifier = swapped(job)["id"]
    told = done_well("restore", job)
    assert snapshot(job) == before
    assert identifier in told.err
    assert "taken" in told.err


def test_a_path_need_not_be_there_any_more_nor_what_was_above_it(volume: Path) -> None:
    job = make(volume / "above/job")
    before = snapshot(job)
    done_well("rm", job)
    done_well("restore", job)
    assert snapshot(job) == before
    done_well("rm", job)
    (volume / "above").rmdir()
    assert trashd("restore", job).code == 5, "where it was is gone"
    done_well("restore", job, "--to", volume / "elsewhere")
    assert snapshot(volume / "elsewhere") == before


def test_a_path_inside_brings_that_part_alone(volume: Path) -> None:
    job = make(volume / "job")
    done_well("swap", job)
    done_well("restore", job / "below/deep")
    assert (job / "below/deep").read_text() == "more"
    assert not (job / "file").exists()
    done_well("restore", job, "file")
    assert (job / "file").read_text() == "content"


def test_of_several_the_one_is_meant_that_has_the_part(volume: Path) -> None:
    job = make(volume / "job")
    done_well("swap", job)
    (job / "other").touch()
    done_well("swap", job)
    done_well("restore", job / "other")
    assert os.listdir(job) == ["other"]


def test_several_are_told_where_nobody_can_be_asked(volume: Path) -> None:
    job = make(volume / "job")
    ids = [swapped(job)["id"] for _ in range(2)]
    done = trashd("restore", job)
    assert done.code == 2
    assert all(identifier in done.err for identifier in ids)
    assert os.listdir(job) == []


def test_a_list_shows_the_ends_of_ids(volume: Path) -> None:
    identifier = swapped(make(volume / "job"))["id"]
    terminal = Terminal("list", "--volume", volume)
    assert terminal.end() == 0
    for seen in (terminal.seen, done_well("list", "--volume", volume).out):
        assert (identifier in seen, identifier[-12:] in seen) == (False, True)


@pytest.mark.parametrize(("typed", "is_newest"), [("\n", True), ("2\n", False)])
def test_on_a_terminal_one_is_asked_which_and_the_newest_is_offered(volume: Path, typed: str, is_newest: bool) -> None:
    job = volume / "job"
    for content in ("old", "new"):
        job.mkdir(exist_ok=True)
        (job / "file").write_text(content)
        done_well("rm", job)
    terminal = Terminal("restore", job)
    terminal.type(typed)
    assert terminal.end() == 0
    assert (job / "file").read_text() == ("new" if is_newest else "old")


@pytest.mark.parametrize(("typed", "name"), [("\n", "new"), ("2\n", "old")])
def test_on_a_terminal_without_a_path_one_chooses_from_a_list(volume: Path, typed: str, name: str) -> None:
    for job in ("old", "new"):
        done_well("rm", make(volume / job))
    terminal = Terminal("restore", "--volume", volume)
    terminal.type(typed)
    assert (terminal.end(), "taken" in terminal.seen, (volume / name).exists()) == (0, True, True)
    terminal = Terminal("restore", "--volume", volume, "--user", "0")
    terminal.type("\n")
    assert terminal.end() == 0
    terminal = Terminal("restore", "--volume", volume)
    assert (terminal.end(), "there is no orphan to restore" in terminal.seen) == (5, True)


def test_root_restores_his_own_by_a_path_and_anothers_when_he_names_him(volume: Path) -> None:
    volume.chmod(0o1777)
    theirs = make(volume / "job")
    subprocess.run(["chown", "-R", str(USER), theirs], check=True)
    assert as_user(USER, lambda: trashd("rm", theirs)).code == 0
    done = trashd("restore", theirs)
    assert done.code == 3
    assert "--user" in done.err
    ours = make(volume / "job")
    done_well("rm", ours)
    done_well("restore", ours)
    assert ours.stat().st_uid == 0
    done_well("rm", ours)
    done_well("restore", theirs, "--user", str(USER))
    assert (theirs / "file").stat().st_uid == USER


def test_nobody_restores_anothers(volume: Path) -> None:
    volume.chmod(0o1777)
    job = make(volume / "job")
    done_well("rm", job)
    assert as_user(USER, lambda: trashd("restore", job)).code == 5
    assert as_user(USER, lambda: trashd("restore", job, "--user", "0")).code == 4
    done_well("restore", job)


def test_what_a_sweep_took_is_found_by_its_path(volume: Path) -> None:
    job = make(volume / "job")
    done_well("sweep", job, "--name", "deep")
    assert not (job / "below/deep").exists()
    done_well("restore", job / "below/deep")
    assert (job / "below/deep").read_text() == "more"


def test_a_name_here_that_could_be_an_id_is_asked_about(volume: Path) -> None:
    identifier = swapped(make(volume / "job"))["id"]
    part = identifier[-12:]
    done_well("rm", make(volume / part))
    assert trashd("restore", part, cwd=volume).code == 2
    done_well("restore", f"./{part}", cwd=volume)
    assert (volume / part / "file").read_text() == "content"
    done_well("restore", part, cwd=volume)
    assert (volume / "job/file").read_text() == "content"


def test_a_bind_mount_leads_to_it_too(volume: Path) -> None:
    job = make(volume / "above/job")
    before = snapshot(job)
    done_well("rm", job)
    with tmpfs_volume() as other:
        (other / "seen").mkdir()
        with bind_mount(volume, other / "seen"):
            done_well("restore", other / "seen/above/job")
    assert snapshot(job) == before


@pytest.fixture
def mount() -> Iterator[Mounted]:
    with tmpfs_volume() as path:
        init(path)
        make(path / "job")
        point = path.with_name("mounted")
        point.mkdir(exist_ok=True)
        with trashd_mount(path, point) as mounted:
            yield mounted
        assert_silent(path)


@pytest.mark.needs("fuse")
@pytest.mark.parametrize("by_mount", [True, False])
def test_a_mount_and_what_it_shows_are_the_same_place(mount: Mounted, by_mount: bool) -> None:
    done_well("swap", mount.path / "job")
    done_well("restore", (mount.path if by_mount else mount.backing) / "job")
    assert (mount.path / "job/file").read_text() == "content"
