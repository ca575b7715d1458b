"""Which rank has which slices of the first rank's plan."""

import random

from hypothesis import example, given
from hypothesis import strategies as st

from fusefs.core.pacing import SliceBudget
from fusefs.core.slices import RemovalSliceResult, Slice, SlicePlan, SliceWork
from fusefs.engine.mpi_ranks import SlicesOfRanks, least_slice_s
from tests.support.simulated_ranks import BUDGET, run_by_ranks
from tests.unit.test_slices import ROOT_FD, Model, leaves, n_stuck, only_stuck, trees

DONE = RemovalSliceResult(0, 0, (), 0, SliceWork())
Ranks = SlicesOfRanks[Slice]


def directories(key: int = 0) -> Slice:
    return Slice(key, -1, b"top", SliceWork(subdirs=["a", "b", "c", "d"]), 8, is_hoisted=False)


STUCK_IN_TWO: dict[str, object] = {
    **dict.fromkeys("abcd"),
    "e": dict.fromkeys("ab"),
    "f": dict.fromkeys([*"abcde", "stuck"]),
    "g": {},
    "h": dict.fromkeys(["a", "stuck"]),
}


@example(57550, STUCK_IN_TWO, 1, 1, 3).via("a slice's directory was listed again, without what others failed at")
@given(st.integers(0, 2**32), trees, st.integers(1, 3), st.integers(1, 3), st.integers(1, 4))
def test_whatever_ends_when_all_goes_and_is_counted_once(
    seed: int, tree: dict[str, object], n_ranks: int, n_threads: int, window: int
) -> None:
    tree = {"tree": tree}
    stuck, total = n_stuck(tree), leaves(tree)
    model, chance = Model(tree, window), random.Random(seed)
    plan = SlicePlan(n_ranks * n_threads, splits_names=True, least_share=1, n_machines=n_ranks)
    plan.add(ROOT_FD, b"", SliceWork(names=["tree"]))

    def run(part: Slice) -> RemovalSliceResult:
        return model.run(part, chance.choice((1, 2, 30)))

    run_by_ranks(plan, plan.finish_slice, [n_threads] * n_ranks, run, chance)
    assert plan.is_dry()
    assert only_stuck(tree)
    assert len(set(model.unlinked)) == len(model.unlinked)
    report = plan.report(paced=False, stopped=False)
    assert (report.n_failed, report.removed) == (stuck, total - leaves(tree))


def test_ranks_take_turns_however_few_slices_there_are() -> None:
    ranks, order = Ranks([2, 2]), list[int]()
    for _ in range(6):
        rank, sent = ranks.send(directories(), BUDGET)
        ranks.end(sent.number, DONE)
        order.append(rank)
    assert order == [0, 1, 0, 1, 0, 1]


def test_those_with_the_fewest_slices_get_the_next() -> None:
    ranks = Ranks([2, 1, 2])
    sent = [ranks.send(directories(), BUDGET) for _ in range(5)]
    assert [rank for rank, _sent in sent] == [0, 1, 2, 0, 2]
    ranks.end(sent[1][1].number, DONE)
    assert ranks.send(directories(), BUDGET)[0] == 1


def test_a_slice_that_has_ended_is_the_one_that_was_sent() -> None:
    ranks, works = Ranks([1, 1]), [directories(key) for key in (1, 2, 3)]
    first, second = (ranks.send(work, BUDGET)[1] for work in works[:2])
    assert ranks.sent[second.number] is second
    assert ranks.end(second.number, DONE) == (works[1], second.budget, DONE)
    third = ranks.send(works[2], BUDGET)[1]
    assert third.number != first.number
    assert ranks.end(first.number, None) == (works[0], first.budget, None)


def test_a_slice_is_as_long_as_the_first_rank_needs_to_keep_up_with_those_under_way() -> None:
    ranks = Ranks([1] * 2000)
    seconds = [ranks.send(directories(), SliceBudget())[1].budget.seconds for _ in range(2000)]
    assert seconds == [least_slice_s(n) for n in range(1, 2001)]
    assert (seconds[0], seconds[-1]) == (0.25, 4.0)


def test_a_paced_slice_is_as_short_as_its_pace_says() -> None:
    budget = SliceBudget(0.01, n_entries=10)
    assert Ranks([1] * 2000).send(directories(), budget)[1].budget == budget
