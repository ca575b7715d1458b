"""The tables are a thread's between its calls, and free during one; nobody believes what is old by then."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from fusefs.core import fuse_protocol as wire
from fusefs.core.fuse_protocol import Opcode
from fusefs.core.metadata_cache import ROOT
from fusefs.mount.tables.tables_lock import TablesLock
from tests.support.fake_dev_fuse import a_real
from tests.support.vfs_without_mount import Names, Somebody, vfs_at

LIMIT_S, MOMENT_S = 20, 0.2
ME = Somebody(0, 0, os.getpid(), 0o22)


@pytest.fixture
def lock() -> TablesLock:
    return TablesLock()


def in_thread(act: Callable[[], object]) -> None:
    """Do something, and wait for it."""
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def is_free(lock: TablesLock) -> bool:
    """Whether another thread can have the tables; if not, it does later."""
    thread = threading.Thread(target=lambda: lock.run(lambda: None), daemon=True)
    thread.start()
    thread.join(MOMENT_S)
    return not thread.is_alive()


def test_others_have_the_tables_during_a_call_and_not_between_two(lock: TablesLock) -> None:
    seen: list[bool] = []
    with lock:
        lock.call(in_thread, lambda: lock.run(lambda: seen.append(lock.mutex.is_held)))
        assert (seen, lock.mutex.is_held, is_free(lock)) == ([True], True, False)
    assert (lock.mutex.is_held, is_free(lock)) == (False, True)


def test_the_tables_are_a_threads_again_after_a_call_that_failed(lock: TablesLock) -> None:
    def fail() -> None:
        raise FileNotFoundError

    with lock:
        with pytest.raises(FileNotFoundError):
            lock.call(fail)
        assert lock.mutex.is_held
    assert is_free(lock)


def test_a_call_outside_of_an_operation_takes_no_tables(lock: TablesLock) -> None:
    assert lock.call(lambda: lock.mutex.is_held) is False
    assert is_free(lock)


def test_an_fd_stays_open_to_the_end_of_the_operation_that_uses_it(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    with vfs_at(tmp_path) as vfs:
        node = vfs.nodes.get(Names(vfs).lookup(ROOT, b"sub", ME).nodeid)
        assert node is not None
        with vfs.lock:
            fd = vfs.fd_of(node)
            vfs.nodes.drop_directory_fd(node)
            assert vfs.nodes.directory_fd(node) is None
            os.fstat(fd)
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(fd)


def test_what_others_learn_during_a_change_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    with a_real() as (kernel, vfs, path):
        core = vfs.core

        class LookedUpBefore:
            def do(self, request: bytes, held: int = -1) -> bytes:
                monkeypatch.undo()
                vfs.lock.is_slow = True
                in_thread(lambda: vfs.lock.run(Names(vfs).lookup, ROOT, b"new", ME))
                vfs.lock.is_slow = False
                return core.do(request, held)

        monkeypatch.setattr(vfs, "core", LookedUpBefore())
        assert kernel.asked(Opcode.MKDIR, wire.MKDIR_IN.pack(0o755, 0) + b"new\0").error == 0
        assert (path / "new").is_dir()
        assert vfs.cache.name(vfs.nodes.root, b"new") is None
