"""Decides whether a mount's backing filesystem is slow, so that the daemon itself caches its metadata."""

from __future__ import annotations

_SLOW_NS = 300_000
"""A stat takes 2 µs from memory, about 100 µs from a local SSD, and more over a network or from a rotating disk."""
QUICK_NS = 60_000
_SCORE_MAX = 16.0
_SCORE_SLOW = 8.0
_QUICK_WEIGHT_LOCAL, _QUICK_WEIGHT_REMOTE = 1 / 4, 1 / 64
"""The weight of a quick reply: low for a network filesystem, since most of its replies come quickly from memory."""


class SlownessDetector:
    """Decides whether the backing filesystem is slow. A single slow reply proves nothing: the machine may be busy.

    is_slow  the present verdict
    """

    __slots__ = ("_quick", "_score", "is_slow")

    def __init__(self, *, is_slow: bool) -> None:
        """is_slow: the verdict until there are enough replies"""
        self._quick = _QUICK_WEIGHT_REMOTE if is_slow else _QUICK_WEIGHT_LOCAL
        self._score = _SCORE_MAX if is_slow else 0.0
        self.is_slow = is_slow

    @property
    def is_in_doubt(self) -> bool:
        """Whether a reply within QUICK_NS could affect the verdict; on a local filesystem it seldom could."""
        return self._score > 0

    def record(self, answer_ns: float, n: int = 1) -> None:
        """Count n consecutive replies. One cause may have delayed all of them, so n slow replies count as one.

        answer_ns  how long each reply took
        """
        if answer_ns > _SLOW_NS:
            self._score = min(self._score + 1, _SCORE_MAX)
            self.is_slow |= self._score >= _SCORE_SLOW
        elif answer_ns < QUICK_NS and self._score:
            self._score = max(self._score - n * self._quick, 0.0)
            self.is_slow &= self._score > 0
