"""Identities: what proves that two things are one incarnation of one inode, and what proves nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.core.identity import Identity, IdentityMatch, compare, is_in_snapshot

INODE, GENERATION = "0101000000000000", "09000000"  # 257
TOP, SNAPSHOT = "0500000000000000", "0001000000000000"
BTRFS = f"77:{INODE}{TOP}{GENERATION}"
SNAPPED = f"77:{INODE}{SNAPSHOT}{GENERATION}"
IDENTITY = st.builds(
    Identity,
    st.sampled_from(["", "1:aa", "1:bb", BTRFS, SNAPPED]),
    st.sampled_from([0, 1, 2, 256]),
    st.sampled_from([0, 5, 6]),
)
MAYBE = st.none() | IDENTITY


@given(MAYBE, MAYBE)
def test_comparison_is_symmetric(a: Identity | None, b: Identity | None) -> None:
    assert compare(a, b) is compare(b, a)


@given(IDENTITY)
def test_nothing_is_other_than_itself(a: Identity) -> None:
    assert compare(a, a) is not IdentityMatch.OTHER


@given(MAYBE)
def test_nothing_is_known_of_what_has_no_identity(a: Identity | None) -> None:
    assert compare(a, None) is IdentityMatch.UNKNOWN


@given(IDENTITY, IDENTITY)
def test_sameness_is_claimed_only_by_handle_or_birth_time(a: Identity, b: Identity) -> None:
    if compare(a, b) is IdentityMatch.SAME:
        by_handle = a.handle == b.handle != ""
        assert by_handle or (a.ino, a.btime_ns) == (b.ino, b.btime_ns) != (a.ino, 0)


def test_handles_decide_whatever_the_rest_says() -> None:
    assert compare(Identity("1:aa", 1, 5), Identity("1:aa", 2, 6)) is IdentityMatch.SAME
    assert compare(Identity("1:aa", 1, 5), Identity("1:bb", 1, 5)) is IdentityMatch.OTHER


def test_reused_number_is_told_by_its_birth_time() -> None:
    assert compare(Identity("", 1, 5), Identity("", 1, 6)) is IdentityMatch.OTHER


def test_equal_number_alone_proves_nothing() -> None:
    assert compare(Identity("", 1, 0), Identity("", 1, 5)) is IdentityMatch.UNKNOWN


def test_other_number_proves_the_contrary() -> None:
    assert compare(Identity("", 1, 0), Identity("", 2, 0)) is IdentityMatch.OTHER


SAME, OTHER, UNKNOWN = IdentityMatch.SAME, IdentityMatch.OTHER, IdentityMatch.UNKNOWN
LATER = f"77:{INODE}{SNAPSHOT}0a000000"
NEIGHBOUR = f"77:0201000000000000{SNAPSHOT}{GENERATION}"
WITH_PARENT = f"78:{INODE}{SNAPSHOT}{GENERATION}" + INODE + GENERATION
NOT_BTRFS = (f"1:{INODE}{TOP}{GENERATION}", f"1:{INODE}{SNAPSHOT}{GENERATION}")


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (Identity(BTRFS, 257, 5), Identity(BTRFS, 257, 5), SAME),
        (Identity(BTRFS, 257, 5), Identity(SNAPPED, 257, 5), SAME),  # a snapshot of its subvolume, or a rollback to it
        (Identity(BTRFS, 257, 5), Identity(SNAPPED, 257, 6), OTHER),  # made by the same transaction in another one
        (Identity(BTRFS, 257, 0), Identity(SNAPPED, 257, 5), UNKNOWN),
        (Identity(BTRFS, 257, 0), Identity(SNAPPED, 257, 0), UNKNOWN),
        (Identity(BTRFS, 0, 5), Identity(SNAPPED, 257, 5), UNKNOWN),
        (Identity(BTRFS, 257, 5), Identity(LATER, 257, 5), OTHER),  # the number was given again
        (Identity(BTRFS, 257, 5), Identity(NEIGHBOUR, 258, 5), OTHER),
        (Identity(BTRFS, 257, 5), Identity(WITH_PARENT, 257, 5), OTHER),
        (Identity(BTRFS, 256, 5), Identity(SNAPPED, 256, 5), UNKNOWN),  # subvolumes themselves
        (Identity(NOT_BTRFS[0], 257, 5), Identity(NOT_BTRFS[1], 257, 5), OTHER),
        (Identity("77:", 257, 5), Identity(SNAPPED, 257, 5), OTHER),
        (Identity("mark:aa", 0, 0), Identity("mark:aa", 0, 0), SAME),
        (Identity("mark:aa", 0, 0), Identity("mark:bb", 0, 0), OTHER),
        (Identity("mark:aa", 0, 0), Identity("", 0, 0), UNKNOWN),  # attributes get lost
        (Identity(BTRFS, 257, 5), Identity("", 257, 5), SAME),  # a record from where handles are not given
    ],
)
def test_a_snapshots_inode_is_told_by_number_generation_and_birth_time_and_a_marked_one_by_its_mark(
    a: Identity, b: Identity, expected: IdentityMatch
) -> None:
    assert (compare(a, b), compare(b, a)) == (expected, expected)


def test_a_snapshots_inode_and_its_sources_can_be_told_apart() -> None:
    assert is_in_snapshot(Identity(BTRFS, 257, 5), Identity(SNAPPED, 257, 5))
    assert not is_in_snapshot(Identity(BTRFS, 257, 5), Identity(BTRFS, 257, 5))
    assert not is_in_snapshot(Identity(BTRFS, 257, 5), Identity("", 257, 5))
    assert not is_in_snapshot(Identity(BTRFS, 257, 5), Identity(LATER, 257, 5))
