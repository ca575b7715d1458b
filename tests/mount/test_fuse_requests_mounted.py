"""Two mounts, by the engine and in plain mode: clients can't tell which is which."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fusefs.linux.syscalls import RENAME_EXCHANGE, RENAME_NOREPLACE
from tests.support.busy_clients import ask_for_missing_names
from tests.support.foreground_mount import Mounted, trashd_mount
from tests.support.oracle_subjects import Native, outcome
from tests.support.real_filesystems import volume_of

pytestmark = [pytest.mark.needs("root", "fuse", "loop"), pytest.mark.takes_engine]

MIB = 1 << 20
SHARED_LIMIT_S = 1000.0
N_FORGOTTEN = 3000
N_EACH = 120  # files of a client, while the filesystem changes some hundred times
_NUMBERS = count()
_FS_IOC_GETFLAGS, _FIONREAD = 0x80086601, 0x541B

# A daemon whose filesystem becomes slow and quick again all the time. $1 and on: as for trashd.
MOODY = """
import sys, threading, time
from fusefs.mount.tables.tables_lock import TablesLock
begin = TablesLock.__init__
def begin_moody(self, *args, **named):
    begin(self, *args, **named)
    self._latency = None
    def change():
        while True:
            time.sleep(0.002)
            self.is_slow = not self.is_slow
    threading.Thread(target=change, daemon=True).start()
