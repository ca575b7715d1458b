"""What bench/mount.py times: each operation a tight loop of system calls, done by a worker process in the tree.

The worker's own time, Python's included, is in every subject's figure alike; native's shows how much it is at most.
Where a target is about native, calls are few and long, or the loop is C's: 0.1 µs of a call is Python's then.
Names are one component long and the directory is the worker's own, so that a path's walk is not measured.
"""

import ctypes
import gc
import mmap
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import NamedTuple, Self

from bench.support import PYTHON, make_files

Names = Sequence[bytes]

AGAIN = " again"
SCAN, NAMES, MISS = "scandir, lstat", "getdents", "missing name"

# Not zeros: memory that was never written to makes the kernel send 17 or more small WRITEs for one large one.
_BLOCK = b"x" * (4 << 10)
_MIB = b"x" * (1 << 20)
_LINE = b"x" * 127 + b"\n"
_LISTING_BYTES = 32 << 10  # as glibc's readdir asks for them
_LEAST_ENTRY_BYTES = 24
_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_ROOT = Path(__file__).parents[1]
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value


def _stat(names: Names) -> None:
    for name in names:
        os.stat(name, follow_symlinks=False)


def _list_long(names: Names) -> None:
    with os.scandir() as entries:
        n_entries = sum(1 for entry in entries if entry.stat(follow_symlinks=False))
    if n_entries != len(names):
        raise OSError(f"{n_entries} entries listed of {len(names)}")


def _list_names(names: Names) -> None:
    """What `ls` asks the kernel for, without what it makes of it."""
    buffer = ctypes.create_string_buffer(_LISTING_BYTES)
    fd = os.open(b".", os.O_RDONLY | os.O_DIRECTORY)
    n_bytes = 0
    while (n_got := _LIBC.getdents64(fd, buffer, _LISTING_BYTES)) > 0:
        n_bytes += n_got
    os.close(fd)
    if n_got or n_bytes < _LEAST_ENTRY_BYTES * len(names):
        raise OSError(ctypes.get_errno(), f"{n_bytes} bytes listed for {len(names)} entries")


def _miss(names: Names) -> None:
    for name in names:
        os.access(b"no-" + name, os.F_OK)


def _open_read_close(names: Names) -> None:
    for name in names:
        fd = os.open(name, os.O_RDONLY)
        if len(os.read(fd, len(_BLOCK))) != len(_BLOCK):
            raise OSError("a short read")
        os.close(fd)


def _append(fd: int, names: Names) -> None:
    # The loop is C's: a call takes 0.8 µs natively, and Python's own part would hide how much a mount adds to it.
    deque(map(os.write, repeat(fd, len(names)), repeat(_LINE)), maxlen=0)


def _write(fd: int, names: Names) -> None:
    for number in range(len(names)):
        os.pwrite(fd, _MIB, number << 20)


def _read(fd: int, names: Names) -> None:
    buffer = bytearray(len(_MIB))
    for number in range(len(names)):
        if os.preadv(fd, [buffer], number << 20) != len(_MIB):
            raise OSError("a short read")


def _map(fd: int, names: Names) -> None:
    """A byte of each page. Python's own mmap asks for the file's size first: of a mount, by a message."""
    size = len(names) << 20
    address = _LIBC.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), "mmap")
    pages = (ctypes.c_char * size).from_address(address)
    if len(pages[:: mmap.PAGESIZE]) != size // mmap.PAGESIZE:
        raise OSError("a short map")
    _LIBC.munmap(address, size)


class Held(NamedTuple):
    """What is done to a file that is open before, and closed after the time is taken."""

    file: str
    flags: int
    call: Callable[[int, Names], None]


class Operation(NamedTuple):
    """One thing done to as many names of a directory, or to a file as many times."""

    name: str
    directory: str
    call: Callable[[Names], None] | Held
    n: int
    unit: str = "ops"
    is_cold: bool = False  # nothing of the tree is in memory; the kernel knows the directory itself
    n_passes: int = 1  # the quickest counts: memory that is new to the machine, and its other work, delay the rest
    least_s: float = 0  # passes go on for so long: other work on the machine takes longer than a few of them

    def of(self, share: float) -> "Operation":
        """This operation, done less often."""
        return self._replace(n=max(1, round(self.n * share)), least_s=0)


