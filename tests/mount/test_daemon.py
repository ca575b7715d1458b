"""The daemon's start, its end by a person, a signal or a failure, a remount and an upgrade: no process hangs."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from fusefs.core.errors import NotPermitted
from fusefs.linux import mount_calls
from fusefs.linux.mountinfo import DAEMON_GONE, read_mounts
from fusefs.mount.places.attach import UnmountMode, remount
from fusefs.mount.places.attach import unmount as unmount_ours
from tests.support.background_mounts import abort, backing_of, daemon_of, ended, is_dead, kill_daemon, mount, our_mount
from tests.support.background_processes import LIMIT_S, clients, ends, in_time
from tests.support.foreground_mount import Mounted, fresh_mount, trashd_mount
from tests.support.make_trees import Dir, make_tree
from tests.support.other_users import as_user, run_as
from tests.support.proc_stat import stop
from tests.support.real_filesystems import bind_mount, mounts, tmpfs_volume, unmount
from tests.support.replaced_package import ReplacedPackage, modules_ever
from tests.support.transports import by_ring
from tests.support.trashd_command import TRASHD, done_well, swapped, trashd

pytestmark = pytest.mark.needs("root", "fuse")


# trashd, installed without a C compiler. $1 and on: as for trashd.
NOT_BUILT = """
import sys
sys.modules["fusefs.mount.native._core"] = None
from fusefs.cli.main import main
sys.exit(main())
"""


@pytest.mark.quick("mount")
def test_it_answers_when_the_command_returns(bench: Path) -> None:
    mount(bench / "source", bench / "target")
    assert (bench / "target/file").read_text() == "content"


@pytest.mark.parametrize("name", ["a, b", "\u00e9", os.fsdecode(b"\xff\n\\ ")])
def test_any_name_will_do(bench: Path, name: str) -> None:
    source, target = (bench / "source").rename(bench / f"s{name}"), (bench / "target").rename(bench / f"t{name}")
    mount(source, target)
    assert backing_of(target) == source
    assert (target / "file").read_text() == "content"
    done_well("umount", target)
    assert our_mount(target) is None


def test_links_are_followed_on_both_sides(bench: Path) -> None:
    for name in ("source", "target"):
        (bench / f"to-{name}").symlink_to(name)
    mount(bench / "to-source", bench / "to-target")
    assert backing_of(bench / "target") == bench / "source"
    done_well("umount", bench / "to-target")


def test_the_daemon_holds_on_to_no_terminal_and_no_directory(bench: Path) -> None:
    mount(bench / "source", bench / "target")
    process = Path("/proc", str(daemon_of(bench / "target")))
    assert {(process / "fd" / fd).readlink() for fd in "012"} == {Path("/dev/null")}
    assert (process / "cwd").readlink() == Path("/")
    assert os.getsid(int(process.name)) == int(process.name)


def test_the_daemon_can_pass_no_quota_and_keep_no_suid_bit(bench: Path) -> None:
    mount(bench / "source", bench / "target")
    status = Path("/proc", str(daemon_of(bench / "target")), "status").read_text()
    sets = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith("Cap")]
    assert all(not one & (1 << 24 | 1 << 4) for one in sets)


def test_the_daemon_has_all_the_fds_that_it_may_have(bench: Path) -> None:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    subprocess.run(
        ["prlimit", f"--nofile={soft // 2}:{soft}", TRASHD, "mount", bench / "source", bench / "target"], check=True
    )
    assert resource.prlimit(daemon_of(bench / "target"), resource.RLIMIT_NOFILE) == (soft, soft)


@pytest.mark.parametrize("flag", ["nosuid", "nodev", "noexec", "ro"])
@pytest.mark.parametrize("over_itself", [False, True])
def test_what_the_backing_filesystem_forbids_the_mount_forbids(bench: Path, flag: str, over_itself: bool) -> None:
    with tmpfs_volume(options=[flag]) as volume:
        target = volume if over_itself else bench / "target"
        mount(volume, target)
        entry = our_mount(target)
        assert entry is not None
        assert flag in entry.options
        done_well("umount", target)


def test_options_reach_the_kernel(bench: Path) -> None:
    mount(bench / "source", bench / "target", "-o", "ro,noexec,x-systemd.automount", "-o", "nosuid")
    entry = our_mount(bench / "target")
    assert entry is not None
    assert entry.options >= {"ro", "noexec", "nosuid", "allow_other", "default_permissions"}


# What keeps it from mounting.


REFUSED = {
    "file": (["source/file", "target"], 3),
    "missing source": (["missing", "target"], 5),
    "missing target": (["source", "missing"], 5),
    "target inside": ([".", "target"], 3),
    "source inside": (["target/deep", "target"], 3),
    "root": (["source", "/"], 3),
    "root itself": (["/"], 3),
    "options": (["source", "target", "-o", "bogus"], 2),
}


@pytest.mark.parametrize("foreground", [[], ["--foreground"]], ids=["background", "foreground"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_reaches_the_terminal(bench: Path, foreground: list[str], name: str) -> None:
    (bench / "target/deep").mkdir()
    words, code = REFUSED[name]
    older = mounts()
    done = trashd("mount", *words, *foreground, cwd=bench)
    assert (done.code, done.out) == (code, "")
    assert "\n  hint: " in done.err
    assert mounts() == older


def test_a_second_mount_at_the_same_point_is_refused(bench: Path) -> None:
    mount(bench / "source", bench / "target")
    for words in ((bench / "source", bench / "target"), (bench / "target",), (bench / "target", bench / "source")):
        done = trashd("mount", *words)
        assert done.code == 3
        assert "trashd mount at" in done.err or "already mounted by trashd" in done.err


def test_a_bind_mount_of_the_same_directory_is_refused(bench: Path) -> None:
    with bind_mount(bench / "source", bench / "target"):
        assert trashd("mount", bench / "source", bench / "target").code == 3


def test_a_place_inside_through_a_bind_mount_is_refused(bench: Path) -> None:
    (bench / "source/deep").mkdir()
    with bind_mount(bench / "source", bench / "target"):
        assert trashd("mount", bench / "source", bench / "target/deep").code == 3
        assert trashd("mount", bench / "target/deep", bench / "source").code == 3


def test_what_is_mounted_inside_is_not_hidden(bench: Path) -> None:
    (bench / "target/inside").mkdir()
    with bind_mount(bench / "source", bench / "target/inside"):
        done = trashd("mount", bench / "source", bench / "target")
    assert done.code == 3
    assert str(bench / "target/inside") in done.err


def test_no_fuse_device_is_told_with_what_to_do(bench: Path) -> None:
    script = 'mount -t tmpfs tmpfs /dev && mknod -m 666 /dev/null c 1 3 && exec "$@"'
    argv: list[str | Path] = ["unshare", "--mount", "sh", "-c", script, "sh", TRASHD, "mount"]
    argv += [bench / "source", bench / "target"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "/dev/fuse" in done.stderr
    assert "modprobe fuse" in done.stderr


def test_a_missing_pyfuse3_is_told_with_what_to_do_where_it_is_needed(bench: Path) -> None:
    (bench / "pyfuse3.py").write_text("raise ImportError('no libfuse3.so.3')")
    assert trashd("mount", bench / "source", bench / "target", PYTHONPATH=str(bench)).code == 0
    done_well("umount", bench / "target")
    done = trashd("mount", "-o", "engine=plain", bench / "source", bench / "target", PYTHONPATH=str(bench))
    assert done.code == 3
    assert "the engine is off (engine=plain), and pyfuse3" in done.err
    assert "no libfuse3.so.3" in done.err
    assert "pipx inject trashd pyfuse3" in done.err


@pytest.mark.parametrize("engine", ["engine=auto", "engine=plain"])
def test_where_the_c_part_was_not_built_nothing_is_mounted(bench: Path, engine: str) -> None:
    command: list[str | Path] = [sys.executable, "-c", NOT_BUILT, "mount", bench / "source", bench / "target"]
    done = subprocess.run([*command, "-o", engine], capture_output=True, text=True, check=False)
    assert (done.returncode, os.path.ismount(bench / "target")) == (3, False)
    assert "the C module for mounts was not built" in done.stderr


def test_a_daemon_that_is_killed_before_it_is_ready_is_told(bench: Path) -> None:
    (bench / "pyfuse3.py").write_text("import os; os.kill(os.getpid(), 9)")
    done = trashd("mount", "-o", "engine=plain", bench / "source", bench / "target", PYTHONPATH=str(bench))
    assert done.code == 128 + 9
    assert "Killed" in done.err


def test_umount_takes_away_only_what_is_ours(bench: Path) -> None:
    with bind_mount(bench / "source", bench / "target"):
        done = trashd("umount", bench / "target")
        assert done.code == 5
        assert (bench / "target/file").exists()


DEAD = {*DAEMON_GONE, errno.EIO}


def at_work(top: Path) -> list[Callable[[], None]]:
    """What is going on when the daemon ends; each for ever, until an OSError."""

    def write() -> None:
        with (top / "written").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(100_000))
                file.seek(0)
                os.fstat(file.fileno())  # what is written may pass the daemon by; this does not

    def make() -> None:
        i = 0
        while True:
            os.stat(top / "standing")  # once unmounted, the directory below could be written to
            path = top / f"made{i % 50}"
            path.write_bytes(b"x")
            path.rename(top / f"renamed{i % 50}")
            (top / f"renamed{i % 50}").unlink()
            i += 1

    def walk() -> None:
        while True:
            os.listdir(top)
            os.stat(top / "standing")

    def read() -> None:
        while True:
            fd = os.open(top / "standing", os.O_RDONLY | os.O_DIRECT)
            os.pread(fd, 4096, 0)
            os.close(fd)

    return [write, make, walk, read]


def wait_for_work(mounted: Mounted) -> None:
    """Until the clients' files are there."""
    while not ((mounted.backing / "written").exists() and any(mounted.backing.glob("*ed[0-9]*"))):
        pass


