"""docs/howto/faq.md: the commands of each answer, typed on real filesystems, do what it says."""

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
from tests.support.service_process import SCALED, places, service
from tests.support.store_verbs import assert_silent, init
from tests.support.trashd_command import done_well, swapped
from tests.support.tried_pages import TriedPage, constants, in_bash

pytestmark = [pytest.mark.needs("root"), pytest.mark.timeout(120)]

ALICE = 1000
PAGE = TriedPage("howto/faq")
NOT_TYPED_HERE = {
    "systemctl enable --now trashd-reaper": "tests/packages/test_debian.py",
    "systemctl stop trashd-reaper": "tests/packages/test_debian.py",
    "systemctl start trashd-reaper": "tests/packages/test_debian.py",
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


def test_an_expired_orphan_can_be_restored_until_it_is_reaped(ext4: Path) -> None:
    job = make_job(ext4)
    for code in (0, 5):
        identifier = swapped(job, "--keep-for", "0s")["id"]
        if code:
            PAGE.typed("trashd reap", ext4)
        assert in_bash(f"trashd restore {identifier}", ext4).code == code


def test_swap_rm_and_sweep_can_be_undone(ext4: Path) -> None:
    job = make_job(ext4)
    os.utime(job / "file", (0, 0))
    for command, remaining in (
        ("trashd swap DIR", ""),
        ("trashd rm PATH", None),
        ("trashd sweep DIR --older 30d", "a.conf results"),
    ):
        assert {command, "trashd undo"} <= PAGE.commands()
        line = command.replace("DIR", "job").replace("PATH", "job")
        done = in_bash(f"{line} >&2 && echo :$(ls job 2>&1): && trashd undo >&2 && ls job", ext4)
        assert remaining is None or f":{remaining}:" in done.out
        assert (remaining is None) == ("No such file" in done.out)
        assert done.out.endswith("\na.conf\nfile\nresults\n"), done


def test_only_the_user_can_enter_their_directory_in_the_store(ext4: Path) -> None:
    swapped(make_job(ext4))
    assert (ext4 / ".trashd/u/0").stat().st_mode & 0o7777 == 0o700


def test_a_shell_in_the_old_tree_enters_the_new_directory_by_cd(ext4: Path) -> None:
    job = make_job(ext4)
    told = in_bash("trashd swap ../job >&2; ls old file 2>&1; ls file; cd . && ls | wc -l", job)
    assert "cd ." in PAGE.commands()
    assert told.out.endswith("file\n0\n"), told


def test_processes_that_use_the_old_tree_are_listed(ext4: Path) -> None:
    job = make_job(ext4)
    with held(job / "file"):
        swapped(job)
        assert str(os.getpid()) in PAGE.typed("trashd holders ID", ext4, ID=only(ext4))


def test_a_kept_file_is_the_same_file_in_the_orphan(ext4: Path) -> None:
    job = make_job(ext4)
    PAGE.typed("trashd swap --keep '*.conf' DIR", ext4, DIR=job)
    assert os.listdir(job) == ["a.conf"]
    (job / "a.conf").write_text("edited")
    assert in_bash(f"trashd cat {job}/a.conf", ext4).out == "edited"


def test_a_backup_without_caches_has_no_orphans(ext4: Path) -> None:
    job = make_job(ext4)
    swapped(job)
    told = PAGE.typed("tar --exclude-caches", ext4, f"-cf - -C {ext4} . | tar t")
    assert [line for line in told.splitlines() if ".trashd/" in line] == ["./.trashd/", "./.trashd/CACHEDIR.TAG"]
    assert str(job) in PAGE.typed("trashd list --volume DIR", ext4, DIR=ext4)
    assert PAGE.typed("trashd doctor DIR", ext4, DIR=ext4) == ""


@pytest.mark.parametrize("fs_type", ["ext4", "tmpfs"])
def test_after_rm_of_the_store_users_make_their_own_until_init(fs_type: str) -> None:
    with loop_volume(fs_type, 64) if fs_type == "ext4" else tmpfs_volume() as volume:
        volume.chmod(0o1777)
        init(volume)
        swapped(make_job(volume))
        as_user(ALICE, partial(make_tree, volume / "hers", {"file": "1"}))
        # The service may read the store while rm removes it: it is broken then, until the next try.
        timers = SCALED._replace(rest_pause_s=0.2)
        with places() as base, service(base, volume, timers=timers) as running:
            running.until_phase(volume, VolumePhase.IDLE)
            running.until(running.is_alone)  # no child makes directories there while rm removes them
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


def test_a_snapshot_keeps_the_directory_and_its_space() -> None:
    with loop_volume("btrfs", 128) as volume:
        init(volume)
        btrfs_subvolume(volume, "data")
        job = make_job(volume / "data")
        subprocess.run(["btrfs", "-q", "subvolume", "snapshot", volume / "data", volume / "before"], check=True)
        swapped(job, "--keep-for", "0s")
        assert "<=" in in_bash("trashd du", volume).out
        assert in_bash("trashd reap", volume).code == 0
        assert (volume / "before/job/file").stat().st_size == 1 << 20
        assert_silent(volume)


def test_a_subvolume_can_be_swapped_with_unlike_and_a_directory_takes_its_place() -> None:
    with loop_volume("btrfs", 128) as volume:
        init(volume)
        sub = btrfs_subvolume(volume, "sub")
        assert in_bash(f"trashd swap {sub}", volume).code == 3
        swapped(sub, "--unlike")
        assert sub.stat().st_ino != 256
        assert_silent(volume)


def test_a_mount_point_is_emptied_from_within(ext4: Path) -> None:
    job = make_job(ext4)
    (ext4 / "beside").touch()
    PAGE.typed("trashd swap DIR/*/", ext4, DIR=ext4)
    assert os.listdir(job) == []
    PAGE.typed("trashd sweep DIR --name '*' --depth 1", ext4, DIR=ext4)
    assert not (ext4 / "beside").exists()
    assert job.is_dir()
