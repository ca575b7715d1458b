"""Test suites that others wrote: those of crates.io, built once, outside the tree, and the Linux Test Project's.

python -m tests.support.third_party_suites        build what is missing
"""

import fcntl
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

ROOT = Path(os.environ.get("LTPROOT", "/opt/ltp"))
_ON_FILES = re.compile(
    r"(access|chdir|chmod|chown|close|copy_file_range|creat|dup|execve|faccessat|fallocate|fchdir|fchmod|fchown|fcntl"
    r"|fdatasync|fgetxattr|flistxattr|flock|fremovexattr|fsetxattr|fstat|fstatfs|fsync|ftruncate|futimesat|getcwd"
    r"|getdents|getxattr|inotify|lchown|lgetxattr|link|linkat|listxattr|llistxattr|lremovexattr|lseek|lstat|mkdir|mknod"
    r"|mmap|msync|name_to_handle_at|open|openat|pread|pwrite|pwritev|preadv|read|readahead|readdir|readlink|readv"
    r"|removexattr|rename|renameat|rmdir|sendfile|setxattr|splice|stat|statfs|statvfs|statx|symlink|sync_file_range"
    r"|tee|truncate|umask|unlink|utime|utimensat|utimes|vmsplice|write|writev)(at|2|64)*\d*(_\d+)?(_64)?"
)
"""By their names: a call's, and a number."""
_LIMIT_S = 120
FINE = "passes"


class LtpTest(NamedTuple):
    """One of its tests: a name, and what runs it."""

    name: str
    argv: Sequence[str]


def why_ltp_is_missing() -> str | None:
    """Why there are no such tests on this machine; None: there are."""
    runs = ROOT / "runtest/syscalls"
    return None if runs.is_file() else f"LTP is not installed: no {runs} (LTPROOT says where it is)"


def ltp_tests() -> list[LtpTest]:
    """Those that work on files."""
    found = []
    for line in (ROOT / "runtest/syscalls").read_text().splitlines():
        name, *argv = shlex.split(line, comments=True) or [""]
        if _ON_FILES.fullmatch(name) and (ROOT / "testcases/bin" / argv[0]).exists():
            found.append(LtpTest(name, argv))
    return found


def ltp_outcome(test: LtpTest, directory: Path) -> str:
    """What a test says when it works in a directory: FINE, or how it ends.

    Source  include/tst_res_flags.h in LTP
    """
    place = tempfile.mkdtemp(prefix="ltp-", dir=directory)
    os.chmod(place, 0o777)
    programs = ROOT / "testcases/bin"
    variables = {
        "LTPROOT": str(ROOT), "PATH": f"{programs}:{os.environ['PATH']}", "TMPDIR": place, "LTP_COLORIZE_OUTPUT": "0",
        "LC_ALL": "C", "HOME": "/root",
    }  # fmt: skip
    with subprocess.Popen(
        test.argv, executable=programs / test.argv[0], cwd=place, env=variables, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            code = process.wait(_LIMIT_S)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            _end_group(process.pid)
    shutil.rmtree(place, ignore_errors=True)
    match code:
        case 0:
            return FINE
        case 32:
            return "can't be run"
        case -1:
            return "takes too long"
        case _:
            return f"fails ({code})"


def _end_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


VERSIONS = MappingProxyType({"pjdfstest": "0.2.2", "fsx": "0.3.2"})
_BUILD_LIMIT_S = 900
_RUN_LIMIT_S = 300

_FEWER = "all clients together have fewer files open than one may, where the daemon's limit is no higher than theirs"
EXPECTED: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "pjdfstest": {
            "link::link_count_max": "the C library tells how many links a file may have by the filesystem's type",
        },
        "fsx": {},
        "LTP": {
            "creat05": _FEWER,
            "fcntl12": _FEWER,
            "fcntl12_64": _FEWER,
            "name_to_handle_at01": "there are no file handles",
            "name_to_handle_at02": "there are no file handles",
            "openat03": "a write by root takes set-ID bits away",
            "setxattr03": "there is no ioctl, and so no flag that makes a file immutable",
        },
    }
)
"""What comes out otherwise through a mount than below, by suite and test, and why."""

