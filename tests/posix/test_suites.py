"""pjdfstest and fsx on a mount of ours: what they find wrong there and not below is our fault."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.foreground_mount import trashd_mount
from tests.support.real_filesystems import bind_mount, loop_volume, tmpfs_volume
from tests.support.third_party_suites import EXPECTED, SuiteResult, fsx, pjdfstest, short_path
from tests.support.transports import PLAIN, by_ring

pytestmark = [pytest.mark.needs("root", "fuse", "loop", "cargo"), pytest.mark.timeout(900)]

LIMIT_S = 800
N_OPERATIONS = int(os.environ.get("TRASHD_TEST_OPERATIONS", "10000"))
"""Of fsx in all, half of them past the daemon; `make soak-mount` asks for more."""
N_OPERATIONS_A_RUN = 2500
BY_EACH = pytest.mark.parametrize("transport", ["uring=off", by_ring("uring=on"), PLAIN])
SKIPPED_MORE = frozenset(EXPECTED["pjdfstest"])


@contextmanager
def open_directory(parent: Path, name: str) -> Iterator[Path]:
    """A directory that all may write in."""
    path = parent / name
    path.mkdir()
    path.chmod(0o777)
    yield path


@pytest.fixture(scope="module")
def right() -> SuiteResult:
    """What pjdfstest finds below, in a plain directory."""
    with (
        loop_volume("ext4", 256) as volume,
        short_path() as target,
        open_directory(volume, "native") as native,
        bind_mount(native, target),
    ):
        return pjdfstest(target)


@BY_EACH
def test_pjdfstest_finds_nothing_wrong(right: SuiteResult, transport: str) -> None:
    options = ["coherence=exclusive", transport]
    with (
        loop_volume("ext4", 256) as volume,
        short_path() as target,
        open_directory(volume, "source") as source,
        trashd_mount(source, target, options, limit_s=LIMIT_S),
    ):
        seen = pjdfstest(target)
    assert right.failed == frozenset()
    assert seen.failed == frozenset()
    assert seen.skipped - right.skipped <= SKIPPED_MORE
    assert seen.n_passed >= right.n_passed - len(SKIPPED_MORE)


@pytest.mark.parametrize(
    ("passthrough", "transport"),
    [
        ("auto", "uring=off"),
        ("off", "uring=off"),
        by_ring("auto", "uring=on"),
        by_ring("off", "uring=on"),
        ("off", PLAIN),
    ],
)
def test_fsx_reads_what_it_wrote(passthrough: str, transport: str) -> None:
    """Reads, writes, maps, cuts and extends at random, allocates, makes holes and copies parts; two at a time.

    In pieces: fsx leaves a mapping behind for every fifth operation, and each cut of the file walks all of them.
    """
    options = ["coherence=exclusive", f"passthrough={passthrough}", transport]
    with tmpfs_volume() as volume, trashd_mount(volume / "source", options=options, limit_s=LIMIT_S) as mounted:

        def run(seed: int) -> str:
            return fsx(mounted.path, seed, N_OPERATIONS_A_RUN, has_blocks=transport != PLAIN)

        with ThreadPoolExecutor(2) as pool:
            for seed, wrong in enumerate(pool.map(run, range(N_OPERATIONS // 2 // N_OPERATIONS_A_RUN))):
                assert not wrong, f"seed {seed}: {wrong}"
