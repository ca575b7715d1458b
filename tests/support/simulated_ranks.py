"""A job of ranks without MPI, threads or a clock: which slice ends next is by chance."""

import random
from collections.abc import Callable, Sequence

from fusefs.core.pacing import SliceBudget
from fusefs.engine.mpi_ranks import SlicesOfRanks
from fusefs.engine.run_slices import Outcome, SliceSource, Work

BUDGET = SliceBudget(1.0)


def run_by_ranks(
    plan: SliceSource[Work],
    done: Callable[[Work, Outcome], object],
    n_slices: Sequence[int],
    run: Callable[[Work], Outcome],
    chance: random.Random,
) -> None:
    """Run all slices of a plan by ranks of so many threads. Raises what the plan does.

    plan, done  the first rank's, and how it takes in what a slice did
    run         runs a slice, as much of it as it likes
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
        done(sent.work, run(sent.work))
        slices.end(number, None)
