"""The engine of a reap: few calls, workers that may be lost, a clean stop, a pace, and allocation groups of xfs."""

import fcntl
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random

import pytest

from fusefs.core.pacing import CUT_BYTES, NamesPerClockCheck, SliceBudget, Speed
from fusefs.core.results import Reaped, Report
from fusefs.core.slices import RemovalSliceResult, Slice, SlicePlan, SliceWork
from fusefs.engine.pace import ConstantSpeed
from fusefs.engine.run_slices import SlicePool, worker_processes, worker_threads
from fusefs.engine.strategy import AllocationGroups, Strategy, Workers, choose_strategy, group_shift
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.reaper.inner_stores import InnerStores
from fusefs.reaper.reap import RemovalOptions, reap
from fusefs.reaper.remove_slice import SliceRemover
from tests.support.background_processes import EndsWorkers
from tests.support.make_trees import fill
from tests.support.open_fds import open_fds
from tests.support.open_files import is_broken_into
from tests.support.real_filesystems import loop_volume, sync, tmpfs_volume
from tests.support.reap_process import all_given, empty_container
from tests.support.small_orphans import ids
from tests.support.store_verbs import ActingBefore, Counting, in_child, init, own, swap
from tests.support.trashd_command import TRASHD, environment

pytestmark = pytest.mark.needs("root")


IN_PARTS = ConstantSpeed(Speed(entries_per_s=100_000))
"""No slice does more than 10,000, on whatever machine."""


@contextmanager
def container(parent: Path) -> Iterator[tuple[Path, Fd]]:
    path = parent / "container"
    path.mkdir()
    (path / "record.json").touch()
    with Kernel().open_path(os.fsencode(path), os.O_RDONLY | os.O_DIRECTORY) as fd:
        yield path, fd


def remover_of(container: Fd, strategy: Strategy) -> SliceRemover:
    kernel = Kernel()
    given, inner_stores = all_given(kernel, container), InnerStores(kernel, container)
    return SliceRemover(
        kernel, container, strategy, AllocationGroups(kernel, None), given, inner_stores, NamesPerClockCheck()
    )


def reap_with(volume: Path, identifier: str, wishes: RemovalOptions, kernel: Kernel | None = None) -> Reaped:
    with own(volume) as folder:
        if kernel is not None:
            folder = folder._replace(store=folder.store._replace(kernel=kernel))
        return reap(folder, next(e for e in ids(volume) if e == identifier), wishes)  # type: ignore[arg-type]


# Calls


def system_calls(volume: Path, identifier: str, log: Path, *options: str) -> Counter[str]:
    """The calls of a whole `trashd reap`, its workers' too."""
    command = [str(TRASHD), "reap", "--now", "--volume", str(volume), *options, identifier]
    traced = ["strace", "-f", "-qq", "--signal=none", "-o", str(log), *command]
    subprocess.run(traced, env=environment({}), check=True, capture_output=True, timeout=120)
    begun = (re.match(r"\d+ +(\w+)\(", line) for line in log.read_text(errors="replace").splitlines())
    return Counter(match[1] for match in begun if match)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", ["flat", "tree"])
