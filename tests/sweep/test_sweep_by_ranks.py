"""A sweep as ranks share it: whatever comes back half done, what goes is what one worker would take."""

import os
import random
from pathlib import Path

import pytest

from fusefs.core.pacing import SliceBudget
from fusefs.core.results import SweepSums
from fusefs.core.selection import Selection
from fusefs.linux.kernel import Kernel
from fusefs.linux.machine_identity import boot_id
from fusefs.sweep.agenda import Agenda, Job, JobKind, SliceCounts, SweepSlice, SweepSliceResult
from fusefs.sweep.matcher import Dirs
from fusefs.sweep.request import ToDelete
from fusefs.sweep.sweep_by_ranks import SharedSweep, identify_anywhere
from tests.support.make_trees import Spec, make_tree
from tests.support.run_sweep import names, sweep
from tests.support.simulated_ranks import run_by_ranks

WAYS = [
    (Selection(names=("*.log",)), Dirs.LAST),
    (Selection(types=frozenset("d")), Dirs.LAST),
    (Selection(types=frozenset("fd")), Dirs.LAST),
    (Selection(names=("a*",), types=frozenset("d")), Dirs.STRIPPED),
    (Selection(empty=True), Dirs.LAST),
]
BUDGETS = (SliceBudget(0.0), SliceBudget(30.0, n_entries=2), SliceBudget(30.0))


def tree_of(chance: random.Random, depth: int = 0) -> Spec:
    files = {f"f{number}{chance.choice(('.log', ''))}": "" for number in range(chance.randint(0, 4))}
    n_directories = chance.randint(0, 4 - depth)
    return {**files, **{f"{chance.choice('ab')}{n}": tree_of(chance, depth + 1) for n in range(n_directories)}}


@pytest.mark.parametrize(("selection", "dirs"), WAYS)
def test_whatever_ends_when_each_match_goes_and_is_counted_once(volume: Path, selection: Selection, dirs: Dirs) -> None:
    for seed in range(8):
        chance = random.Random(seed)
        tree = {f"a{number}": tree_of(chance) for number in range(4)}
        top, twin = make_tree(volume / f"top{seed}", tree), make_tree(volume / f"twin{seed}", tree)
        alone = sweep(twin, selection, ToDelete(recursive=dirs is Dirs.STRIPPED))
        sums = by_ranks(top, selection, dirs, chance)
        assert names(top) == names(twin)
        assert sums._replace(n_bytes=0) == alone.sums._replace(n_bytes=0)


def by_ranks(top: Path, selection: Selection, dirs: Dirs, chance: random.Random) -> SweepSums:
    """A sweep by some ranks, to its end; and what its parts came to."""
    n_ranks, n_threads = chance.randint(1, 3), chance.randint(1, 3)
    plan = Agenda(iter([Job(JobKind.ENTER, b"", [""])]), n_ranks * n_threads, None, splits=True, lists_whole=True)
    kernel = Kernel()
    told = SliceCounts(None)

    def done(work: SweepSlice, outcome: SweepSliceResult) -> None:
        plan.finish_slice(work, outcome)
        told.add(outcome.sums, outcome.failures, outcome.spared)

    with kernel.open_path(os.fsencode(top), os.O_RDONLY | os.O_DIRECTORY) as fd:
        seen = identify_anywhere(kernel, fd)
    with SharedSweep(os.fsencode(top), seen, boot_id(), selection, dirs, n_threads).opened(kernel, n_ranks) as rank:

        def run(part: SweepSlice) -> SweepSliceResult:
            return rank.run_slice(part, chance.choice(BUDGETS))

        run_by_ranks(plan, done, [n_threads] * n_ranks, run, chance)
    assert plan.is_dry()
    return told.sums
