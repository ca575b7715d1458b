"""Fair queueing: which user's turn it is. Users share a volume's time, whatever each of them has in the trash.

Start-time fair queueing: the user who had least comes next. A new one begins where the others are, so is
next, and no time is saved up by staying away. A user with subordinate uids has one person's share for all.
Source  Goyal, Vin, Chen: Start-time fair queueing (1996)
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from hashlib import blake2b

Order = Callable[[int], int]
"""Of users who had as much as each other, who comes first: whoever has the least number."""


def by_number(uid: int) -> int:
    """Users by their uids."""
    return uid


def order_of_node(node: bytes) -> Order:
    """An order of users that is that of no other node, so that nodes begin with different ones."""

    def order(uid: int) -> int:
        return int.from_bytes(blake2b(b"%d" % uid, key=node[:64], digest_size=8).digest())

    return order


class FairTurns:
    """The time that each user had; pure."""

    def __init__(self, holder_of: Callable[[int], int] = lambda uid: uid, order: Order = by_number) -> None:
        """holder_of: the user who has a subordinate uid; most uids are their own."""
        self._holder_of = holder_of
        self._order = order
        self._holders = _TimeShares(order)
        self._users: dict[int, _TimeShares] = {}

    def next(self, wanting: Collection[int]) -> int:
        """The user whose turn it is, of those who want one (at least one does)."""
        by_holder: dict[int, list[int]] = {}
        for uid in wanting:
            by_holder.setdefault(self._holder_of(uid), []).append(uid)
        for holder in self._users.keys() - by_holder.keys():
            del self._users[holder]
        holder = self._holders.next(by_holder)
        return self._users.setdefault(holder, _TimeShares(self._order)).next(by_holder[holder])

    def charge(self, uid: int, seconds: float) -> None:
        """A turn took so long."""
        holder = self._holder_of(uid)
        self._holders.charge(holder, seconds)
        if holder in self._users:
            self._users[holder].charge(uid, seconds)


class _TimeShares:
    """The time that each of some had."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._had_s: dict[int, float] = {}
        self._now_s = 0.0

    def next(self, wanting: Collection[int]) -> int:
        """The one that had least of those that want a turn."""
        known = set(wanting)
        for one in [one for one, had_s in self._had_s.items() if one not in known and had_s <= self._now_s]:
            del self._had_s[one]  # it would begin anew where the others are, which is not before that
        for one in wanting:
            self._had_s[one] = max(self._had_s.get(one, self._now_s), self._now_s)
        chosen = min(wanting, key=lambda one: (self._had_s[one], self._order(one), one))
        self._now_s = self._had_s[chosen]
        return chosen

    def charge(self, one: int, seconds: float) -> None:
        """A user's turn took so long."""
        self._had_s[one] = self._had_s.get(one, self._now_s) + seconds
