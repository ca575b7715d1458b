"""docs/faq.md: the commands of each answer, typed on real filesystems, do what it says.

What an answer has in common with docs/troubleshooting.md is in test_troubleshooting_tried.py.
"""

import os
import subprocess
from functools import partial
from pathlib import Path

import pytest

from fusefs.core.service_status import VolumePhase
from tests.cli import test_troubleshooting_tried
from tests.support.make_trees import make_tree
from tests.support.open_files import held
from tests.support.other_users import as_user
from tests.support.real_filesystems import btrfs_subvolume, loop_volume, tmpfs_volume
from tests.support.service_process import places, service
from tests.support.store_verbs import assert_silent, init
from tests.support.trashd_command import done_well, swapped
from tests.support.tried_pages import TriedPage, constants, in_bash

pytestmark = [pytest.mark.needs("root"), pytest.mark.timeout(120)]

ALICE = 1000
PAGE = TriedPage("faq")
NOT_TYPED_HERE = {
    "systemctl enable --now trashd-reaper": "tests/packages/test_debian.py",
    "systemctl stop trashd-reaper": "tests/packages/test_debian.py",
    "systemctl start trashd-reaper": "tests/packages/test_debian.py",
    "mv DIR .trashd/drop/": "tests/mount",
}
"""And where it is."""


def make_job(volume: Path) -> Path:
    return make_tree(volume / "job", {"file": b"x" * (1 << 20), "results": {"a.csv": "1"}, "a.conf": "kept"})


def only(volume: Path) -> str:
    """The id of the one orphan that is there."""
    (entry,) = done_well("list", "--json", "--volume", volume).objects()
    return str(entry["id"])


def test_every_command_of_the_page_is_typed_here_or_for_troubleshooting() -> None:
    assert sorted(PAGE.commands() - constants(__file__, test_troubleshooting_tried.__file__)) == []


def test_where_is_my_space(ext4: Path) -> None:
    swapped(make_job(ext4))
    identifier = only(ext4)
    assert "1.00 MiB" in PAGE.typed("trashd du", ext4)
    assert "root" in PAGE.typed("trashd list --sum-by user", ext4)
    PAGE.typed("trashd reap --free 200G", ext4, code=13)
    assert only(ext4) == identifier
    PAGE.typed("trashd reap --now 3fc2b800eb1e", ext4, ID=identifier[-12:])
    assert os.listdir(ext4 / ".trashd/u/0/orphans") == []


def test_why_is_it_still_full_it_has_other_names(ext4: Path) -> None:
    job = make_job(ext4)
    os.link(job / "file", ext4 / "other")
    swapped(job, "--keep-for", "0s")
    assert "1.00 MiB stays: other hard links exist" in PAGE.typed("trashd du", ext4)
    PAGE.typed("trashd reap", ext4)
    assert (ext4 / "other").read_bytes()


def test_why_is_it_still_full_a_snapshot_has_it() -> None:
    with loop_volume("btrfs", 128) as volume:
        init(volume)
        btrfs_subvolume(volume, "data")
        job = make_job(volume / "data")
        subprocess.run(["btrfs", "-q", "subvolume", "snapshot", volume / "data", volume / "before"], check=True)
        swapped(job, "--keep-for", "0s")
        assert "<=" in PAGE.typed("trashd du", volume)
        assert (volume / "before/job/file").stat().st_size == 1 << 20
        PAGE.typed("trashd reap", volume)
        assert (volume / "before/job/file").exists()
        assert_silent(volume)


def test_the_space_at_once(ext4: Path) -> None:
    PAGE.typed("trashd swap --now DIR", ext4, DIR=make_job(ext4))
    assert os.listdir(ext4 / ".trashd/u/0/orphans") == []
    with places() as base, service(base, ext4) as running:
        running.until_phase(ext4, VolumePhase.IDLE)
        (ext4 / "job").rmdir()
        output = PAGE.typed("trashd swap --wait=100G DIR", ext4, DIR=make_job(ext4), code=13)
    assert os.listdir(ext4 / "job") == []
    assert os.listdir(ext4 / ".trashd/u/0/orphans") == [], output


def test_the_wrong_directory_comes_back(ext4: Path) -> None:
    job = make_job(ext4)
    assert in_bash(f"trashd swap {job} && trashd undo", ext4).code == 0
    assert "trashd undo" in PAGE.commands()
    swapped(job)
    (job / "late").touch()
    PAGE.typed("trashd restore /scratch/job", ext4)
    assert sorted(os.listdir(job)) == ["a.conf", "file", "results"]
    assert "6d23h" in PAGE.typed("trashd list", ext4)
    in_bash("trashd reap --all --now --yes; trashd reap --pinned --now --yes", ext4)
    identifier = swapped(job)["id"]
    PAGE.typed("trashd restore 3fc2b800eb1e --to /scratch/job.old", ext4, ID=identifier[-12:])
    assert sorted(os.listdir(ext4 / "job.old")) == ["a.conf", "file", "results"]


def test_how_long(ext4: Path) -> None:
    identifier = swapped(make_job(ext4), "--keep-for", "3d")["id"]
    assert "2d23h" in PAGE.typed("trashd list", ext4)
    PAGE.typed("trashd keep ID", ext4, ID=identifier)
    assert " pinned " in PAGE.typed("trashd list", ext4)


