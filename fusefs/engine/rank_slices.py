"""Slices among the ranks of a job, and within each: who has which, who lacks work, and what is told when.

Two levels of plans. The first rank's hands slices out, as to workers; one that may have much in it is shared: done by
all the threads of its rank, by a plan of its own (SharedSlice), for as long as it takes. The first hears how it goes,
and asks for what is left of it when a rank lacks work, or when it is to stop. So the first plan has to do with ranks,
and not with threads. Pure: what is told is carried by engine/mpi_ranks.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple

from fusefs.core.slice_budget import SliceBudget
from fusefs.engine.slice_runners import Done, EndedSlice, SharesSlices, SharedSlice, Work

_SLICE_S = 0.25
"""Of a slice, at least: beside that its messages, and its directory opened anew, cost little. With 50 ms 16 ranks of 4
threads on a server of 10 ms a call had half the rate on two cores (measured: bench/nodes.py).
"""
PLANNING_S = 0.0004
"""Of the first rank for a slice, about twice: slices are as much longer as there are workers, so that it keeps up."""


class UnseenHere(Exception):
    """A rank does not find a directory on its mount: the first rank is to look."""


class GivenSlice(NamedTuple, Generic[Work]):
    """A slice for a rank; or a part of it for one of its threads, which has its number. is_shared: by all threads"""

    number: int
    work: Work
    budget: SliceBudget
    is_shared: bool = False


class LeftSlice(NamedTuple):
    """What is left of a slice is wanted, soon."""

    number: int


class ToldSlice(NamedTuple, Generic[Done]):
    """What a rank says of a slice.

    outcome    of what was done since it was told of last, perhaps not to its end
    is_unseen  nothing was done: the rank does not see the directory
    problem    it ended by a mistake of ours
    lacks      half of the rank's threads have nothing to do
    """

    number: int
    outcome: Done | None = None
    is_unseen: bool = False
    problem: str = ""
    lacks: bool = False


def least_slice_s(n_workers: int) -> float:
    """Seconds that a slice takes at least, so that the first rank keeps up with so many workers."""
    return max(_SLICE_S, PLANNING_S * n_workers)


class SlicesOfRanks(Generic[Work, Done]):
    """Which rank has which slices; of the first."""

    def __init__(self, n_slices: Sequence[int], may_share: Callable[[Work], bool]) -> None:
        """None has any.

        n_slices   that each may have
        may_share  whether all threads of a rank may be at a slice
        """
        self._most = n_slices
        self._may_share = may_share
        self._least_s = least_slice_s(sum(n_slices))
        self._n_had = [0] * len(n_slices)
        self._having = [dict.fromkeys(range(len(n_slices))), *({} for _ in range(max(n_slices) - 1))]
        """Ranks by how many they have, those without room left out."""
        self._lacking = dict.fromkeys(range(len(n_slices)))
        self._given: dict[int, tuple[int, GivenSlice[Work]]] = {}
        self._n_given = 0
        self._begun_s: dict[int, float] = {}
        """Of shared slices that were not asked for: since when they are given, the oldest first."""
        self._asked = set[int]()

    def give(self, work: Work, budget: SliceBudget, now_s: float) -> tuple[int, GivenSlice[Work]]:
        """A slice, and which rank it is for: one of those that have the fewest.

        So those that share a directory are on as many machines as there are.
        """
        rank = next(rank for ranks in self._having for rank in ranks)
        self._has(rank, self._n_had[rank] + 1)
        self._lacking.pop(rank, None)
        if not budget.is_paced():
            least_s = _SLICE_S if self._lacking else self._least_s
            budget = budget._replace(seconds=max(budget.seconds, least_s))
        given = GivenSlice(self._n_given, work, budget, not budget.is_paced() and self._may_share(work))
        self._n_given += 1
        self._given[given.number] = rank, given
        if given.is_shared:
            self._begun_s[given.number] = now_s
        return rank, given

    def rank_of(self, number: int) -> int:
        """Which one has a slice."""
        return self._given[number][0]

    def unseen(self, told: ToldSlice[Done], now_s: float) -> GivenSlice[Work]:
        """A slice that its rank does not see, which is the first rank's now."""
        rank, given = self._given[told.number]
        self._has(rank, self._n_had[rank] - 1)
        self._hear(rank, lacks=told.lacks)
        self._has(0, self._n_had[0] + 1)
        self._given[given.number] = 0, given
        if given.is_shared:
            self._asked.discard(given.number)
            self._begun_s.pop(given.number, None)
            self._begun_s[given.number] = now_s
        return given

    def told(self, told: ToldSlice[Done]) -> EndedSlice[Work, Done]:
        """Take in what a rank did of a slice."""
        rank, given = self._given[told.number]
        if told.outcome is None or not told.outcome.goes_on:
            del self._given[told.number]
            self._begun_s.pop(told.number, None)
            self._asked.discard(told.number)
            self._has(rank, self._n_had[rank] - 1)
        self._hear(rank, lacks=told.lacks)
        return EndedSlice(given.work, given.budget, told.outcome)

    def _hear(self, rank: int, *, lacks: bool) -> None:
        if lacks or not self._n_had[rank]:
            self._lacking[rank] = None
        else:
            self._lacking.pop(rank, None)

    def _has(self, rank: int, n: int) -> None:
        if self._n_had[rank] < self._most[rank]:
            del self._having[self._n_had[rank]][rank]
        if n < self._most[rank]:
            self._having[n][rank] = None
        self._n_had[rank] = n

    def to_be_left(self, now_s: float, *, each: bool) -> list[tuple[int, LeftSlice]]:
        """Slices of which the rest is wanted, each with its rank: as many as there are ranks that lack work.

        The oldest of those that are shared, once they were worked at for a slice's time: told of or not, as with many
        ranks one is told of seldom.

        each  all of them: it is to stop
        """
        n = len(self._begun_s) if each else len(self._lacking) - len(self._asked)
        found = list[int]()
        for number, begun_s in self._begun_s.items():
            if len(found) >= n or not (each or now_s - begun_s >= _SLICE_S):
                break
            found.append(number)
        for number in found:
            del self._begun_s[number]
        self._asked.update(found)
        return [(self.rank_of(number), LeftSlice(number)) for number in found]


