"""Two levels of plans: the first rank's slices, and what the threads of each rank make of them."""

from __future__ import annotations

import random

from hypothesis import example, given
from hypothesis import strategies as st

from fusefs.core.pacing import SliceBudget
from fusefs.core.slices import RemovalSliceResult, Slice, SlicePlan, SliceWork, UnfinishedDirectory
from fusefs.engine.mpi_ranks import (
    GivenSlice,
    LeftSlice,
    SlicesOfRanks,
    SlicesOfThreads,
    ToldSlice,
    UnseenHere,
    least_slice_s,
)
from fusefs.reaper.remove_by_ranks import SharedRemoval
from tests.support.simulated_ranks import BUDGET, ModelJob, ModelRank, strategy_of
from tests.unit.test_slices import ROOT_FD, Model, leaves, n_stuck, only_stuck, trees

GOES_ON = RemovalSliceResult(0, 0, (), 0, SliceWork(), goes_on=True)
DONE = RemovalSliceResult(0, 0, (), 0, SliceWork())
SOON_S, LONG_S = 0.2, 0.25
Ranks = SlicesOfRanks[Slice, RemovalSliceResult]


def ranks_of(n_slices: list[int]) -> Ranks:
    return Ranks(n_slices, SharedRemoval.takes)


def rank_of(n_threads: int) -> ModelRank[Slice, RemovalSliceResult]:
    return ModelRank(strategy_of(n_threads), SharedRemoval)


def threads_of(n_threads: int) -> SlicesOfThreads[Slice, RemovalSliceResult]:
    return SlicesOfThreads(rank_of(n_threads))


def directories(key: int = 0, n: int = 4) -> Slice:
    return Slice(key, -1, b"top", SliceWork(subdirs=[f"d{number}" for number in range(n)]), 8, is_hoisted=False)


def names(n: int) -> Slice:
    return directories()._replace(work=SliceWork(names=[f"f{number}" for number in range(n)]))


STUCK_IN_TWO: dict[str, object] = {
    **dict.fromkeys("abcd"),
    "e": dict.fromkeys("ab"),
    "f": dict.fromkeys([*"abcde", "stuck"]),
    "g": {},
    "h": dict.fromkeys(["a", "stuck"]),
}


@example(57550, STUCK_IN_TWO, 1, 1, 3).via("a slice's directory was listed again, without what others failed at")
@given(st.integers(0, 2**32), trees, st.integers(1, 3), st.integers(1, 3), st.integers(1, 4))
def test_whatever_is_left_when_and_to_whom_all_goes_and_is_counted_once(
    seed: int, tree: dict[str, object], n_ranks: int, n_threads: int, window: int
) -> None:
    tree = {"tree": tree}
    stuck, total = n_stuck(tree), leaves(tree)
    model, chance = Model(tree, window), random.Random(seed)
    plan = SlicePlan(n_ranks * n_threads, splits_names=True, least_share=1, n_machines=n_ranks)
    plan.add(ROOT_FD, b"", SliceWork(names=["tree"]))
    ranks = [rank_of(n_threads) for _ in range(n_ranks)]

    def run(part: Slice) -> RemovalSliceResult:
        return model.run(part, chance.choice((1, 2, 30)))

    ModelJob(plan, plan.done, ranks, SharedRemoval.takes, run, chance).run()
    assert plan.is_dry()
    assert only_stuck(tree)
    assert len(set(model.unlinked)) == len(model.unlinked)
    report = plan.report(paced=False, stopped=False)
    assert (report.n_failed, report.removed) == (stuck, total - leaves(tree))


# Who gets what


def test_those_with_the_fewest_slices_get_the_next() -> None:
    ranks = ranks_of([2, 1, 2])
    assert [ranks.give(directories(), BUDGET, 0.0)[0] for _ in range(5)] == [0, 1, 2, 0, 2]
    ranks.told(ToldSlice(1, DONE))
    assert ranks.give(directories(), BUDGET, 0.0)[0] == 1


def test_a_rank_that_lacks_work_has_another_asked_for_its_oldest_slice_once() -> None:
    ranks = ranks_of([4, 4, 4])
    _rank, first = ranks.give(directories(), BUDGET, 0.0)
    ranks.give(directories(), BUDGET, 0.1)
    for now_s in (LONG_S, 2 * LONG_S):
        asked = [(rank, left.number) for rank, left in ranks.to_be_left(now_s, each=False)]
        assert asked == ([(0, first.number)] if now_s == LONG_S else [])
        ranks.told(ToldSlice(first.number, GOES_ON))


def test_a_slice_is_asked_for_after_a_slices_time_whether_it_was_told_of_or_not() -> None:
    ranks = ranks_of([4, 4, 4])
    told, untold = (ranks.give(directories(), BUDGET, 0.0)[1] for _ in range(2))
    ranks.told(ToldSlice(told.number, GOES_ON, lacks=True))
    assert ranks.to_be_left(SOON_S, each=False) == []
    assert [left.number for _rank, left in ranks.to_be_left(LONG_S, each=False)] == [told.number, untold.number]


