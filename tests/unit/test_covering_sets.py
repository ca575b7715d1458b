"""The covering sets that `make test` runs: each pair of values of two axes is in a case, and fields may be axes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, product

from tests.support.covering_sets import Axes, choose_pairwise, split_axes

CASES = [dict(zip("abcd", values, strict=True)) for values in product(range(5), range(3), range(3), range(2))]


@dataclass(frozen=True)
class Mount(Axes):
    fs_type: str
    coherence: str


def test_each_pair_of_values_is_in_a_chosen_case() -> None:
    chosen = [CASES[number] for number in choose_pairwise(CASES)]
    assert len(chosen) < len(CASES) / 3
    assert {pair for case in chosen for pair in combinations(case.items(), 2)} == {
        pair for case in CASES for pair in combinations(case.items(), 2)
    }


def test_all_cases_of_two_axes_are_chosen() -> None:
    cases = [{"a": one, "b": other, "c": 1} for one, other in product(range(5), range(5))]
    assert choose_pairwise(cases) == list(range(len(cases)))


def test_a_case_that_is_kept_is_chosen() -> None:
    (left_out, *_) = set(range(len(CASES))).difference(choose_pairwise(CASES))
    assert left_out in choose_pairwise(CASES, [left_out])


def test_each_field_of_axes_is_an_axis() -> None:
    one, other = Mount("ext4", "shared"), Mount("ext4", "exclusive")
    assert dict(split_axes({"mount": one})) == {"mount.fs_type": "ext4", "mount.coherence": "shared"}
    cases = [dict(split_axes({"mount": mount, "change": change})) for mount in (one, other) for change in ("a", "b")]
    assert choose_pairwise(cases) == [0, 1, 2, 3], "one field has one value: that leaves two axes"
