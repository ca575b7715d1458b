"""The daemon without a mount: plain mode's handlers, INIT, the lock of the tables, and what is counted where."""

import errno
import inspect
import logging
import os
import socket
import struct
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyfuse3
import pytest
import trio
import trio.testing

from fusefs.core import fuse_protocol as wire
from fusefs.core.errors import KernelRefused
from fusefs.core.fuse_protocol import Opcode
from fusefs.core.metadata_cache import ROOT
from fusefs.core.mount_counters import (
    BOUNDS_NS,
    CachedKind,
    CacheHits,
    CounterLayout,
    CounterTable,
    Gauges,
    decode_counters,
    encode_counters,
)
from fusefs.linux.fd import Fd
from fusefs.linux.syscalls import name_to_handle_at
from fusefs.mount.life.init import InitFlag, read_init, reply_to_init, why_too_old
from fusefs.mount.places.counters import CELL_OF, Counters
from fusefs.mount.plain.handlers import PlainHandlers
from fusefs.mount.tables.tables_lock import TablesLock
from fusefs.mount.tree.vfs import Vfs
from tests.support.fake_dev_fuse import Broken, Files, Names, Somebody, a_real, options_of, vfs_at
from tests.support.foreground_mount import fresh_mount
from tests.support.open_files import opened

NOT_HANDLED = {"poll"}
"""Answered by pyfuse3 with ENOSYS: the kernel then takes every file as ready, as on other filesystems."""
HANDLERS = sorted(
    name for name, method in inspect.getmembers(pyfuse3.Operations) if inspect.iscoroutinefunction(method)
)
FMODE_EXEC = 0x20
"""include/linux/fs.h, among the flags of OPEN: the file is run."""
CALLER = Somebody(uid=0, gid=0, pid=1, umask=0)
LIMIT_S = 60.0


def answer_of(name: str, error: Exception) -> int:
    """The errno that a handler answers with when all below it raises that."""
    broken: Any = Broken(error)
    handlers = PlainHandlers(broken, 2, has_acls=True)
    handler: Callable[..., Any] = getattr(handlers, name)
    values: dict[str, Any] = dict.fromkeys(("name", "name_old", "name_new", "new_name", "target", "value"), b"a")
    values |= {"ctx": CALLER, "inode_list": [(2, 1)], "attr": pyfuse3.EntryAttributes()}
    values |= {"fields": pyfuse3.SetattrFields(), "token": pyfuse3.ReaddirToken(), "buf": b"", "datasync": False}
    parameters = inspect.signature(handler).parameters
    with pytest.raises(pyfuse3.FUSEError) as answer:
        trio.run(handler, *[values.get(parameter, 2) for parameter in parameters])
    number: int = answer.value.errno
    return number


def test_every_handler_is_ours_but_those_that_nobody_needs() -> None:
    ours = {name for name in HANDLERS if getattr(PlainHandlers, name) is not getattr(pyfuse3.Operations, name)}
    assert set(HANDLERS) - ours == NOT_HANDLED


@pytest.mark.parametrize("name", sorted(set(HANDLERS) - NOT_HANDLED))
def test_an_error_of_the_kernel_goes_to_the_client(name: str) -> None:
    assert answer_of(name, OSError(errno.EDQUOT, "refused")) == errno.EDQUOT