TablesLock.__init__ = begin_moody
from fusefs.cli.main import main
sys.exit(main())
"""

NAMES = st.sampled_from([b"a", b"b", b"c", b"\xff\n", b"x" * 255, b"x" * 256])
PATHS = st.lists(NAMES, min_size=1, max_size=2).map(b"/".join)
MODES = st.sampled_from([0o600, 0o644, 0o755, 0o1777, 0o4755])
XATTRS = st.sampled_from(["user.a", "user.b", "trusted.a", "system.none", "security.none"])
OPEN_FLAGS = st.sampled_from(
    [os.O_RDONLY, os.O_RDWR | os.O_CREAT, os.O_WRONLY | os.O_CREAT | os.O_EXCL, os.O_RDWR | os.O_TRUNC, os.O_DIRECTORY]
)
Step = Callable[[Native], object]


def _written(path: bytes, data: bytes, offset: int) -> Step:
    def act(s: Native) -> object:
        handle = s.open(path, os.O_RDWR | os.O_CREAT, 0o640)
        try:
            s.pwrite(handle, data, offset)
            s.fsync(handle)
            return s.fstat(handle), s.pread(handle, 100, 0)
        finally:
            s.close(handle)

    return act


STEPS: st.SearchStrategy[Step] = st.one_of(
    st.builds(_written, PATHS, st.binary(max_size=40), st.integers(0, 9000)),
    st.builds(lambda path, flags: lambda s: s.opens(path, flags, 0o640), PATHS, OPEN_FLAGS),
    st.builds(lambda path, mode: lambda s: s.mkdir(path, mode), PATHS, MODES),
    st.builds(lambda path: lambda s: s.rmdir(path), PATHS),
    st.builds(lambda path: lambda s: s.unlink(path), PATHS),
    st.builds(
        lambda old, new, flags: lambda s: s.rename(old, new, flags),
        PATHS, PATHS, st.sampled_from([0, RENAME_NOREPLACE, RENAME_EXCHANGE]),
    ),
    st.builds(lambda old, new: lambda s: s.link(old, new), PATHS, PATHS),
    st.builds(lambda to, path: lambda s: (s.symlink(to, path), s.readlink(path)), PATHS, PATHS),
    st.builds(lambda path, mode: lambda s: s.chmod(path, mode), PATHS, MODES),
    st.builds(lambda path, ns: lambda s: (s.utime(path, ns, -ns), s.times(path)), PATHS, st.integers(0, 1 << 60)),
    st.builds(lambda path, size: lambda s: s.truncate(path, size), PATHS, st.integers(0, 9000)),
    st.builds(lambda path: lambda s: s.mknod(path, 0o20600, os.makedev(4000, 1 << 18)), PATHS),
    st.builds(lambda path: lambda s: sorted(s.listdir(path)), PATHS),
    st.builds(lambda path: lambda s: s.stat(path), PATHS),
    st.builds(lambda path, name: lambda s: s.getxattr(path, name), PATHS, XATTRS),
    st.builds(lambda path, name, value: lambda s: s.setxattr(path, name, value), PATHS, XATTRS, st.binary(max_size=99)),
    st.builds(lambda path: lambda s: sorted(s.listxattr(path)), PATHS),
)  # fmt: skip


@pytest.fixture(scope="module")
def mounts(volume: Path) -> Iterator[list[Mounted]]:
    """By the engine, and in plain mode; reads and writes come to both."""
    options, plain = ("coherence=exclusive", "passthrough=off"), "engine=plain"
    with (
        trashd_mount(volume / "with", options=options, limit_s=SHARED_LIMIT_S) as one,
        trashd_mount(volume / "plain", options=(*options, plain), limit_s=SHARED_LIMIT_S) as other,
    ):
        yield [one, other]


def fresh(mounts: list[Mounted]) -> list[Native]:
    """A new directory in each."""
    name = f"case{next(_NUMBERS)}"
    for mount in mounts:
        (mount.path / name).mkdir()
    return [Native(mount.path.name, mount.path / name) for mount in mounts]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(steps=st.lists(STEPS, max_size=25))
def test_both_answer_the_same(mounts: list[Mounted], steps: list[Step]) -> None:
    one, other = fresh(mounts)
    for step in steps:
        assert outcome(step, one) == outcome(step, other)
    assert outcome(one.tree) == outcome(other.tree)


def _locked(path: Path) -> object:
    with path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, 5)
        with path.open("r+b") as second:
            return outcome(fcntl.flock, second, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _copied(path: Path) -> object:
    with path.open("rb") as from_, path.with_name("copy").open("w+b") as to:
        n_bytes = os.copy_file_range(from_.fileno(), to.fileno(), 100_000)
        return n_bytes, os.pread(to.fileno(), 20, 0)


def _with_fd(act: Callable[[int], object]) -> Callable[[Path], object]:
    def on_file(path: Path) -> object:
        with path.open("r+b") as file:
            return act(file.fileno())

    return on_file


SELDOM: dict[str, Callable[[Path], object]] = {
    "setxattr": lambda path: os.setxattr(path, "user.long", bytes(2000)),
    "getxattr": lambda path: os.getxattr(path, "user.long"),
    "listxattr": lambda path: [name for name in os.listxattr(path) if name.startswith("user")],
    "removexattr": lambda path: os.removexattr(path, "user.long"),
    "symlink": lambda path: os.symlink(b"to " * 300, path.with_name("a link")),
    "readlink": lambda path: os.readlink(path.with_name("a link")),
    "link": lambda path: os.link(path, path.with_name("another")),
    "mknod": lambda path: os.mknod(path.with_name("fifo"), 0o10644),
    "fallocate": _with_fd(lambda fd: os.posix_fallocate(fd, 0, 50_000)),
    "a hole": _with_fd(lambda fd: os.lseek(fd, 0, os.SEEK_HOLE)),
    "data": _with_fd(lambda fd: os.lseek(fd, 5, os.SEEK_DATA)),
    "statvfs": lambda path: (os.statvfs(path).f_bsize, os.statvfs(path).f_namemax),
    "locks": _locked,
    "copy": _copied,
    "an ioctl": _with_fd(lambda fd: len(fcntl.ioctl(fd, _FS_IOC_GETFLAGS, bytes(8)))),
    "another": _with_fd(lambda fd: struct.unpack("=I", fcntl.ioctl(fd, _FIONREAD, bytes(4)))),
    "fsync": _with_fd(os.fsync),
    "fdatasync": _with_fd(os.fdatasync),
    "chmod": lambda path: os.chmod(path, 0o4711),
    "chown": lambda path: os.chown(path, 1000, 1000),
    "truncate": lambda path: os.truncate(path, 7),
    "utime": lambda path: os.utime(path, ns=(-1, -1_500_000_000)),
    "access": lambda path: os.access(path, os.X_OK),
}
"""Most of them are pyfuse3's to answer, or the kernel's own; and what it does without where only we answer."""


def test_what_is_seldom_asked_is_answered_the_same_between_what_is_common(mounts: list[Mounted]) -> None:
    seen = []
    for subject in fresh(mounts):
        path = Path(os.fsdecode(subject._at(b"file")))
        path.write_bytes(b"content" * 1000)
        answers = []
        for turn in range(3):
            for name, act in SELDOM.items():
                with suppress(FileNotFoundError):
                    os.stat(path.with_name(f"missing {turn} {name}"))
                answers.append((name, turn, outcome(act, path), repr(subject.stat(b"file"))))
        seen.append(answers)
    assert seen[0] == seen[1]


@pytest.mark.parametrize("size", [1, 4096, 128 * 1024, MIB - 1, MIB, MIB + 1, 5 * MIB])
def test_large_pieces_come_and_go_whole(mounts: list[Mounted], size: int) -> None:
    data = os.urandom(size)
    for subject in fresh(mounts):
        handle = subject.open(b"large", os.O_RDWR | os.O_CREAT, 0o600)
        assert subject.pwrite(handle, data, 3) == size
        os.posix_fadvise(handle.number, 0, 0, os.POSIX_FADV_DONTNEED)
        assert subject.pread(handle, size + 10, 0) == bytes(3) + data
        subject.close(handle)


def directory_of(mounted: Mounted) -> Path:
    """A new one in it."""
    path = mounted.path / f"case{next(_NUMBERS)}"
    path.mkdir()
    return path


def test_signals_that_interrupt_lose_nothing(mounts: list[Mounted]) -> None:
    """Names and files made durable, and others' requests between, while the caller has no rest."""
    path = directory_of(mounts[0])
    (path / "file").write_bytes(b"x")
    n_signals = 0

    def heard(_number: int, _frame: object) -> None:
        nonlocal n_signals
        n_signals += 1

    before = signal.signal(signal.SIGALRM, heard)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        for number in range(300):
            fd = os.open(path / f"new{number % 7}", os.O_CREAT | os.O_RDWR)
            os.write(fd, b"y" * 10_000)
            os.fsync(fd)
            os.close(fd)
            directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            os.fsync(directory)
            os.close(directory)
            os.setxattr(path / "file", "user.number", b"%d" % number)
            os.unlink(path / f"new{number % 7}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert n_signals
    assert os.listdir(path) == ["file"]
    assert os.getxattr(path / "file", "user.number") == b"299"


def test_whoever_takes_the_number_of_what_was_deleted_has_it_as_below(mounts: list[Mounted]) -> None:
    """The kernel has not let go of it yet; meanwhile another client asks on."""
    mount = mounts[0]
    path = directory_of(mount)
    with ThreadPoolExecutor(1) as pool:
        others = pool.submit(ask_for_missing_names, path, 3000)
        for number in range(500):
            make = Path.touch if number % 2 else Path.mkdir
            make(path / "a")
            below = mount.backing / path.relative_to(mount.path) / "a"
            assert (path / "a").stat().st_ino == below.stat().st_ino
            (path / "a").unlink() if number % 2 else (path / "a").rmdir()
        others.result()


def test_forgetting_many_stops_nobody_and_forgets_all(mounts: list[Mounted]) -> None:
    mount = mounts[0]
    path = directory_of(mount)
    with ThreadPoolExecutor(1) as pool:
        below = mount.backing / path.relative_to(mount.path)
        for number in range(N_FORGOTTEN):
            (below / str(number)).touch()
        for name in os.listdir(path):
            (path / name).stat()
        others = pool.submit(ask_for_missing_names, path, 2000)
        mount.forget_all()
        others.result()
        assert (path / "5").stat().st_size == 0
        mount.forget_all()


@pytest.mark.parametrize("fs_type", ["tmpfs", "overlay"], ids=["unopened", "opened"])
def test_traffic_while_the_filesystem_becomes_slow_and_quick_again_is_answered_once(fs_type: str) -> None:
    options = ("coherence=exclusive", "passthrough=off")
    command = (sys.executable, "-c", MOODY)
    with volume_of(fs_type) as volume, trashd_mount(volume / "source", options=options, command=command) as mounted:
        failures: list[str] = []

        def work(path: Path) -> None:
            path.mkdir()
            for number in range(N_EACH):
                one, other = path / f"a{number}", path / f"b{number}"
                one.write_bytes(b"%d" % number * 100)
                one.rename(other)
                if one.exists() or other.read_bytes() != b"%d" % number * 100:
                    failures.append(f"{other}: {other.read_bytes()[:9]!r}")
                os.setxattr(other, "user.a", b"%d" % number)
                if number % 3:
                    other.unlink()
                elif os.getxattr(other, "user.a") != b"%d" % number:
                    failures.append(f"{other}: attribute")
                if number % 20 == 0 and len(os.listdir(path)) != number // 3 + 1:
                    failures.append(f"{path}: {len(os.listdir(path))} at {number}")

        workers = [threading.Thread(target=work, args=(mounted.path / f"w{number}",)) for number in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert failures == []
        for number in range(3):
            assert len(os.listdir(mounted.path / f"w{number}")) == len(range(0, N_EACH, 3))
