"""How every benchmark is run: subjects take turns, the order rotates, each round is kept."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from bench import runs
from bench.runs import Run
from bench.subjects import Unable
from bench.support import print_progress
from bench.verdicts import Target, Verdict, judged

Turn = Callable[[], float | Mapping[str, float]]
"""Of one subject: its figure, or several by name. Raises Unable: it takes part no more."""
LEAST_ROUNDS, MOST_ROUNDS = 3, 9
"""Of a quick run, as time allows. Nine have 96 %, six are the fewest that have 95."""
_QUIET_S = 2.0
"""Rounds that come sooner after each other are not printed one by one."""


class Case(NamedTuple):
    """One thing that is measured, in one size.

    words  what it is, such as the filesystem: `--only` chooses by them
    n      files, or whatever there are many of
    least  rounds of a quick run, whatever they take
    """

    words: tuple[str, ...]
    n: int = 0
    least: int = LEAST_ROUNDS

    @property
    def label(self) -> str:
        """Return the words as one text, for messages and for the file of results."""
        return " ".join(self.words)


class Bed(NamedTuple):
    """Where turns are taken. once: who is measured once at the end, since nothing is left after it"""

    turns: Mapping[str, Turn]
    once: Mapping[str, Turn] = {}


class Result(NamedTuple):
    """A run, and what it is to show."""

    run: Run
    targets: Sequence[Target]

    def verdicts(self) -> list[Verdict]:
        """Of each target that it can judge."""
        return list(judged(self.targets, self.run.rounds))


class Benchmark(NamedTuple):
    """One question.

    cases    in full size; quick: what `make bench` measures
    bed      makes what the subjects need, for one case
    targets  of a case
    unit     of the figures of a turn
    """

    name: str
    description: str
    cases: tuple[Case, ...]
    quick: tuple[Case, ...]
    bed: Callable[[Case], AbstractContextManager[Bed]]
    targets: Callable[[Case], Sequence[Target]]
    n_rounds: int = MOST_ROUNDS
    unit: str = "s"


def rotated(names: Sequence[str], number: int) -> tuple[str, ...]:
    """The order of a round: who is first in one is last in the next."""
    begin = number % max(1, len(names))
    return (*names[begin:], *names[:begin])


class Until(NamedTuple):
    """How long rounds go on, by the monotonic clock.

    share_s  as many as end before it, but the case's least
    end_s    whatever was done: then the whole run ends; but for the first one
    """

    share_s: float
    end_s: float

    def is_over(self, n_finished: int, least: int, next_s: float) -> bool:
        """Return whether the next round must not begin, because it would end at next_s."""
        return n_finished >= 1 and next_s > (self.share_s if n_finished >= least else self.end_s)


def take(benchmark: Benchmark, case: Case, n_rounds: int, until: Until | None = None) -> Run:
    """Measure one case, in all rounds unless they are to end before.

    Raises  OSError: its bed can't be made here, or a subject failed that can't be left out
    """
    load_before = runs.load()
    with benchmark.bed(case) as bed:
        rounds, left_out = _take_rounds(f"{benchmark.name} {case.label}", bed, n_rounds, case.least, until)
    return Run(
        *(benchmark.name, case.label, case.n, tuple(rounds), left_out, runs.now(), runs.commit()),
        *(runs.on_this_machine(), (load_before, runs.load())),
    )


def _take_rounds(
    title: str, bed: Bed, n_rounds: int, least: int, until: Until | None
) -> tuple[list[dict[str, float]], dict[str, str]]:
    rounds: list[dict[str, float]] = []
    left_out: dict[str, str] = {}
    longest_s = printed_s = 0.0
    for number in range(n_rounds):
        began_s = time.monotonic()
        if until and until.is_over(number, least, began_s + longest_s):
            break
        names = [name for name in rotated(list(bed.turns), number) if name not in left_out]
        rounds.append(dict(_figures(bed.turns, names, left_out)))
        longest_s = max(longest_s, time.monotonic() - began_s)
        if time.monotonic() - printed_s >= _QUIET_S:
            printed_s = time.monotonic()
            text = ", ".join(f"{key} {found:.3g}" for key, found in rounds[-1].items())
            print_progress(f"{title}, round {number + 1}: {text}")
    rounds[-1] |= dict(_figures(bed.once, list(bed.once), left_out))
    return rounds, left_out


def _figures(turns: Mapping[str, Turn], names: Sequence[str], left_out: dict[str, str]) -> Iterator[tuple[str, float]]:
    for name in names:
        try:
            found = turns[name]()
        except Unable as error:
            left_out[name] = str(error)
            print_progress(f"{name}: {error}")
            continue
        if isinstance(found, Mapping):
            yield from ((f"{name}, {figure}" if figure else name, value) for figure, value in found.items())
        else:
            yield name, found
