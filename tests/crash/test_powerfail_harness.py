"""The power-loss harness tells right from wrong: only correct code passes every crash state."""

import ctypes
import enum
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.crash_states import Check, CrashState, Result, check_states, crash_states
from tests.support.foreground_mount import until
from tests.support.write_log_disk import MOUNTED, Flush, Log, LoggedVolume, Mark, Write, logged_volume

REPO = Path(__file__).resolve().parents[2]
SIZE_MB = {"ext4": 64, "xfs": 300, "btrfs": 128}
N_ROUNDS = 2
FILE_SIZE_BYTES = 3000
FILES = ("f0", "f1", "f2")
AT_FDCWD, RENAME_EXCHANGE = -100, 2

on_each_fs = pytest.mark.parametrize(
    "fstype",
    [
        pytest.param("ext4", marks=pytest.mark.needs("root", "loop", "fuse")),
        pytest.param("xfs", marks=pytest.mark.needs("root", "loop", "fuse", "xfs")),
        pytest.param("btrfs", marks=pytest.mark.needs("root", "loop", "fuse", "btrfs")),
    ],
)

libc = ctypes.CDLL(None, use_errno=True)


class Variant(enum.Enum):
    CORRECT = enum.auto()
    NO_PARENT_FSYNC = enum.auto()
    NO_FILE_FSYNC = enum.auto()
    THREE_RENAMES = enum.auto()


def fsync_dir(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def exchange(one: Path, other: Path) -> None:
    if libc.renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE):
        raise OSError(ctypes.get_errno(), "renameat2")


def exchange_by_renames(one: Path, other: Path) -> None:
    """What must not be done: between the first and the second rename, `one` is missing."""
    spare = one.with_name(one.name + ".spare")
    for source, destination in ((one, spare), (other, one), (spare, other)):
        source.rename(destination)
        fsync_dir(one.parent)


def make_dir(path: Path, letter: str, *, fsync_files: bool) -> None:
    path.mkdir()
    for name in FILES:
        fd = os.open(path / name, os.O_CREAT | os.O_WRONLY, 0o600)
        try:
            os.write(fd, letter.encode() * FILE_SIZE_BYTES)
            if fsync_files:
                os.fsync(fd)
        finally:
            os.close(fd)
    fsync_dir(path)


def run_workload(volume: LoggedVolume, variant: Variant) -> None:
    """Rounds of: make live<k> (A) and trash<k> (B), exchange them; each step durable before its mark."""
    root = volume.mountpoint
    for k in range(N_ROUNDS):
        live, trash = root / f"live{k}", root / f"trash{k}"
        for path, letter in ((live, "A"), (trash, "B")):
            make_dir(path, letter, fsync_files=variant is not Variant.NO_FILE_FSYNC)
        fsync_dir(root)
        volume.mark(f"made {k}")
        volume.mark(f"start {k}")
        if variant is Variant.THREE_RENAMES:
            exchange_by_renames(live, trash)
        else:
            exchange(live, trash)
        if variant is not Variant.NO_PARENT_FSYNC:
            fsync_dir(root)
        volume.mark(f"durable {k}")


def read_letter(path: Path) -> str:
    """A or B: a directory with all files, each whole; else what is wrong with it."""
    contents = set()
    for name in FILES:
        try:
            contents.add((path / name).read_bytes())
        except FileNotFoundError:
            return "missing"
    if any(len(content) != FILE_SIZE_BYTES for content in contents):
        return "short"
    return contents.pop()[:1].decode() if len(contents) == 1 else "mixed"


def check_exchanges(root: Path, marks: Sequence[str]) -> str | None:
    for k in range(N_ROUNDS):
        if f"made {k}" not in marks:
            break
        found = (read_letter(root / f"live{k}"), read_letter(root / f"trash{k}"))
        if f"durable {k}" in marks:
            allowed = {("B", "A")}
        elif f"start {k}" in marks:
            allowed = {("A", "B"), ("B", "A")}
        else:
            allowed = {("A", "B")}
        if found not in allowed:
            return f"round {k} is {found[0]}/{found[1]}"
    return None


def replay(fstype: str, variant: Variant, check: Check = check_exchanges, *, stop_after: int | None = None) -> Result:
    with logged_volume(fstype, SIZE_MB[fstype]) as volume:
        run_workload(volume, variant)
        log = volume.stop()
    return check_states(log, fstype, check, n_torn=4, fsck_stride=5, stop_after=stop_after)


