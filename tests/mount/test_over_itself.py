"""A directory mounted over itself: served, with a private clone of it for root."""

import errno
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fusefs.core.errors import DaemonGone
from tests.support.background_mounts import RUNTIME, backing_of, daemon_of, ended, kill_daemon, mount, our_mount
from tests.support.foreground_mount import until
from tests.support.open_files import errno_of
from tests.support.other_users import run_as
from tests.support.real_filesystems import bind_mount, mounts
from tests.support.trashd_command import TRASHD, done_well, trashd

pytestmark = pytest.mark.needs("root", "fuse")

USER = 1000


def test_over_itself_the_tree_is_served_and_its_clone_shows_what_is_below(bench: Path) -> None:
    mount(bench)
    clone = backing_of(bench)
    (bench / "made").touch()
    assert clone.is_relative_to(RUNTIME)
    assert (clone / "made").exists()
    assert our_mount(clone) is None


def test_over_itself_in_a_shared_mount_the_clone_is_not_covered(bench: Path) -> None:
    subprocess.run(["mount", "--make-shared", bench], check=True)
    mount(bench)
    source = os.fsencode(backing_of(bench))
    assert [entry.mount_point for entry in mounts() if entry.source == source] == [os.fsencode(bench)]
    assert (backing_of(bench) / "source/file").read_text() == "content"


def test_the_clone_has_the_same_path_at_the_next_mount(bench: Path) -> None:
    paths = set()
    for _ in range(2):
        mount(bench)
        paths.add(backing_of(bench))
        done_well("umount", bench)
    assert len(paths) == 1


@pytest.mark.parametrize("end", ["umount", "umount(8)", "SIGTERM"])
def test_nothing_is_left_of_it_however_it_ends(bench: Path, end: str) -> None:
    mount(bench)
    pid_fd = os.pidfd_open(daemon_of(bench))
    clone = backing_of(bench)
    match end:
        case "umount":
            done_well("umount", bench)
        case "umount(8)":
            subprocess.run(["umount", bench], check=True)
        case "SIGTERM":
            os.kill(daemon_of(bench), signal.SIGTERM)
    ended(pid_fd)
    assert our_mount(bench) is None
    assert not clone.parent.exists()


def test_who_mounts_is_told_of_other_ways_to_what_he_mounts(bench: Path) -> None:
    (bench / "source/part").mkdir()
    (bench / "other").mkdir()
    with bind_mount(bench, bench / "target"), bind_mount(bench / "source/part", bench / "other"):
        said = mount(bench / "source").err
        done_well("umount", bench / "source")
        assert f"another path ({bench}/target/source, {bench}/other)" in said
        assert "another path" not in mount(bench / "source", "--coherence", "shared").err
        done_well("umount", bench / "source")
    assert "another path" not in mount(bench / "source").err


@pytest.mark.parametrize("has_store", [False, True])
def test_a_read_only_mount_says_so_to_who_swaps(bench: Path, has_store: bool) -> None:
    (bench / "source/job").mkdir()
    if has_store:
        mount(bench / "source")
        done_well("swap", bench / "source/job")
        done_well("umount", bench / "source")
    mount(bench / "source", "-o", "ro")
    done = trashd("swap", bench / "source/job")
    assert (done.code, "mounted read-only" in done.err) == (11, True), done.err


def test_after_a_crash_an_orphan_is_listed_by_the_path_that_users_know(bench: Path) -> None:
    (bench / "source/job").mkdir()
    mount(bench / "source")
    done_well("swap", bench / "source/job")
    kill_daemon(bench / "source")
    origin = str(bench / "source/job")
    (listed,) = done_well("list", "--path", f"{bench}/source/*", "--json").objects()
    assert listed["origin"] == origin
    (row,) = [line for line in done_well("list").out.splitlines() if listed["id"][-6:] in line]
    assert row.endswith(f" {origin}")
    mount("--replace", bench / "source")
    done_well("restore", origin)
    assert (bench / "source/job").is_dir()


def test_after_a_crash_a_swap_and_doctor_name_the_dead_daemon_and_what_brings_it_back(bench: Path) -> None:
    (bench / "source/job").mkdir()
    mount(bench / "source")
    kill_daemon(bench / "source")
    doctor_results = trashd("doctor", "--json").objects()
    assert [one["hint"] for one in doctor_results if one["where"] == str(bench / "source")] == [DaemonGone.hint]
    for done in (trashd("swap", bench / "source/job"), trashd("doctor", bench / "source")):
        assert done.code == 6
        assert "Transport endpoint is not connected" in done.err
        assert "trashd mount --replace" in done.err
        assert ".trashd/drop" not in done.err
    run = run_as(USER, [TRASHD, "swap", bench / "source/job"])
    assert run.returncode == 6
    assert b"trashd mount --replace" in run.stderr


@pytest.mark.takes_engine
@pytest.mark.needs("passthrough")
def test_after_a_crash_an_open_file_can_be_read_and_written_and_little_else(bench: Path) -> None:
    mount(bench / "source")
    fd = os.open(bench / "source/file", os.O_RDWR)
    os.fstat(fd)
    kill_daemon(bench / "source")
    assert os.read(fd, 100) == b"content"
    assert os.write(fd, b"more") == len(b"more")
    assert os.lseek(fd, 0, os.SEEK_SET) == 0
    fails: dict[str, Callable[[], object]] = {
        "fstat": lambda: os.fstat(fd),
        "fsync": lambda: os.fsync(fd),
        "ftruncate": lambda: os.ftruncate(fd, 1),
        "lseek": lambda: os.lseek(fd, 0, os.SEEK_END),
        "close": lambda: os.close(fd),  # the first of this mount: the file is closed all the same
    }
    assert until(lambda: errno_of(fails["fstat"]) == errno.ENOTCONN), "a ring is given up after a moment"
    assert {name: errno_of(act) for name, act in fails.items()} == dict.fromkeys(fails, errno.ENOTCONN)
    mount("--replace", bench / "source")
    assert (bench / "source/file").read_bytes() == b"contentmore"
