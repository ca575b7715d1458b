"""`mount -t fuse.trashd`, lines of fstab, and mount.fuse.trashd itself: words and exit codes of mount(8)."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.background_mounts import daemon_of, mount, our_mount
from tests.support.other_users import run_as
from tests.support.proc_stat import stop
from tests.support.real_filesystems import bind_mount, tmpfs_volume
from tests.support.trashd_command import done_well, environment

pytestmark = pytest.mark.needs("root", "fuse")

REPO = Path(__file__).parents[2]
WithHelper = Callable[[str], subprocess.CompletedProcess[str]]
HELPER = Path(sys.executable).with_name("mount.fuse.trashd")

# $1 a directory with sbin/, the rest a command; mount(8) looks for its helpers in /sbin alone.
_WITH_HELPER = 'mount -t overlay -o "lowerdir=$1/sbin:$(realpath /sbin)" overlay "$(realpath /sbin)" && shift && "$@"'


def helper(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HELPER, *words], capture_output=True, text=True, env=environment({}), check=False)


@pytest.fixture(scope="module")
def installed() -> Iterator[Path]:
    """What `make install-system` installs."""
    with tmpfs_volume() as path:
        words = ["install-system", f"DESTDIR={path}", "ARGS="]  # not those of a `make test ARGS=` that runs us
        subprocess.run(["make", "-C", REPO, *words], check=True, stdout=subprocess.DEVNULL)
        yield path


@pytest.fixture
def with_helper(installed: Path, bench: Path) -> WithHelper:
    """Run a shell script in a mount namespace where it is installed."""

    def run(script: str) -> subprocess.CompletedProcess[str]:
        argv = ["unshare", "--mount", "sh", "-euc", _WITH_HELPER, "sh", str(installed), "sh", "-euxc", script]
        return subprocess.run(argv, capture_output=True, text=True, cwd=bench, check=False)

    return run


def test_mount_8_finds_it(bench: Path, with_helper: WithHelper) -> None:
    script = f"mount -t fuse.trashd -o ro,nosuid {bench}/source {bench}/target; cat target/file; umount target"
    done = with_helper(script)
    assert (done.returncode, done.stdout) == (0, "content"), done.stderr


def test_a_line_of_fstab_may_say_what_others_read(bench: Path, with_helper: WithHelper) -> None:
    options = "_netdev,nofail,x-systemd.automount,x-systemd.idle-timeout=1min,coherence=shared,timeout=2"
    (bench / "fstab").write_text(f"{bench}/source {bench}/target fuse.trashd {options} 0 0\n")
    done = with_helper("mount -T fstab -a; mount -T fstab -a; cat target/file; umount target")
    assert (done.returncode, done.stdout.strip()) == (0, "content"), done.stderr


def test_a_line_of_fstab_with_noatime_mounts_and_prints_that_it_has_no_effect(
    bench: Path, with_helper: WithHelper
) -> None:
    (bench / "fstab").write_text(f"{bench}/source {bench}/target fuse.trashd noatime,nodiratime 0 0\n")
    done = with_helper("mount -T fstab -a; cat target/file; mount -T fstab -o remount,ro target; umount target")
    assert (done.returncode, done.stdout.strip()) == (0, "content"), done.stderr
    lines = [line for line in done.stderr.splitlines() if "no effect" in line]
    assert [line.split("-o ")[1].split()[0] for line in lines] == ["noatime", "nodiratime"]


def test_what_stands_and_works_is_not_mounted_again(bench: Path) -> None:
    (bench / "other").mkdir()
    assert helper(bench / "source", bench / "target").returncode == 0
    before = our_mount(bench / "target")
    assert helper(bench / "source", bench / "target").returncode == 0
    assert our_mount(bench / "target") == before
    for words in ((bench / "other", bench / "target"), (bench / "source", bench / "target", "-o", "ro")):
        done = helper(*words)
        assert done.returncode == 32
        assert "already mounted by trashd" in done.stderr


# Says at each step who may make a file, and what else is refused: in the mount, and in the tree behind it.
_REMOUNTED = r"""
tree() { awk -v at="$1" '$5 == at && / fuse.trashd / { sub(/.* fuse.trashd /, ""); print $1 }' /proc/self/mountinfo; }
flags() { awk -v at="$1" '$5 == at { print $6 }' /proc/self/mountinfo | tail -n 1 | grep -oE 'no(exec|suid)'; }
try() { touch "$1/made" 2> said && rm "$1/made" && echo may || grep -o Read-only said; }
mount -T fstab "$MOUNT"
TREE=$(tree "$MOUNT")
for words in ro rw,noexec rw; do
    mount -T fstab -o "remount,$words" "$MOUNT"
    echo $words: $(try "$MOUNT") $(try "$TREE") $(flags "$MOUNT") - $(flags "$TREE")
