"""Folders of subordinate uids: a user can make 65,536 of them, and each costs root's commands a process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from fusefs.linux.subuid import read_subordinates

MOST = 1000
"""Of one user that are registered, served and listed for root; the others serve their own uids alone."""


class SubordinateFolders:
    """Counts them; pure but for the look at who has which uids."""

    def __init__(self, n_users: int, counted: Iterable[int] = ()) -> None:
        """Count these from the beginning. n_users: of a store; where they are few nobody needs to be asked for"""
        self._holder_of: Callable[[int], int] = read_subordinates().holder_of if n_users > MOST else int
        self._n_counted: Counter[int] = Counter()
        self._n_more: Counter[int] = Counter()
        for uid in counted:
            self.count(uid)

    def count(self, uid: int) -> None:
        """One more; a user's own folder does not count."""
        holder = self._holder_of(uid)
        self._n_counted[holder] += holder != uid

    def is_one_too_many(self, uid: int) -> bool:
        """Whether there is no room for that one; it is noted."""
        holder = self._holder_of(uid)
        is_more = holder != uid and self._n_counted[holder] >= MOST
        self._n_more[holder] += is_more
        return is_more

    def passed_over(self) -> dict[int, int]:
        """For how many of whom there was no room."""
        return {holder: n_more for holder, n_more in self._n_more.items() if n_more}