def test_one_file_of_it(ext4: Path) -> None:
    job = make_job(ext4)
    identifier = swapped(job)["id"][-12:]
    assert "a.csv" in PAGE.typed("trashd ls 3fc2b800eb1e:results", ext4, ID=identifier)
    assert PAGE.typed("trashd cat 3fc2b800eb1e:results/a.csv", ext4, ID=identifier) == "1"
    PAGE.typed("trashd restore /scratch/job/results/a.csv", ext4)
    assert (job / "results/a.csv").read_text() == "1"


def test_without_trashd_by_mv(ext4: Path) -> None:
    job = make_job(ext4)
    identifier = swapped(job)["id"]
    subprocess.run(["mv", ext4 / f".trashd/u/0/orphans/{identifier}/tree", ext4 / "back"], check=True)
    assert (ext4 / "back/results/a.csv").read_text() == "1"
    in_bash(f"rm -r .trashd/u/0/orphans/{identifier}", ext4)


def test_nobody_else_sees_it(ext4: Path) -> None:
    swapped(make_job(ext4))
    assert (ext4 / ".trashd/u/0").stat().st_mode & 0o7777 == 0o700


def test_who_stands_in_it_goes_into_the_new_one_by_cd(ext4: Path) -> None:
    job = make_job(ext4)
    output = in_bash("trashd swap ../job >&2; ls old file 2>&1; ls file; cd . && ls | wc -l", job)
    assert "cd ." in PAGE.commands()
    assert output.out.endswith("file\n0\n"), output


def test_who_holds_it_is_named(ext4: Path) -> None:
    job = make_job(ext4)
    with held(job / "file"):
        swapped(job)
        assert str(os.getpid()) in PAGE.typed("trashd holders ID", ext4, ID=only(ext4))


def test_some_of_it_stays(ext4: Path) -> None:
    job = make_job(ext4)
    PAGE.typed("trashd swap --keep '*.conf' DIR", ext4, DIR=job)
    assert os.listdir(job) == ["a.conf"]


def test_what_the_store_is_and_to_be_rid_of_it(ext4: Path) -> None:
    job = make_job(ext4)
    swapped(job)
    output = PAGE.typed("tar --exclude-caches", ext4, f"-cf - -C {ext4} . | tar t")
    assert [line for line in output.splitlines() if ".trashd/" in line] == ["./.trashd/", "./.trashd/CACHEDIR.TAG"]
    assert str(job) in PAGE.typed("trashd list --volume DIR", ext4, DIR=ext4)
    swapped(job)
    assert (ext4 / ".trashd").is_dir()


@pytest.mark.parametrize("fs_type", ["ext4", "tmpfs"])
def test_a_removed_store_is_the_next_users_until_init(fs_type: str) -> None:
    with loop_volume(fs_type, 64) if fs_type == "ext4" else tmpfs_volume() as volume:
        volume.chmod(0o1777)
        init(volume)
        swapped(make_job(volume))
        as_user(ALICE, partial(make_tree, volume / "hers", {"file": "1"}))
        with places() as base, service(base, volume) as running:
            running.until_phase(volume, VolumePhase.IDLE)
            PAGE.typed("rm -rf DIR/.trashd", volume, DIR=volume)
            running.until_phase(volume, VolumePhase.GONE)
            PAGE.typed("trashd init DIR", volume, DIR=volume)
            running.until_phase(volume, VolumePhase.IDLE)
            PAGE.typed("rm -rf DIR/.trashd", volume, DIR=volume)
        hers = as_user(ALICE, lambda: str(swapped(volume / "hers")["id"]))
        PAGE.typed("trashd init DIR", volume, DIR=volume)
        swapped(volume / "job")
        as_user(ALICE, partial(done_well, "restore", hers, "--volume", volume))
        assert (volume / "hers/file").read_text() == "1"


@pytest.mark.parametrize("fs_type", ["ext4", "xfs", "btrfs", "tmpfs"])
def test_where_it_works(fs_type: str) -> None:
    with loop_volume(fs_type, 300) if fs_type != "tmpfs" else tmpfs_volume() as volume:
        assert "one atomic exchange" in PAGE.typed("trashd check DIR", volume, DIR=make_job(volume))


def test_a_subvolume_can_be_swapped_with_unlike_and_a_directory_takes_its_place() -> None:
    with loop_volume("btrfs", 128) as volume:
        init(volume)
        sub = btrfs_subvolume(volume, "sub")
        assert in_bash(f"trashd swap {sub}", volume).code == 3
        swapped(sub, "--unlike")
        assert sub.stat().st_ino != 256
        assert_silent(volume)


def test_for_one_store_of_all_users_root_says_so() -> None:
    with tmpfs_volume() as volume:
        PAGE.typed("trashd init DIR", volume, DIR=volume)
        PAGE.typed("trashd init --known DIR", volume, DIR=volume)
        assert os.listdir(volume) == [".trashd"]


def test_a_mount_point_is_emptied_from_within(ext4: Path) -> None:
    job = make_job(ext4)
    (ext4 / "beside").touch()
    PAGE.typed("trashd swap /scratch/*/", ext4)
    assert os.listdir(job) == []
    PAGE.typed("trashd sweep /scratch --name '*' --depth 1", ext4)
    assert not (ext4 / "beside").exists()
    assert job.is_dir()
