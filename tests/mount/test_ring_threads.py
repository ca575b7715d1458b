"""Requests by io_uring: which mounts get them so, which queue a request goes to, and the threads that serve it."""

import errno
import os
import re
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast

import pytest

from fusefs.core.uring_choice import SWITCH, known_faults
from fusefs.linux.fd import Fd
from fusefs.mount.native._core import N_RING_THREADS, Core
from fusefs.mount.requests.ring_threads import RingThreads
from tests.support.background_mounts import mount
from tests.support.background_processes import LIMIT_S, clients, ends, in_time, is_ended
from tests.support.busy_clients import work
from tests.support.foreground_mount import Mounted, links, trashd_mount, until
from tests.support.fsfreeze import frozen
from tests.support.open_files import waits_in_the_kernel, write_lease
from tests.support.proc_stat import status_of, stop
from tests.support.real_filesystems import loop_volume, tmpfs_volume
from tests.support.trashd_command import TRASHD, done_well

pytestmark = [pytest.mark.needs("root", "fuse", "fuse_uring"), pytest.mark.takes_engine]


MIB = 1 << 20
N_WRITERS = 12
RING_LIMIT_S = 20.0


@pytest.fixture
def device() -> Iterator[Fd]:
    with Fd(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)) as device:
        yield device


def fail() -> None:
    pytest.fail("there is nothing to abort")


def n_rings() -> int:
    return [target for _fd, target in links("/proc/self/fd")].count("anon_inode:[io_uring]")


def n_threads() -> int:
    return [thread.name for thread in threading.enumerate()].count("ring")


def test_rings_that_are_not_used_leave_no_thread_and_no_file(device: Fd) -> None:
    before = n_rings()
    rings = RingThreads(device, fail, 1000)
    rings.prepare()
    assert n_threads() == N_RING_THREADS * len(os.sched_getaffinity(0))
    rings.give_up()
    rings.wait_for_end(RING_LIMIT_S)
    assert not n_threads()
    del rings
    assert n_rings() <= before  # those of an earlier test, which its exception kept, may have gone meanwhile


def test_rings_that_need_more_open_files_than_there_are_leave_no_thread(device: Fd) -> None:
    rings = RingThreads(device, fail, 4)
    with pytest.raises(OSError, match="open files") as refused:
        rings.prepare()
    assert refused.value.errno == errno.EMFILE
    assert not n_threads()


def test_a_kernel_that_refuses_entries_is_an_error(device: Fd) -> None:
    """Nothing is mounted by this fd."""
    rings = RingThreads(device, fail, 1000)
    rings.prepare()
    with pytest.raises(OSError, match="not permitted"):
        rings.serve(cast(Core, object()))
    rings.wait_for_end(RING_LIMIT_S)
    assert not n_threads()


