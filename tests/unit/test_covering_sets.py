"""The cases that `make test` runs have every pair of parameters that all cases have; fields may be parameters."""

from dataclasses import dataclass
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.covering_sets import EVERY_CASE, Axes, choose_pairwise, share_of, split_axes

Case = dict[str, int]


@dataclass(frozen=True)
class Mount(Axes):
    fs_type: str
    coherence: str


def pairs_of(cases: list[Case]) -> set[frozenset[tuple[str, int]]]:
    return {frozenset(pair) for case in cases for pair in combinations(case.items(), 2)}


def full_product(*sizes: int) -> list[Case]:
    return [{f"axis {i}": value for i, value in enumerate(row)} for row in product(*map(range, sizes))]


@given(st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=1, max_size=60))
def test_chosen_cases_have_all_pairs_of_all_cases(rows: list[list[int]]) -> None:
    cases = [{f"axis {i}": value for i, value in enumerate(row)} for row in rows]
    assert pairs_of([cases[number] for number in choose_pairwise(cases)]) == pairs_of(cases)


def test_a_case_that_must_run_is_chosen() -> None:
    assert 26 in choose_pairwise(full_product(3, 3, 3), kept=[26])


def test_the_cases_of_a_test_share_every_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(EVERY_CASE, raising=False)
    moments = list(range(10))
    shares = [share_of(moments, number, 3) for number in range(3)]
    assert sorted(moment for share in shares for moment in share) == moments


def test_each_field_of_axes_is_an_axis() -> None:
    one, other = Mount("ext4", "shared"), Mount("ext4", "exclusive")
    assert dict(split_axes({"mount": one})) == {"mount.fs_type": "ext4", "mount.coherence": "shared"}
    cases = [dict(split_axes({"mount": mount, "change": change})) for mount in (one, other) for change in ("a", "b")]
    assert choose_pairwise(cases) == [0, 1, 2, 3], "one field has one value: that leaves two axes"