def test_a_file_costs_one_unlink_and_no_stat_and_a_thousand_cost_one_getdents(
    tmp_path: Path, shape: str, threads: int
) -> None:
    n_files, n_few, n_dirs = 12_000, 1000, 1 if shape == "flat" else 12
    with loop_volume("ext4", 128, ("-N", "30000")) as volume:
        init(volume)
        few = swap(fill(volume / "few", n_few))
        for number in range(n_dirs):
            fill(volume / "many" / str(number), n_files // n_dirs)
        many = swap(volume / "many")
        least = system_calls(volume, few.id, tmp_path / "few", "--threads", str(threads))
        most = system_calls(volume, many.id, tmp_path / "many", "--threads", str(threads))
    more = most - least
    stats = sum(more[call] for call in ("stat", "lstat", "fstat", "newfstatat", "statx", "openat2"))
    assert more["unlinkat"] <= n_files - n_few + 3 * n_dirs + 20
    # A buffer of 32 KiB holds 1,024 short names; each directory is read to its end, and once more if it was split.
    assert more["getdents64"] <= n_files // 1000 + 4 * n_dirs + 20
    assert stats <= 6 * n_dirs + 100, most


# The workers


class _On(Kernel):
    """The kernel, where all that is asked about is on another kind of filesystem."""

    def __init__(self, magic: int) -> None:
        super().__init__()
        self._magic = magic

    def filesystem(self, fd: int) -> int:
        return self._magic


@pytest.mark.parametrize("name", [b"GPFS", b"\xffSMB"])
def test_what_is_on_a_server_is_waited_for_by_threads_and_is_not_local(volume: Path, name: bytes) -> None:
    """GPFS's number is its name, and so is that of Samba's client."""
    kernel = _On(int.from_bytes(name, "big"))
    with container(volume) as (_path, fd):
        assert choose_strategy(kernel, fd).workers is Workers.THREADS
        assert not kernel.is_local(fd)


@pytest.mark.parametrize("workers", Workers)
def test_crew_removes_what_one_would(volume: Path, workers: Workers) -> None:
    with container(volume) as (path, fd):
        for number in range(20):
            fill(path / "tree" / str(number) / "deep", 100)
        strategy = choose_strategy(Kernel(), fd)._replace(n_workers=3, workers=workers)
        open_pool = worker_threads if workers is Workers.THREADS else worker_processes
        with open_pool(3, remover_of(fd, strategy).run_slice) as pool:
            report = drive(pool, fd)
        assert (report.removed, report.n_failed, os.listdir(path)) == (20 * 102 + 1, 0, ["record.json"])


def test_a_directory_that_another_worker_has_just_removed_is_no_failure(tmp_path: Path) -> None:
    """What is too deep may be found by name and told by who moved it up: then two are at it."""
    with container(tmp_path) as (path, fd):
        (path / "tree").mkdir()
        with Kernel().open_dir(fd, b"tree") as tree:
            (path / "tree").rmdir()
            work = Slice(0, tree, b"tree", SliceWork(is_listed=False), 10, False)
            outcome = remover_of(fd, choose_strategy(Kernel(), fd)).run_slice(work, SliceBudget(seconds=1.0))
        assert (outcome.failures, outcome.n_failed, outcome.rest.has_rest()) == ((), 0, False)


def drive(pool: SlicePool[Slice, RemovalSliceResult], fd: Fd) -> Report:
    """Run a plan with workers, one slice after the other, each of them short."""
    plan = SlicePlan(3, splits_names=True)
    plan.add(fd, b"", SliceWork(names=["tree"]))
    while (job := plan.next()) is not None:
        pool.submit(job, SliceBudget(seconds=0.0))
        for _work, _budget, outcome in pool.collect_ended(60.0):
            assert outcome is not None
            for spare in plan.finish_slice(job, outcome):
                os.close(spare.fd)
    return plan.report(paced=False, stopped=False)


def test_workers_that_are_killed_cost_nothing_but_time(volume: Path) -> None:
    with container(volume) as (path, fd):
        for number in range(30):
            fill(path / "tree" / str(number), 2000)
        report = empty_container(Kernel(EndsWorkers(5000)), fd, RemovalOptions(n_workers=2))
        assert (report.n_failed, report.stopped, os.listdir(path)) == (0, False, ["record.json"])


def test_no_worker_outlives_its_reaper(volume: Path) -> None:
    with container(volume) as (path, fd):
        fill(path / "tree", 40_000)
        visited: set[str] = set()

        def look(_entries: int, _bytes: int) -> None:
            visited.update(children() - before)

        before = children()
        empty_container(Kernel(), fd, RemovalOptions(n_workers=2, pace=IN_PARTS, progress=look))
        assert visited, "no worker was ever forked"
        assert children() <= before


def children() -> set[str]:
    return {pid for task in os.listdir("/proc/self/task") for pid in read_children(task)}


def read_children(task: str) -> list[str]:
    try:
        return Path(f"/proc/self/task/{task}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return []  # a thread that was joined is in the listing for a moment


def test_slices_hand_back_all_fds(volume: Path) -> None:
    with container(volume) as (path, fd):
        deepest = path / "tree"
        for number in range(150):
            deepest /= str(number % 7)
        deepest.mkdir(parents=True)
        fill(path / "tree/wide", 20_000)
        before = len(open_fds())
        empty_container(Kernel(), fd, RemovalOptions(n_workers=2))
        assert len(open_fds()) <= before
        assert os.listdir(path) == ["record.json"]


# Stop


def test_stopped_reap_is_finished_by_the_next(volume: Path) -> None:
    swapped = swap(fill(volume / "job", 30_000))
    asked: list[None] = []

    def stops() -> bool:
        asked.append(None)
        return len(asked) > 3

    first = reap_with(volume, swapped.id, RemovalOptions(stops=stops, pace=IN_PARTS))
    assert (first.report.stopped, first.report.n_failed) == (True, 0)
    assert 0 < first.report.removed < 30_000
    second = reap_with(volume, swapped.id, RemovalOptions())
    assert not second.report.stopped
    assert first.report.removed + second.report.removed == 30_001
    assert ids(volume) == set()


# Pace


def test_pace_is_kept(volume: Path) -> None:
    with container(volume) as (path, fd):
        fill(path / "tree", 600)
        began = time.monotonic()
        report = empty_container(Kernel(), fd, RemovalOptions(pace=ConstantSpeed(Speed(entries_per_s=1000))))
        assert time.monotonic() - began >= 0.5
        assert (report.removed, report.n_bytes, os.listdir(path)) == (601, 0, ["record.json"])


def test_pace_in_bytes_counts_what_is_freed() -> None:
    with loop_volume("ext4", 64) as volume, container(volume) as (path, fd):
        (path / "tree").mkdir()
        for number in range(20):
            (path / f"tree/{number}").write_bytes(b"x" * 100_000)
        sync(volume)
        n_bytes = sum(os.stat(path / f"tree/{number}").st_blocks * 512 for number in range(20))
        began = time.monotonic()
        report = empty_container(Kernel(), fd, RemovalOptions(pace=ConstantSpeed(Speed(bytes_per_s=4 << 20))))
        assert time.monotonic() - began >= 0.4
        assert report.n_bytes == n_bytes
        assert os.listdir(path) == ["record.json"]


def large(path: Path, n_steps: int = 3) -> Path:
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, (n_steps - 1) * CUT_BYTES + (1 << 20))
    return path


PACED = RemovalOptions(n_workers=1, pace=ConstantSpeed(Speed(bytes_per_s=1 << 40)))
"""By ourselves to the end: what a hook of a forked worker counts is not ours."""


def test_large_file_is_cut_in_steps_when_paced() -> None:
    with loop_volume("ext4", 256) as volume, container(volume) as (path, fd):
        (path / "tree").mkdir()
        size = large(path / "tree/large").stat().st_size
        (path / "tree/small").write_text("x")
        hook = Counting()
        report = empty_container(Kernel(hook), fd, PACED)
        assert (hook.calls.count("truncate"), report.removed, report.n_failed) == (3, 3, 0)
        assert report.n_bytes == pytest.approx(size, abs=1 << 16)
        assert os.listdir(path) == ["record.json"]


def test_hole_takes_few_steps_and_what_is_before_it_as_many_as_ever() -> None:
    with loop_volume("ext4", 256) as volume, container(volume) as (path, fd):
        with (path / "tree").open("wb") as file:
            for _ in range(CUT_BYTES // (1 << 20) + 1):
                file.write(bytes(1 << 20))
            file.truncate(1 << 40)
        sizes: list[int] = []
        blocks: list[int] = []

        class Watched(Kernel):
            def truncate(self, fd: int, size: int) -> None:
                before = os.fstat(fd).st_blocks
                super().truncate(fd, size)
                sizes.append(size)
                blocks.append(before - os.fstat(fd).st_blocks)

        assert empty_container(Watched(), fd, PACED).n_failed == 0
        assert sizes[-1] == 0
        assert len(sizes) < 200  # 16,384 of equal size
        assert max(blocks) * 512 <= CUT_BYTES + (1 << 20)


def test_large_file_is_not_cut_when_nothing_is_limited() -> None:
    with loop_volume("ext4", 256) as volume, container(volume) as (path, fd):
        large(path / "tree")
        hook = Counting()
        assert empty_container(Kernel(hook), fd, RemovalOptions(n_workers=1)).removed == 1
        assert hook.calls.count("truncate") == 0


def test_large_file_with_a_link_outside_keeps_its_content() -> None:
    with loop_volume("ext4", 256) as volume, container(volume) as (path, fd):
        large(path / "tree")
        os.link(path / "tree", volume / "outside")
        before = os.stat(volume / "outside")
        empty_container(Kernel(), fd, PACED)
        after = os.stat(volume / "outside")
        assert (after.st_size, after.st_blocks, after.st_nlink) == (before.st_size, before.st_blocks, 1)


def test_large_file_that_gets_a_link_at_the_last_moment_keeps_its_content() -> None:
    with loop_volume("ext4", 256) as volume, container(volume) as (path, fd):
        large(path / "tree")
        before = os.stat(path / "tree")

        link = ActingBefore("unlink", lambda: os.link(path / "tree", volume / "outside"))
        empty_container(Kernel(link), fd, PACED)
        after = os.stat(volume / "outside")
        assert (after.st_size, after.st_blocks) == (before.st_size, before.st_blocks)


def test_large_file_that_somebody_has_open_is_not_cut() -> None:
    with loop_volume("ext4", 256) as volume, container(volume) as (path, fd):
        large(path / "tree")
        with (path / "tree").open("rb") as held:
            size = os.fstat(held.fileno()).st_size
            empty_container(Kernel(), fd, PACED)
            assert os.fstat(held.fileno()).st_size == size
        assert os.listdir(path) == ["record.json"]


def test_large_file_whose_mode_forbids_writing_is_cut_for_its_owner() -> None:
    with loop_volume("ext4", 256) as volume, container(volume) as (path, fd):
        large(path / "tree").chmod(0o400)
        for owned in (path, path / "tree", path / "record.json"):
            os.chown(owned, 1000, 1000)
        hook = Counting()

        def as_owner() -> None:
            os.setresgid(1000, 1000, 1000)
            os.setresuid(1000, 1000, 1000)
            empty_container(Kernel(hook), fd, PACED)
            assert hook.calls.count("truncate") == 3

        assert in_child(as_owner) == 0
        assert os.listdir(path) == ["record.json"]


def test_opener_who_waits_for_the_lease_finds_the_content_whole() -> None:
    """A process opens the file between our lease and the unlink: it waits in open(2), and must not read a stump."""
    with loop_volume("ext4", 256) as volume, container(volume) as (path, fd):
        large(path / "tree")
        read, write = os.pipe()
        opener = 0

        def open_it() -> None:
            nonlocal opener
            opener = os.fork()
            if opener == 0:
                os.closerange(write + 1, 1000)  # an inherited fd would keep the lease
                held = os.open(path / "tree", os.O_RDONLY)
                os.write(write, b"%d" % os.fstat(held).st_size)
                os._exit(0)
            while not is_broken_into(st):
                time.sleep(0.001)

        st = os.stat(path / "tree")
        empty_container(Kernel(ActingBefore("unlink", open_it)), fd, PACED)
        assert int(os.read(read, 100)) == st.st_size
        os.waitpid(opener, 0)
        os.close(read)
        os.close(write)


def test_large_file_is_left_whole_where_there_are_no_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> int:
        raise OSError(22, "no leases here")

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with loop_volume("ext4", 256) as volume, container(volume) as (path, fd):
        large(path / "tree")
        hook = Counting()
        report = empty_container(Kernel(hook), fd, PACED)
        assert (hook.calls.count("truncate"), report.removed) == (0, 1)


# Slices


def test_slice_ends_at_its_deadline_and_leaves_the_rest(volume: Path) -> None:
    from fusefs.core.slices import SliceWork

    with container(volume) as (path, fd):
        fill(path / "tree", 1000)
        remover = remover_of(fd, choose_strategy(Kernel(), fd))
        outcome = remover.run_slice(Slice(0, fd, b"", SliceWork(names=["tree"]), 10, False), SliceBudget(seconds=0.0))
        assert outcome.removed == 0
        assert outcome.rest.subdirs == ["tree"]
        outcome = remover.run_slice(
            Slice(0, fd, b"", outcome.rest, 10, False), SliceBudget(seconds=60.0, n_entries=100)
        )
        assert outcome.removed == 100
        (left,) = outcome.remaining
        assert left.name == "tree"
        assert len(left.work.names) + len(os.listdir(path / "tree")) == 2 * len(os.listdir(path / "tree"))
        os.close(left.fd)


N_GROUPS = 4


@pytest.fixture
def xfs() -> Iterator[Path]:
    """An xfs of four groups; it puts each new directory into the next one."""
    with loop_volume("xfs", 300, ["-d", f"agcount={N_GROUPS}"]) as path:
        yield path


def open_dir(path: Path) -> Fd:
    return Kernel().open_path(os.fsencode(path), os.O_RDONLY | os.O_DIRECTORY)


@pytest.fixture
def shift(xfs: Path) -> int:
    with open_dir(xfs) as root:
        found = group_shift(Kernel(), root)
    assert found is not None
    return found


@pytest.fixture
def groups(shift: int) -> Iterator[AllocationGroups]:
    with AllocationGroups(Kernel(), shift) as groups:
        yield groups


@pytest.fixture
def directories(xfs: Path) -> Iterator[list[Fd]]:
    with ExitStack() as owned:
        found = []
        for number in range(3 * N_GROUPS):
            (xfs / str(number)).mkdir()
            found.append(owned.enter_context(open_dir(xfs / str(number))))
        yield found


@pytest.mark.needs("loop", "xfs")
def test_group_is_what_the_filesystems_own_tool_says(xfs: Path, directories: list[Fd], shift: int) -> None:
    for fd in directories:
        ino = os.fstat(fd).st_ino
        assert xfs_db(xfs, f"convert inode {ino} agno").split()[0] == hex(ino >> shift)
    assert {os.fstat(fd).st_ino >> shift for fd in directories} == set(range(N_GROUPS))


def xfs_db(xfs: Path, command: str) -> str:
    [device] = [line.split()[0] for line in Path("/proc/mounts").read_text().splitlines() if f" {xfs} " in line]
    return subprocess.run(["xfs_db", "-r", "-c", command, device], capture_output=True, text=True, check=True).stdout


@pytest.mark.needs("loop", "xfs")
def test_groups_are_an_xfs_matter(xfs: Path) -> None:
    with tmpfs_volume() as path, open_dir(path) as other, open_dir(xfs) as ours:
        assert group_shift(Kernel(), other) is None
        assert choose_strategy(Kernel(), other, 2).group_shift is None
        assert choose_strategy(Kernel(), ours, 2).group_shift is not None
        assert choose_strategy(Kernel(), ours, 1).group_shift is None, "one worker is in nobody's way"


@pytest.fixture
def other(groups: AllocationGroups, directories: list[Fd]) -> Iterator[int]:
    """The pid of a process that is at work in the group of the first directory."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        with groups.lock_group(directories[0]):
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


@pytest.mark.needs("loop", "xfs")
def test_group_is_crowded_for_the_others_until_who_is_in_it_dies(
    groups: AllocationGroups, directories: list[Fd], other: int, shift: int
) -> None:
    numbers = [os.fstat(fd).st_ino >> shift for fd in directories]
    assert [groups.is_crowded(fd) for fd in directories] == [number == numbers[0] for number in numbers]
    os.kill(other, signal.SIGKILL)
    with groups.lock_group(directories[0]):
        assert not groups.is_crowded(directories[0])


@pytest.mark.needs("loop", "xfs")
@pytest.mark.usefixtures("other")
def test_only_so_many_directories_are_passed_over_in_a_row(groups: AllocationGroups, directories: list[Fd]) -> None:
    passed_over = [groups.is_crowded(directories[0]) for _ in range(20)]
    assert 1 < passed_over.index(False) < 10


@pytest.mark.needs("loop", "xfs")
def test_workers_whose_directories_are_all_in_one_group_come_to_an_end(xfs: Path, shift: int) -> None:
    tree = make_tree_of(xfs, 200)
    for directory in list(tree.iterdir()):
        if directory.stat().st_ino >> shift:
            directory.rename(xfs / f"elsewhere-{directory.name}")
    n_entries = sum(1 + len(files) for _directory, _subdirs, files in os.walk(tree))
    assert n_entries > 200
    assert_goes(tree, n_entries, n_workers=4)


@pytest.mark.needs("loop", "xfs")
def test_workers_in_all_groups_remove_what_one_would(xfs: Path) -> None:
    tree = make_tree_of(xfs, 300)
    n_entries = sum(1 + len(files) for _directory, _subdirs, files in os.walk(tree))
    assert_goes(tree, n_entries, n_workers=3)


def make_tree_of(xfs: Path, n_directories: int) -> Path:
    random = Random("groups")
    for number in range(n_directories):
        fill(xfs / "container" / "tree" / str(number), random.randrange(40))
    return xfs / "container" / "tree"


def assert_goes(tree: Path, n_entries: int, n_workers: int) -> None:
    with open_dir(tree.parent) as container:
        report = empty_container(Kernel(), container, RemovalOptions(n_workers=n_workers))
    assert (report.removed, report.n_failed, os.listdir(tree.parent)) == (n_entries, 0, [])