def end_lazily(mounted: Mounted) -> None:
    subprocess.run(["umount", "--lazy", mounted.path], check=True)
    os.kill(mounted.pid, signal.SIGTERM)


ENDS: dict[str, Callable[[Mounted], object]] = {
    "kill": lambda mounted: os.kill(mounted.pid, signal.SIGKILL),
    "abort": lambda mounted: mounted.fuse.abort(),
    "SIGTERM": lambda mounted: os.kill(mounted.pid, signal.SIGTERM),
    "SIGINT": lambda mounted: os.kill(mounted.pid, signal.SIGINT),
    "lazy unmount": end_lazily,
}


@pytest.mark.parametrize("how", ENDS)
def test_clients_get_errors_when_the_daemon_ends_under_load(how: str) -> None:
    with fresh_mount(expect_end=True) as mounted:
        (mounted.path / "standing").write_bytes(bytes(4096))
        with clients(at_work(mounted.path)) as pids:
            wait_for_work(mounted)
            ENDS[how](mounted)
            codes = {ends(pid) for pid in pids}
        # Unmounted, the names are gone and the directory below shows: ENOENT there, EXDEV for a rename at that moment.
        allowed = DEAD if how in ("kill", "abort") else DEAD | {errno.ENOENT, errno.EXDEV}
        assert codes <= allowed, codes


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


