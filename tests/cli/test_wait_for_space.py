"""`--wait` after a reap: the space comes back, or each process that keeps it is named with its bytes."""

import ctypes
import mmap
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from fusefs.cli import wait
from fusefs.cli.wait import TOLERANCE_BYTES, VolumeWait
from fusefs.core.names import ContainerId
from fusefs.core.results import Waited, WaitReason, WaitReasonKind
from fusefs.engine.count_tree import survey
from fusefs.linux.kernel import Kernel
from fusefs.linux.tree_users import DeletedFile
from tests.support.fuse_silent import silent_fuse
from tests.support.make_trees import Spec, make_tree
from tests.support.other_users import as_user, become
from tests.support.real_filesystems import ALL_FILESYSTEMS, loop_volume, sync, tmpfs_volume
from tests.support.small_orphans import OTHER
from tests.support.store_verbs import init, raw, reap_now, swap, tree_of

pytestmark = pytest.mark.needs("root", "loop")

MIB = 1 << 20
SIZE, N_SMALL, SMALL = 2 * MIB, 50, 20_000


def make_job(volume: Path) -> Path:
    """A directory with a large file, `held`, and small ones; of new bytes, for kept ones make every fork dearer."""
    spec: Spec = {"held": os.urandom(SIZE), "sub": {f"{i}": os.urandom(SMALL) for i in range(N_SMALL)}}
    return make_tree(volume / "job", spec)


@contextmanager
def volume_of(fs_type: str) -> Iterator[Path]:
    with tmpfs_volume() if fs_type == "tmpfs" else loop_volume(fs_type) as path:
        init(path)
        yield path


class Gone(NamedTuple):
    """A tree that was reaped, its size, and the free space of its volume since before the reap."""

    id: ContainerId
    n_bytes: int
    volume_wait: VolumeWait

    def wait(self) -> Waited:
        return self.volume_wait.conclude(lambda: False)


@contextmanager
def reaped(volume: Path, victim: Path) -> Iterator[Gone]:
    kernel = Kernel()
    swapped = swap(victim)
    sync(volume)
    with ExitStack() as owned:
        volume_wait = VolumeWait(kernel, raw(volume), owned)
        with kernel.open_path(raw(tree_of(swapped).parent), os.O_RDONLY) as container:
            n_bytes = survey(kernel, container).n_bytes
        volume_wait.add_reaped(reap_now(volume, swapped.id))
        yield Gone(swapped.id, n_bytes, volume_wait)


