"""What benchmarks and the demo share: trees made quickly, commands timed, volumes to do it on, results kept."""

import contextlib
import datetime
import errno
import hashlib
import json
import mmap
import os
import platform
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.real_filesystems import loop_volume, tmpfs_volume
from tests.support.third_party_suites import cache

_FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror")
_COMPILE_LIMIT_S = 60.0

PYTHON = sys.executable
TRASHD = str(Path(sys.executable).with_name("trashd"))
FILES_PER_DIRECTORY = 1000
# Enough for a million empty files and the directories that hold them.
SIZE_MB = 3072
N_INODES = 1_250_000
_MAP_LOCKED = 0x2000  # the same number on every architecture but alpha, mips, powerpc, sparc


@contextlib.contextmanager
def compiled() -> Iterator[None]:
    """Let Python keep its bytecode, as an installed package does, whatever this environment says."""
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="trashd-pycache-") as cache:
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = cache
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


@contextlib.contextmanager
def volume(filesystem: str) -> Iterator[Path]:
    """A fresh volume with room for a million files.

    filesystem  tmpfs, ext4, xfs, btrfs, or `plain`: a directory of the disk, for who may not mount
    Raises      OSError: this machine or user can't mount it
    """
    if filesystem == "plain":
        with tempfile.TemporaryDirectory(prefix="trashd-bench-", dir="/var/tmp") as directory:
            yield Path(directory)
    elif filesystem == "tmpfs":
        with tmpfs_volume(f"{SIZE_MB}m", [f"nr_inodes={2 * N_INODES}"]) as path:
            yield path
    else:
        options = ("-N", str(N_INODES)) if filesystem == "ext4" else ()
        with loop_volume(filesystem, SIZE_MB, options) as path:
            yield path


def make_files(parent: Path, n_files: int, content: bytes = b"") -> int:
    """Put equal files into a directory; the number."""
    fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for number in range(n_files):
            file = os.open(b"f%d" % number, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=fd)
            if content:
                os.write(file, content)
            os.close(file)
    finally:
        os.close(fd)
    return n_files


def make_tree(path: Path, n_files: int, content: bytes = b"") -> int:
    """A tree of directories with at most a thousand files each; the number of files."""
    path.mkdir()
    n_made = 0
    while n_made < n_files:
        number = n_made // FILES_PER_DIRECTORY
        directory = path / f"{number // 10}" / f"{number % 10}"
        directory.mkdir(parents=True)
        n_made += make_files(directory, min(FILES_PER_DIRECTORY, n_files - n_made), content)
    return n_made


def make_flat(path: Path, n_files: int) -> int:
    """One directory with all the files; their number."""
    path.mkdir()
    return make_files(path, n_files)


def make_chain(path: Path, n_files: int) -> int:
    """A chain of directories, each in the one before, with ten files in each; the number of files."""
    path.mkdir()
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for n_made in range(n_files):
            if n_made % 10 == 0:
                os.mkdir(b"d", dir_fd=fd)
                below = os.open(b"d", os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
                os.close(fd)
                fd = below
            os.close(os.open(b"f%d" % n_made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=fd))
    finally:
        os.close(fd)
    return n_files


@contextlib.contextmanager
def kept_in_memory(paths: Sequence[Path]) -> Iterator[None]:
    """Files whose pages stay where they are in memory, whatever caches are dropped."""
    with contextlib.ExitStack() as stack:
        for path in paths:
            with path.open("rb") as file:
                pages = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED | _MAP_LOCKED, prot=mmap.PROT_READ)
            stack.callback(pages.close)
        yield


