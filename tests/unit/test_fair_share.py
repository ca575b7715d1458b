"""No user takes the last: whatever others have, one with none gets some, root too; one with most is refused first."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fusefs.core.metadata_cache import Attributes
from fusefs.mount.native._core import Tables, max_handles_of_user

N = 6000
FIRST = 16
ROOT = 0
NEWCOMERS = range(3000, 3015)
UIDS = (ROOT, 1000, 1001, 1002, 65_535, 200_000)
HOGS = st.lists(st.integers(1000, 1020), min_size=1, max_size=20, unique=True)


def shares_of(n: int, *, is_for_all: bool = True) -> Tables:
    """Of so many handles."""
    return Tables((1, b""), Attributes(1, 1, 0o040755, *[0] * 11), n_handles=n, is_for_all=is_for_all)


def take(shares: Tables, uid: int, n: int = N) -> int:
    """How many of n that it asks for a uid gets."""
    got = 0
    while got < n and shares.make_room(uid):
        shares.add_to_share(uid, 1)
        got += 1
    return got


def take_in_turns(shares: Tables, uids: Iterable[int]) -> None:
    """All that each gets, one after the other."""
    asking = list(uids)
    while asking:
        asking = [uid for uid in asking if take(shares, uid, 1)]


def assert_some_are_left(shares: Tables) -> None:
    """For newcomers and for root."""
    assert [take(shares, uid, FIRST) for uid in NEWCOMERS] == [FIRST] * len(NEWCOMERS)
    assert take(shares, ROOT, N // 32) == N // 32


@given(HOGS)
def test_who_comes_after_any_who_take_all_they_get_has_his_first_ones(hogs: list[int]) -> None:
    shares = shares_of(N)
    for uid in hogs:
        take(shares, uid)
    assert_some_are_left(shares)


@given(HOGS)
def test_the_same_after_many_who_take_it_in_turns(hogs: list[int]) -> None:
    shares = shares_of(N)
    take_in_turns(shares, hogs)
    assert_some_are_left(shares)


def test_root_who_takes_all_he_gets_leaves_some() -> None:
    shares = shares_of(N)
    take(shares, ROOT)
    assert [take(shares, uid, FIRST) for uid in NEWCOMERS] == [FIRST] * len(NEWCOMERS)


@pytest.mark.parametrize("n", [16, 40, 176, 1000, N, 522_224])
def test_one_who_is_alone_gets_as_many_as_is_told_and_that_is_most(n: int) -> None:
    shares = shares_of(n)
    most = max_handles_of_user(n)
    if n <= N:
        assert abs(take(shares, 1000) - most) <= 1
    assert most > 0.7 * n


def test_the_only_user_may_have_them_all() -> None:
    shares = shares_of(N, is_for_all=False)
    assert take(shares, 1000) == N


def test_who_has_most_gets_none_of_what_he_gives_back_while_another_does() -> None:
    shares = shares_of(N)
    much, little = take(shares, 1000), take(shares, 1001)
    assert much > little > FIRST
    for _ in range(100):
        shares.add_to_share(1000, -1)
    assert not shares.make_room(1000)
    assert take(shares, 1001)


class Clients(RuleBasedStateMachine):
    """They take and give back, in any order and number."""

    uids = st.sampled_from(UIDS)
    numbers = st.sampled_from([1, 10, 300, N])

    def __init__(self) -> None:
        super().__init__()
        self.shares = shares_of(N)
        self.has = dict.fromkeys(UIDS, 0)

    @rule(uid=uids, n=numbers)
    def want(self, uid: int, n: int) -> None:
        self.has[uid] += take(self.shares, uid, n)

    @rule(uid=uids, n=numbers)
    def close(self, uid: int, n: int) -> None:
        for _ in range(min(n, self.has[uid])):
            self.shares.add_to_share(uid, -1)
            self.has[uid] -= 1

    @invariant()
    def no_more_are_given_than_there_are(self) -> None:
        assert sum(self.has.values()) <= N

    @invariant()
    def first_ones_are_for_everybody(self) -> None:
        assert self.shares.make_room(4711)

    @invariant()
    def root_has_his_part(self) -> None:
        assert self.has[ROOT] >= N // 32 or self.shares.make_room(ROOT)

    @invariant()
    def who_has_more_is_refused_before_who_has_less(self) -> None:
        may = [self.shares.make_room(uid) for uid in sorted(UIDS[1:], key=self.has.__getitem__)]
        assert may == sorted(may, reverse=True)


TestClients = Clients.TestCase
