"""A job of ranks without MPI, threads or a clock: which slice ends next is by chance."""

import random
from collections.abc import Callable, Sequence

from fusefs.core.pacing import SliceBudget
from fusefs.engine.mpi_ranks import SlicesOfRanks
from fusefs.engine.run_slices import Outcome, SliceSource, Work

BUDGET = SliceBudget(1.0)


def run_by_ranks(
    plan: SliceSource[Work],
    collect: Callable[[Work, Outcome], object],
    n_slices: Sequence[int],
    run_slice: Callable[[Work], Outcome],
    chance: random.Random,
) -> None:
    """Run all slices of a plan by ranks of so many threads. Raises what the plan does.

    plan, collect  the first rank's plan, and its function that adds the outcome of a slice
    run_slice      runs a slice, or a part of it
    """
    slices, running = SlicesOfRanks[Work](n_slices), list[tuple[int, int]]()
    while True:
        while len(running) < sum(n_slices) and (work := plan.next()) is not None:
            rank, sent = slices.send(work, BUDGET)
            running.append((rank, sent.number))
            assert sum(one == rank for one, _number in running) <= n_slices[rank]
        if not running:
            return
        _rank, number = running.pop(chance.randrange(len(running)))
        sent = slices.sent[number]
        collect(sent.work, run_slice(sent.work))
        slices.end(number, None)
