"""The power-loss harness: its states are what a log allows, each has a disk of its own, and nothing of it stays.

That wrong code does not pass is for the controls of test_powerfail.py to show, which leave flushes out.
"""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.crash.powerfail_replay import BTRFS, EXT4, SIZE_MB, XFS
from tests.support.crash_states import CrashState, check_states, crash_states
from tests.support.foreground_mount import until
from tests.support.write_log_disk import MOUNTED, Flush, Log, Mark, Write, logged_volume

N_ROUNDS = 2
FILES = ("f0", "f1", "f2")
CONTENT = b"x" * 3000


def fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_dir(path: Path) -> None:
    """A directory with files, all of it durable."""
    path.mkdir()
    for name in FILES:
        (path / name).write_bytes(CONTENT)
        fsync(path / name)
    fsync(path)
    fsync(path.parent)


def logged_rounds(fstype: str) -> Log:
    with logged_volume(fstype, SIZE_MB[fstype]) as volume:
        for k in range(N_ROUNDS):
            make_dir(volume.mountpoint / f"made{k}")
            volume.mark(f"made{k}")
        return volume.stop()


def check_and_write(root: Path, marks: Sequence[str]) -> str | None:
    """What was marked is whole; and there is something in the disk that no other state may show."""
    if (root / "left").exists():
        return "left by the state before"
    make_dir(root / "left")
    made = [root / name / file for name in marks if name.startswith("made") for file in FILES]
    return None if all(path.read_bytes() == CONTENT for path in made) else "short"


def backing_filesystems() -> list[str]:
    """Device numbers of the filesystems that hold the files behind the loop devices."""
    command = ["losetup", "--list", "--noheadings", "--output", "BACK-MAJ:MIN"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


@pytest.mark.parametrize("fstype", [EXT4, XFS, BTRFS])
def test_states_do_not_see_what_the_check_of_another_wrote(fstype: str) -> None:
    result = check_states(logged_rounds(fstype), fstype, check_and_write, n_torn=4, fsck_stride=5)
    assert not result.failures, str(result)
    assert result.n_by_kind["flush"] > 2 * N_ROUNDS, str(result)
    assert result.n_by_kind["lost"] >= N_ROUNDS, str(result)
    assert result.n_by_kind["torn"] > N_ROUNDS, str(result)
    assert result.n_fscks > N_ROUNDS, str(result)


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
