"""Which cases of a test with many parameters run each time: every pair of values of any two parameters is in one."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import combinations
from typing import TypeVar

from hypothesis import settings

EVERY_CASE = "TRASHD_TEST_EVERY_CASE"
"""The environment variable that tests/conftest.py sets where all cases run (make every)."""
T = TypeVar("T")


def runs_every_case() -> bool:
    return EVERY_CASE in os.environ


def is_soak() -> bool:
    """Return whether hypothesis has the profile of the soaks, whose runs take hours."""
    return settings().max_examples > 1000


@dataclass(frozen=True)
class Axes:
    """A parameter of a test each of whose fields is an axis; for subclasses with fields that are compared by value."""


def share_of(moments: Sequence[T], number: int, n_cases: int) -> Sequence[T]:
    """Choose the moments, of those that a test goes through one after the other, which its case `number` goes through.

    The cases of a test together go through each moment once; with `make every` each of them goes through all.
    """
    return moments if runs_every_case() else moments[number % n_cases :: n_cases]


def split_axes(parameters: Mapping[str, object]) -> Iterator[tuple[str, Hashable]]:
    """Name the axes of a case, and give their values: one of each parameter, or of each field of an `Axes`."""
    for name, value in parameters.items():
        if isinstance(value, Axes):
            yield from ((f"{name}.{field.name}", getattr(value, field.name)) for field in fields(value))
        else:
            yield name, value if isinstance(value, str) else id(value)


def choose_pairwise(cases: Sequence[Mapping[str, Hashable]], kept: Sequence[int] = ()) -> list[int]:
    """Choose some of the cases so that each pair of values of two axes that is in any case is in a chosen one.

    With one or two axes that is every case.

    Args:
        cases: the value of each axis in each case. Axes whose values always change together count as one.
        kept: the numbers of the cases that are chosen in any event.
    Returns: the numbers of the chosen cases, ascending; the same for the same arguments.
    Source: a greedy covering array, as in D. R. Kuhn, Introduction to Combinatorial Testing (2013), chapter 10.
    """
    axes = _find_axes(cases)
    if len(axes) < 3:
        return list(range(len(cases)))
    pairs = [set(combinations([(axis, case[axis]) for axis in axes], 2)) for case in cases]
    chosen = set(kept)
    missing = set().union(*pairs).difference(*(pairs[number] for number in chosen))
    while missing:
        best = max(range(len(cases)), key=lambda number: len(pairs[number] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return sorted(chosen)


def _find_axes(cases: Sequence[Mapping[str, Hashable]]) -> list[str]:
    """Name the axes that have several values, of those that always change together the first."""
    axes: dict[tuple[int, ...], str] = {}
    for name in cases[0] if cases else ():
        numbers: dict[Hashable, int] = {}
        column = tuple(numbers.setdefault(case[name], len(numbers)) for case in cases)
        if len(numbers) > 1:
            axes.setdefault(column, name)
    return list(axes.values())