@contextmanager
def holder(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    with path.open("rb") as file, subprocess.Popen(["sleep", "infinity"], stdin=file) as process:
        file.close()
        try:
            yield process
        finally:
            process.kill()


# The space comes back


@pytest.mark.parametrize("fs_type", ALL_FILESYSTEMS)
def test_the_space_comes_back(fs_type: str) -> None:
    with volume_of(fs_type) as volume, reaped(volume, make_job(volume)) as gone:
        waited = gone.wait()
        assert gone.n_bytes >= SIZE + N_SMALL * SMALL
        assert (waited.is_reached, waited.reasons) == (True, ())
        assert waited.came_bytes >= gone.n_bytes - max(TOLERANCE_BYTES, gone.n_bytes // 50)


# Processes that have deleted files open


@pytest.mark.parametrize("fs_type", ALL_FILESYSTEMS)
def test_a_process_that_has_a_deleted_file_open_is_named_with_its_bytes(fs_type: str) -> None:
    with volume_of(fs_type) as volume:
        job = make_job(volume)
        with holder(job / "held") as process, reaped(volume, job) as gone:
            waited = gone.wait()
            (reason,) = waited.reasons
            assert (reason.kind, reason.n_bytes, waited.is_reached) == (WaitReasonKind.OPEN, SIZE, False)
            assert f"(pid {process.pid}) has a deleted file open: " in reason.detail
            assert reason.detail.endswith(f"{gone.id}/tree/held")
            process.kill()
            process.wait()
            assert gone.wait().is_reached


def test_a_process_that_only_works_in_a_deleted_directory_is_no_failure() -> None:
    with volume_of("ext4") as volume:
        job = make_job(volume)
        with subprocess.Popen(["sleep", "infinity"], cwd=job / "sub") as process, reaped(volume, job) as gone:
            waited = gone.wait()
            process.kill()
    assert (waited.is_reached, waited.reasons) == (True, ())


@contextmanager
def mapper(path: Path, uid: int) -> Iterator[int]:
    """A user's process that has a file mapped, and not open."""
    fd = os.open(path, os.O_RDONLY)
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            become(uid)
            libc = ctypes.CDLL(None)
            libc.mmap.restype = ctypes.c_void_p
            size = ctypes.c_size_t(os.fstat(fd).st_size)
            libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, ctypes.c_long(0))
            os.closerange(0, theirs)
            os.write(theirs, b"mapped")
            signal.pause()
        finally:
            os._exit(1)
    os.close(fd)
    os.close(theirs)
    try:
        assert os.read(ours, 100) == b"mapped"
        yield pid
    finally:
        os.close(ours)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("fs_type", ALL_FILESYSTEMS)
@pytest.mark.parametrize("uid", [0, OTHER])
def test_a_file_that_is_only_mapped_is_found_too(fs_type: str, uid: int) -> None:
    with volume_of(fs_type) as volume:
        job = make_job(volume)
        with mapper(job / "held", uid) as pid, reaped(volume, job) as gone:
            waited = as_user(uid, gone.wait) if uid else gone.wait()
            (reason,) = waited.reasons
            assert (reason.kind, reason.n_bytes) == (WaitReasonKind.OPEN, SIZE)
            assert f"(pid {pid})" in reason.detail


def test_all_processes_that_have_a_file_open_are_named() -> None:
    with volume_of("ext4") as volume:
        job = make_job(volume)
        with holder(job / "held") as one, holder(job / "held") as other, reaped(volume, job) as gone:
            reasons = gone.wait().reasons
            assert [reason.n_bytes for reason in reasons] == [SIZE, SIZE]
            text = " ".join(reason.detail for reason in reasons)
            assert f"(pid {one.pid})" in text
            assert f"(pid {other.pid})" in text


def test_deleted_files_that_were_none_of_the_tree_are_not_blamed() -> None:
    with volume_of("ext4") as volume, holding_deleted(volume / "else"), reaped(volume, make_job(volume)) as gone:
        waited = gone.wait()
    assert (waited.is_reached, waited.reasons) == (True, ())


@contextmanager
def holding_deleted(path: Path) -> Iterator[None]:
    path.write_bytes(os.urandom(SIZE))
    with holder(path):
        path.unlink()
        yield


@pytest.mark.needs("fuse")
def test_a_mount_that_never_answers_holds_nobody_who_looks_for_holders() -> None:
    with volume_of("ext4") as volume, reaped(volume, make_job(volume)) as gone:
        mounted = volume / str(gone.id) / "looks like a file (deleted)"
        mounted.mkdir(parents=True)
        with silent_fuse(mounted, 0):  # root's: another user's request would be refused, not kept waiting
            fd = os.open(mounted, os.O_PATH)
            try:
                waited = gone.wait()
            finally:
                os.close(fd)
    assert (waited.is_reached, waited.reasons) == (True, ())


# How it waits: a volume whose free space is told by a script, no process that has files open, and a clock that only
# pauses move


class Clock:
    """Stands in for `time`."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(wait, "time", clock)
    monkeypatch.setattr(wait, "find_deleted", lambda *_args: ())
    return clock


class Volume(Kernel):
    """A kernel that tells the next of some figures at each look, and the last one for ever: free MiB."""

    def __init__(self, free_mib: Sequence[int]) -> None:
        self.calls: list[str] = []
        super().__init__(self.calls.append)
        self._mib = list(free_mib)

    def free_bytes(self, _fd: int) -> int:
        return (self._mib.pop(0) if len(self._mib) > 1 else self._mib[0]) * MIB

    def wait(self, goal_mib: int = 0, stops: Callable[[], bool] = lambda: False) -> Waited:
        with ExitStack() as owned:
            volume_wait = VolumeWait(self, b"/dev/shm", owned, goal_mib * MIB)
            volume_wait.ids.append(ContainerId("nobody-has-this-id"))
            return volume_wait.conclude(stops)


def test_an_amount_that_is_there_is_not_waited_for(clock: Clock) -> None:
    waited = Volume([100, 164]).wait(64)
    assert (waited.is_reached, waited.came_bytes, waited.reasons, clock.now_s) == (True, 64 * MIB, (), 0.0)


@pytest.mark.usefixtures("clock")
def test_it_ends_as_soon_as_enough_has_come() -> None:
    waited = Volume(range(100, 165)).wait(20)
    assert waited.is_reached
    assert 20 * MIB <= waited.came_bytes <= 25 * MIB


def test_it_waits_while_space_still_comes(clock: Clock) -> None:
    slowly = [mib for mib in range(100, 165, 4) for _ in range(20)]
    assert Volume(slowly).wait(64).is_reached
    assert clock.now_s > 30


def test_it_gives_up_when_nothing_has_come_for_a_while(clock: Clock) -> None:
    waited = Volume([100, 110, 120]).wait(64)
    assert (waited.came_bytes, waited.is_reached) == (20 * MIB, False)
    assert [reason.kind for reason in waited.reasons] == [WaitReasonKind.LESS]
    assert 10 <= clock.now_s < 15


def test_done_waits_only_while_free_space_grows(clock: Clock) -> None:
    waited = Volume([100, 110, 120, 130]).wait()
    assert (waited.is_reached, waited.came_bytes) == (True, 30 * MIB)
    assert clock.now_s < 2


def test_space_that_others_used_again_has_come(clock: Clock) -> None:
    waited = Volume([100, 150, 90]).wait(64)
    assert (waited.is_reached, waited.came_bytes) == (False, 50 * MIB)
    assert clock.now_s >= 10


def test_a_stop_ends_it(clock: Clock) -> None:
    assert Volume([100, 110]).wait(64, stops=lambda: clock.now_s > 1).came_bytes == 10 * MIB
    assert clock.now_s < 5


@pytest.mark.usefixtures("clock")
def test_a_commit_is_requested_once() -> None:
    volume = Volume([100, 110])
    volume.wait(64)
    assert volume.calls.count("syncfs") == 1


@pytest.mark.usefixtures("clock")
def test_a_server_is_asked_for_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    volume = Volume([100, 110])
    monkeypatch.setattr(volume, "is_local", lambda _fd: False)
    volume.wait(64)
    assert "syncfs" not in volume.calls


def test_a_daemon_that_has_files_open_is_waited_for_and_named_if_it_keeps_them(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = [DeletedFile(7, 0, "trashd", (0, ino), MIB, b"/v/.trashd/x") for ino in range(3)]
    ends_s = [5.0]
    monkeypatch.setattr(wait, "find_deleted", lambda *_args: held if clock.now_s < ends_s[0] else ())
    monkeypatch.setattr(wait, "serves_fuse", lambda _pid: True)
    assert Volume([100, 164]).wait().is_reached
    assert 5 <= clock.now_s < 7
    clock.now_s, ends_s[0] = 0.0, 100.0
    (reason,) = Volume([100, 164]).wait().reasons
    assert reason == WaitReason(WaitReasonKind.OPEN, "trashd (pid 7) has 3 deleted files open: /v/.trashd/x", 3 * MIB)
    assert 10 <= clock.now_s < 12
