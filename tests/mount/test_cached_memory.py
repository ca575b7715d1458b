"""What the daemon remembers is bounded: however many names are looked up, its memory stays what it was.

TRASHD_TEST_LOOKUPS  how many (make soak-mount: millions)
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.covering_sets import Axes
from tests.support.foreground_mount import Mounted, trashd_mount, until
from tests.support.many_files import fill
from tests.support.proc_stat import status_of
from tests.support.real_filesystems import tmpfs_volume
from tests.support.trashd_command import EXECUTED

pytestmark = pytest.mark.needs("root", "fuse")

N_LOOKUPS = int(os.environ.get("TRASHD_TEST_LOOKUPS", "6000"))
N_FILES = 2000
N_ROUND = 1500
CACHE_BYTES = 512 << 10
GROWTH_KIB = 3 << 9  # what the interpreter's own pools take now and then


@dataclass(frozen=True)
class Setup(Axes):
    """Of a mount: its coherence, and whether operations go to threads."""

    coherence: str
    backing: str

    def options(self) -> list[str]:
        own = [f"coherence={self.coherence}", f"backing={self.backing}", f"cache_size={CACHE_BYTES}"]
        return [*own, "timeout=3600"] if self.coherence == "shared" else own


IN_THREADS = Setup("exclusive", "slow")
SETUPS = {"local": Setup("exclusive", "local"), "shared": Setup("shared", "local"), "in threads": IN_THREADS}
_NUMBERS = itertools.count()


@contextmanager
def a_mount(setup: Setup) -> Iterator[Mounted]:
    with tmpfs_volume("64m", ["nr_inodes=50000"]) as volume:
        fill(volume / "flat", N_FILES)
        with trashd_mount(volume, options=setup.options(), limit_s=100_000, command=EXECUTED) as mounted:
            yield mounted


def look_up_missing(top: Path, n: int) -> None:
    """Names that never existed, each once."""
    for _ in range(n):
        assert not os.path.lexists(top / f"flat/missing-{next(_NUMBERS)}")


def look_up_files(top: Path, n: int) -> None:
    for i in range(n):
        os.lstat(top / f"flat/f{i % N_FILES}")


def list_all(top: Path, n: int) -> None:
    for _ in range(0, n, N_FILES):
        with os.scandir(top / "flat") as entries:
            for entry in entries:
                entry.stat(follow_symlinks=False)


def make_and_remove(top: Path, n: int) -> None:
    """Inodes that come and go; a change costs as much as ten looks."""
    for _ in range(n // 10):
        path = top / f"flat/made-{next(_NUMBERS)}"
        path.touch()
        path.rename(top / "flat/renamed")
        path.exists()
        (top / "flat/renamed").unlink()


@pytest.mark.parametrize("look", [look_up_missing, look_up_files, list_all, make_and_remove])
@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_memory_is_flat_over_many_lookups(setup: Setup, look: Callable[[Path, int], None]) -> None:
    with a_mount(setup) as mounted:
        sizes = []
        for _ in range(0, N_LOOKUPS, N_ROUND):
            look(mounted.path, N_ROUND)
            mounted.forget_all()
            assert until(lambda: mounted.n_nodes() == 1)
            sizes.append(int(status_of(mounted.pid)["RssAnon"][0]))
        half = max(sizes[: len(sizes) // 2])
        assert sizes[-1] < half + GROWTH_KIB, sizes
        print(f"{look.__name__}: {sizes[0]} KiB, {half} KiB, {sizes[-1]} KiB")


@pytest.mark.takes_engine  # without it nothing goes to threads, and so nothing is remembered
def test_tables_are_empty_and_the_cache_is_full_when_all_is_forgotten() -> None:
    """I7: no node but the root; and what is remembered is as much as was allowed, no more."""
    with a_mount(IN_THREADS) as mounted:
        for look in (list_all, look_up_missing):
            look(mounted.path, N_ROUND)
            mounted.forget_all()
        assert until(lambda: mounted.n_nodes() == 1)
        told = mounted.stats().gauges
        assert CACHE_BYTES / 4 < told["cache_bytes"] <= CACHE_BYTES
        assert told["cache_size_bytes"] == CACHE_BYTES
        assert told["n_handles"] == 0
