"""What is due next: soonest first, bounded, and honest about what was dropped."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fusefs.service.messages import DueContainer
from fusefs.service.user_state import DueQueue

MOST = 5
ids = st.sampled_from([f"id{n}" for n in range(12)])
times = st.integers(0, 20).map(float)


def test_the_longest_overdue_is_taken_first() -> None:
    upcoming = DueQueue(10)
    for identifier, at_s in (("b", 2.0), ("c", 3.0), ("a", 1.0), ("d", 9.0)):
        upcoming.add(DueContainer(identifier, 5), at_s)
    assert upcoming.n_due(3.0) == 3
    assert upcoming.take(3.0, 2) == [DueContainer("a", 5), DueContainer("b", 5)]
    assert upcoming.take(3.0, 2) == [DueContainer("c", 5)]
    assert upcoming.next_at_s() == 9.0


def test_another_time_takes_the_place_of_the_old_one() -> None:
    upcoming = DueQueue(10)
    upcoming.add(DueContainer("a", None), 1.0)
    upcoming.add(DueContainer("a", None), 5.0)
    assert (len(upcoming), upcoming.n_due(4.0), upcoming.next_at_s()) == (1, 0, 5.0)


def test_whoever_took_all_that_was_kept_must_look_again() -> None:
    upcoming = DueQueue(2)
    for n in range(3):
        upcoming.add(DueContainer(f"id{n}", None), float(n))
    assert upcoming.is_cut()
    assert not upcoming.must_look()
    assert upcoming.take(10.0, 5) == [DueContainer("id0", None), DueContainer("id1", None)]
    assert upcoming.must_look()
    upcoming.clear()
    assert not upcoming.must_look()


@given(st.dictionaries(ids, times, max_size=12))
def test_what_is_kept_is_what_comes_soonest(added: dict[str, float]) -> None:
    upcoming = DueQueue(MOST)
    for identifier, at_s in added.items():
        upcoming.add(DueContainer(identifier, 5), at_s)
    soonest = sorted((at_s, identifier) for identifier, at_s in added.items())[:MOST]
    assert upcoming.is_cut() == (len(added) > MOST)
    assert upcoming.take(100.0, 100) == [DueContainer(identifier, 5) for _at_s, identifier in soonest]


class Machine(RuleBasedStateMachine):
    """Against a plain dictionary, as long as nothing has to be dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.upcoming = DueQueue(100)
        self.model: dict[str, float] = {}

    @rule(identifier=ids, at_s=times)
    def add(self, identifier: str, at_s: float) -> None:
        self.upcoming.add(DueContainer(identifier, 5), at_s)
        self.model[identifier] = at_s

    @rule(identifier=ids)
    def remove(self, identifier: str) -> None:
        self.upcoming.remove(identifier)
        self.model.pop(identifier, None)

    @precondition(lambda self: self.model)
    @rule(now_s=times, most=st.integers(1, 4))
    def take(self, now_s: float, most: int) -> None:
        wanted = sorted((at_s, one) for one, at_s in self.model.items() if at_s <= now_s)[:most]
        assert self.upcoming.take(now_s, most) == [DueContainer(one, 5) for _at_s, one in wanted]
        for _at_s, one in wanted:
            del self.model[one]

    @invariant()
    def same(self) -> None:
        assert len(self.upcoming) == len(self.model)
        assert self.upcoming.next_at_s() == min(self.model.values(), default=math.inf)
        for now_s in (0.0, 7.0, 20.0):
            assert self.upcoming.n_due(now_s) == sum(at_s <= now_s for at_s in self.model.values())
        assert not self.upcoming.is_cut()


TestMachine = Machine.TestCase
