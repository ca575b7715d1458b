"""The mount's end, asked for by a person, by a signal, or not at all."""

import json
import os
import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest

from fusefs.linux.mountinfo import DAEMON_GONE
from tests.support.background_mounts import abort, backing_of, daemon_of, ended, is_dead, kill_daemon, mount, our_mount
from tests.support.background_processes import LIMIT_S, in_time
from tests.support.other_users import run_as
from tests.support.proc_stat import stop
from tests.support.real_filesystems import bind_mount, mounts, tmpfs_volume, unmount
from tests.support.transports import by_ring
from tests.support.trashd_command import TRASHD, done_well, trashd

pytestmark = pytest.mark.needs("root", "fuse")

USER = 1000


@pytest.mark.quick("umount")
def test_umount_waits_for_the_daemon(bench: Path) -> None:
    mount(bench / "source", bench / "target")
    pid_fd = os.pidfd_open(daemon_of(bench / "target"))
    done_well("umount", bench / "target")
    ended(pid_fd)
    with tmpfs_volume() as volume:
        mount(volume, bench / "target")
        done_well("umount", bench / "target")
        subprocess.run(["umount", volume], check=True)


def test_a_busy_mount_stays_with_a_hint(bench: Path) -> None:
    mount(bench / "source", bench / "target")
    with open(bench / "target/file", encoding="ascii"):
        done = trashd("umount", bench / "target")
        assert done.code == 8
        assert "--lazy" in done.err
    done_well("umount", bench / "target")


def test_umount_lazy_leaves_an_open_file_to_its_user(bench: Path) -> None:
    mount(bench / "source", bench / "target")
    pid_fd = os.pidfd_open(daemon_of(bench / "target"))
    with open(bench / "target/file", "r+", encoding="ascii") as file:
        done_well("umount", "--lazy", bench / "target")
        assert our_mount(bench / "target") is None
        file.write("changed")
        file.flush()
    ended(pid_fd)
    assert (bench / "source/file").read_text() == "changed"


def test_umount_force_leaves_nothing_to_anybody(bench: Path) -> None:
    mount(bench / "source", bench / "target")
    pid_fd = os.pidfd_open(daemon_of(bench / "target"))
    with open(bench / "target/file", "rb", buffering=0) as file:
        done_well("umount", "--force", bench / "target")
        assert our_mount(bench / "target") is None
        with pytest.raises(OSError, match=r".") as caught:
            os.fstatvfs(file.fileno())
    assert caught.value.errno in DAEMON_GONE
    ended(pid_fd)


@pytest.mark.usefixtures("short_patience")
def test_umount_force_frees_those_who_wait_for_a_daemon_that_hangs(bench: Path) -> None:
    mount(bench)
    pid = daemon_of(bench)
    pid_fd = os.pidfd_open(pid)
    stop(pid)
    with subprocess.Popen(["stat", "--file-system", bench], stderr=subprocess.DEVNULL) as waiting:
        refusal = trashd("mount", "--replace", bench)
        done = trashd("umount", "--force", "--json", bench)
        assert waiting.wait(LIMIT_S) != 0
    assert refusal.code == 3
    assert "does not answer" in refusal.err
    assert done.code == 0
    assert "was killed" in done.err
    assert json.loads(done.out) == {"path": str(bench), "is_ended": True, "is_killed": True}
    ended(pid_fd)


@pytest.mark.usefixtures("short_patience")
@pytest.mark.parametrize("transport", [by_ring("uring=on"), "uring=off"])
def test_umount_force_ends_though_a_stopped_daemon_has_a_request_and_no_client_waits(
    bench: Path, transport: str
) -> None:
    """Over io_uring the last to leave a mount waits in the kernel until the daemon has let go of its requests."""
    mount("-o", transport, bench / "source", bench / "target")
    pid_fd = os.pidfd_open(pid := daemon_of(bench / "target"))
    (bench / "target/file").read_bytes()
    with (bench / "target/file").open():
        stop(pid)
    in_time(partial(done_well, "umount", "--force", bench / "target"))
    ended(pid_fd)