def test_what_one_thread_does_is_not_asked_for() -> None:
    ranks = ranks_of([4, 4])
    ranks.give(names(9), BUDGET, 0.0)
    ranks.give(directories()._replace(max_depth=0), BUDGET, 0.0)
    ranks.give(directories(), BUDGET._replace(n_entries=10), 0.0)
    assert ranks.to_be_left(9.0, each=True) == []


def test_nothing_is_asked_for_while_each_rank_has_enough_to_do() -> None:
    ranks = ranks_of([4, 4])
    for _ in range(2):
        ranks.give(directories(), BUDGET, 0.0)
    assert ranks.to_be_left(9.0, each=False) == []


def test_a_stop_asks_for_all_at_once() -> None:
    ranks = ranks_of([4, 4])
    for _ in range(3):
        ranks.give(directories(), BUDGET, 0.0)
    assert [(rank, left.number) for rank, left in ranks.to_be_left(0.0, each=True)] == [(0, 0), (1, 1), (0, 2)]


def test_half_a_ranks_threads_without_work_are_a_lack() -> None:
    ranks = ranks_of([4, 4])
    given = [ranks.give(directories(), BUDGET, 0.0)[1] for _ in range(2)]
    ranks.told(ToldSlice(given[0].number, GOES_ON))
    ranks.told(ToldSlice(given[1].number, GOES_ON, lacks=True))
    assert [left.number for _rank, left in ranks.to_be_left(LONG_S, each=False)] == [given[0].number]


def test_what_a_rank_does_not_see_is_the_firsts_and_asked_of_it() -> None:
    ranks = ranks_of([1, 1])
    ranks.give(directories(1), BUDGET, 0.0)
    _rank, given = ranks.give(directories(2), BUDGET, 0.0)
    ((_rank, _left), (rank, left)) = ranks.to_be_left(0.0, each=True)
    assert (rank, left.number) == (1, given.number)
    assert ranks.unseen(ToldSlice(given.number, is_unseen=True), 0.1) == given
    assert ranks.to_be_left(0.2, each=True) == [(0, LeftSlice(given.number))]
    assert ranks.give(directories(3), BUDGET, 0.3)[0] == 1
    assert ranks.told(ToldSlice(given.number, DONE)).work == given.work


def test_slices_are_told_of_soon_while_a_rank_has_none_and_as_often_as_the_first_keeps_up_with_then() -> None:
    ranks = ranks_of([1] * 2000)
    seconds = [ranks.give(directories(), SliceBudget(), 0.0)[1].budget.seconds for _ in range(2000)]
    assert seconds == [least_slice_s(1)] * 1999 + [least_slice_s(2000)]


# What a rank does


def test_all_threads_of_a_rank_are_at_a_slice_of_directories_and_one_at_others() -> None:
    threads = threads_of(4)
    threads.take(GivenSlice(0, directories(n=8), BUDGET, is_shared=True), 0.0)
    parts = [threads.next() for _ in range(5)]
    assert [part and part.number for part in parts] == [0, 0, 0, 0, None]
    threads = threads_of(4)
    threads.take(GivenSlice(1, names(2), BUDGET), 0.0)
    threads.take(GivenSlice(2, directories(), BUDGET), 0.0)
    assert [part and part.number for part in (threads.next(), threads.next(), threads.next())] == [1, 2, None]


def test_threads_begin_another_slice_before_they_crowd_in_a_directory() -> None:
    threads = threads_of(4)
    for number in range(2):
        threads.take(GivenSlice(number, directories(n=1), BUDGET, is_shared=True), 0.0)
    first = threads.next()
    assert first is not None
    assert first.number == 0
    begun = SliceWork(names=[f"f{number}" for number in range(40)])
    threads.done(first, DONE._replace(left=(UnfinishedDirectory("d0", -1, begun),)), 0.0)
    parts = [threads.next() for _ in range(4)]
    assert [part and (part.number, len(part.work.work.subdirs)) for part in parts] == [(0, 0), (1, 1), (0, 0), (0, 0)]


def test_a_slice_that_is_asked_for_before_it_is_begun_comes_back_whole() -> None:
    threads = threads_of(1)
    threads.take(GivenSlice(7, directories(), BUDGET, is_shared=True), 0.0)
    threads.take(LeftSlice(7), 0.0)
    (told,) = threads.told()
    assert told.outcome is not None
    assert (told.is_unseen, told.outcome.rest.subdirs, told.outcome.goes_on) == (
        False,
        directories().work.subdirs,
        False,
    )


def test_a_directory_that_a_rank_does_not_see_is_the_firsts_once_it_is_all_of_a_slice() -> None:
    threads = threads_of(2)
    threads.take(GivenSlice(0, directories(), BUDGET, is_shared=True), 0.0)
    one, other = threads.next(), threads.next()
    assert one is not None
    assert other is not None
    threads.done(one, DONE._replace(removed=1), 0.0)
    threads.failed(other, UnseenHere(), 0.0)
    (told,) = threads.told()
    assert told.outcome is not None
    assert (told.is_unseen, told.outcome.removed, told.outcome.rest.subdirs) == (False, 1, ["d0", "d1"])
    threads.take(GivenSlice(1, directories(n=1), BUDGET, is_shared=True), 0.0)
    again = threads.next()
    assert again is not None
    threads.failed(again, UnseenHere(), 0.0)
    assert [(told.number, told.is_unseen) for told in threads.told()] == [(1, True)]