@dataclass(slots=True)
class _Shared(Generic[Work, Done]):
    """A slice that a rank's threads share.

    tells_s    when it is told of next
    is_left    no more of it is begun: what is left goes back
    is_unseen  a thread did not find its directory
    """

    given: GivenSlice[Work]
    plan: SharedSlice[Work, Done]
    tells_s: float
    is_left: bool = False
    is_unseen: bool = False
    has_begun: bool = False
    n_running: int = 0


class SlicesOfThreads(Generic[Work, Done]):
    """What each thread of a rank does next, and what the first rank is to be told."""

    def __init__(self, rank: SharesSlices[Work, Done]) -> None:
        """There is nothing to do."""
        self._rank = rank
        self._n_threads = rank.strategy.n_workers
        self._n_running = 0
        self._alone = deque[GivenSlice[Work]]()
        self._shared: dict[int, _Shared[Work, Done]] = {}
        self._told = list[ToldSlice[Done]]()

    def is_busy(self) -> bool:
        """Whether each thread has something to do."""
        return self._n_running == self._n_threads

    def take(self, message: GivenSlice[Work] | LeftSlice, now_s: float) -> None:
        """What the first rank says: a slice, or to end one soon, unless it is over."""
        if isinstance(message, LeftSlice):
            shared = self._shared.get(message.number)
            if shared is not None:
                shared.is_left = True
                self._look(shared, now_s)
        elif message.is_shared:
            plan = self._rank.shared(message.work)
            self._shared[message.number] = _Shared(message, plan, now_s + message.budget.seconds)
        else:
            self._alone.append(message)

    def next(self) -> GivenSlice[Work] | None:
        """Something for a thread; None if there is nothing at the moment, or no thread."""
        if self.is_busy():
            return None
        found = self._alone.popleft() if self._alone else self._part()
        self._n_running += found is not None
        return found

    def _part(self) -> GivenSlice[Work] | None:
        """Of the oldest slice; where others are at the same directory only if there is nothing else in any."""
        for may_crowd in (False, True):
            for number, shared in self._shared.items():
                if shared.is_left or (shared.plan.is_crowded() and not may_crowd):
                    continue
                if (work := shared.plan.next()) is not None:
                    shared.n_running += 1
                    return GivenSlice(number, work, SliceBudget(_SLICE_S))
        return None

    def done(self, part: GivenSlice[Work], outcome: Done, now_s: float) -> None:
        """A thread did that."""
        self._n_running -= 1
        shared = self._shared.get(part.number)
        if shared is None:
            self._told.append(ToldSlice(part.number, outcome))
            return
        shared.n_running -= 1
        shared.has_begun = True
        shared.plan.done(part.work, outcome)
        self._look(shared, now_s)

    def failed(self, part: GivenSlice[Work], error: BaseException, now_s: float) -> None:
        """A thread did nothing."""
        self._n_running -= 1
        shared = self._shared.get(part.number)
        if not isinstance(error, UnseenHere):
            self._told.append(ToldSlice(part.number, problem=repr(error)))
        elif shared is None:
            self._told.append(ToldSlice(part.number, is_unseen=True))
        else:
            # Of a part that is seen by nobody the first rank is told when that is all of a slice, which it will be.
            shared.n_running -= 1
            shared.plan.lost(part.work)
            shared.is_left = shared.is_unseen = True
            self._look(shared, now_s)

    def _look(self, shared: _Shared[Work, Done], now_s: float) -> None:
        """Tell of a shared slice if it is over, or if it is time to."""
        number, is_over = shared.given.number, not shared.n_running and (shared.is_left or shared.plan.is_dry())
        if is_over:
            del self._shared[number]
        elif now_s < shared.tells_s:
            return
        shared.tells_s = now_s + shared.given.budget.seconds
        is_unseen = is_over and shared.is_unseen and not shared.has_begun
        outcome = None if is_unseen else shared.plan.told(goes_on=not is_over)
        self._told.append(ToldSlice(number, outcome, is_unseen))

    def told(self) -> list[ToldSlice[Done]]:
        """What there is to tell; asked when threads have what they can have."""
        if not self._told:
            return []
        told, self._told = self._told, []
        lacks = 2 * self._n_running <= self._n_threads
        return [one._replace(lacks=lacks) for one in told]
