"""The daemon's start: what it is like when it serves, and what keeps it from mounting."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.background_mounts import backing_of, daemon_of, mount, our_mount
from tests.support.real_filesystems import bind_mount, mounts, tmpfs_volume
from tests.support.trashd_command import TRASHD, done_well, trashd

# trashd, installed without a C compiler. $1 and on: as for trashd.
NOT_BUILT = """
import sys
sys.modules["fusefs.mount.native._core"] = None
from fusefs.cli.main import main
sys.exit(main())
"""

pytestmark = pytest.mark.needs("root", "fuse")


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
        assert "mount of trashd at" in done.err or "already mounted by trashd" in done.err


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
    assert "engine=plain: then pyfuse3 is needed" in done.err
    assert "no libfuse3.so.3" in done.err
    assert "pipx inject trashd pyfuse3" in done.err


@pytest.mark.parametrize("engine", ["engine=auto", "engine=plain"])
def test_where_the_c_part_was_not_built_nothing_is_mounted(bench: Path, engine: str) -> None:
    command: list[str | Path] = [sys.executable, "-c", NOT_BUILT, "mount", bench / "source", bench / "target"]
    done = subprocess.run([*command, "-o", engine], capture_output=True, text=True, check=False)
    assert (done.returncode, os.path.ismount(bench / "target")) == (3, False)
    assert "the C part of the mount was not built" in done.stderr


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
