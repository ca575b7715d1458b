"""A rate limit on events: one user may rename containers all day, and each rename would be reported."""

from __future__ import annotations

import logging

_LOG = logging.getLogger(__name__)
_SPAN_S = 10.0
_MOST = 1000
"""Events of one user in such a span: a hundred a second are more than people and their scripts throw away."""


class EventLimit:
    """Counts events by user; what is beyond is counted, and told as a number."""

    def __init__(self) -> None:
        self._since_s = 0.0
        self._counts: dict[int, int] = {}

    def lets_pass(self, uid: int, now_s: float) -> bool:
        """Whether one more event of a user is to be told now."""
        if now_s >= self._since_s + _SPAN_S:
            for one, count in self._counts.items():
                if count > _MOST:
                    _LOG.warning("%d more events and faults of uid %d were not told", count - _MOST, one)
            self._since_s, self._counts = now_s, {}
        self._counts[uid] = self._counts.get(uid, 0) + 1
        return self._counts[uid] <= _MOST