@pytest.mark.allows_warnings
@pytest.mark.parametrize("error", [KeyError("a bug"), OSError("no errno")], ids=["bug", "no errno"])
@pytest.mark.parametrize("name", sorted(set(HANDLERS) - NOT_HANDLED))
def test_a_bug_is_eio_and_in_the_log(name: str, error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    assert answer_of(name, error) == errno.EIO
    has_logged = any(record.levelno == logging.ERROR for record in caplog.records)
    assert has_logged is not isinstance(error, OSError)


@pytest.mark.allows_warnings
def test_no_thread_to_be_had_is_an_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(trio.to_thread, "run_sync", refuse)
        assert answer_of("statfs", OSError()) == errno.EIO


@contextmanager
def program(path: Path) -> Iterator[tuple[Vfs, int]]:
    """A tree with an executable file, and its nodeid."""
    (path / "program").write_bytes(b"content")
    (path / "program").chmod(0o755)
    with vfs_at(path) as vfs:
        yield vfs, Names(vfs).lookup(ROOT, b"program", CALLER).nodeid


@pytest.mark.needs("root")
def test_what_has_run_may_be_written_at_once_whatever_its_release_waits_for(tmp_path: Path) -> None:
    """A release is sent before a wait for the program's end returns, and thus before the file is opened next."""
    with program(tmp_path) as (vfs, nodeid):
        run = Files(vfs).open(nodeid, os.O_RDONLY | FMODE_EXEC, CALLER)
        with pytest.raises(OSError, match=os.strerror(errno.ETXTBSY)):
            Files(vfs).open(nodeid, os.O_WRONLY | os.O_TRUNC, CALLER)

        async def release_and_write() -> None:
            handlers = PlainHandlers(vfs, 1, has_acls=True)
            go_on = threading.Event()
            async with trio.open_nursery() as nursery:
                busy = partial(trio.to_thread.run_sync, go_on.wait, limiter=handlers.release_limiter)
                nursery.start_soon(busy)
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(handlers.release, pyfuse3.FileHandleT(run.fh))
                await trio.testing.wait_all_tasks_blocked()
                written = Files(vfs).open(nodeid, os.O_WRONLY | os.O_TRUNC, CALLER)
                go_on.set()
            Files(vfs).release(written.fh)

        trio.run(release_and_write)
        assert not (tmp_path / "program").read_bytes()
        assert not vfs.nodes.n_handles


@pytest.mark.needs("root", "fuse")
def test_a_file_handle_never_means_a_later_file() -> None:
    """The kernel makes it of nodeid and generation."""
    with fresh_mount("coherence=exclusive", "engine=plain", limit_s=LIMIT_S) as mounted:
        path = mounted.path / "file"
        handles = set()
        for _ in range(20):
            path.write_bytes(b"content")
            with opened(path, os.O_RDONLY) as fd:
                handles.add(name_to_handle_at(fd))
            path.unlink()
        assert len(handles) == 20


@pytest.mark.needs("root", "fuse")
def test_large_listings_come_whole_while_others_change_the_directory() -> None:
    with fresh_mount("coherence=exclusive", "engine=plain", limit_s=LIMIT_S) as mounted:
        names = {f"file-{number:04}" + "x" * (number % 200) for number in range(1000)}
        for name in names:
            (mounted.backing / name).touch()

        def change(number: int) -> None:
            for _ in range(50):
                (mounted.path / f"new-{number}").touch()
                (mounted.path / f"new-{number}").unlink()

        with ThreadPoolExecutor(2) as pool:
            changes = [pool.submit(change, number) for number in range(2)]
            while not all(one.done() for one in changes):
                seen = [name for name in os.listdir(mounted.path) if not name.startswith("new-")]
                assert sorted(seen) == sorted(names)
            for one in changes:
                one.result()


OFFERED = 0x7FD_73FFFFFB
"""Linux 6.18's flags."""
ALWAYS = 0x40_5044B069
ACLS = 1 << 20
UNIQUE = 2


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The kernel's and the daemon's of what stands for /dev/fuse."""
    kernel, daemon = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with kernel, daemon:
        yield kernel, daemon


def request(flags: int, *, version: tuple[int, int] = (7, 45), opcode: int = 26, n_bytes: int = 64) -> bytes:
    body = struct.pack("=IIIIII40x", *version, 131072, flags & 0xFFFFFFFF, flags >> 32, 0)[:n_bytes]
    return struct.pack("=IIQ24x", 40 + len(body), opcode, UNIQUE) + body


def answered(ends: tuple[socket.socket, socket.socket], wanted: InitFlag, *, has_acls: bool) -> tuple[int, ...]:
    """The fields of the reply: flags, the number of background requests, bytes and pages of a write, and the depth."""
    kernel, daemon = ends
    kernel.send(request(OFFERED))
    reply_to_init(daemon.fileno(), read_init(daemon.fileno()), wanted, has_acls=has_acls, stack_depth=2)
    reply = kernel.recv(1000)
    assert struct.unpack_from("=IiQ", reply) == (len(reply), 0, UNIQUE)
    major, minor, ahead, flags, background, congested, write, gran, pages, _, more, depth = struct.unpack(
        "=IIIIHHIIHHII24x", reply[16:]
    )
    assert (major, minor, ahead, gran) == (7, 33, 131072, 1)
    assert congested < background
    return flags | more << 32, background, write, pages, depth


@pytest.mark.parametrize("flag", [InitFlag(0), *InitFlag])
def test_what_a_mount_has_is_asked_for_alone(ends: tuple[socket.socket, socket.socket], flag: InitFlag) -> None:
    depth = 2 if flag is InitFlag.PASSTHROUGH else 0
    assert answered(ends, flag, has_acls=False) == (ALWAYS | flag, 256, 1 << 20, 256, depth)


def test_permissions_are_checked_by_acls_only_where_the_kernel_checks_them(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    assert answered(ends, InitFlag(0), has_acls=True)[0] == ALWAYS | ACLS


def test_what_a_kernel_does_not_offer_is_found(ends: tuple[socket.socket, socket.socket]) -> None:
    kernel, daemon = ends
    lacking = InitFlag.PASSTHROUGH | InitFlag.OVER_IO_URING
    kernel.send(request(OFFERED & ~lacking))
    init = read_init(daemon.fileno())
    assert [flag for flag in InitFlag if not init.offers(flag)] == list(lacking)


def test_an_older_kernel_offers_what_it_knows(ends: tuple[socket.socket, socket.socket]) -> None:
    """Before Linux 5.17 the request ends after 32 flags."""
    kernel, daemon = ends
    kernel.send(request(InitFlag.CACHE_SYMLINKS, version=(7, 33), n_bytes=16))
    init = read_init(daemon.fileno())
    assert [flag for flag in InitFlag if init.offers(flag)] == [InitFlag.CACHE_SYMLINKS]


@pytest.mark.parametrize(("version", "opcode"), [((7, 32), 26), ((6, 45), 26), ((7, 45), 1)])
def test_what_is_too_old_or_no_init_is_refused(
    ends: tuple[socket.socket, socket.socket], version: tuple[int, int], opcode: int
) -> None:
    kernel, daemon = ends
    kernel.send(request(OFFERED, version=version, opcode=opcode))
    with pytest.raises(KernelRefused, match=r"FUSE 7\.33 is needed"):
        read_init(daemon.fileno())


@pytest.mark.parametrize(("release", "is_old"), [("4.18.0-553.el8", True), ("5.10.0", True), ("5.11.0", False)])
def test_a_kernel_that_is_too_old_is_known_before_the_mount(release: str, *, is_old: bool) -> None:
    assert (why_too_old(release) is not None) is is_old


def test_this_kernel_will_do() -> None:
    assert why_too_old(os.uname().release) is None


LOCK_LIMIT_S, MOMENT_S = 20, 0.2
ME = Somebody(0, 0, os.getpid(), 0o22)


@pytest.fixture
def lock() -> TablesLock:
    return TablesLock()


def in_thread(act: Callable[[], object]) -> None:
    """Do something, and wait for it."""
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(LOCK_LIMIT_S)
    assert not thread.is_alive()


def is_free(lock: TablesLock) -> bool:
    """Whether another thread can have the tables; if not, it does later."""
    thread = threading.Thread(target=lambda: lock.run_operation(lambda: None), daemon=True)
    thread.start()
    thread.join(MOMENT_S)
    return not thread.is_alive()


def test_others_have_the_tables_during_a_call_and_not_between_two(lock: TablesLock) -> None:
    seen: list[bool] = []
    with lock:
        lock.call(in_thread, lambda: lock.run_operation(lambda: seen.append(lock.mutex.is_held)))
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
            fd = vfs.directory_fd(node)
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
                in_thread(lambda: vfs.lock.run_operation(Names(vfs).lookup, ROOT, b"new", ME))
                vfs.lock.is_slow = False
                return core.do(request, held)

        monkeypatch.setattr(vfs, "core", LookedUpBefore())
        assert kernel.request(Opcode.MKDIR, wire.MKDIR_IN.pack(0o755, 0) + b"new\0").error == 0
        assert (path / "new").is_dir()
        assert vfs.cache.find_name(vfs.nodes.root, b"new") is None


@pytest.fixture
def counted() -> tuple[Counters, bytearray]:
    """Numbers, and the file that they are."""
    table = CounterTable(version="", pid=0, started_ns=0)
    data = bytearray(encode_counters(table))
    return Counters(memoryview(data)[-8 * CounterLayout(table).n_cells :].cast("Q")), data


def test_what_is_remembered_is_counted_by_sort(counted: tuple[Counters, bytearray]) -> None:
    stats, data = counted
    for i, sort in enumerate(CachedKind):
        for _ in range(i):
            stats.count_hit(sort)
        stats.count_miss(sort)
    assert decode_counters(data).remembered == {sort.label(): CacheHits(i, 1) for i, sort in enumerate(CachedKind)}


@pytest.mark.parametrize(
    "took_ns", [1, BOUNDS_NS[0] - 1, BOUNDS_NS[0], BOUNDS_NS[0] + 1, BOUNDS_NS[-1] - 1, BOUNDS_NS[-1], 10**12]
)
def test_an_answer_is_counted_in_the_bucket_of_its_time(
    counted: tuple[Counters, bytearray], took_ns: int, tmp_path: Path
) -> None:
    stats, data = counted
    with Fd(os.open(tmp_path, os.O_PATH)) as root, closing(Vfs(root, TablesLock(), stats, options_of(), 1000)) as vfs:
        vfs.core.count(CELL_OF["read"], took_ns, True)
    told = decode_counters(data).operations
    bucket = bisect_right(BOUNDS_NS, took_ns)
    assert told["read"].counts == tuple(int(i == bucket) for i in range(len(BOUNDS_NS) + 1))
    assert (told["read"].n_failed, told["read"].total_ns, told["read"].max_ns) == (1, took_ns, took_ns)
    assert sum(one.n() for one in told.values()) == 1


def test_an_idle_daemon_is_not_woken(counted: tuple[Counters, bytearray]) -> None:
    """Gauges are looked at after something happened, once for all that happened, and then no more."""
    stats, data = counted
    n_looks = 0

    def look() -> Gauges:
        nonlocal n_looks
        n_looks += 1
        return Gauges(n_nodes=n_looks)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stats.update_gauges, look)
            await trio.testing.wait_all_tasks_blocked()
            assert n_looks == 1
            for _ in range(1000):
                stats.note_change()
            await trio.sleep(3600)
            assert n_looks == 2
            stats.note_change()
            await trio.sleep(3600)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert decode_counters(data).gauges["n_nodes"] == n_looks == 3


def test_gauges_are_new_before_it_is_told_that_they_are(counted: tuple[Counters, bytearray]) -> None:
    stats, data = counted
    told: list[int] = []

    def look() -> Gauges:
        told.append(decode_counters(data).updated_ns)
        return Gauges()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stats.update_gauges, look)
            await trio.testing.wait_all_tasks_blocked()
            stats.note_change()
            await trio.sleep(3600)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert told == [0, 0]
    assert decode_counters(data).updated_ns > 0


def test_what_changes_while_gauges_are_looked_at_is_seen_by_the_next_look(counted: tuple[Counters, bytearray]) -> None:
    stats, data = counted
    n_looks = 0

    def look() -> Gauges:
        nonlocal n_looks
        n_looks += 1
        if n_looks == 1:
            stats.note_change()
        return Gauges(n_nodes=n_looks)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stats.update_gauges, look)
            await trio.sleep(3600)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert decode_counters(data).gauges["n_nodes"] == n_looks == 2


def test_gauges_follow_the_end_of_threads_that_nobody_tells(counted: tuple[Counters, bytearray]) -> None:
    stats, data = counted
    at_work = [2, 2, 1, 0]

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stats.update_gauges, lambda: Gauges(n_threads=at_work.pop(0)))
            await trio.sleep(3600)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert at_work == []
    assert decode_counters(data).gauges["n_threads"] == 0