# In this order, in one tree: `again` is right after the first time.
LISTING = (
    Operation(SCAN, "list", _list_long, 10_000, "entries", is_cold=True),
    Operation(SCAN + AGAIN, "list", _list_long, 10_000, "entries", n_passes=3),
    Operation(NAMES + AGAIN, "list", _list_names, 10_000, "entries", n_passes=5),
)
FILES = (
    Operation("open, read 4 KiB, close", "read", _open_read_close, 2000, n_passes=3),
    Operation(
        "append 128 bytes, held",
        "held",
        Held("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, _append),
        10_000,
        n_passes=3,
        least_s=0.5,
    ),
)
NEW_DATA = (
    Operation("write a new file", "new", Held("new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _write), 128, "MiB"),
    Operation("read, cold", "new", Held("new", os.O_RDONLY, _read), 128, "MiB", is_cold=True, n_passes=2),
)
# All subjects have the same file: where its pages lie in the machine's memory makes a quarter of these times.
DATA_DIRECTORY, DATA_FILE, DATA_MIB = "data", "big", 128
DATA = (
    Operation("read", DATA_DIRECTORY, Held(DATA_FILE, os.O_RDONLY, _read), DATA_MIB, "MiB", n_passes=3, least_s=1),
    Operation("mmap read", DATA_DIRECTORY, Held(DATA_FILE, os.O_RDONLY, _map), DATA_MIB, "MiB", n_passes=3, least_s=1),
    Operation("write", DATA_DIRECTORY, Held(DATA_FILE, os.O_WRONLY, _write), DATA_MIB, "MiB", n_passes=3, least_s=1),
)
MISSES = (Operation(MISS, "stat", _miss, 4000),)
STATS = (
    Operation("stat, cold", "stat", _stat, 4000, is_cold=True),
    Operation("stat again", "stat", _stat, 4000, n_passes=3),
)
OPERATIONS = (*LISTING, *FILES, *NEW_DATA, *DATA, *MISSES, *STATS)


def prepare(root: Path, operations: Sequence[Operation]) -> None:
    """Make the tree in which the operations find what they need."""
    contents = {"stat": b"", "list": b"", "read": _BLOCK}
    root.mkdir()
    for directory in dict.fromkeys(operation.directory for operation in operations):
        (root / directory).mkdir()
        if directory in contents:
            n_files = max(operation.n for operation in operations if operation.directory == directory)
            make_files(root / directory, n_files, contents[directory])


def drop_caches() -> None:
    """Write all that is to be written, then forget pages, names and inodes: of the whole machine."""
    os.sync()
    _DROP_CACHES.write_text("3", encoding="ascii")


class Worker:
    """A process that does the operations below a directory; a `with` of it ends it."""

    def __init__(self, root: Path, uid: int = 0) -> None:
        command = (PYTHON, "-c", "from bench.operations import work; work()", root)
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=_ROOT, user=uid, group=uid, extra_groups=()
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # What it waits for in a mount, the mount's watchdog ends.
        self._process.kill()
        self._process.communicate()

    def do(self, operation: Operation) -> float:
        """Seconds of an operation's quickest pass.

        Raises  OSError: it failed, with what the worker said last
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        try:
            self._process.stdin.write(f"{operation.n} {operation.least_s} {operation.name}\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            said = self._process.stderr.read().splitlines()
            raise OSError(f"{operation.name}: {said[-1] if said else 'the worker ended'}")
        return float(answer)


def work() -> None:
    """The worker: a line says how often to do what; the seconds of it are the answer."""
    root = Path(sys.argv[1])
    by_name = {operation.name: operation for operation in OPERATIONS}
    gc.disable()
    for line in sys.stdin:
        n, least_s, name = line.rstrip("\n").split(" ", 2)
        operation = by_name[name]
        names = [b"f%d" % number for number in range(int(n))]
        os.chdir(root / operation.directory)
        os.sync()  # or what was written before is written to disk meanwhile
        end_s = time.monotonic() + float(least_s)
        times = [_time_pass(operation, names) for _ in range(operation.n_passes)]
        while time.monotonic() < end_s:
            times.append(_time_pass(operation, names))
        print(min(times), flush=True)


def _time_pass(operation: Operation, names: Names) -> float:
    if operation.is_cold:
        drop_caches()
    call = operation.call
    if not isinstance(call, Held):
        return _time(call, names)
    fd = os.open(call.file, call.flags, 0o644)
    try:
        return _time(partial(call.call, fd), names)
    finally:
        os.close(fd)


def _time(call: Callable[[Names], None], names: Names) -> float:
    began = time.perf_counter()
    call(names)
    return time.perf_counter() - began
