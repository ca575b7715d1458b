"""Identities: what proves that two things are one incarnation of one inode, and what proves nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fusefs.core.identity import Identity, Likelihood, compare

IDENTITY = st.builds(
    Identity, st.sampled_from(["", "1:aa", "1:bb"]), st.sampled_from([0, 1, 2]), st.sampled_from([0, 5, 6])
)
MAYBE = st.none() | IDENTITY


@given(MAYBE, MAYBE)
def test_comparison_is_symmetric(a: Identity | None, b: Identity | None) -> None:
    assert compare(a, b) is compare(b, a)


@given(IDENTITY)
def test_nothing_is_other_than_itself(a: Identity) -> None:
    assert compare(a, a) is not Likelihood.OTHER


@given(MAYBE)
def test_nothing_is_known_of_what_has_no_identity(a: Identity | None) -> None:
    assert compare(a, None) is Likelihood.UNKNOWN


@given(IDENTITY, IDENTITY)
def test_sameness_is_claimed_only_by_handle_or_birth_time(a: Identity, b: Identity) -> None:
    if compare(a, b) is Likelihood.SAME:
        by_handle = a.handle == b.handle != ""
        assert by_handle or (a.ino, a.btime_ns) == (b.ino, b.btime_ns) != (a.ino, 0)


def test_handles_decide_whatever_the_rest_says() -> None:
    assert compare(Identity("1:aa", 1, 5), Identity("1:aa", 2, 6)) is Likelihood.SAME
    assert compare(Identity("1:aa", 1, 5), Identity("1:bb", 1, 5)) is Likelihood.OTHER


def test_number_and_birth_time_prove_sameness() -> None:
    assert compare(Identity("", 1, 5), Identity("1:aa", 1, 5)) is Likelihood.SAME


def test_reused_number_is_told_by_its_birth_time() -> None:
    assert compare(Identity("", 1, 5), Identity("", 1, 6)) is Likelihood.OTHER


def test_equal_number_alone_proves_nothing() -> None:
    assert compare(Identity("", 1, 0), Identity("", 1, 5)) is Likelihood.UNKNOWN


def test_other_number_proves_the_contrary() -> None:
    assert compare(Identity("", 1, 0), Identity("", 2, 0)) is Likelihood.OTHER


def test_number_that_does_not_last_proves_nothing() -> None:
    assert compare(Identity("", 0, 0), Identity("", 2, 0)) is Likelihood.UNKNOWN
