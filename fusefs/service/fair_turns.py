"""Choose the user whose orphans are reaped next, by start-time fair queueing; no I/O.

The user who has had the least time is next. A new user starts with the time of the user chosen last, and is
therefore served soon. A user without work saves up no time. A user and the user's subordinate uids count as one user.

Source  Goyal, Vin, Chen: Start-time fair queueing (1996)
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from hashlib import blake2b

UserOrder = Callable[[int], int]
"""Sort key for users who have had the same time: the user with the lowest number is first."""


def by_number(uid: int) -> int:
    return uid


def order_of_node(node: bytes) -> UserOrder:
    """Return an order that is different on each node, so that nodes start with different users."""

    def order(uid: int) -> int:
        return int.from_bytes(blake2b(b"%d" % uid, key=node[:64], digest_size=8).digest())

    return order


class FairTurns:
    """Chooses the next user, based on the time that each user has had; no I/O."""

    def __init__(self, holder_of: Callable[[int], int] = lambda uid: uid, order: UserOrder = by_number) -> None:
        """holder_of: returns the user to whom a subordinate uid belongs, and any other uid unchanged"""
        self._holder_of = holder_of
        self._order = order
        self._holders = _TimeShares(order)
        self._users: dict[int, _TimeShares] = {}

    def next(self, uids: Collection[int]) -> int:
        """Return the next user among those with work (at least one)."""
        by_holder: dict[int, list[int]] = {}
        for uid in uids:
            by_holder.setdefault(self._holder_of(uid), []).append(uid)
        for holder in self._users.keys() - by_holder.keys():
            del self._users[holder]
        holder = self._holders.next(by_holder)
        return self._users.setdefault(holder, _TimeShares(self._order)).next(by_holder[holder])

    def charge(self, uid: int, seconds: float) -> None:
        """Add the time of a turn."""
        holder = self._holder_of(uid)
        self._holders.charge(holder, seconds)
        if holder in self._users:
            self._users[holder].charge(uid, seconds)


class _TimeShares:
    """Chooses the next of several uids, based on the time that each has had."""

    def __init__(self, order: UserOrder) -> None:
        self._order = order
        self._had_s: dict[int, float] = {}
        self._now_s = 0.0

    def next(self, uids: Collection[int]) -> int:
        """Return the uid with the least time among those with work."""
        uid_set = set(uids)
        for one in [one for one, had_s in self._had_s.items() if one not in uid_set and had_s <= self._now_s]:
            del self._had_s[one]  # if the uid returns, it starts with at least as much time
        for one in uids:
            self._had_s[one] = max(self._had_s.get(one, self._now_s), self._now_s)
        chosen = min(uids, key=lambda one: (self._had_s[one], self._order(one), one))
        self._now_s = self._had_s[chosen]
        return chosen

    def charge(self, uid: int, seconds: float) -> None:
        self._had_s[uid] = self._had_s.get(uid, self._now_s) + seconds