def backing_filesystems() -> list[str]:
    """Device numbers of the filesystems that hold the files behind the loop devices."""
    command = ["losetup", "--list", "--noheadings", "--output", "BACK-MAJ:MIN"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


@on_each_fs
def test_correct_code_passes_every_crash_state(fstype: str) -> None:
    result = replay(fstype, Variant.CORRECT)
    assert not result.failures, str(result)
    assert result.n_by_kind["flush"] > 2 * N_ROUNDS, str(result)
    assert result.n_by_kind["lost"] >= N_ROUNDS, str(result)
    assert result.n_by_kind["torn"] > N_ROUNDS, str(result)
    assert result.n_fscks > N_ROUNDS, str(result)


@on_each_fs
def test_exchange_without_parent_fsync_is_not_durable(fstype: str) -> None:
    result = replay(fstype, Variant.NO_PARENT_FSYNC, stop_after=1)
    [failure] = result.failures
    assert failure.text in [f"round {k} is A/B" for k in range(N_ROUNDS)], str(result)  # there may be a sync meanwhile


@on_each_fs
def test_files_without_fsync_are_short(fstype: str) -> None:
    result = replay(fstype, Variant.NO_FILE_FSYNC, stop_after=1)
    [failure] = result.failures
    found = failure.text.rpartition(" ")[2].split("/")
    assert "short" in found, str(result)
    assert set(found) <= {"short", "A", "B"}, str(result)  # whole is what was synced meanwhile


@on_each_fs
def test_three_renames_leave_the_name_missing(fstype: str) -> None:
    result = replay(fstype, Variant.THREE_RENAMES, stop_after=1)
    assert ["is missing/" in failure.text for failure in result.failures] == [True], str(result)


@on_each_fs
def test_states_do_not_see_what_the_check_of_another_wrote(fstype: str) -> None:
    def check_and_write(root: Path, _: Sequence[str]) -> str | None:
        left = root / "left"
        if left.exists():
            return "left by the state before"
        make_dir(left, "L", fsync_files=True)
        return None

    result = replay(fstype, Variant.CORRECT, check_and_write)
    assert not result.failures, str(result)


@pytest.mark.needs("root", "loop", "fuse")
def test_two_processes_check_the_same_states_as_one() -> None:
    with logged_volume("ext4", SIZE_MB["ext4"]) as volume:
        run_workload(volume, Variant.NO_PARENT_FSYNC)
        log = volume.stop()
    one = check_states(log, "ext4", check_exchanges)
    two = check_states(log, "ext4", check_exchanges, n_processes=2)
    assert one.n_by_kind == two.n_by_kind
    assert sorted(map(str, one.failures)) == sorted(map(str, two.failures))


@pytest.mark.needs("root", "loop", "fuse")
def test_child_process_marks_by_its_environment() -> None:
    with logged_volume("ext4", SIZE_MB["ext4"]) as volume:
        command = [sys.executable, "-c", "from tests.support.write_log_disk import mark; mark('from a child')"]
        subprocess.run(command, check=True, cwd=REPO, env={**os.environ, **volume.child_env})
        log = volume.stop()
    assert Mark("from a child") in log.events


@pytest.mark.needs("root", "loop", "fuse")
def test_nothing_stays_when_the_body_raises() -> None:
    numbers: list[str] = []
    scratch: list[Path] = []

    def fail_inside() -> None:
        with logged_volume("ext4", SIZE_MB["ext4"]) as volume:
            served = os.stat(volume.ctl).st_dev
            numbers.append(f"{os.major(served)}:{os.minor(served)}")
            scratch.append(volume.mountpoint.parent)
            assert numbers[0] in backing_filesystems()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert not scratch[0].exists()
    assert str(scratch[0]) not in Path("/proc/self/mountinfo").read_text()
    assert until(lambda: numbers[0] not in backing_filesystems())  # another test's disk may have got the number


def synthetic_log() -> Log:
    """Two epochs after `mounted`; the second ends with the log."""
    first = (Write(0, b"a" * 8192), Mark("one"), Write(8192, b"b" * 4096), Flush())
    second = (Mark("two"), Write(0, b"c" * 4096), Mark("three"))
    return Log(1 << 20, (Write(0, b"mkfs"), Mark(MOUNTED), Flush(), *first, *second))


def test_log_survives_its_binary_form() -> None:
    assert Log.from_bytes(synthetic_log().to_bytes()) == synthetic_log()


def test_each_flush_boundary_after_the_mount_is_a_state_with_and_without_the_next_marks() -> None:
    whole = [(state.kind, state.n_base, state.marks[1:]) for state in crash_states(synthetic_log(), 0, 1)]
    assert whole == [
        ("flush", 3, ()),
        ("lost", 3, ("one",)),
        ("flush", 7, ("one",)),
        ("lost", 7, ("one", "two", "three")),
    ]


def torn_states(seed: int) -> list[CrashState]:
    return [state for state in crash_states(synthetic_log(), 60, seed) if state.kind == "torn"]


def test_torn_states_are_the_same_for_the_same_seed() -> None:
    assert torn_states(7) == torn_states(7)
    assert torn_states(7) != torn_states(8)


def test_torn_states_tear_at_pages_and_reorder() -> None:
    first_epoch = [[(w.offset, len(w.data)) for w in state.extra] for state in torn_states(1) if state.n_base == 3]
    assert [(8192, 4096)] in first_epoch  # the second write without the first
    assert [(4096, 4096)] in first_epoch  # half of the first write


def test_torn_state_has_all_marks_before_its_last_write() -> None:
    for state in torn_states(1):
        if any(write.data[:1] == b"b" for write in state.extra):
            assert "one" in state.marks
        if any(write.data[:1] == b"c" for write in state.extra):
            assert "two" in state.marks
