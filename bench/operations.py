"""What bench/mount.py times: each operation a tight loop of system calls, done by a worker process in the tree.

The worker's own time, Python's included, is in every subject's figure alike; native's shows how much it is at most.
Names are one component long and the directory is the worker's own, so that a path's walk is not measured.
"""

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from bench.support import PYTHON, make_files

Names = Sequence[bytes]

# Not zeros: memory that was never written to makes the kernel send 17 or more small WRITEs for one large one.
_BLOCK = b"x" * (4 << 10)
_MIB = b"x" * (1 << 20)
_ACL = "system.posix_acl_access"
_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_ROOT = Path(__file__).parents[1]


def _stat(names: Names) -> None:
    for name in names:
        os.stat(name, follow_symlinks=False)


def _list_long(names: Names) -> None:
    with os.scandir() as entries:
        n_entries = sum(1 for entry in entries if entry.stat(follow_symlinks=False))
    if n_entries != len(names):
        raise OSError(f"{n_entries} entries listed of {len(names)}")


def _read_acl(names: Names) -> None:
    for name in names:
        try:
            os.getxattr(name, _ACL, follow_symlinks=False)
        except OSError:
            continue  # there is none, or no such thing here: that is the answer


def _miss(names: Names) -> None:
    for name in names:
        os.access(b"no-" + name, os.F_OK)


def _create(names: Names) -> None:
    for name in names:
        os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))


def _rename(names: Names) -> None:
    for name in names:
        os.rename(name, b"new-" + name)


def _unlink(names: Names) -> None:
    for name in names:
        os.unlink(b"new-" + name)


def _mkdir(names: Names) -> None:
    for name in names:
        os.mkdir(name)


def _rmdir(names: Names) -> None:
    for name in names:
        os.rmdir(name)


def _open_read_close(names: Names) -> None:
    for name in names:
        fd = os.open(name, os.O_RDONLY)
        if len(os.read(fd, len(_BLOCK))) != len(_BLOCK):
            raise OSError("a short read")
        os.close(fd)


def _append(names: Names) -> None:
    fd = os.open(b"log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for _ in names:
        os.write(fd, _BLOCK)
    os.close(fd)


def _write(names: Names) -> None:
    fd = os.open(b"big", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for _ in names:
        os.write(fd, _MIB)
    os.close(fd)


def _read(names: Names) -> None:
    buffer = bytearray(len(_MIB))
    fd = os.open(b"big", os.O_RDONLY)
    for _ in names:
        if os.readv(fd, [buffer]) != len(_MIB):
            raise OSError("a short read")
    os.close(fd)


class Operation(NamedTuple):
    """One thing done to as many names of a directory, or to a file as many times."""

    name: str
    directory: str
    run: Callable[[Names], None]
    n: int
    unit: str = "ops"
    is_cold: bool = False  # nothing of the tree is in memory; the kernel knows the directory itself
    n_passes: int = 1  # the quickest counts: memory that is new to the machine, and its other work, delay the rest

    def of(self, share: float) -> "Operation":
        """The same, done less often."""
        return self._replace(n=max(1, round(self.n * share)))


# In this order, in one tree: `again` is right after the first time, and what is made is then removed.
OPERATIONS = (
    Operation("stat, cold", "stat", _stat, 4000, is_cold=True),
    Operation("stat again", "stat", _stat, 4000, n_passes=3),
    Operation("missing name", "stat", _miss, 4000),
    Operation("ls -l, cold", "list", _list_long, 5000, "entries", is_cold=True),
    Operation("ls -l again", "list", _list_long, 5000, "entries", n_passes=2),
    Operation("getxattr (no ACL)", "list", _read_acl, 2000),
    Operation("create", "made", _create, 2000),
    Operation("rename", "made", _rename, 2000),
    Operation("unlink", "made", _unlink, 2000),
    Operation("mkdir", "made", _mkdir, 2000),
    Operation("rmdir", "made", _rmdir, 2000),
    Operation("open, read, close, cold", "read", _open_read_close, 2000, is_cold=True),
    Operation("open, read, close again", "read", _open_read_close, 2000, n_passes=2),
    Operation("append 4 KiB", "data", _append, 4000, n_passes=3),
    Operation("write", "data", _write, 128, "MiB", n_passes=3),
    Operation("read, cold", "data", _read, 128, "MiB", is_cold=True, n_passes=2),
    Operation("read again", "data", _read, 128, "MiB", n_passes=3),
)


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

    def __init__(self, root: Path) -> None:
        command = (PYTHON, "-c", "from bench.operations import work; work()", root)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=_ROOT
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
            self._process.stdin.write(f"{operation.n} {operation.name}\n")
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
        n, _, name = line.rstrip("\n").partition(" ")
        operation = by_name[name]
        names = [b"f%d" % number for number in range(int(n))]
        os.chdir(root / operation.directory)
        print(min(_time_pass(operation, names) for _ in range(operation.n_passes)), flush=True)


def _time_pass(operation: Operation, names: Names) -> float:
    if operation.is_cold:
        drop_caches()
    began = time.perf_counter()
    operation.run(names)
    return time.perf_counter() - began
