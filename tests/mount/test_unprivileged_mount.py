"""Mounts without root: for the mounting user alone, by fusermount3; and the ordinary commands in them."""

import ctypes
import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from tests.support import acls
from tests.support.background_mounts import daemon_of, ended, kill_daemon, our_mount
from tests.support.background_processes import LIMIT_S
from tests.support.foreground_mount import until
from tests.support.make_trees import Spec, make_tree, snapshot
from tests.support.other_users import as_user, run_as
from tests.support.proc_stat import stop
from tests.support.real_filesystems import bind_mount, tmpfs_volume
from tests.support.trashd_command import TRASHD, done_well

pytestmark = pytest.mark.needs("root", "fuse")


USER, OTHER = 1000, 1001
_PIDFD_GETFD = 438


@pytest.fixture
def bench(users_bench: Path) -> Path:
    return users_bench


def trashd(*words: str | Path) -> CompletedProcess[bytes]:
    return run_as(USER, [TRASHD, *words])


@pytest.fixture
def mounted(bench: Path) -> Iterator[Path]:
    """The bench, `source` mounted on `target`."""
    assert trashd("mount", bench / "source", bench / "target").returncode == 0
    yield bench
    assert trashd("umount", bench / "target").returncode == 0


def test_it_is_for_its_user_alone(mounted: Path) -> None:
    assert run_as(USER, ["cat", mounted / "target/file"]).stdout == b"content"
    assert run_as(OTHER, ["ls", mounted / "target"]).returncode != 0


def test_what_is_made_is_the_users(mounted: Path) -> None:
    assert run_as(USER, ["install", "-m", "640", "/dev/null", mounted / "target/made"]).returncode == 0
    made = (mounted / "source/made").stat()
    assert (made.st_uid, made.st_gid, stat.S_IMODE(made.st_mode)) == (USER, USER, 0o640)


BLOCKS = """
import os
fd = os.open(".", os.O_TMPFILE | os.O_RDWR, 0o640)
os.posix_fallocate(fd, 0, 100_000)
os.copy_file_range(os.open("file", os.O_RDONLY), fd, 7, 0, 200_000)
os.link(f"/proc/self/fd/{fd}", "named", dst_dir_fd=os.open(".", os.O_PATH), follow_symlinks=True)
print(os.fstat(fd).st_size)
try:
    os.open("closed", os.O_TMPFILE | os.O_RDWR)
except PermissionError:
    print("closed")
"""


@pytest.mark.takes_engine
def test_blocks_and_files_without_a_name_are_the_users(mounted: Path) -> None:
    (mounted / "source/closed").mkdir(0o555)
    done = run_as(USER, ["sh", "-c", 'cd "$0" && exec "$@"', mounted / "target", sys.executable, "-c", BLOCKS])
    assert done.stdout == b"200007\nclosed\n", done.stderr
    named = (mounted / "source/named").stat()
    assert (named.st_uid, stat.S_IMODE(named.st_mode), named.st_size) == (USER, 0o640, 200_007)
    assert named.st_blocks * 512 < 200_007
    born = run_as(USER, ["stat", "-c", "%W", mounted / "target/named"]).stdout
    assert 0 < int(born) <= named.st_ctime


@pytest.mark.takes_engine  # else the kernel asks for a chmod, and that is its owner's
def test_anothers_program_is_written_to_and_loses_its_rights(mounted: Path) -> None:
    program = mounted / "source/program"
    program.touch()
    program.chmod(0o6777)
    assert run_as(USER, ["tee", "-a", mounted / "target/program"], stdin=b"his").returncode == 0
    assert program.read_bytes() == b"his"
    assert stat.S_IMODE(program.stat().st_mode) == 0o777


def test_the_filesystem_below_checks_permissions(mounted: Path) -> None:
    """The kernel would ask for the directory before each change in it."""
    (mounted / "source/closed").mkdir(0o555)
    os.chown(mounted / "source/closed", USER, USER)
    entry = our_mount(mounted / "target")
    assert entry is not None
    assert "default_permissions" not in entry.options
    assert b"Permission denied" in run_as(USER, ["mkdir", mounted / "target/closed/new"]).stderr


def test_the_kernel_checks_them_on_request(bench: Path) -> None:
    assert trashd("mount", bench / "source", bench / "target", "-o", "default_permissions").returncode == 0
    entry = our_mount(bench / "target")
    assert entry is not None
    assert "default_permissions" in entry.options
    assert trashd("umount", bench / "target").returncode == 0


