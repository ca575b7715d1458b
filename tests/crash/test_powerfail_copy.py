"""Power cut at every moment of a move by copies: no original is gone whose copy is not there, whole."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from fusefs.linux.kernel import Kernel
from tests.support.crash_states import Result, check_states
from tests.support.make_trees import HardLink, Spec, Symlink, make_tree
from tests.support.move_entries import move
from tests.support.real_filesystems import sync, tmpfs_volume
from tests.support.write_log_disk import LoggedVolume, logged_volume

SIZE_MB = {"ext4": 64, "xfs": 300, "btrfs": 128}
N_TORN = 2
N_ROUNDS = 3
TEXT = b"0123456789abcdef" * 2000
TREE: Spec = {
    "a": {"b": {"deep": TEXT, "small": b"x"}, "link": Symlink("y" * 200)},
    "second": HardLink("a/b/deep"),
    "top": TEXT,
}
GONE = "gone"

on_each_fs = pytest.mark.parametrize(
    "fstype",
    [
        pytest.param("ext4", marks=pytest.mark.needs("root", "loop", "fuse")),
        pytest.param("xfs", marks=pytest.mark.needs("root", "loop", "fuse", "xfs")),
        pytest.param("btrfs", marks=pytest.mark.needs("root", "loop", "fuse", "btrfs")),
    ],
)


class Telling(Kernel):
    """Marks what is gone as soon as it is."""

    def __init__(self, volume: LoggedVolume, job: Path, k: int) -> None:
        super().__init__()
        self.told = volume, job, k

    def unlink(self, dir_fd: int, name: bytes) -> None:
        volume, job, k = self.told
        path = Path(os.readlink(f"/proc/self/fd/{int(dir_fd)}"), os.fsdecode(name))
        super().unlink(dir_fd, name)
        if path.is_relative_to(job):
            volume.mark(f"{GONE} {k}/{path.relative_to(job)}")


class NoFlush(Telling):
    """Flushes nothing."""

    def fsync(self, fd: int) -> None:
        pass


def replay(fstype: str, kind: type[Telling]) -> Result:
    with logged_volume(fstype, SIZE_MB[fstype]) as volume, tmpfs_volume() as near:
        for k in range(N_ROUNDS):
            job = make_tree(near / f"job{k}", TREE)
            target = volume.mountpoint / str(k)
            target.mkdir()
            sync(target)
            assert move(job, target, kind(volume, job, k), copy=True) == {}
        log = volume.stop()
    return check_states(log, fstype, check, n_torn=N_TORN, seed=1)


def check(root: Path, marks: Sequence[str]) -> str | None:
    """What is missing of that whose original is gone."""
    for mark in marks:
        what, _, name = mark.partition(" ")
        if what != GONE:
            continue
        path = root / name
        if not os.path.lexists(path):
            return f"{name} is gone"
        if path.name == "link":
            if str(path.readlink()) != "y" * 200:
                return f"{name} leads elsewhere"
        elif path.read_bytes() != (b"x" if path.name == "small" else TEXT):
            return f"{name} has {path.stat().st_size} bytes"
    return None


@on_each_fs
def test_no_original_is_gone_whose_copy_is_not_there(fstype: str) -> None:
    result = replay(fstype, Telling)
    assert result.n_states > 0
    assert not result.failures, result


@on_each_fs
def test_without_flushes_it_would_be(fstype: str) -> None:
    assert replay(fstype, NoFlush).failures
