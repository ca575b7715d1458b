"""Whether a filesystem answers slowly, from how long its answers took."""

from __future__ import annotations

_SLOW_NS = 300_000
"""A look at an inode from memory takes 2 µs, from a local SSD some 100, over a network or from a turning disk more."""
QUICK_NS = 60_000
_MOST = 16.0
_ENOUGH = 8.0
_QUICK_LOCAL, _QUICK_REMOTE = 1 / 4, 1 / 64
"""What a quick answer weighs: a busy machine makes some late; a network's filesystem answers most from memory."""


class Latency:
    """Slow answers weighed against quick ones; one late answer is no sign, since a busy machine gives such too.

    is_slow  the verdict
    """

    __slots__ = ("_quick", "_score", "is_slow")

    def __init__(self, *, is_slow: bool) -> None:
        """is_slow: what is believed until the answers tell."""
        self._quick = _QUICK_REMOTE if is_slow else _QUICK_LOCAL
        self._score = _MOST if is_slow else 0.0
        self.is_slow = is_slow

    @property
    def is_in_doubt(self) -> bool:
        """Whether an answer quicker than QUICK_NS would tell anything new; of a local filesystem it seldom does."""
        return self._score > 0

    def took(self, answer_ns: float, n: int = 1) -> None:
        """Some answers in a row; what made them late may have been one thing. answer_ns: how long each took"""
        if answer_ns > _SLOW_NS:
            self._score = min(self._score + 1, _MOST)
            self.is_slow |= self._score >= _ENOUGH
        elif answer_ns < QUICK_NS and self._score:
            self._score = max(self._score - n * self._quick, 0.0)
            self.is_slow &= self._score > 0