def test_umount_waits_for_a_brief_use(bench: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount(bench / "source", bench / "target")
    with open(bench / "target/file", encoding="ascii") as file:
        umount2 = mount_calls.unmount

        def unmount_then_close(path: bytes, flags: int) -> None:
            try:
                umount2(path, flags)
            finally:
                file.close()

        monkeypatch.setattr(mount_calls, "unmount", unmount_then_close)
        unmount_ours(os.fsencode(bench / "target"), UnmountMode.PLAIN)
    assert our_mount(bench / "target") is None


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
    assert "does not respond" in refusal.err
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


RESTRICTIONS = ("ro", "nosuid", "nodev", "noexec", "nosymfollow")
EVERYTHING = "remount,rw,suid,dev,exec,symfollow,atime,diratime"


def flags_at(path: Path) -> set[str]:
    """Of what one sees mounted at exactly this path."""
    found = [one for one in read_mounts() if one.point == os.fsencode(path)]
    return set(found[-1].flags())


def target_of(bench: Path, where: str) -> Path:
    return bench / ("source" if where == "over itself" else "target")


@pytest.mark.parametrize("where", ["elsewhere", "over itself"])
@pytest.mark.parametrize("flag", RESTRICTIONS)
def test_what_the_mount_of_the_source_refuses_stays_refused(bench: Path, flag: str, where: str) -> None:
    source, target = bench / "source", target_of(bench, where)
    with bind_mount(source, source, [flag]):
        mount(source, target)
        for words in (EVERYTHING, "remount,sync", EVERYTHING):
            assert remount(os.fsencode(target), [words])
            assert flag in flags_at(target)
            assert where == "elsewhere" or flag in flags_at(backing_of(target))
        done_well("umount", target)


@pytest.mark.parametrize("flag", ["noatime", "nodiratime", "strictatime"])
def test_times_of_access_stay_as_the_mount_of_the_source_says(bench: Path, flag: str) -> None:
    source = bench / "source"
    with bind_mount(source, source, [flag]):
        before = flags_at(source) & {"noatime", "nodiratime", "relatime"}
        mount(source)
        for words in (EVERYTHING, "remount,ro", EVERYTHING):
            assert remount(os.fsencode(source), [words])
            assert flags_at(backing_of(source)) & {"noatime", "nodiratime", "relatime"} == before
        done_well("umount", source)


@pytest.mark.parametrize("where", ["elsewhere", "over itself"])
@pytest.mark.parametrize("flag", RESTRICTIONS)
def test_what_the_mount_alone_refuses_is_given_back_on_request_and_not_before(
    bench: Path, flag: str, where: str
) -> None:
    source, target = bench / "source", target_of(bench, where)
    mount(source, target, "-o", flag)
    seen = [target] if where == "elsewhere" else [target, backing_of(target)]
    assert remount(os.fsencode(target), ["remount,sync"])
    assert all(flag in flags_at(path) for path in seen)
    assert remount(os.fsencode(target), [EVERYTHING])
    assert not any(flag in flags_at(path) for path in seen)


@pytest.mark.parametrize("flag", ["ro", "noexec"])
def test_what_a_user_refuses_in_his_mount_root_gives_to_nobody(users_bench: Path, flag: str) -> None:
    target = users_bench / "target"
    run_as(USER, [TRASHD, "mount", users_bench / "source", target, "-o", flag], check=True)
    assert remount(os.fsencode(target), [EVERYTHING])
    assert flags_at(target) >= {flag, "nosuid", "nodev"}
    assert remount(os.fsencode(target), ["remount,ro"])
    assert flags_at(target) >= {flag, "nosuid", "nodev", "ro"}
    run_as(USER, [TRASHD, "umount", target], check=True)


def test_a_user_changes_no_mount_not_even_his(users_bench: Path) -> None:
    target = users_bench / "target"
    run_as(USER, [TRASHD, "mount", users_bench / "source", target, "-o", "ro"], check=True)
    with pytest.raises(NotPermitted):
        as_user(USER, lambda: remount(os.fsencode(target), [EVERYTHING]))
    assert flags_at(target) >= {"ro", "nosuid", "nodev"}
    run_as(USER, [TRASHD, "umount", target], check=True)


def test_a_running_daemon_loads_no_module_of_a_new_version(volume: Path, tmp_path: Path) -> None:
    source = make_tree(volume / "upgraded", {"job": Dir({"file": "content"})})
    package = ReplacedPackage(tmp_path)
    with trashd_mount(source, command=package.command) as mounted:
        had = package.replace()
        late = {name for name in modules_ever("fusefs.mount.life.daemon") if not name.startswith("fusefs.mount.plain")}
        assert late <= had
        job = mounted.path / "job"
        swap_result = swapped(job)
        assert os.listdir(job) == []
        done_well("restore", swap_result["id"])
        assert (job / "file").read_text() == "content"
        os.setxattr(job / "file", "user.key", b"value")
        (job / "file").rename(job / "other")
        (job / "link").symlink_to("other")
        job.rename(mounted.path / ".trashd/drop/job")
        assert str(mounted.path) in trashd("status").out
        assert package.imported_since() == []
    assert package.imported_since() == []
