"""pjdfstest and fsx on a mount of ours: what they find wrong there and not below is our fault."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.mounted import trashd_mount
from tests.support.suites import suite
from tests.support.volumes import bind_mount, loop_volume, tmpfs_volume

pytestmark = [pytest.mark.needs("root", "fuse", "loop", "cargo"), pytest.mark.timeout(900)]

LIMIT_S = 300
N_OPERATIONS, N_RUNS = 200_000, 40
N_SKIPPED_MORE = 1  # posix_fallocate: pyfuse3 has no handler for it

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


class Told(NamedTuple):
    """What pjdfstest found."""

    failed: frozenset[str]
    skipped: frozenset[str]
    n_passed: int


@contextmanager
def open_directory(parent: Path, name: str) -> Iterator[Path]:
    """A directory that all may write in."""
    path = parent / name
    path.mkdir()
    path.chmod(0o777)
    yield path


def pjdfstest(path: Path, configuration: Path) -> Told:
    argv = [str(suite("pjdfstest")), "--configuration-file", str(configuration), "--path", str(path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=path)
    print(done.stdout[-20_000:], done.stderr)
    found = dict(re.findall(r"^(\w+(?:::\w+)+)\s+(ok|skipped|FAILED|\w+)$", done.stdout, re.MULTILINE))
    summary = re.search(r"^Summary: (\d+) failed, (\d+) skipped, (\d+) passed", done.stdout, re.MULTILINE)
    assert summary, "no summary"
    told = Told(
        frozenset(name for name, how in found.items() if how not in ("ok", "skipped")),
        frozenset(name for name, how in found.items() if how == "skipped"),
        int(summary[3]),
    )
    assert (len(told.failed), len(told.skipped)) == (int(summary[1]), int(summary[2])), "the output is not understood"
    return told


@contextmanager
def short_path() -> Iterator[Path]:
    """A directory to mount on whose path leaves room for the name of a socket (108 bytes)."""
    path = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    path.chmod(0o755)
    try:
        yield path
    finally:
        path.rmdir()


def test_pjdfstest_finds_nothing_wrong(tmp_path: Path) -> None:
    configuration = tmp_path / "pjdfstest.toml"
    configuration.write_text(CONFIGURATION)
    with loop_volume("ext4", 256) as volume, short_path() as target:
        with open_directory(volume, "native") as native, bind_mount(native, target):
            right = pjdfstest(target, configuration)
        with open_directory(volume, "source") as source, trashd_mount(source, target, limit_s=LIMIT_S):
            seen = pjdfstest(target, configuration)
    assert right.failed == frozenset()
    assert seen.failed == frozenset()
    assert len(seen.skipped - right.skipped) <= N_SKIPPED_MORE
    assert seen.n_passed >= right.n_passed - N_SKIPPED_MORE


def test_fsx_reads_what_it_wrote(tmp_path: Path) -> None:
    """Reads, writes, maps, cuts and extends at random; two at a time.

    In pieces: fsx leaves a mapping behind for every fifth operation, and each cut of the file walks all of them.
    """
    with tmpfs_volume() as volume, trashd_mount(_made(volume / "source"), limit_s=LIMIT_S) as mounted:

        def run(seed: int) -> subprocess.CompletedProcess[str]:
            counted = ["-N", str(N_OPERATIONS // N_RUNS), "-S", str(seed)]
            argv = [str(suite("fsx")), "-q", *counted, "-P", str(tmp_path), str(mounted.path / f"file{seed}")]
            return subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False)

        with ThreadPoolExecutor(2) as pool:
            for seed, done in enumerate(pool.map(run, range(N_RUNS))):
                assert done.returncode == 0, f"seed {seed}: {done.stdout[-5000:]}{done.stderr[-5000:]}"


def _made(path: Path) -> Path:
    path.mkdir()
    return path
