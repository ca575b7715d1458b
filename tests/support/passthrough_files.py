"""Files that are passed through, as tests use them: what shows that they are, and that nothing is left of them."""

import mmap
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fusefs.core.uring_choice import FastPath
from fusefs.mount.places.find_mounts import mounts_of, read_counters
from tests.support.background_processes import workers
from tests.support.foreground_mount import Mounted, until
from tests.support.real_filesystems import tmpfs_volume
from tests.support.store_verbs import init

LIMIT_S = 100.0
SIZE = 4 << 20
CONTENT = b"passed through, " * (SIZE // 16)
NEARLY = 256 << 10
"""What a filesystem may need for itself."""


@contextmanager
def stored_volume() -> Iterator[Path]:
    """A directory with a store, in a filesystem of its own."""
    with tmpfs_volume("256m") as volume:
        path = volume / "source"
        path.mkdir()
        init(path)
        yield path


def put(path: Path) -> Path:
    """Make a file with all of the content."""
    path.write_bytes(CONTENT)
    return path


def free_bytes(path: Path) -> int:
    st = os.statvfs(path)
    return st.f_bavail * st.f_frsize


@contextmanager
def space_comes_back(backing: Path) -> Iterator[None]:
    """What the body takes of a filesystem, it gives back; perhaps a moment later."""
    before = free_bytes(backing)
    yield
    assert until(lambda: free_bytes(backing) > before - NEARLY)


def why_off(mounted: Mounted) -> str | None:
    """Why nothing passes the daemon of a mount; None: it does."""
    states = read_counters(mounts_of(os.fsencode(mounted.path))[0]).fast_paths
    (state,) = (state for state in states if state.name == FastPath.PASSTHROUGH.value)
    return None if state.is_on else state.why


def n_messages(mounted: Mounted) -> int:
    """Reads and writes that came to the daemon."""
    return mounted.n_requests_for("read", "write")


def all_closed(mounted: Mounted) -> bool:
    """Whether the daemon hears of the close of every file, though late: what was read ahead keeps a file for a moment.

    Until then the next open is of the same mode.
    """

    def is_so() -> bool:
        operations = mounted.stats().operations
        opens = (operations["open"], operations["create"])
        return sum(one.n() - one.n_failed for one in opens) == operations["release"].n()

    return until(is_so)


@contextmanager
def without_requests(mounted: Mounted) -> Iterator[None]:
    """Assert that the daemon gets no read or write request in the block: the kernel reads and writes itself."""
    before = n_messages(mounted)
    yield
    assert n_messages(mounted) == before


@contextmanager
def processes(n: int, work: Callable[[], None]) -> Iterator[list[int]]:
    """So many, each of which has done its work, and is there until it is killed at the end."""
    read_fd, ready_fd = os.pipe()

    def work_and_stay() -> None:
        work()
        os.write(ready_fd, b".")
        signal.pause()

    try:
        with workers([work_and_stay] * n) as pids:
            n_done = 0
            while n_done < n:
                n_done += len(os.read(read_fd, n))
            yield pids
    finally:
        os.close(read_fd)
        os.close(ready_fd)


def works_on(fd: int) -> None:
    """A process that has it open reads, writes, maps and flushes."""
    assert os.pread(fd, SIZE, 0) == CONTENT
    assert os.pwrite(fd, b"PASSED", 0) == 6
    with mmap.mmap(fd, SIZE) as mapped:
        assert mapped[:7] == b"PASSED "
        mapped[:6] = b"mapped"
        mapped.flush()
    os.fsync(fd)
    assert os.pread(fd, 7, 0) == b"mapped "
    os.ftruncate(fd, SIZE // 2)
    assert os.fstat(fd).st_size == SIZE // 2
    os.ftruncate(fd, 0)
    os.pwrite(fd, CONTENT, 0)
