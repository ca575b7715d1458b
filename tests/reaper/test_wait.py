"""Waiting for the space of a reaped tree: it comes, or what keeps it is named with its bytes."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from fusefs.core.freed_space import SpaceKeeper, Survey, Waited, tolerance_bytes
from fusefs.core.names import ContainerId
from fusefs.core.space_goal import ALL
from fusefs.engine.count_tree import survey
from fusefs.linux.kernel import XFS_MAGIC, Kernel
from fusefs.waiting.wait_for_space import FreeSpaceGauge, wait_for_goal
from tests.support.filesystem_params import ALL_FILESYSTEMS
from tests.support.fuse_silent import silent_fuse
from tests.support.make_trees import IMMUTABLE, Spec, make_tree, set_flags
from tests.support.other_users import as_user, become
from tests.support.real_filesystems import loop_volume, sync, tmpfs_volume
from tests.support.small_orphans import OTHER
from tests.support.store_calls import init, raw, reap_now, swap, tree_of

pytestmark = pytest.mark.needs("root", "loop")

MIB = 1 << 20
SIZE = 8 * MIB


def make_job(volume: Path) -> Path:
    """A directory with a large file, `held`, and small ones; of new bytes, for kept ones make every fork dearer."""
    spec: Spec = {"held": os.urandom(SIZE), "sub": {f"{i}": os.urandom(20_000) for i in range(200)}}
    return make_tree(volume / "job", spec)


@contextmanager
def volume_of(fs_type: str) -> Iterator[Path]:
    """A volume with a store."""
    with tmpfs_volume() if fs_type == "tmpfs" else loop_volume(fs_type, 200) as path:
        init(path)
        yield path


class Gone(NamedTuple):
    """A tree that was counted and reaped."""

    id: ContainerId
    before_bytes: int
    survey: Survey

    def wait(self, volume: Path, left_bytes: int = 0, patience_s: float = 30.0) -> Waited:
        """`--wait`."""
        kernel = Kernel()
        with kernel.open_path(raw(volume)) as fd:
            return wait_for_goal(
                kernel,
                fd,
                FreeSpaceGauge(kernel, fd, before_bytes=self.before_bytes),
                ALL,
                self.survey,
                left_bytes=left_bytes,
                containers=[self.id],
                patience_s=patience_s,
            ).waited


def reap_counted(volume: Path, victim: Path, before_reap: Callable[[Path], object] = lambda _tree: None) -> Gone:
    """Swap a directory, count it, and reap it; `before_reap` gets the orphan's tree."""
    kernel = Kernel()
    swapped = swap(victim)
    before_reap(tree_of(swapped))
    sync(volume)
    with kernel.open_path(raw(volume)) as fd:
        before_bytes = kernel.free_bytes(fd)
    with kernel.open_path(raw(tree_of(swapped).parent), os.O_RDONLY) as fd:
        seen = survey(kernel, fd, with_shared=True)
    reap_now(volume, swapped.id)
    return Gone(swapped.id, before_bytes, seen)


def flush_deferred(volume: Path) -> None:
    """Have xfs free now what it has put off (inodegc): a freeze waits for that."""
    with Kernel().open_path(raw(volume)) as fd:
        is_xfs = Kernel().filesystem(fd) == XFS_MAGIC
    if is_xfs:
        subprocess.run(["fsfreeze", "--freeze", volume], check=True)
        subprocess.run(["fsfreeze", "--unfreeze", volume], check=True)


