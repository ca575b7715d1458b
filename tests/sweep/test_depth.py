"""Sweeps of deep chains: what is taken of them, moved or put back costs a way as long as the chain, not its square."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fusefs.core.selection import Selection
from fusefs.sweep.request import ToMove, ToTrash
from tests.support.make_trees import CountedPathBytes, deep_chain, remove_tree_hard
from tests.support.run_sweep import sweep
from tests.support.store_verbs import entries, init, restore

pytestmark = pytest.mark.needs("root")

NAME = b"d" * 30
FILES = Selection(names=("x*",))
N_LEVELS = 300


@pytest.fixture
def volume(volume: Path) -> Path:
    init(volume)
    return volume


def chain(top: Path, n_levels: int, every: int = 1) -> Path:
    """A chain of directories with a file in some of them, the last too."""
    deep_chain(top, n_levels, NAME, leaf=None)
    fd = os.open(top, os.O_RDONLY)
    for level in range(1, n_levels + 1):
        above, fd = fd, os.open(NAME, os.O_RDONLY, dir_fd=fd)
        os.close(above)
        if level % every == 0:
            os.close(os.open("x", os.O_WRONLY | os.O_CREAT, dir_fd=fd))
    os.close(fd)
    return top


def files(top: Path) -> list[int]:
    """The levels of a chain that have a file, and how many levels there are."""
    found, level = [], 0
    fd = os.open(top, os.O_RDONLY)
    while True:
        names = os.listdir(fd)
        if "x" in names:
            found.append(level)
        if os.fsdecode(NAME) not in names:
            os.close(fd)
            return [*found, level]
        level += 1
        above, fd = fd, os.open(NAME, os.O_RDONLY, dir_fd=fd)
        os.close(above)


def trash(top: Path, kernel: CountedPathBytes) -> str:
    swept = sweep(top, FILES, ToTrash(), kernel=kernel, n_workers=1)
    assert swept.failures == ()
    assert swept.orphan is not None
    return swept.orphan


def move(top: Path, kernel: CountedPathBytes) -> None:
    there = top.with_name(f"to-{top.name}")
    there.mkdir()
    swept = sweep(top, FILES, ToMove(bytes(there)), kernel=kernel, n_workers=1)
    assert (swept.sums.n_done, swept.failures) == (len(files(there)) - 1, ())


def put_back(top: Path, kernel: CountedPathBytes) -> None:
    restore(top.parent, trash(top, CountedPathBytes()), kernel)


def put_back_the_deepest(top: Path, kernel: CountedPathBytes) -> None:
    n_levels = files(top)[-1]
    restore(top.parent, trash(top, CountedPathBytes()), kernel, inside=b"/".join([NAME] * n_levels) + b"/x")
    assert files(top) == [n_levels, n_levels]


@pytest.mark.parametrize("act", [trash, move, put_back, put_back_the_deepest])
def test_way_grows_with_the_depth(volume: Path, act: Callable[[Path, CountedPathBytes], object]) -> None:
    """What an action costs on a chain twice as long is about twice as much."""
    costs = []
    for n_levels in (N_LEVELS, 2 * N_LEVELS):
        kernel = CountedPathBytes()
        act(chain(volume / f"top{n_levels}", n_levels), kernel)
        costs.append(kernel.n_bytes)
    assert costs[1] < 3 * costs[0]


@pytest.mark.parametrize("every", [1, 70])
def test_deep_chain_is_trashed_and_restored_as_it_was(volume: Path, every: int) -> None:
    top = chain(volume / "top", 2000, every)
    before = files(top)
    orphan = trash(top, CountedPathBytes())
    assert files(top) == [2000]
    done = restore(volume, orphan)
    assert (done.n_left, files(top), entries(volume)) == (0, before, [])


@pytest.mark.parametrize("every", [1, 70])
def test_deep_chain_that_is_gone_is_restored_with_its_directories(volume: Path, every: int) -> None:
    top = chain(volume / "top", 1000, every)
    before = files(top)
    orphan = trash(top, CountedPathBytes())
    remove_tree_hard(top / os.fsdecode(NAME))
    deepest = before[-2]
    restore(volume, orphan, inside=b"/".join([NAME] * deepest) + b"/x")
    assert files(top) == [deepest, deepest]
    restore(volume, orphan)
    assert files(top) == [*before[:-1], deepest]
