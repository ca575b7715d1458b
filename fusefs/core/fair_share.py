"""Fair shares of a limited number of things: there are always some for a user who has none yet.

Nothing can be taken back, so the user with most must be refused in time. An eighth is kept for people's first ones. Of
the rest no user may have more than eight times what is left then: one alone gets eight ninths of it, the next one eight
ninths of what that leaves, and so on; after giving some back there are none until it has come down to that.

A user has more uids than one: those of containers, 65,536 as a rule, from anywhere. So from there on, all uids of
an aligned block of 65,536 are one more user, and share what that gets by the same rule; a user's lie in two blocks.
People of a directory service have such uids, too, and need not be told from these: each of them gets their first ones,
as long as half of what is kept for that is left, which is for all others.
"""

from __future__ import annotations

_RATIO = 8
_KEPT_PART, _RESERVED_PART = 8, 32
_N_FIRST = 16
_BLOCK_BITS = 16


class FairShares:
    """Of one mount's clients. root always gets a thirty-second part."""

    def __init__(self, n: int, *, is_for_all: bool = True) -> None:
        """Begin with all of them left.

        n           how many there are
        is_for_all  else there is one user, who may have all
        """
        self._n = n
        self._is_for_all = is_for_all
        self._n_kept, self._n_reserved = n // _KEPT_PART, n // _RESERVED_PART
        self._n_given = 0
        self._of_uids: dict[int, int] = {}
        self._of_blocks: dict[int, int] = {}

    def may_have(self, uid: int) -> bool:
        """Whether a uid may have one more."""
        left = self._n - self._n_given
        if not self._is_for_all:
            return left > 0
        n_first = _N_FIRST
        if uid:
            left -= self._n_reserved
        else:
            n_first = max(n_first, self._n_reserved)
        block, has = uid >> _BLOCK_BITS, self._of_uids.get(uid, 0)
        if has < n_first:
            return left > (self._n_kept // 2 if block else 0)
        left = _RATIO * (left - self._n_kept)
        if block:
            left = _RATIO * (left - self._of_blocks.get(block, 0))
        return has < left

    def most_of_one(self) -> int:
        """How many a lone user gets who is neither root nor of a block."""
        if not self._is_for_all:
            return self._n
        return max(_N_FIRST, (self._n - self._n_reserved - self._n_kept) * _RATIO // (_RATIO + 1))

    def give(self, uid: int) -> None:
        """It has one more; even if it may not, as others were quicker since that was asked."""
        self._change(uid, 1)

    def take_back(self, uid: int) -> None:
        """It has one less."""
        self._change(uid, -1)

    def _change(self, uid: int, n: int) -> None:
        self._n_given += n
        _add(self._of_uids, uid, n)
        _add(self._of_blocks, uid >> _BLOCK_BITS, n)


def _add(shares: dict[int, int], key: int, n: int) -> None:
    has = shares.get(key, 0) + n
    if has:
        shares[key] = has
    else:
        del shares[key]