@contextmanager
def holder(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has a file open."""
    with path.open("rb") as file, subprocess.Popen(["sleep", "infinity"], stdin=file) as process:
        file.close()
        try:
            yield process
        finally:
            process.kill()


def is_about(n_bytes: int, expected: int, of: int) -> bool:
    """Whether it is as many, but for what metadata comes and goes."""
    return abs(n_bytes - expected) <= tolerance_bytes(of) + MIB


# It comes


@pytest.mark.parametrize("fs_type", ALL_FILESYSTEMS)
def test_the_space_comes_back(fs_type: str) -> None:
    with volume_of(fs_type) as volume:
        gone = reap_counted(volume, make_job(volume))
        waited = gone.wait(volume)
        assert gone.survey.n_bytes >= SIZE + 200 * 20_000
        assert (waited.is_complete, waited.reasons) == (True, ())
        assert waited.came_bytes >= gone.survey.n_bytes - tolerance_bytes(gone.survey.n_bytes)


# Or it is known why not


@pytest.mark.parametrize("fs_type", ALL_FILESYSTEMS)
def test_who_has_a_deleted_file_open_is_named_with_its_bytes(fs_type: str) -> None:
    with volume_of(fs_type) as volume:
        job = make_job(volume)
        with holder(job / "held") as process:
            gone = reap_counted(volume, job)
            waited = gone.wait(volume)
            (reason,) = waited.reasons
            assert (reason.kind, reason.n_bytes, waited.is_complete) == (SpaceKeeper.OPEN, SIZE, False)
            assert f"(pid {process.pid}) has a deleted file open: " in reason.detail
            assert reason.detail.endswith(f"{gone.id}/tree/held")
            assert gone.wait(volume, patience_s=0).reasons == waited.reasons
            assert is_about(waited.came_bytes, gone.survey.n_bytes - SIZE, gone.survey.n_bytes)
        assert gone.wait(volume).is_complete


def test_a_file_that_several_have_counts_once_and_all_are_named() -> None:
    with volume_of("ext4") as volume:
        job = make_job(volume)
        with holder(job / "held") as one, holder(job / "held") as other:
            waited = reap_counted(volume, job).wait(volume)
            assert sorted(reason.n_bytes for reason in waited.reasons) == [0, SIZE]
            told = " ".join(reason.detail for reason in waited.reasons)
            assert f"(pid {one.pid})" in told
            assert f"(pid {other.pid})" in told


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
        with mapper(job / "held", uid) as pid:
            gone = reap_counted(volume, job)
            waited = as_user(uid, partial(gone.wait, volume)) if uid else gone.wait(volume)
            (reason,) = waited.reasons
            assert (reason.kind, reason.n_bytes) == (SpaceKeeper.OPEN, SIZE)
            assert f"(pid {pid})" in reason.detail


def test_a_user_is_told_that_root_would_see_more() -> None:
    with volume_of("ext4") as volume:
        job = make_job(volume)
        with holder(job / "held"):
            gone = reap_counted(volume, job)
            waited = as_user(OTHER, partial(gone.wait, volume, patience_s=0))
    (reason,) = waited.reasons
    assert reason.kind is SpaceKeeper.UNKNOWN
    assert is_about(reason.n_bytes, SIZE, gone.survey.n_bytes)
    assert "root would see" in reason.detail


def test_deleted_files_that_were_none_of_the_tree_are_not_blamed() -> None:
    with volume_of("ext4") as volume, holding_deleted(volume / "else"):
        gone = reap_counted(volume, make_job(volume))
        (volume / "written").write_bytes(os.urandom(SIZE))
        sync(volume)
        waited = gone.wait(volume, patience_s=0)
    (reason,) = waited.reasons
    assert reason.kind is SpaceKeeper.UNKNOWN
    assert is_about(reason.n_bytes, SIZE, gone.survey.n_bytes)
    assert "others wrote" in reason.detail


@contextmanager
def holding_deleted(path: Path) -> Iterator[None]:
    """A process has a deleted file open."""
    path.write_bytes(os.urandom(SIZE))
    with holder(path):
        path.unlink()
        yield


@pytest.mark.needs("fuse")
def test_a_mount_that_never_answers_holds_nobody_who_looks_for_holders() -> None:
    with volume_of("ext4") as volume:
        gone = reap_counted(volume, make_job(volume))
        (volume / "written").write_bytes(os.urandom(SIZE))
        mounted = volume / str(gone.id) / "looks like a file (deleted)"
        mounted.mkdir(parents=True)
        with silent_fuse(mounted, 0):  # root's: another user's request would be refused, not kept waiting
            fd = os.open(mounted, os.O_PATH)
            try:
                waited = gone.wait(volume, patience_s=0)
            finally:
                os.close(fd)
    assert [reason.kind for reason in waited.reasons] == [SpaceKeeper.UNKNOWN]


def test_a_hard_link_outside_is_a_reason() -> None:
    with volume_of("ext4") as volume:
        job = make_job(volume)
        os.link(job / "held", volume / "outside")
        waited = reap_counted(volume, job).wait(volume)
        assert [(reason.kind, reason.n_bytes) for reason in waited.reasons] == [(SpaceKeeper.LINKS, SIZE)]
        assert not waited.is_complete


@pytest.mark.needs("btrfs")
def test_a_snapshot_is_a_reason() -> None:
    with volume_of("btrfs") as volume:
        job = make_job(volume)
        subprocess.run(["btrfs", "subvolume", "snapshot", volume, volume / "snapshot"], check=True, capture_output=True)
        gone = reap_counted(volume, job)
        waited = gone.wait(volume, patience_s=0)
        assert [reason.kind for reason in waited.reasons] == [SpaceKeeper.SHARED]
        assert is_about(waited.reasons[0].n_bytes, gone.survey.n_bytes, gone.survey.n_bytes)


@pytest.mark.needs("btrfs")
def test_a_snapshot_that_goes_meanwhile_gives_the_space() -> None:
    """btrfs frees it in the background: some commits later."""
    with loop_volume("btrfs", 200, mount_options=["commit=1"]) as volume:
        init(volume)
        job = make_job(volume)
        snapshot = volume / "snapshot"
        subprocess.run(["btrfs", "subvolume", "snapshot", volume, snapshot], check=True, capture_output=True)
        gone = reap_counted(volume, job)
        subprocess.run(["btrfs", "subvolume", "delete", snapshot], check=True, capture_output=True)
        assert gone.wait(volume, patience_s=600).is_complete


@pytest.mark.needs("xfs")
def test_a_reflink_is_a_reason() -> None:
    with volume_of("xfs") as volume:
        job = make_job(volume)
        subprocess.run(["cp", "--reflink=always", job / "held", volume / "copy"], check=True)
        gone = reap_counted(volume, job)
        assert gone.survey.shared_bytes == SIZE
        flush_deferred(volume)
        (reason,) = gone.wait(volume, patience_s=0).reasons
        assert reason.kind is SpaceKeeper.SHARED
        assert is_about(reason.n_bytes, SIZE, gone.survey.n_bytes)


@pytest.mark.needs("xfs")
def test_files_that_share_only_with_each_other_come_back_whole() -> None:
    with volume_of("xfs") as volume:
        job = make_job(volume)
        subprocess.run(["cp", "--reflink=always", job / "held", job / "copy"], check=True)
        gone = reap_counted(volume, job)
        assert gone.survey.shared_bytes == 2 * SIZE
        flush_deferred(volume)
        (reason,) = gone.wait(volume, patience_s=0).reasons  # counted twice, and nobody can tell
        assert reason.kind is SpaceKeeper.SHARED
        assert is_about(reason.n_bytes, SIZE, gone.survey.n_bytes)


def test_what_lies_in_quarantine_is_a_reason() -> None:
    with volume_of("ext4") as volume:
        gone = reap_counted(volume, make_job(volume), lambda tree: set_flags(tree / "held", IMMUTABLE))
        (container,) = volume.glob(".trashd/u/*/quarantine/*")
        kernel = Kernel()
        with kernel.open_path(raw(container), os.O_RDONLY) as fd:
            left = survey(kernel, fd)
        (reason,) = gone.wait(volume, left.n_bytes).reasons
        set_flags(container / "tree/held", IMMUTABLE, on=False)
        assert (reason.kind, reason.n_bytes) == (SpaceKeeper.LEFT, left.n_bytes)
        assert left.n_bytes >= SIZE


# How it waits: a volume whose free space is told by a script, and a clock that only pauses move


class Volume(Kernel):
    """A kernel that tells the next of some figures at each look, in MiB, and the last one for ever."""

    def __init__(self, *free_mib: int) -> None:
        self.calls: list[str] = []
        super().__init__(self.calls.append)
        self._free = list(free_mib)
        self.now_s = 0.0
        self.told: list[int] = []

    def free_bytes(self, _fd: int) -> int:
        return (self._free.pop(0) if len(self._free) > 1 else self._free[0]) * MIB

    def pause(self, seconds: float) -> None:
        self.now_s += seconds

    def wait(self, patience_s: float = 30.0, stops: Callable[[], bool] = lambda: False) -> Waited:
        """Wait for 64 MiB that were taken when 100 were free."""
        with self.open_path(b"/dev/shm") as fd:
            return wait_for_goal(
                self,
                fd,
                FreeSpaceGauge(self, fd, before_bytes=100 * MIB, clock=lambda: self.now_s),
                ALL,
                Survey(1, 64 * MIB, 0, 0, 0, False),
                containers=[ContainerId("nobody-has-this-id")],
                patience_s=patience_s,
                tell=lambda came, _expected: self.told.append(came // MIB),
                stops=stops,
                clock=lambda: self.now_s,
                pause=self.pause,
            ).waited


def test_what_is_there_at_once_is_not_waited_for() -> None:
    volume = Volume(164)
    assert volume.wait() == Waited(64 * MIB, 64 * MIB, (), True)
    assert (volume.told, volume.calls.count("syncfs")) == ([], 0)


def test_it_waits_while_space_still_comes() -> None:
    volume = Volume(*range(100, 165))
    assert volume.wait(patience_s=1.0).is_complete
    assert volume.told == sorted(volume.told)
    assert volume.now_s > 1.0


def test_it_gives_up_when_nothing_has_come_for_as_long_as_its_patience() -> None:
    volume = Volume(110, 120, 120)
    waited = volume.wait()
    assert (waited.came_bytes, waited.is_complete) == (20 * MIB, False)
    assert [(reason.kind, reason.n_bytes) for reason in waited.reasons] == [(SpaceKeeper.UNKNOWN, 44 * MIB)]
    assert 30 <= volume.now_s < 35
    assert volume.calls.count("syncfs") < 25


def test_it_hurries_up_a_commit_before_it_waits() -> None:
    volume = Volume(100, 164)
    assert volume.wait().is_complete
    assert (volume.told, volume.calls.count("syncfs")) == ([], 1)


def test_who_says_stop_gets_what_is_known() -> None:
    volume = Volume(110)
    assert volume.wait(stops=lambda: volume.now_s > 1).came_bytes == 10 * MIB
    assert volume.now_s < 5


def test_a_network_is_asked_for_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    volume = Volume(110)
    monkeypatch.setattr(volume, "is_local", lambda _fd: False)
    (reason,) = volume.wait().reasons
    assert "server" in reason.detail
    assert "syncfs" not in volume.calls
