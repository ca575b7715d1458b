"""Fair queueing: which user's turn it is. Users share a volume's time, whatever each of them has in the trash.

Start-time fair queueing: the user who had least comes next. A new one begins where the others are, so is
next, and no time is saved up by staying away. A user with subordinate uids has one person's share for all.
Source  Goyal, Vin, Chen: Start-time fair queueing (1996)
"""

from __future__ import annotations

from collections.abc import Callable, Collection


class FairTurns:
    """The time that each user had; pure."""

    def __init__(self, holder_of: Callable[[int], int] = lambda uid: uid) -> None:
        """holder_of: the user who has a subordinate uid; most uids are their own."""
        self._holder_of = holder_of
        self._holders = _TimeShares()
        self._users: dict[int, _TimeShares] = {}

    def next(self, wanting: Collection[int]) -> int:
        """The user whose turn it is, of those who want one (at least one does)."""
        by_holder: dict[int, list[int]] = {}
        for uid in wanting:
            by_holder.setdefault(self._holder_of(uid), []).append(uid)
        for holder in self._users.keys() - by_holder.keys():
            del self._users[holder]
        holder = self._holders.next(by_holder)
        return self._users.setdefault(holder, _TimeShares()).next(by_holder[holder])

    def charge(self, uid: int, seconds: float) -> None:
        """A turn took so long."""
        holder = self._holder_of(uid)
        self._holders.charge(holder, seconds)
        if holder in self._users:
            self._users[holder].charge(uid, seconds)


class _TimeShares:
    """The time that each of some had."""

    def __init__(self) -> None:
        self._had_s: dict[int, float] = {}
        self._now_s = 0.0

    def next(self, wanting: Collection[int]) -> int:
        """The one that had least of those that want a turn."""
        known = set(wanting)
        for one in [one for one, had_s in self._had_s.items() if one not in known and had_s <= self._now_s]:
            del self._had_s[one]  # it would begin anew where the others are, which is not before that
        for one in wanting:
            self._had_s[one] = max(self._had_s.get(one, self._now_s), self._now_s)
        chosen = min(wanting, key=lambda one: (self._had_s[one], one))
        self._now_s = self._had_s[chosen]
        return chosen

    def charge(self, one: int, seconds: float) -> None:
        """A user's turn took so long."""
        self._had_s[one] = self._had_s.get(one, self._now_s) + seconds
