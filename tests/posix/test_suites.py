"""pjdfstest and fsx on a mount of ours: what they find wrong there and not below is our fault."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.mounted import trashd_mount
from tests.support.suites import pjdfstest, short_path, suite
from tests.support.volumes import bind_mount, loop_volume, tmpfs_volume

pytestmark = [pytest.mark.needs("root", "fuse", "loop", "cargo"), pytest.mark.timeout(900)]

LIMIT_S = 300
N_OPERATIONS = int(os.environ.get("TRASHD_TEST_OPERATIONS", "30000"))
"""Of fsx in all; `make soak-mount` asks for more."""
N_OPERATIONS_A_RUN = 2500
N_SKIPPED_MORE = 1  # posix_fallocate: pyfuse3 has no handler for it


@contextmanager
def open_directory(parent: Path, name: str) -> Iterator[Path]:
    """A directory that all may write in."""
    path = parent / name
    path.mkdir()
    path.chmod(0o777)
    yield path


def test_pjdfstest_finds_nothing_wrong() -> None:
    with loop_volume("ext4", 256) as volume, short_path() as target:
        with open_directory(volume, "native") as native, bind_mount(native, target):
            right = pjdfstest(target)
        with open_directory(volume, "source") as source, trashd_mount(source, target, limit_s=LIMIT_S):
            seen = pjdfstest(target)
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
            counted = ["-N", str(N_OPERATIONS_A_RUN), "-S", str(seed)]
            argv = [str(suite("fsx")), "-q", *counted, "-P", str(tmp_path), str(mounted.path / f"file{seed}")]
            return subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False)

        with ThreadPoolExecutor(2) as pool:
            for seed, done in enumerate(pool.map(run, range(N_OPERATIONS // N_OPERATIONS_A_RUN))):
                assert done.returncode == 0, f"seed {seed}: {done.stdout[-5000:]}{done.stderr[-5000:]}"


def _made(path: Path) -> Path:
    path.mkdir()
    return path