def write_large(path: Path) -> None:
    def write(number: int) -> None:
        with open(path / f"file-{number}", "wb", buffering=0) as file:
            file.writelines(bytes(MIB) for _ in range(3))

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    writers = [threading.Thread(target=write, args=(number,)) for number in range(N_WRITERS)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()


def memory_kib(mounted: Mounted) -> int:
    return int(status_of(mounted.pid)["RssAnon"][0])


def test_memory_of_large_requests_is_given_back() -> None:
    with tmpfs_volume() as volume:
        source = volume / "source"
        source.mkdir()
        options = ["coherence=exclusive", "uring=on", "passthrough=off"]
        with trashd_mount(source, options=options, limit_s=90) as mounted:
            in_time(partial(write_large, mounted.path))
            most = memory_kib(mounted)
            assert until(lambda: memory_kib(mounted) < most - 512, RING_LIMIT_S), (most, memory_kib(mounted))


N_PROCESSES, N_THREADS = 8, 125
N_CLIENTS = N_PROCESSES * N_THREADS
STACK_BYTES = 128 << 10
STORM_S = 1.5


class Place(NamedTuple):
    """A mount with a file to be leased, and another one."""

    mounted: Mounted
    behind: Path

    @property
    def leased(self) -> Path:
        return self.mounted.path / "leased"


@pytest.fixture
def place() -> Iterator[Place]:
    with tmpfs_volume() as volume:
        source = volume / "source"
        (source / "free").mkdir(parents=True)
        for name in ("leased", "other", "free/free-0", "free/free-1"):
            (source / name).write_bytes(b"content")
        options = ["coherence=shared", "uring=on"]
        with trashd_mount(source, options=options, limit_s=90) as mounted:
            yield Place(mounted, source)


def on_one_core(act: Callable[[], object]) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    act()


def by_threads(act: Callable[[], object]) -> None:
    """Something that each of many threads does on that core. Raises  what the first of them did"""
    failures: list[OSError] = []

    def try_it() -> None:
        try:
            act()
        except OSError as error:
            failures.append(error)

    threading.stack_size(STACK_BYTES)
    threads = [threading.Thread(target=try_it) for _ in range(N_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@contextmanager
def a_thousand(place: Place, act: Callable[[], object]) -> Iterator[list[int]]:
    """That many clients on one core that do something, all of whom wait when the block begins."""
    each = partial(on_one_core, partial(by_threads, act))
    with clients([each] * N_PROCESSES) as pids:
        assert until(lambda: place.mounted.fuse.n_waiting() >= N_CLIENTS, LIMIT_S)
        yield pids


def let_a_thousand_wait(place: Place) -> None:
    with write_lease(place.behind / "leased") as give_up, a_thousand(place, place.leased.read_bytes) as pids:
        give_up()
        assert {ends(pid) for pid in pids} == {0}


def looks_for_what_is_not_there(place: Place) -> None:
    with suppress(FileNotFoundError):
        os.lstat(place.mounted.path / f"missing-{threading.get_native_id()}")


def test_a_stat_on_a_core_is_answered_where_a_thousand_wait_for_a_lease(place: Place) -> None:
    with (
        write_lease(place.behind / "leased") as give_up,
        a_thousand(place, place.leased.read_bytes) as pids,
    ):
        for _ in range(2):
            place.mounted.forget_all()
            in_time(partial(on_one_core, (place.mounted.path / "other").stat))
        in_time(partial(on_one_core, partial(work, place.mounted.path / "free")))
        assert not any(map(is_ended, pids))
        give_up()
        assert {ends(pid) for pid in pids} == {0}


def test_the_thread_that_adds_entries_on_a_core_runs_before_the_clients_there(place: Place) -> None:
    """Otherwise a thousand clients of a busy core use up its entries, and later requests wait for one of theirs."""
    threads = [int(task.name) for task in Path(f"/proc/{place.mounted.pid}/task").iterdir()]
    policies = Counter(os.sched_getscheduler(thread) & ~os.SCHED_RESET_ON_FORK for thread in threads)
    may_have_it = subprocess.run(["chrt", "--fifo", "1", "true"], check=False).returncode == 0
    assert policies[os.SCHED_FIFO] == may_have_it * len(os.sched_getaffinity(0))


def test_what_comes_at_once_for_all_entries_of_a_core_is_answered(place: Place) -> None:
    """Once a thousand have waited there are as many entries, and more than the ring has room for answers to."""
    let_a_thousand_wait(place)
    stop(place.mounted.pid)
    try:
        with a_thousand(place, partial(looks_for_what_is_not_there, place)) as pids:
            os.kill(place.mounted.pid, signal.SIGCONT)
            assert {ends(pid) for pid in pids} == {0}
    finally:
        os.kill(place.mounted.pid, signal.SIGCONT)
    in_time(partial(on_one_core, partial(work, place.mounted.path / "free")))


def looks_and_syncs(place: Place, until_s: float) -> None:
    """A thread in twelve waits for the disk, and another thread answers that; the others are answered at once."""
    number, n = threading.get_native_id(), 0
    with (place.mounted.path / f"synced-{number}").open("wb") as file:
        while time.monotonic() < until_s:
            n += 1
            if number % 12:
                with suppress(FileNotFoundError):
                    os.lstat(place.mounted.path / f"missing-{number}-{n}")
            else:
                os.fsync(file.fileno())


def test_no_answer_is_lost_where_a_ring_is_full_of_them_and_its_thread_is_woken(place: Place) -> None:
    """More entries in a ring than it has room for answers to, and answers by other threads meanwhile."""
    let_a_thousand_wait(place)
    each = partial(on_one_core, partial(by_threads, partial(looks_and_syncs, place, time.monotonic() + STORM_S)))
    with clients([each] * 2) as pids:
        assert {ends(pid) for pid in pids} == {0}
    in_time(partial(on_one_core, partial(work, place.mounted.path / "free")))


@pytest.mark.needs("loop")
@pytest.mark.parametrize("uring", ["on", "off"])
def test_who_waits_for_a_frozen_disk_keeps_nobody_of_that_core_waiting_after_many_waited(uring: str) -> None:
    with loop_volume("ext4", 64) as volume:
        source = volume / "source"
        for name in ("one", "two", "three", "another"):
            (source / name).mkdir(parents=True)
        (source / "leased").write_bytes(b"content")
        files = [source / f"another/file-{number}" for number in range(40)]
        for file in files:
            file.touch()
        with trashd_mount(source, options=["coherence=exclusive", f"uring={uring}"], limit_s=90) as mounted:
            place = Place(mounted, source)
            let_a_thousand_wait(place)
            for name in ("one", "two", "three", "another"):
                (mounted.path / name).stat()
            makes = [partial(on_one_core, (mounted.path / name / "new").mkdir) for name in ("one", "two", "three")]
            with frozen(source) as thaw, clients(makes) as makers:
                assert until(lambda: all(map(waits_in_the_kernel, makers)), LIMIT_S)
                looks = [partial(on_one_core, (mounted.path / "another" / file.name).stat) for file in files]
                with clients(looks) as lookers:
                    assert {ends(pid) for pid in lookers} == {0}
                assert not any(map(is_ended, makers))
                thaw()
                assert {ends(pid) for pid in makers} == {0}


def cores_of(task: Path) -> str:
    (cores,) = re.findall(r"^Cpus_allowed_list:\s*(.*)", (task / "status").read_text(), re.MULTILINE)
    return str(cores)


def test_threads_begun_by_one_that_has_one_core_run_on_any(place: Place) -> None:
    tasks = Path(f"/proc/{place.mounted.pid}/task")
    before = {*tasks.iterdir()}
    with write_lease(place.behind / "leased") as give_up, a_thousand(place, place.leased.read_bytes) as pids:
        assert cores_of(Path("/proc/self")) in {cores_of(task) for task in {*tasks.iterdir()} - before}
        give_up()
        assert {ends(pid) for pid in pids} == {0}


def told_of_uring(target: Path) -> str:
    (mount_result,) = done_well("mount", "--explain", "--json", target).objects()
    state = mount_result["fast_paths"]["uring"]
    return f"{'on' if state['is_on'] else 'off'}: {state['why']}"


def behind_switch(bench: Path, switch: str, script: str) -> subprocess.CompletedProcess[str]:
    """Run a script of a shell, of `$T` (trashd), `$S` (a source) and `$M`, where a file stands in for the switch."""
    stand_in = bench / "enable_uring"
    stand_in.write_text(f"{switch}\n")
    words = ["sh", "-c", f'mount --bind "$0" {SWITCH} && {script}', str(stand_in)]
    env = {**os.environ, "T": TRASHD, "S": str(bench / "source"), "M": str(bench / "target")}
    return subprocess.run(["unshare", "--mount", *words], env=env, capture_output=True, text=True, check=False)


IS_TRUSTED = known_faults(os.uname().release) is None


@pytest.mark.parametrize("uring", ["on", pytest.param("auto", marks=pytest.mark.skipif(not IS_TRUSTED, reason="old"))])
def test_requests_come_by_io_uring(bench: Path, uring: str) -> None:
    mount(bench / "source", bench / "target", "--uring", uring)
    assert told_of_uring(bench / "target").startswith("on: ")
    assert (bench / "target/file").read_text() == "content"


def test_auto_never_sets_the_switch(bench: Path) -> None:
    done = behind_switch(bench, "N", '"$T" mount "$S" "$M" && "$T" mount --explain "$M" && umount "$M"')
    assert done.returncode == 0, done
    assert ["uring", "off"] in [line.split()[:2] for line in done.stdout.splitlines()]
    assert (bench / "enable_uring").read_text() == "N\n"


def test_a_mount_names_the_switch_that_is_off_once_in_each_boot(bench: Path) -> None:
    script = 'mount -t tmpfs run /run && for i in 1 2; do "$T" mount "$S" "$M" && umount "$M"; done'
    said = [behind_switch(bench, switch, script).stderr for switch in ("N", "Y")]
    assert [text.count("hint: trashd service install --uring") for text in said] == [1, 0]


def test_on_by_root_sets_it(bench: Path) -> None:
    done = behind_switch(bench, "N", '"$T" mount --uring on "$S" "$M" && "$T" mount --explain "$M" && umount "$M"')
    assert done.returncode == 0, done
    assert ["uring", "on"] in [line.split()[:2] for line in done.stdout.splitlines()]
    assert (bench / "enable_uring").read_text().startswith("Y")


def test_on_fails_with_the_reason_where_the_switch_can_not_be_set(bench: Path) -> None:
    done = behind_switch(bench, "N", f'mount -o remount,bind,ro {SWITCH} && "$T" mount --uring on "$S" "$M"')
    assert done.returncode != 0
    assert f"uring=on: {SWITCH} is N" in done.stderr
    assert not list((bench / "target").iterdir())


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this machine has one core")
def test_on_fails_with_the_reason_where_a_core_is_out_of_reach(bench: Path) -> None:
    words = [TRASHD, "mount", "--uring", "on", str(bench / "source"), str(bench / "target")]
    done = subprocess.run(["taskset", "-c", "0", *words], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "keeps the daemon off" in done.stderr
    assert not list((bench / "target").iterdir())
