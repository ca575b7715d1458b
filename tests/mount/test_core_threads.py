"""A thread of the native core that is in a call keeps nobody from the tables; and none believes what is old."""

import contextlib
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from fusefs.core import fuse_protocol as wire
from fusefs.core.fuse_protocol import Opcode
from fusefs.mount.tree.vfs import Vfs
from tests.support.core_requests import CoreClient, core_threads
from tests.support.fake_dev_fuse import FakeKernel, FuseReply
from tests.support.fsfreeze import frozen
from tests.support.real_filesystems import loop_volume

pytestmark = [pytest.mark.needs("root", "loop"), pytest.mark.takes_engine]

LIMIT_S, MOMENT_S, GLANCE_S = 20, 0.2, 0.005
FILE, NEW = b"file\0", b"new\0"
CREATE = Opcode.CREATE, wire.CREATE_IN.pack(os.O_WRONLY, 0o100644, 0), NEW
FIND = Opcode.LOOKUP, b"", FILE


class CoreThread:
    """A thread of a core's, and what it is asked."""

    def __init__(self, new: Callable[[], CoreClient], stack: ExitStack) -> None:
        self._executor = stack.enter_context(ThreadPoolExecutor(1))
        self._asked = self._executor.submit(new).result(LIMIT_S)
        self._number = self._executor.submit(threading.get_native_id).result(LIMIT_S)

    def asks(self, *request: Any) -> Future[FuseReply | None]:
        """Opcode, own part, names, nodeid."""
        return self._executor.submit(self._asked.request, *request)

    def asked(self, *request: Any) -> FuseReply | None:
        return self.asks(*request).result(LIMIT_S)

    def is_stuck(self) -> bool:
        """Whether it waits in the kernel, and can't be woken."""
        return " D " in Path(f"/proc/self/task/{self._number}/stat").read_text()


class Scene:
    """Two threads of a core, on a filesystem that can be frozen: then changes wait, and looks don't."""

    def __init__(
        self, new: Callable[[], CoreClient], kernel: FakeKernel, vfs: Vfs, path: Path, stack: ExitStack
    ) -> None:
        self.one, self.other = CoreThread(new, stack), CoreThread(new, stack)
        self.kernel, self.vfs, self.path = kernel, vfs, path
        self._stack = stack

    def waits(self, *request: Any) -> tuple[Future[FuseReply | None], Callable[[], None]]:
        """What one thread is asked, and waits in; and what lets it go on."""
        go_on = self._stack.enter_context(frozen(self.path))
        asked, end_s = self.one.asks(*request), time.monotonic() + LIMIT_S
        while not self.one.is_stuck():
            assert time.monotonic() < end_s
            time.sleep(GLANCE_S)
        return asked, go_on


@pytest.fixture
def scene() -> Iterator[Scene]:
    with (
        loop_volume("ext4") as volume,
        core_threads(volume) as (new, kernel, vfs, path),
        ExitStack() as threads,
    ):
        (path / "file").touch()
        assert not kernel.request(Opcode.LOOKUP, FILE).error  # Python finds out whether letter case matters
        yield Scene(new, kernel, vfs, path, threads)


def is_right(told: FuseReply | None) -> bool:
    """Whether it was answered, and by the core."""
    return told is not None and not told.error


def elsewhere(scene: Scene) -> int:
    """A directory with a file, which the tables have open."""
    made = scene.kernel.request(Opcode.MKDIR, wire.MKDIR_IN.pack(0o755, 0) + b"elsewhere\0")
    (scene.path / "elsewhere" / "file").touch()
    nodeid = int.from_bytes(made.body[:8], "little")
    assert not scene.kernel.request(Opcode.LOOKUP, FILE, nodeid).error
    return nodeid


def test_who_is_in_a_call_keeps_no_other_of_the_core_from_the_tables(scene: Scene) -> None:
    directory = elsewhere(scene)
    waits, go_on = scene.waits(*CREATE)
    assert is_right(scene.other.asked(*FIND, directory))
    assert not waits.done()
    go_on()
    assert is_right(waits.result(LIMIT_S))


def test_a_thread_that_is_in_a_call_keeps_no_thread_of_pythons_from_the_tables(scene: Scene) -> None:
    waits, go_on = scene.waits(*CREATE)
    has_begun = threading.Event()

    def have_tables() -> None:
        with scene.vfs.lock:
            has_begun.set()

    threading.Thread(target=have_tables, daemon=True).start()
    assert has_begun.wait(LIMIT_S)
    go_on()
    assert is_right(waits.result(LIMIT_S))


def test_a_request_waits_for_a_thread_of_pythons_that_has_the_tables(scene: Scene) -> None:
    with scene.vfs.lock:
        waits = scene.other.asks(*FIND)
        time.sleep(MOMENT_S)
        assert not waits.done()
    assert is_right(waits.result(LIMIT_S))


def test_a_name_is_not_believed_while_another_changes_one_in_that_directory(scene: Scene) -> None:
    def lifetime_s(directory: int = 1) -> int:
        reply = scene.other.asked(*FIND, directory)
        assert reply is not None
        return int.from_bytes(reply.body[16:24], "little")

    directory = elsewhere(scene)
    waits, go_on = scene.waits(*CREATE)
    assert not lifetime_s()
    assert lifetime_s(directory)
    go_on()
    assert is_right(waits.result(LIMIT_S))
    assert lifetime_s()


def test_what_a_directory_is_is_not_believed_while_another_changes_it(scene: Scene) -> None:
    def lifetime_s() -> int:
        reply = scene.other.asked(Opcode.GETATTR, bytes(16))
        assert reply is not None
        return int.from_bytes(reply.body[:8], "little")

    waits, go_on = scene.waits(*CREATE)
    assert not lifetime_s()
    go_on()
    assert is_right(waits.result(LIMIT_S))
    assert lifetime_s()


def test_an_fd_that_another_request_uses_is_closed_after_that(scene: Scene) -> None:
    made = scene.one.asked(*CREATE)
    assert made is not None
    nodeid, handle = (int.from_bytes(made.body[at : at + 8], "little") for at in (0, 128))
    mode = wire.SETATTR_IN.pack(wire.FATTR_MODE, 0, 0, 0, 0, 0, 0, 0o600, 0, 0)
    waits, go_on = scene.waits(Opcode.SETATTR, mode, b"", nodeid)
    assert is_right(scene.other.asked(Opcode.RELEASE, struct.pack("=Q16x", handle), b"", nodeid))
    os.fstat(handle)
    go_on()
    assert is_right(waits.result(LIMIT_S))
    assert is_right(scene.one.asked(*FIND))
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(handle)


def test_what_the_core_removes_is_held_open_no_longer(scene: Scene) -> None:
    elsewhere(scene)
    (scene.path / "elsewhere/file").unlink()
    held = {fd for fd in os.listdir("/proc/self/fd") if is_at(fd, scene.path / "elsewhere")}
    assert held, "the tables have it open"
    assert is_right(scene.one.asked(Opcode.RMDIR, b"", b"elsewhere\0"))
    assert not (scene.path / "elsewhere").exists()
    assert not any(is_at(fd, f"{scene.path / 'elsewhere'} (deleted)") for fd in held)


def is_at(fd: str, path: Path | str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.readlink(f"/proc/self/fd/{fd}") == str(path)
    return False
