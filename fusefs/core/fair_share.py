"""Fair shares of a limited number of things: there are always some for a user who has none yet.

Nothing can be taken back, so the user with most must be refused in time. An eighth is kept for each user's first
sixteen, and a thirty-second for root. Of the rest no user may have more than eight times what is left: one alone gets
three quarters of all, the next one eight ninths of what is left then, and so on.
"""

from __future__ import annotations

from collections import Counter

_RATIO = 8
_KEPT_PART, _ROOTS_PART = 8, 32
_N_FIRST = 16


class FairShares:
    """Of one mount's clients."""

    def __init__(self, n: int, *, is_for_all: bool = True) -> None:
        """Begin with all of them left.

        n           how many there are
        is_for_all  else there is one user, who may have all
        """
        self._n = n
        self._is_for_all = is_for_all
        self._n_kept, self._n_roots = n // _KEPT_PART, n // _ROOTS_PART
        self._n_given = 0
        self._of_uids = Counter[int]()

    def may_have(self, uid: int) -> bool:
        """Whether a uid may have one more."""
        left, has, n_first = self._n - self._n_given, self._of_uids[uid], _N_FIRST
        if not self._is_for_all:
            return left > 0
        if uid:
            left -= self._n_roots
        else:
            n_first = max(n_first, self._n_roots)
        return left > 0 if has < n_first else has < _RATIO * (left - self._n_kept)

    def most_of_one(self) -> int:
        """How many a lone user gets who is not root."""
        if not self._is_for_all:
            return self._n
        return max(_N_FIRST, (self._n - self._n_roots - self._n_kept) * _RATIO // (_RATIO + 1))

    def add(self, uid: int, n: int) -> None:
        """A uid has so many more, or fewer; even if it may not, as others were quicker since that was asked."""
        self._n_given += n
        self._of_uids[uid] += n
        if not self._of_uids[uid]:
            del self._of_uids[uid]