def test_acls_are_the_filesystems_below(mounted: Path) -> None:
    value = acls.acl(
        (acls.USER_OBJ, 6, acls.NOBODY),
        (acls.USER, 4, OTHER),
        (acls.GROUP_OBJ, 0, acls.NOBODY),
        (acls.MASK, 4, acls.NOBODY),
        (acls.OTHER, 0, acls.NOBODY),
    )
    script = "import os, sys; os.setxattr(sys.argv[1], sys.argv[2], bytes.fromhex(sys.argv[3]))"
    done = run_as(USER, [sys.executable, "-c", script, mounted / "target/file", acls.ACCESS, value.hex()])
    assert done.returncode == 0, done.stderr
    assert os.getxattr(mounted / "source/file", acls.ACCESS) == value
    assert run_as(OTHER, ["cat", mounted / "source/file"]).stdout == b"content"


@pytest.mark.parametrize("name", ["source, too", "sourc\u00e9", "source\\,fsname=x"])
def test_the_mount_tells_its_backing_path_whatever_the_name(bench: Path, name: str) -> None:
    source = (bench / "source").rename(bench / name)
    assert trashd("mount", source, bench / "target").returncode == 0
    entry = our_mount(bench / "target")
    assert entry is not None
    assert entry.source == os.fsencode(source)
    assert entry.options >= {"nosuid", "nodev", f"user_id={USER}"}
    assert trashd("umount", bench / "target").returncode == 0


def test_over_itself_takes_root(bench: Path) -> None:
    done = trashd("mount", bench / "source")
    assert done.returncode == 4
    assert b"only root" in done.stderr or b"hint" in done.stderr
    assert our_mount(bench / "source") is None


def test_fusermounts_own_words_reach_the_terminal(bench: Path) -> None:
    os.chown(bench / "target", OTHER, OTHER)
    done = trashd("mount", bench / "source", bench / "target")
    assert done.returncode == 4
    assert b"fusermount3: user has no write access" in done.stderr


def test_who_may_not_open_the_device_is_told_of_that(bench: Path) -> None:
    os.chmod("/dev/fuse", 0o600)
    done = trashd("mount", bench / "source", bench / "target")
    assert done.returncode == 4
    assert b"chmod 666 /dev/fuse" in done.stderr
    assert b"a directory that you own" not in done.stderr


def test_who_may_not_let_others_in_is_told_of_that(bench: Path) -> None:
    with tmpfs_volume() as empty:
        (empty / "fuse.conf").touch()
        with bind_mount(empty / "fuse.conf", Path("/etc/fuse.conf")):
            done = trashd("mount", "-o", "allow_other", bench / "source", bench / "target")
    assert done.returncode == 4
    assert b"user_allow_other to /etc/fuse.conf" in done.stderr


def test_a_busy_mount_stays_with_a_hint(bench: Path) -> None:
    assert trashd("mount", bench / "source", bench / "target").returncode == 0
    holding = f"exec 3< {bench}/target/file; {TRASHD} umount {bench}/target"
    done = run_as(USER, ["sh", "-c", holding])
    assert done.returncode == 8
    assert b"--lazy" in done.stderr
    assert trashd("umount", "--lazy", bench / "target").returncode == 0
    assert our_mount(bench / "target") is None


def test_umount_force_aborts_the_connection(bench: Path) -> None:
    assert trashd("mount", bench / "source", bench / "target").returncode == 0
    holding = f"exec 3< {bench}/target/file; {TRASHD} umount --force --json {bench}/target && ! cat <&3"
    done = run_as(USER, ["sh", "-c", holding])
    assert done.returncode == 0
    assert not json.loads(done.stdout)["is_killed"]  # or its death, not the abort, would have closed the file
    assert our_mount(bench / "target") is None


def test_a_dead_mount_is_replaced_on_request(bench: Path) -> None:
    words = ("mount", bench / "source", bench / "target")
    assert trashd(*words).returncode == 0
    kill_daemon(bench / "target")
    refusal = trashd(*words)
    assert refusal.returncode == 3
    assert b"--replace" in refusal.stderr
    assert trashd(*words, "--replace").returncode == 0
    assert run_as(USER, ["cat", bench / "target/file"]).stdout == b"content"
    assert trashd("umount", bench / "target").returncode == 0


def test_a_missing_fusermount_is_told_with_what_to_do(bench: Path) -> None:
    done = run_as(USER, [TRASHD, "mount", bench / "source", bench / "target"], env={"PATH": "/nowhere"})
    assert done.returncode == 3
    assert b"fuse3" in done.stderr


