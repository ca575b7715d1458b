"""Open files of tests and of processes: for the time of a block, held by the kernel alone, or waited for."""

import ctypes
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