CONFIGURATION = """
[features]
posix_fallocate = {}
rename_ctime = {}
utimensat = {}
utime_now = {}
stat_st_birthtime = {}
[settings]
naptime = 0.02
allow_remount = false
[dummy_auth]
entries = [["nobody", "nogroup"], ["games", "games"], ["daemon", "daemon"]]
"""


def cache() -> Path:
    """Where they are kept; root's is not in a home directory that tests change."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "trashd-tests")


def _root(name: str) -> Path:
    return cache() / f"{name}-{VERSIONS[name]}"


def is_built(name: str) -> bool:
    """Whether a suite is there already: it takes no cargo then."""
    return (_root(name) / "bin" / name).exists()


def suite(name: str) -> Path:
    """The program of a suite, built if it is missing: needs cargo, the network and a minute or two.

    Raises  CalledProcessError: cargo could not; its words are on stderr
    """
    root = _root(name)
    program = root / "bin" / name
    root.mkdir(parents=True, exist_ok=True)
    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs at a time build once
        if not program.exists():
            what = ["--root", str(root), "--version", VERSIONS[name], name]
            subprocess.run(
                ["cargo", "install", "--quiet", "--locked", *what],
                stdin=subprocess.DEVNULL,
                check=True,
                timeout=_BUILD_LIMIT_S,
            )
    return program


_BLOCKS = """
[weights]
posix_fallocate = 1
punch_hole = 1
copy_file_range = 1
"""


class SuiteResult(NamedTuple):
    """What pjdfstest found."""

    failed: frozenset[str]
    skipped: frozenset[str]
    passed: frozenset[str]

    @property
    def n_passed(self) -> int:
        return len(self.passed)


def pjdfstest(path: Path) -> SuiteResult:
    """What it finds in a directory in which all may write."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as configuration:
        configuration.write(CONFIGURATION)
        configuration.flush()
        argv = [str(suite("pjdfstest")), "--configuration-file", configuration.name, "--path", str(path)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_RUN_LIMIT_S, check=False, cwd=path)
    print(done.stdout[-20_000:], done.stderr)
    found = dict(re.findall(r"^(\w+(?:::\w+)+)\s+(ok|skipped|FAILED|\w+)$", done.stdout, re.MULTILINE))
    summary = re.search(r"^Summary: (\d+) failed, (\d+) skipped, (\d+) passed", done.stdout, re.MULTILINE)
    assert summary, "no summary"
    told = SuiteResult(
        frozenset(name for name, how in found.items() if how not in ("ok", "skipped")),
        frozenset(name for name, how in found.items() if how == "skipped"),
        frozenset(name for name, how in found.items() if how == "ok"),
    )
    assert [*map(len, told)] == [int(n) for n in summary.groups()], "the output is not understood"
    return told


def fsx(path: Path, seed: int, n_operations: int, *, has_blocks: bool) -> str:
    """What it finds wrong with a file in a directory that it reads, writes, maps, cuts and extends at random.

    has_blocks  it allocates, makes holes and copies parts, too
    """
    with tempfile.TemporaryDirectory(prefix="trashd-fsx-") as place:
        configuration = Path(place, "fsx.toml")
        configuration.write_text(_BLOCKS if has_blocks else "")
        counted = ["-N", str(n_operations), "-S", str(seed), "-f", str(configuration)]
        argv = [str(suite("fsx")), "-q", *counted, "-P", place, str(path / f"file{seed}")]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_RUN_LIMIT_S, check=False)
    return "" if done.returncode == 0 else f"{done.stdout[-5000:]}{done.stderr[-5000:]}" or str(done.returncode)


@contextmanager
def short_path() -> Iterator[Path]:
    """A directory to mount on whose path leaves room for the name of a socket (108 bytes)."""
    path = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    path.chmod(0o755)
    try:
        yield path
    finally:
        path.rmdir()


def main() -> None:
    """Build all."""
    for name in VERSIONS:
        print(f"{name} {VERSIONS[name]}: {suite(name)}", file=sys.stderr)


if __name__ == "__main__":
    main()
