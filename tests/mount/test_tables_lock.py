"""The tables are taken from a thread that waits with them, which comes back to what others have left, unharmed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fusefs.core import fuse_protocol as wire
from fusefs.core.fuse_protocol import Opcode
from fusefs.core.nodeids import ROOT
from fusefs.mount.tables.tables_lock import TablesLock
from fusefs.mount.tree.vfs import Vfs
from tests.support.fake_dev_fuse import FakeKernel, a_real
from tests.support.vfs_without_mount import Somebody, vfs_at

LIMIT_S, MOMENT_S = 20, 0.2
ME = Somebody(0, 0, os.getpid(), 0o22)


@pytest.fixture
def lock() -> TablesLock:
    lock = TablesLock()
    lock.watch()
    return lock


def in_thread(act: Callable[[], object]) -> None:
    """Do something, and wait for it."""
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


def is_free(lock: TablesLock) -> bool:
    """Whether a thread can begin a turn; if not, it does when that is over."""
    thread = threading.Thread(target=lambda: lock.run(lambda: None), daemon=True)
    thread.start()
    thread.join(MOMENT_S)
    return not thread.is_alive()


def taken(lock: TablesLock, act: Callable[[], object]) -> None:
    """What is under way is taken away, something is done, and the call goes on: a call of the loop's own thread."""

    def take() -> None:
        call = lock.turn.under_way()
        assert call is not None
        assert lock.take_away(lock.turn, call)
        act()

    in_thread(take)


def test_others_have_the_tables_while_he_waits_and_he_has_them_when_he_comes_back(lock: TablesLock) -> None:
    seen: list[bool] = []
    with lock:
        lock.call(taken, lock, lambda: lock.run(lambda: seen.append(lock.is_home)))
        assert (seen, lock.is_home, is_free(lock)) == ([False], True, False)
        assert (lock.is_away, lock.was_away) == (False, True)
    with lock:
        assert (lock.is_away, lock.was_away) == (False, False)
    assert is_free(lock)


def test_nothing_is_taken_from_who_is_in_another_call(lock: TablesLock) -> None:
    seen: list[object] = []
    with lock:
        lock.call(lambda _number: seen.append(lock.turn.under_way()), 1)
        lock.call(lambda _number: seen.append(lock.take_away(lock.turn, seen[0])), 2)
    assert seen[1] is False
    assert lock.turn.under_way() is None
    assert not lock.take_away(lock.turn, object())
    assert not lock.is_away


def test_what_fails_while_he_is_away_fails_for_him(lock: TablesLock) -> None:
    def fail() -> None:
        taken(lock, lambda: None)
        raise FileNotFoundError

    with lock, pytest.raises(FileNotFoundError):
        lock.call(fail)
    assert is_free(lock)


def test_an_fd_stays_open_to_the_end_of_the_operation_that_uses_it(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    with vfs_at(tmp_path) as vfs:
        node = vfs.nodes.get(vfs.lookups.lookup(ROOT, b"sub", Somebody(0, 0, 1, 0)).nodeid)
        assert node is not None
        with vfs.lock:
            fd = vfs.directories.fd_of(node)
            vfs.nodes.drop_directory_fd(node)
            assert vfs.nodes.directory_fd(node) is None
            os.fstat(fd)
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(fd)


def test_two_may_be_away_at_a_time_and_each_comes_back_to_its_own_turn(lock: TablesLock) -> None:
    away, may_return = threading.Event(), threading.Event()
    ends: list[tuple[str, bool, bool]] = []

    def wait() -> None:
        away.set()
        may_return.wait(LIMIT_S)

    def first() -> None:
        with lock:
            lock.call(wait)
            ends.append(("first", lock.is_away, lock.was_away))

    thread = threading.Thread(target=first)
    thread.start()
    assert away.wait(LIMIT_S)
    first_turn = lock.turn
    call = first_turn.under_way()
    assert call is not None
    assert lock.take_away(first_turn, call)
    with lock:
        lock.call(taken, lock, lambda: in_thread(lambda: lock.run(str)))
        ends.append(("second", lock.is_away, lock.was_away))
    may_return.set()
    thread.join(LIMIT_S)
    assert ends == [("second", True, True), ("first", False, True)]


@pytest.fixture
def real() -> Iterator[tuple[FakeKernel, Vfs, Path]]:
    with a_real() as (kernel, vfs, path):
        (path / "file").touch()
        vfs.lock.watch()
        yield kernel, vfs, path


def entry_s(kernel: FakeKernel) -> int:
    """For how many seconds the kernel may believe a name."""
    return int.from_bytes(kernel.asked(Opcode.LOOKUP, b"file\0").body[16:24], "little")


@pytest.mark.parametrize("act", ["changes", "nothing"])
def test_what_he_has_seen_is_not_believed_if_others_were_at_work(
    real: tuple[FakeKernel, Vfs, Path], monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    kernel, vfs, _path = real
    assert entry_s(kernel)
    find: Any = vfs.reader._lookers.looker.find

    def found(fd: int, name: bytes) -> object:
        seen = find(fd, name)
        taken(vfs.lock, lambda: vfs.lock.run(vfs.lookups.getattr, ROOT, ME) if act == "changes" else None)
        return seen

    monkeypatch.setattr(vfs.reader._lookers.looker, "find", found)
    assert bool(entry_s(kernel)) is (act == "nothing")
    monkeypatch.undo()
    assert entry_s(kernel)


def test_what_others_learn_while_he_changes_it_is_forgotten(
    real: tuple[FakeKernel, Vfs, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, vfs, path = real
    mkdir = os.mkdir

    def looked_at_before(*args: Any, **named: Any) -> None:
        taken(vfs.lock, lambda: vfs.lock.run(vfs.lookups.lookup, ROOT, b"new", ME))
        mkdir(*args, **named)

    monkeypatch.setattr(os, "mkdir", looked_at_before)
    assert kernel.asked(Opcode.MKDIR, wire.MKDIR_IN.pack(0o755, 0) + b"new\0").error == 0
    assert (path / "new").is_dir()
    assert vfs.cache.name(vfs.nodes.root, b"new") is None
