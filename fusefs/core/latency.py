"""Whether a filesystem answers slowly, from how long its answers took."""

from __future__ import annotations

_SLOW_NS = 300_000
"""A look at an inode from memory takes 2 µs, from a local SSD some 100, over a network or from a turning disk more."""
_QUICK_NS = 60_000
_WEIGHT = 16
"""Answers that make up the mean: one late answer of 5 ms is enough, ten of 100 µs are not."""


class Latency:
    """The mean of the last answers, with a gap between slow and quick, so that it does not change sides all the time.

    is_slow  the verdict
    """

    __slots__ = ("_mean_ns", "is_slow")

    def __init__(self, *, is_slow: bool) -> None:
        """is_slow: what is believed until the answers tell."""
        self._mean_ns = float(_SLOW_NS if is_slow else 0)
        self.is_slow = is_slow

    def took(self, answer_ns: int) -> None:
        """One more answer."""
        self._mean_ns += (answer_ns - self._mean_ns) / _WEIGHT
        if self._mean_ns > _SLOW_NS:
            self.is_slow = True
        elif self._mean_ns < _QUICK_NS:
            self.is_slow = False
