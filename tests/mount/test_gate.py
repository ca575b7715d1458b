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
from fusefs.core.inode_table import ROOT
from fusefs.linux.fd import Fd
from fusefs.mount.tables_lock import TablesLock
from fusefs.mount.vfs import Vfs
from tests.support.fake_dev_fuse import Kernel, a_real
from tests.support.vfs_without_mount import Somebody

ME = Somebody(0, 0, os.getpid(), 0o22)


@pytest.fixture
def gate() -> TablesLock:
    gate = TablesLock()
    gate.watch()
    return gate


def in_thread(act: Callable[[], object]) -> None:
    """Do something, and wait for it."""
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


def taken(gate: TablesLock, act: Callable[[], object]) -> None:
    """What is under way is taken away, something is done, and the call goes on: a call of the loop's own thread."""

    def take() -> None:
        call = gate.under_way()
        assert call is not None
        assert gate.take_away(call)
        act()

    in_thread(take)


def test_others_have_the_tables_while_he_waits_and_he_has_them_when_he_comes_back(gate: TablesLock) -> None:
    seen: list[bool] = []
    with gate.lock:
        gate.begin()
        gate.call(taken, gate, lambda: gate.run(lambda: seen.append(gate.is_home)))
        assert (seen, gate.is_home, gate.lock.locked()) == ([False], True, True)
        assert (gate.is_away, gate.was_away) == (False, True)
        gate.begin()
        assert (gate.is_away, gate.was_away) == (False, False)
    assert not gate.lock.locked()


def test_nothing_is_taken_from_who_is_in_another_call(gate: TablesLock) -> None:
    seen: list[object] = []
    with gate.lock:
        gate.call(lambda _number: seen.append(gate.under_way()), 1)
        gate.call(lambda _number: seen.append(gate.take_away(seen[0])), 2)
    assert seen[1] is False
    assert gate.under_way() is None
    assert not gate.take_away(None)


def test_what_fails_while_he_is_away_fails_for_him(gate: TablesLock) -> None:
    def fail() -> None:
        taken(gate, lambda: None)
        raise FileNotFoundError

    with gate.lock, pytest.raises(FileNotFoundError):
        gate.call(fail)
    assert not gate.lock.locked()


def test_what_he_was_lent_stays_open_until_his_next_operation(gate: TablesLock) -> None:
    fd, other = (Fd(os.open("/", os.O_PATH)) for _ in range(2))
    with gate.lock:
        gate.begin()
        gate.lend(fd)
        gate.call(taken, gate, lambda: [gate.run(gate.close, one) for one in (fd, other)])
        os.fstat(fd)
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(other)
        gate.begin()
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(fd)


@pytest.fixture
def real() -> Iterator[tuple[Kernel, Vfs, Path]]:
    with a_real() as (kernel, vfs, path):
        (path / "file").touch()
        vfs.gate.watch()
        yield kernel, vfs, path


def entry_s(kernel: Kernel) -> int:
    """For how many seconds the kernel may believe a name."""
    return int.from_bytes(kernel.asked(Opcode.LOOKUP, b"file\0").body[16:24], "little")


@pytest.mark.parametrize("act", ["changes", "nothing"])
def test_what_he_has_seen_is_not_believed_if_others_were_at_work(
    real: tuple[Kernel, Vfs, Path], monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    kernel, vfs, _path = real
    assert entry_s(kernel)
    find: Any = vfs._looker.find

    def found(fd: int, name: bytes) -> object:
        seen = find(fd, name)
        taken(vfs.gate, lambda: vfs.gate.run(vfs.getattr, ROOT, ME) if act == "changes" else None)
        return seen

    monkeypatch.setattr(vfs._looker, "find", found)
    assert bool(entry_s(kernel)) is (act == "nothing")
    monkeypatch.undo()
    assert entry_s(kernel)


def test_what_others_learn_while_he_changes_it_is_forgotten(
    real: tuple[Kernel, Vfs, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, vfs, path = real
    mkdir = os.mkdir

    def looked_at_before(*args: Any, **named: Any) -> None:
        taken(vfs.gate, lambda: vfs.gate.run(vfs.lookup, ROOT, b"new", ME))
        mkdir(*args, **named)

    monkeypatch.setattr(os, "mkdir", looked_at_before)
    assert kernel.asked(Opcode.MKDIR, wire.MKDIR_IN.pack(0o755, 0) + b"new\0").error == 0
    assert (path / "new").is_dir()
    assert vfs.memory.name(vfs.nodes.root, b"new") is None
