"""What orphans hold by user, project and age: each counts once, in one sum, and the parts add up to the whole."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.core.orphan_sums import (
    OrphanSum,
    OrphanSums,
    OrphanToSum,
    SumBy,
    SumKey,
    Survey,
    age_key,
    project_of,
    space_of_file,
)
from fusefs.core.record import TreeSize

DAY_S = 86_400


def size(n_bytes: int, *, is_at_least: bool = False) -> TreeSize:
    return TreeSize(None, n_bytes, 0, 0, is_at_least, "count", 0)


def orphan(
    origin: bytes | None = b"/scratch/p/x", uid: int = 1, age_s: int | None = 0, known: TreeSize | None = None
) -> OrphanToSum:
    return OrphanToSum(uid, b"/scratch", origin, age_s, None, known)


@pytest.mark.parametrize(
    ("base", "origin", "depth", "project"),
    [
        (b"/scratch", b"/scratch/p/x/y", 1, b"/scratch/p"),
        (b"/scratch", b"/scratch/p/x/y", 2, b"/scratch/p/x"),
        (b"/scratch", b"/scratch/p", 2, b"/scratch/p"),
        (b"/scratch", b"/scratch", 1, b"/scratch"),
        (b"/", b"/p/x", 1, b"/p"),
        (b"/", b"/", 1, b"/"),
    ],
)
def test_a_project_is_the_first_directories_below_the_stores(
    base: bytes, origin: bytes, depth: int, project: bytes
) -> None:
    assert project_of(base, origin, depth) == project


@pytest.mark.parametrize("age_s", [-5, 0, 3599, 3600, DAY_S, 7 * DAY_S - 1, 90 * DAY_S, 1 << 40])
def test_an_age_is_in_one_bracket(age_s: int) -> None:
    key = age_key(age_s)
    assert key.from_s is not None
    assert key.from_s <= max(age_s, 0)
    assert key.under_s is None or age_s < key.under_s


def test_what_no_record_tells_is_a_sum_of_its_own() -> None:
    for by in (SumBy.PROJECT, SumBy.AGE):
        sums = OrphanSums(by)
        sums.add(orphan(origin=None, age_s=None))
        assert list(sums) == [(SumKey(), OrphanSum(1, 0, 1, is_at_least=True))]


def test_a_size_that_is_a_part_makes_the_sum_a_part() -> None:
    sums = OrphanSums(SumBy.USER)
    sums.add(orphan(known=size(5), age_s=7))
    sums.add(orphan(known=size(6, is_at_least=True), age_s=9))
    assert list(sums) == [(SumKey(uid=1), OrphanSum(2, 11, 0, is_at_least=True, oldest_s=9))]


orphans = st.builds(
    orphan,
    st.sampled_from([None, b"/scratch/p/x", b"/scratch/q", b"/scratch"]),
    st.integers(0, 3),
    st.none() | st.integers(0, 200 * DAY_S),
    st.none() | st.builds(size, st.integers(0, 9)),
)


@given(st.sampled_from([*SumBy]), st.lists(orphans), st.integers(0, 20))
def test_parts_that_are_put_together_are_the_whole(by: SumBy, some: list[OrphanToSum], at: int) -> None:
    whole, first, second = (OrphanSums(by) for _ in range(3))
    for one in some:
        whole.add(one)
    for part, sums in ((some[:at], first), (some[at:], second)):
        for one in part:
            sums.add(one)
    first.add_sums(second)
    assert list(first) == list(whole)
    assert sum(one.n_orphans for _key, one in whole) == len(some)


MIB = 1 << 20
BYTES = st.integers(0, 1 << 50)


@given(st.builds(Survey, BYTES, BYTES, BYTES, BYTES, BYTES, st.booleans()))
def test_a_survey_survives_the_way_through_a_child(survey: Survey) -> None:
    assert msgspec.json.decode(msgspec.json.encode(survey), type=Survey) == survey


def test_small_files_take_their_size_where_they_lie_in_the_metadata() -> None:
    assert space_of_file(700, 8, 4096, 2048) == 700
    assert space_of_file(700, 8, 4096, 0) == 4096
    assert space_of_file(700, 4096, 4096, 2048) == 2 * MIB
    assert space_of_file(0, 8, 4096, 2048) == 4096
    assert space_of_file(1 << 40, 16, 4096, 2048) == 8192
