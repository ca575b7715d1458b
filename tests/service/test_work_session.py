"""Users share a volume's time, whatever each of them has to do."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from fusefs.service.work_session import FairTurns, order_of_node


def test_two_who_always_want_share_evenly() -> None:
    turns, had = FairTurns(), Counter[int]()
    for _ in range(100):
        uid = turns.next([1000, 1001])
        had[uid] += 1
        turns.charge(uid, 0.5)
    assert had == {1000: 50, 1001: 50}


def test_whoever_comes_anew_is_next() -> None:
    turns = FairTurns()
    for _ in range(1000):
        turns.charge(turns.next([1000]), 1.0)
    assert turns.next([1000, 1001]) == 1001


def test_nobody_saves_up_time_by_staying_away() -> None:
    turns = FairTurns()
    turns.charge(turns.next([1000, 1001]), 1.0)
    turns.charge(turns.next([1000, 1001]), 1.0)
    for _ in range(100):
        turns.charge(turns.next([1000]), 1.0)
    had = Counter[int]()
    for _ in range(20):
        uid = turns.next([1000, 1001])
        had[uid] += 1
        turns.charge(uid, 1.0)
    assert abs(had[1000] - had[1001]) <= 1


@given(st.lists(st.sets(st.integers(0, 4), min_size=1), min_size=1, max_size=200))
def test_of_equal_turns_nobody_who_wants_is_passed_over_by_the_same_one_twice(wanting: list[set[int]]) -> None:
    turns, since = FairTurns(), Counter[int]()
    for others in wanting:
        uid = turns.next([99, *others])
        if uid == 99:
            since.clear()
        else:
            since[uid] += 1
            assert since[uid] <= 2
        turns.charge(uid, 1.0)


def test_who_is_many_users_has_one_persons_share_and_each_of_them_some_of_it() -> None:
    many = range(100_000, 100_100)
    turns, had = FairTurns(lambda uid: 1002 if uid >= 100_000 else uid), Counter[int]()
    for _ in range(400):
        uid = turns.next([*many, 1001])
        had[uid] += 1
        turns.charge(uid, 0.5)
    assert had[1001] == 200
    assert {had[uid] for uid in many} == {2}


def test_who_comes_anew_waits_for_one_turn_of_who_is_many_users() -> None:
    turns = FairTurns(lambda uid: 1002 if uid < 200_000 else uid)
    for _ in range(3):
        turns.charge(turns.next(range(100_000, 100_100)), 1.0)
    assert turns.next([*range(100_000, 100_100), 200_001]) == 200_001


def test_nodes_begin_with_different_users_and_give_each_as_much() -> None:
    uids, first = range(1000, 1008), set()
    for number in range(20):
        turns, had = FairTurns(order=order_of_node(b"node%d" % number)), Counter[int]()
        first.add(turns.next(uids))
        for _ in range(80):
            uid = turns.next(uids)
            had[uid] += 1
            turns.charge(uid, 0.5)
        assert set(had.values()) == {10}
    assert len(first) > 4


def test_a_nodes_order_is_its_own_every_time() -> None:
    one, same, other = (order_of_node(name) for name in (b"alpha", b"alpha", b"beta"))
    assert sorted(range(50), key=one) == sorted(range(50), key=same) != sorted(range(50), key=other)