@pytest.mark.usefixtures("short_patience")
def test_umount_force_frees_those_who_wait_for_a_daemon_that_hangs(bench: Path) -> None:
    assert trashd("mount", bench / "source", bench / "target").returncode == 0
    pid = daemon_of(bench / "target")
    pid_fd = os.pidfd_open(pid)
    stop(pid)
    asking: list[str | Path] = ["stat", "-f", bench / "target"]
    with subprocess.Popen(asking, stderr=subprocess.DEVNULL, user=USER, group=USER, extra_groups=[]) as waiting:
        done = trashd("umount", "--force", bench / "target")
        assert waiting.wait(LIMIT_S) != 0
    assert done.returncode == 0, done.stderr
    assert b"was killed" in done.stderr
    ended(pid_fd)


@pytest.mark.usefixtures("short_patience")
def test_umount_force_kills_nobody_who_was_sent_the_connection(bench: Path) -> None:
    assert trashd("mount", bench / "source", bench / "target").returncode == 0
    pid = daemon_of(bench / "target")
    pid_fd = os.pidfd_open(pid)
    number = next(int(fd.name) for fd in Path(f"/proc/{pid}/fd").iterdir() if os.path.realpath(fd) == "/dev/fuse")
    sent = ctypes.CDLL(None).syscall(_PIDFD_GETFD, pid_fd, number, 0)
    stop(pid)
    with subprocess.Popen(["sleep", "infinity"], pass_fds=[sent], user=OTHER) as other:
        os.close(sent)
        done_well("umount", "--force", bench / "target")
        assert other.poll() is None
        other.kill()
    ended(pid_fd)


N_DIRECTORIES, SLACK = 200, 8


@pytest.fixture
def mounted_bench(users_bench: Path) -> Iterator[Path]:
    """The user's own mount of `source` at `target`."""
    trashd_well("mount", users_bench / "source", users_bench / "target")
    yield users_bench
    trashd_well("umount", users_bench / "target")


def trashd_well(*words: str | Path) -> CompletedProcess[bytes]:
    done = run_as(USER, [TRASHD, *words])
    assert done.returncode == 0, done
    return done


def told(*words: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in trashd_well(*words).stdout.splitlines()]


def test_swap_restore_and_reap(mounted_bench: Path) -> None:
    target = mounted_bench / "target"
    job = target / "job"
    as_user(USER, lambda: str(make_tree(job, {"a": "x"})))
    before = as_user(USER, lambda: snapshot(job))
    [swapped] = told("swap", "--json", job)
    assert swapped["path"] == str(job)
    assert (os.listdir(mounted_bench / "source/job"), as_user(USER, lambda: os.listdir(job))) == ([], [])
    [entry] = told("list", "--json", "--volume", target)
    assert (entry["id"], entry["origin"]) == (swapped["id"], str(job))
    trashd_well("restore", "--volume", target, swapped["id"])
    assert as_user(USER, lambda: snapshot(job)) == before
    trashd_well("rm", job)
    trashd_well("reap", "--all", "--now", "--volume", target)
    assert told("list", "--json", "--volume", target) == []


def test_drop_leads_to_the_users_own_folder(mounted_bench: Path) -> None:
    target = mounted_bench / "target"
    trashd_well("init", target)
    as_user(USER, lambda: str(make_tree(target / "job", {"a": "x"})))
    done = run_as(USER, ["mv", target / "job", target / f".trashd-{USER}/drop/"])
    assert (done.returncode, done.stderr) == (0, b"")
    [entry] = told("list", "--json", "--volume", mounted_bench / "source")
    assert (entry["method"], entry["uid"]) == ("removed", USER)


@pytest.mark.needs("prune")
def test_after_swap_and_reap_the_daemon_holds_nothing_and_all_inodes_are_back(mounted_bench: Path) -> None:
    target, daemon = mounted_bench / "target", daemon_of(mounted_bench / "target")

    def n_fds() -> int:
        return len(os.listdir(f"/proc/{daemon}/fd"))

    def swap_and_reap(spec: Spec) -> None:
        as_user(USER, lambda: str(make_tree(target / "job", spec)))
        [swapped] = told("swap", "--json", target / "job")
        trashd_well("reap", "--now", "--volume", target, swapped["id"])
        as_user(USER, (target / "job").rmdir)

    swap_and_reap({})  # the store has what it needs by then
    fds, inodes = n_fds(), os.statvfs(mounted_bench).f_ffree
    swap_and_reap({f"d{number}": {"a": "x", "b": "y"} for number in range(N_DIRECTORIES)})
    assert until(lambda: n_fds() <= fds + SLACK and os.statvfs(mounted_bench).f_ffree >= inodes - SLACK), (n_fds(), fds)
