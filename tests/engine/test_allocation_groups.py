"""Workers on an xfs keep out of each other's allocation groups, and none waits for a dead one."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest

from fusefs.engine.strategy import AllocationGroups, choose, group_shift
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.reaper.reap import RemovalWishes
from tests.support.many_files import fill
from tests.support.real_filesystems import loop_volume, tmpfs_volume
from tests.support.reap_process import empty_container

pytestmark = pytest.mark.needs("root", "loop", "xfs")

N_GROUPS = 4


@pytest.fixture
def volume() -> Iterator[Path]:
    """An xfs of four groups; it puts each new directory into the next one."""
    with loop_volume("xfs", 300, ["-d", f"agcount={N_GROUPS}"]) as path:
        yield path


def open_dir(path: Path) -> Fd:
    return Kernel().open_path(os.fsencode(path), os.O_RDONLY | os.O_DIRECTORY)


@pytest.fixture
def shift(volume: Path) -> int:
    with open_dir(volume) as root:
        found = group_shift(Kernel(), root)
    assert found is not None
    return found


@pytest.fixture
def groups(shift: int) -> Iterator[AllocationGroups]:
    with AllocationGroups(Kernel(), shift) as groups:
        yield groups


@pytest.fixture
def directories(volume: Path) -> Iterator[list[Fd]]:
    with ExitStack() as owned:
        found = []
        for number in range(3 * N_GROUPS):
            (volume / str(number)).mkdir()
            found.append(owned.enter_context(open_dir(volume / str(number))))
        yield found


def test_group_is_what_the_filesystems_own_tool_says(volume: Path, directories: list[Fd], shift: int) -> None:
    for fd in directories:
        ino = os.fstat(fd).st_ino
        assert xfs_db(volume, f"convert inode {ino} agno").split()[0] == hex(ino >> shift)
    assert {os.fstat(fd).st_ino >> shift for fd in directories} == set(range(N_GROUPS))


def xfs_db(volume: Path, command: str) -> str:
    [device] = [line.split()[0] for line in Path("/proc/mounts").read_text().splitlines() if f" {volume} " in line]
    return subprocess.run(["xfs_db", "-r", "-c", command, device], capture_output=True, text=True, check=True).stdout


def test_groups_are_an_xfs_matter(volume: Path) -> None:
    with tmpfs_volume() as path, open_dir(path) as other, open_dir(volume) as ours:
        assert group_shift(Kernel(), other) is None
        assert choose(Kernel(), other, 2).group_shift is None
        assert choose(Kernel(), ours, 2).group_shift is not None
        assert choose(Kernel(), ours, 1).group_shift is None, "one worker is in nobody's way"


@pytest.fixture
def other(groups: AllocationGroups, directories: list[Fd]) -> Iterator[int]:
    """The pid of a process that is at work in the group of the first directory."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        with groups.alone_in(directories[0]):
            os.write(writing, b".")
            signal.pause()
        os._exit(0)
    try:
        os.read(reading, 1)
        yield pid
    finally:
        for fd in (reading, writing):
            os.close(fd)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_group_is_crowded_for_the_others_until_who_is_in_it_dies(
    groups: AllocationGroups, directories: list[Fd], other: int, shift: int
) -> None:
    numbers = [os.fstat(fd).st_ino >> shift for fd in directories]
    assert [groups.is_crowded(fd) for fd in directories] == [number == numbers[0] for number in numbers]
    os.kill(other, signal.SIGKILL)
    with groups.alone_in(directories[0]):
        assert not groups.is_crowded(directories[0])


@pytest.mark.usefixtures("other")
def test_only_so_many_directories_are_passed_over_in_a_row(groups: AllocationGroups, directories: list[Fd]) -> None:
    passed_over = [groups.is_crowded(directories[0]) for _ in range(20)]
    assert 1 < passed_over.index(False) < 10


def test_workers_whose_directories_are_all_in_one_group_come_to_an_end(volume: Path, shift: int) -> None:
    tree = make_tree_of(volume, 200)
    for directory in list(tree.iterdir()):
        if directory.stat().st_ino >> shift:
            directory.rename(volume / f"elsewhere-{directory.name}")
    n_entries = sum(1 + len(files) for _directory, _subdirs, files in os.walk(tree))
    assert n_entries > 200
    assert_goes(tree, n_entries, n_workers=4)


def test_workers_in_all_groups_remove_what_one_would(volume: Path) -> None:
    tree = make_tree_of(volume, 300)
    n_entries = sum(1 + len(files) for _directory, _subdirs, files in os.walk(tree))
    assert_goes(tree, n_entries, n_workers=3)


def make_tree_of(volume: Path, n_directories: int) -> Path:
    random = Random("groups")
    for number in range(n_directories):
        fill(volume / "container" / "tree" / str(number), random.randrange(40))
    return volume / "container" / "tree"


def assert_goes(tree: Path, n_entries: int, n_workers: int) -> None:
    with open_dir(tree.parent) as container:
        report = empty_container(Kernel(), container, RemovalWishes(n_workers=n_workers))
    assert (report.removed, report.n_failed, os.listdir(tree.parent)) == (n_entries, 0, [])
