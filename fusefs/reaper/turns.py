"""Whose turn it is: users share a volume's time, whatever each of them has in the trash.

Start-time fair queueing: whoever had least comes next. Whoever comes anew begins where the others are, so that he is
next, and nobody saves up time by staying away.
Source  Goyal, Vin, Chen: Start-time fair queueing (1996)
"""

from __future__ import annotations

from collections.abc import Collection


class Turns:
    """The time that each user had; pure."""

    def __init__(self) -> None:
        self._had_s: dict[int, float] = {}
        self._now_s = 0.0

    def next(self, wanting: Collection[int]) -> int:
        """The user whose turn it is, of those who want one (at least one does)."""
        for uid in list(self._had_s):
            if uid not in wanting and self._had_s[uid] <= self._now_s:
                del self._had_s[uid]  # he would begin anew where the others are, which is not before that
        for uid in wanting:
            self._had_s[uid] = max(self._had_s.get(uid, self._now_s), self._now_s)
        chosen = min(wanting, key=lambda uid: (self._had_s[uid], uid))
        self._now_s = self._had_s[chosen]
        return chosen

    def charge(self, uid: int, seconds: float) -> None:
        """A turn took so long."""
        self._had_s[uid] = self._had_s.get(uid, self._now_s) + seconds