done
umount "$MOUNT"
"""


def test_a_remount_changes_the_mount(bench: Path, with_helper: WithHelper) -> None:
    """The backing path is another matter, and so is what fstab says of trashd's own options."""
    options = "nosuid,coherence=shared,timeout=7,_netdev,x-systemd.automount"
    (bench / "fstab").write_text(f"{bench}/source {bench}/target fuse.trashd {options} 0 0\n")
    done = with_helper(f"MOUNT={bench}/target; {_REMOUNTED}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "ro: Read-only may nosuid -",
        "rw,noexec: may may nosuid noexec -",
        "rw: may may nosuid noexec -",
    ]


def test_who_has_a_file_open_for_writing_keeps_a_mount_from_being_read_only(bench: Path) -> None:
    mount(bench / "source", bench / "target")
    with (bench / "target/file").open("a"):
        done = helper(bench / "source", bench / "target", "-o", "remount,ro")
        assert done.returncode == 32
        assert "fuser -vm" in done.stderr
        (bench / "target/new").touch()


def test_what_is_no_mount_of_ours_is_not_remounted(bench: Path) -> None:
    done = helper(bench / "source", bench / "target", "-o", "remount,ro")
    assert done.returncode == 32
    assert "is no mount of trashd" in done.stderr


def test_a_remount_with_a_word_that_nobody_knows_is_1(bench: Path) -> None:
    mount(bench / "source", bench / "target")
    assert helper(bench / "source", bench / "target", "-o", "remount,bogus").returncode == 1


def test_what_stands_and_does_not_answer_is_told(bench: Path) -> None:
    mount(bench / "source", bench / "target")
    pid = daemon_of(bench / "target")
    stop(pid)
    try:
        done = helper(bench / "source", bench / "target")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert done.returncode == 32
    assert "does not answer" in done.stderr
    assert "umount --force" in done.stderr


def test_what_is_read_only_below_stands_too(bench: Path) -> None:
    with bind_mount(bench / "source", bench / "source", ["ro"]):
        assert helper(bench / "source", bench / "target").returncode == 0
        assert helper(bench / "source", bench / "target").returncode == 0
        done_well("umount", bench / "target")


def test_mount_8_tells_why_not(bench: Path, with_helper: WithHelper) -> None:
    done = with_helper(f"mount -t fuse.trashd {bench}/source/file {bench}/target")
    assert done.returncode == 32
    assert "is not a directory" in done.stderr


def test_it_mounts(bench: Path) -> None:
    assert helper(bench / "source", bench / "target", "-o", "rw,noexec,_netdev", "-n", "-v").returncode == 0
    entry = our_mount(bench / "target")
    assert entry is not None
    assert "noexec" in entry.options


def test_a_dry_run_mounts_nothing(bench: Path) -> None:
    assert helper(bench / "source", bench / "target", "-f").returncode == 0
    assert our_mount(bench / "target") is None


def test_sloppy_passes_over_unknown_options(bench: Path) -> None:
    assert helper(bench / "source", bench / "target", "-s", "-o", "bogus").returncode == 0


@pytest.mark.parametrize(
    "words",
    [(), ("one",), ("one", "two", "three"), ("--bogus",), ("source", "target", "-o", "bogus"), ("a", "b", "-N", "1")],
    ids=" ".join,
)
def test_a_wrong_call_is_1(words: tuple[str, ...]) -> None:
    done = helper(*words)
    assert done.returncode == 1
    assert "hint: " in done.stderr


def test_what_is_not_permitted_is_1(bench: Path) -> None:
    done = run_as(1000, [HELPER, bench / "source", bench / "source"])
    assert done.returncode == 1


def test_a_failed_mount_is_32(bench: Path) -> None:
    for words in ((bench / "missing", bench / "target"), (bench / "source/file", bench / "target")):
        done = helper(*words)
        assert done.returncode == 32
        assert done.stderr.startswith("trashd: ")