def test_umount_force_kills_no_daemon_that_ends(bench: Path) -> None:
    mount(bench)
    done = done_well("umount", "--force", "--json", bench)
    assert json.loads(done.out) == {"path": str(bench), "is_ended": True, "is_killed": False}


def test_umount_is_not_for_everybody(bench: Path) -> None:
    mount(bench / "source", bench / "target")
    done = run_as(USER, [TRASHD, "umount", bench / "target"])
    assert done.returncode == 4
    assert our_mount(bench / "target") is not None


def test_a_signal_leaves_alone_what_somebody_mounted_over_it(bench: Path) -> None:
    mount(bench / "source", bench / "target")
    pid_fd = os.pidfd_open(daemon_of(bench / "target"))
    with bind_mount(bench, bench / "target"):
        os.kill(daemon_of(bench / "target"), signal.SIGTERM)
        ended(pid_fd)
        assert (bench / "target/source/file").exists()
    assert our_mount(bench / "target") is not None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_a_signal_unmounts(bench: Path, number: signal.Signals, busy: bool) -> None:
    mount(bench / "source", bench / "target")
    pid = daemon_of(bench / "target")
    pid_fd = os.pidfd_open(pid)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, cwd=bench / "target" if busy else bench) as user:
        os.kill(pid, number)
        ended(pid_fd)
        assert our_mount(bench / "target") is None
        user.communicate()


def test_the_foreground_ends_with_0_after_sigterm(bench: Path) -> None:
    argv = [TRASHD, "mount", "--foreground", f"{bench}/source", f"{bench}/target"]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as daemon:
        while our_mount(bench / "target") is None:
            assert daemon.poll() is None
        assert (bench / "target/file").exists()
        daemon.terminate()
        _out, said = daemon.communicate()
    assert daemon.returncode == 0
    assert "stopping" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("over_itself", [False, True])
def test_a_killed_daemon_uncovers_nothing_and_is_replaced_on_request(bench: Path, over_itself: bool) -> None:
    words = (bench,) if over_itself else (bench / "source", bench / "target")
    probe = words[-1] / ("source/file" if over_itself else "file")
    mount(*words)
    kill_daemon(words[-1])
    assert is_dead(words[-1])
    refusal = trashd("mount", *words)
    assert refusal.code == 3
    assert "--replace" in refusal.err
    mount("--replace", *words)
    assert probe.read_text() == "content"
    assert len([entry for entry in mounts() if entry.fs_type == "fuse.trashd"]) == 1
    done_well("umount", words[-1])


def test_an_aborted_connection_uncovers_nothing(bench: Path) -> None:
    mount(bench)
    abort(bench)
    assert is_dead(bench)
    assert backing_of(bench).exists()
    mount("--replace", bench)
    assert (bench / "source/file").read_text() == "content"


def test_replace_leaves_a_live_mount_alone(bench: Path) -> None:
    mount(bench / "source", bench / "target")
    pid = daemon_of(bench / "target")
    assert trashd("mount", "--replace", bench / "source", bench / "target").code == 3
    assert daemon_of(bench / "target") == pid


def test_replace_mounts_where_nothing_is(bench: Path) -> None:
    mount("--replace", bench / "source", bench / "target")
    assert (bench / "target/file").exists()


@pytest.mark.parametrize("over_itself", [False, True])
def test_a_dead_mount_is_unmounted_like_any_other(bench: Path, over_itself: bool) -> None:
    words = (bench,) if over_itself else (bench / "source", bench / "target")
    mount(*words)
    kill_daemon(words[-1])
    done_well("umount", words[-1])
    assert our_mount(words[-1]) is None


def test_what_a_crash_left_makes_way_for_the_next_mount(bench: Path) -> None:
    mount(bench)
    clone = backing_of(bench)
    kill_daemon(bench)
    unmount(bench)
    mount(bench)
    assert backing_of(bench) == clone
    assert len([entry for entry in mounts() if entry.mount_point == os.fsencode(clone)]) == 1
