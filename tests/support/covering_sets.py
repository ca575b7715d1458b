"""Which cases of a test with many parameters run each time: every pair of values of any two parameters is in one."""

import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import combinations
from typing import TypeVar

from hypothesis import settings

EVERY_CASE = "TRASHD_TEST_EVERY_CASE"
"""The environment variable that tests/conftest.py sets where all cases run (make every)."""
TRANSPORT, MAIN_TRANSPORT = "over_transport", "uring=off"
"""The parameter of tests of the mount that says how requests come to the daemon; the value with which all cases run."""
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

    With one or two axes that is every case. On another transport than the main one it is a case for each value alone.

    Args:
        cases: the value of each axis in each case. Axes whose values always change together count as one.
        kept: the numbers of the cases that are chosen in any event.
    Returns: the numbers of the chosen cases, ascending; the same for the same arguments.
    Source: a greedy covering array, as in D. R. Kuhn, Introduction to Combinatorial Testing (2013), chapter 10.
    """
    chosen: list[int] = []
    for transport in dict.fromkeys(case.get(TRANSPORT) for case in cases):
        numbers = [number for number, case in enumerate(cases) if case.get(TRANSPORT) == transport]
        among = [cases[number] for number in numbers]
        those = [numbers.index(number) for number in kept if number in numbers]
        chosen += [numbers[at] for at in _choose(among, those, 2 if transport in (None, MAIN_TRANSPORT) else 1)]
    return sorted(chosen)


def _choose(cases: Sequence[Mapping[str, Hashable]], kept: Sequence[int], strength: int) -> list[int]:
    """Choose cases so that each combination of so many values that is in any case is in a chosen one."""
    axes = _find_axes(cases)
    if len(axes) <= strength:
        return list(range(len(cases)))
    parts = [set(combinations([(axis, case[axis]) for axis in axes], strength)) for case in cases]
    chosen = set(kept)
    missing = set().union(*parts).difference(*(parts[number] for number in chosen))
    while missing:
        best = max(range(len(cases)), key=lambda number: len(parts[number] & missing))
        chosen.add(best)
        missing -= parts[best]
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
