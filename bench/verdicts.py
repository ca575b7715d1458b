"""Targets, and what the rounds of a run say of each: met or missed, and whether the interval leaves a doubt.

A figure that is beside a rival's is a ratio within each round: what slows a whole round, slows both.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from bench.estimates import Estimate, estimate

Round = Mapping[str, float]
"""What each subject took in it; who was not measured then is not in it."""
Figure = Callable[[Sequence[Round]], Sequence[float]]
"""A value for each round that has one."""


class Target(NamedTuple):
    """What a figure is to be: at most so much, or at least."""

    description: str
    of: Figure
    limit: float
    is_least: bool = False
    unit: str = ""  # none: times

    @property
    def requirement(self) -> str:
        """Return the limit as text, such as `at most 0.8`."""
        return f"at {'least' if self.is_least else 'most'} {self.limit:.3g}{self.unit}"

    def times(self, value: float) -> float:
        """How many times the limit: up to 1 is met."""
        return self.limit / value if self.is_least else value / self.limit


class Verdict(NamedTuple):
    """What a run says of a target."""

    target: Target
    estimate: Estimate

    @property
    def is_met(self) -> bool:
        """By the median."""
        return self.target.times(self.estimate.median) <= 1

    @property
    def is_sure(self) -> bool:
        """The whole interval says so, and it is one of 95 %."""
        ends = [self.target.times(end) <= 1 for end in (self.estimate.low, self.estimate.high)]
        return self.estimate.confidence >= 0.95 and all(end == self.is_met for end in ends)

    @property
    def word(self) -> str:
        """The answer; in doubt with a question mark."""
        return ("met" if self.is_met else "MISSED") + ("" if self.is_sure else "?")


def judged(targets: Sequence[Target], rounds: Sequence[Round]) -> Iterator[Verdict]:
    """Each target that these rounds can judge."""
    for target in targets:
        if values := target.of(rounds):
            yield Verdict(target, estimate(values))


def value(key: str, scale: float = 1.0) -> Figure:
    """A figure itself."""
    return lambda rounds: [one[key] * scale for one in rounds if key in one]


def times(ours: str, rival: str) -> Figure:
    """How many times a rival's, round by round."""
    return lambda rounds: [one[ours] / one[rival] for one in rounds if ours in one and rival in one]


def times_best(ours: str, rivals: Sequence[str]) -> Figure:
    """How many times that of the best rival, who is the same in all rounds: whose median is least."""

    def figure(rounds: Sequence[Round]) -> Sequence[float]:
        medians = {
            name: statistics.median(found) for name in rivals if (found := [one[name] for one in rounds if name in one])
        }
        return times(ours, min(medians, key=lambda name: medians[name]))(rounds) if medians else []

    return figure


def times_medians(ours: str, rival: str) -> Figure:
    """How many times the median of a rival, or of ours where the rival was measured once."""

    def figure(rounds: Sequence[Round]) -> Sequence[float]:
        medians = [statistics.median(found) for key in (ours, rival) if (found := value(key)(rounds))]
        return [medians[0] / medians[1]] if len(medians) == 2 else []

    return figure
