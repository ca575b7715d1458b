"""The Linux Test Project's tests of system calls on files, where it is installed: LTPROOT, or /opt/ltp.

No registry has it. Each test is a program that works in a directory of its own and ends with what it found.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
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


class Test(NamedTuple):
    """One of its tests: a name, and what runs it."""

    name: str
    argv: Sequence[str]


def why_missing() -> str | None:
    """Why there are no such tests on this machine; None: there are."""
    runs = ROOT / "runtest/syscalls"
    return None if runs.is_file() else f"LTP is not installed: no {runs} (LTPROOT says where it is)"


def tests() -> list[Test]:
    """Those that work on files."""
    found = []
    for line in (ROOT / "runtest/syscalls").read_text().splitlines():
        name, *argv = shlex.split(line, comments=True) or [""]
        if _ON_FILES.fullmatch(name) and (ROOT / "testcases/bin" / argv[0]).exists():
            found.append(Test(name, argv))
    return found


def found_by(test: Test, directory: Path) -> str:
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