@contextlib.contextmanager
def running(command: Sequence[str | Path], stdin: Path = Path("/dev/null"), stderr: int = 2) -> Iterator[int]:
    """The pid of a command whose output is not read; its process group is its own and ends with the `with`."""
    arguments = [os.fspath(word) for word in command]
    redirected = [
        (os.POSIX_SPAWN_OPEN, 0, os.fspath(stdin), os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0),
        (os.POSIX_SPAWN_DUP2, stderr, 2),
    ]
    pid = os.posix_spawnp(arguments[0], arguments, os.environ, file_actions=redirected, setpgroup=0)
    try:
        yield pid
    finally:
        # Not waited for yet, so the number can't be another's; what is left over must not keep the volume busy.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def time_command(
    command: Sequence[str | Path], stdin: Path = Path("/dev/null"), timeout_s: float | None = None
) -> float:
    """Wall seconds of a command, killed when its time is out.

    Raises  OSError if it fails, with the beginning of what it wrote to standard error
    """
    stderr = os.memfd_create("stderr")
    try:
        began = time.perf_counter()
        with running(command, stdin, stderr) as pid:
            code = wait(pid, timeout_s)
            seconds = time.perf_counter() - began
        said = " ".join(os.pread(stderr, 200, 0).decode(errors="replace").split())
    finally:
        os.close(stderr)
    if code is None:
        raise OSError(errno.ETIME, f"not done after {timeout_s:.0f} s", os.fspath(command[0]))
    if code:
        ended = f"exit code {code}" if code > 0 else signal.Signals(-code).name
        raise OSError(errno.ECHILD, f"{ended}: {said}", os.fspath(command[0]))
    return seconds


def program(source: Path) -> Path:
    """A program in C, compiled if it is not there yet. Raises  CalledProcessError: gcc's words are on stderr"""
    digest = hashlib.sha256(b"\0".join([repr(_FLAGS).encode(), source.read_bytes()])).hexdigest()
    made = cache() / f"{source.stem}-{digest[:16]}"
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        new = made.with_suffix(f".{os.getpid()}")
        subprocess.run(["gcc", *_FLAGS, "-o", new, source], check=True, timeout=_COMPILE_LIMIT_S)
        new.rename(made)
    return made


def wait(pid: int, timeout_s: float | None = None) -> int | None:
    """The exit code of a child (-n: signal n), which stays to be waited for; None if the time is out."""
    if timeout_s is not None:
        pidfd = os.pidfd_open(pid)
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            if not poll.poll(timeout_s * 1e3):
                return None
        finally:
            os.close(pidfd)
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def only_orphan(root: Path) -> str:
    """The id of the one orphan in a volume's store."""
    listed = subprocess.run([TRASHD, "list", "--json", "--volume", root], stdout=subprocess.PIPE, check=True)
    (entry,) = [json.loads(line) for line in listed.stdout.splitlines()]
    return str(entry["id"])


def machine() -> dict[str, Any]:
    """What these figures were measured on."""
    names = [line for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if "model name" in line]
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "kernel": platform.release(),
        "cpu": names[0].partition(": ")[2] if names else platform.machine(),
        "n_cpus": os.cpu_count(),
        "memory_gib": round(memory_bytes / 2**30),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
    }


def keep(results: Path, row: dict[str, Any]) -> dict[str, Any]:
    """Append a result to its file; as it stands there, with the time and the machine."""
    at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    kept = {"at": at, **row, "machine": machine()}
    results.parent.mkdir(exist_ok=True)
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(kept) + "\n")
    return kept


def print_progress(text: str) -> None:
    """Print a line of progress on standard error."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def measuring(*also: type[Exception]) -> Iterator[None]:
    """Measure with bytecode kept; SIGTERM ends it as cleanly as Ctrl-C. also: ends it like OSError"""
    expected: tuple[type[Exception], ...] = (OSError, *also)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with compiled():
            yield
    except KeyboardInterrupt:
        print_progress("interrupted: everything was unmounted and deleted")
        sys.exit(130)
    except expected as error:
        sys.exit(f"not measured: {error}")


def percentile(values: Sequence[float], part: int) -> float:
    """The value that so many percent of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) * part // 100, len(ordered) - 1)]
