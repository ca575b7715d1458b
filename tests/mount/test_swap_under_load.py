"""Swaps and restores while many work in the tree and beside it: no error that a native exchange would not give."""

import os
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from tests.support.background_processes import workers
from tests.support.foreground_mount import trashd_mount
from tests.support.make_trees import Spec, make_tree, snapshot
from tests.support.real_filesystems import loop_volume
from tests.support.store_verbs import entries, init, reap_now, restore, swap

pytestmark = pytest.mark.needs("root", "fuse", "loop")

N_ROUNDS = int(os.environ.get("TRASHD_TEST_SWAPS", "10"))
LIMIT_S = 300 + 10 * N_ROUNDS
LOG_MAX_BYTES = 10_000_000
STANDING: Spec = {"sub": {"file": "standing content", "deep": {"er": {"leaf": "x" * 10_000}}}}


def clients(top: Path, victim: Path) -> list[Callable[[], None]]:
    """Each works for ever; an OSError that it does not expect ends it."""

    def lists() -> None:
        while True:
            assert set(os.listdir(victim)) is not None

    def creates() -> None:
        for i in count():
            path = victim / f"created{i}"
            try:
                with path.open("xb", buffering=0) as file:
                    file.write(b"%d" % i)
                    assert os.fstat(file.fileno()).st_size == len(b"%d" % i)
                path.unlink()
            except FileNotFoundError:
                continue  # it stayed in the other tree, or in a fresh directory that is gone

    def renames() -> None:
        for i in count():
            try:
                (victim / f"old{i}").touch()
                (victim / f"old{i}").rename(victim / f"new{i}")
                (victim / f"new{i}").unlink()
            except FileNotFoundError:
                continue

    def appends() -> None:
        while True:
            try:
                file = (victim / "log").open("ab", buffering=0)
            except FileNotFoundError:
                continue
            with file:
                for _ in range(20):
                    assert file.write(b"line\n") == 5
                size = os.fstat(file.fileno()).st_size
                assert size % 5 == 0
                if size > LOG_MAX_BYTES:
                    file.truncate(0)

    def reads() -> None:
        while True:
            try:
                content = (victim / "sub/file").read_bytes()
            except FileNotFoundError:
                continue
            assert content == b"standing content"

    def walks() -> None:
        while True:
            for directory, _, files in os.walk(victim):
                for name in files:
                    try:
                        assert Path(directory, name).lstat().st_nlink <= 1
                    except FileNotFoundError:
                        continue

    def holds() -> None:
        """By an fd of the tree, whatever its name is."""
        while True:
            try:
                fd = os.open(victim / "sub", os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:
                continue  # it has begun so late that the tree is in the store
            break
        for i in count():
            name = f"held{i}"
            os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, dir_fd=fd))
            os.lseek(fd, 0, os.SEEK_SET)
            assert {"file", "deep", name} == set(os.listdir(fd))
            os.unlink(name, dir_fd=fd)

    def beside() -> None:
        for i in count():
            path = top / f"beside{i}"
            path.write_bytes(b"x")
            path.rename(top / f"renamed{i}")
            (top / f"renamed{i}").unlink()

    return [lists, creates, renames, appends, reads, walks, holds, beside]


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S + 100)
def test_swap_and_restore_under_load() -> None:
    with loop_volume("ext4", 512) as volume:
        init(volume)
        with trashd_mount(volume, limit_s=LIMIT_S) as mounted:
            victim = make_tree(mounted.path / "victim", STANDING)
            before = snapshot(victim / "sub")
            with workers(clients(mounted.path, victim)):
                for _ in range(N_ROUNDS):
                    swapped = swap(victim)
                    assert not (victim / "sub").exists()
                    restore(mounted.path, swapped.id)
                    assert (victim / "sub").exists()
                    for orphan in entries(volume):  # what the clients wrote in the fresh directory
                        reap_now(volume, orphan.id)
            for name in os.listdir(victim / "sub"):
                if name.startswith("held"):
                    (victim / "sub" / name).unlink()
            assert snapshot(victim / "sub") == before
            assert snapshot(volume / "victim") == snapshot(victim)
