"""Open files of tests and of processes: for the time of a block, held by the kernel alone, or waited for."""

import ctypes
import fcntl
import os
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def opened(path: Path | bytes, flags: int = os.O_RDWR) -> Iterator[int]:
    """An fd, for the time of the `with`."""
    fd = os.open(path, flags)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def held(*paths: Path) -> Iterator[None]:
    """The kernel forgets none of these meanwhile, though memory is short, or somebody drops its caches.

    Each is looked up, and not opened.
    """
    with ExitStack() as stack:
        for path in paths:
            stack.enter_context(opened(path, os.O_PATH | os.O_NOFOLLOW))
        yield


def read_entries(fd: int, size: int) -> list[tuple[bytes, int]]:
    """One buffer of getdents64: names, the dots among them, and the offset after each; nothing at the end."""
    buffer = ctypes.create_string_buffer(size)
    n = _libc.getdents64(fd, buffer, ctypes.c_size_t(size))
    assert n >= 0, os.strerror(ctypes.get_errno())
    found, at = [], 0
    while at < n:
        _ino, offset, length, _kind = struct.unpack_from("=QqHB", buffer, at)
        found.append((buffer.raw[at + 19 : buffer.raw.index(b"\0", at + 19)], offset))
        at += length
    return found


def may_be_written(program: Path) -> bool:
    """Whether nobody runs it any more: who looks at a process that ends, as others do here, keeps it for a moment."""
    return errno_of(lambda: os.close(os.open(program, os.O_WRONLY))) == 0


def waits_in_the_kernel(pid: int) -> bool:
    """Whether a process waits for the answer to a request, or for somebody who asks the same."""
    found = Path(f"/proc/{pid}/wchan").read_text() + Path(f"/proc/{pid}/stack").read_text()
    return any(word in found for word in ("fuse", "request_wait", "d_alloc_parallel", "d_wait_lookup"))


def errno_of(act: Callable[[], object]) -> int:
    """What something fails with; 0 if it does not."""
    try:
        act()
    except OSError as error:
        return error.errno or -1
    return 0


def is_broken_into(st: os.stat_result) -> bool:
    """Whether a process waits for the end of a lease on that file: there may be other leases on the machine."""
    file = f" {os.major(st.st_dev):02x}:{os.minor(st.st_dev):02x}:{st.st_ino} "
    return any(" BREAKING " in line and file in line for line in Path("/proc/locks").read_text().splitlines())


@contextmanager
def write_lease(path: Path) -> Iterator[Callable[[], object]]:
    """A process has a write lease on a file, which it keeps until it is told to give it up, or until the kernel does.

    Yields  what tells it
    """
    (ready, tells_ready), (end, tells_end) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(tells_end)
            signal.signal(signal.SIGIO, signal.SIG_IGN)
            fd = os.open(path, os.O_RDWR)
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            os.write(tells_ready, b".")
            os.read(end, 1)
        finally:
            os._exit(0)
    for fd in (tells_ready, end):
        os.close(fd)
    try:
        assert os.read(ready, 1) == b"."
        yield partial(os.write, tells_end, b".")
    finally:
        os.close(tells_end)
        os.close(ready)
        os.waitpid(pid, 0)
