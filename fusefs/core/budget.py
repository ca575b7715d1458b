"""How much a slice may do, and how fast slices may follow each other."""

from __future__ import annotations

from typing import NamedTuple

SLICE_S = 0.05
"""Of work in one slice: short enough to stop and step back at once, long enough that handing it out costs nothing."""
CUT_BYTES = 64 << 20
"""A large file is cut by as much at a time when paced (RocksDB and Pebble found the same step)."""


class Budget(NamedTuple):
    """The limits of one slice; whichever is reached first ends it.

    n_entries, n_bytes  None: no limit of that kind. With a limit of either kind the work is paced: files are looked
                        at before they go, and large ones are cut in steps.
    """

    seconds: float = SLICE_S
    n_entries: int | None = None
    n_bytes: int | None = None

    def is_paced(self) -> bool:
        """Whether files are looked at."""
        return self.n_entries is not None or self.n_bytes is not None


class Limits(NamedTuple):
    """What a person asked for: entries and bytes a second; None: as fast as the kernel."""

    entries_per_s: int | None = None
    bytes_per_s: int | None = None

    def is_paced(self) -> bool:
        """Whether anything is limited."""
        return self.entries_per_s is not None or self.bytes_per_s is not None


class Allowance:
    """A rate as a bucket: it fills as time goes by, gives out a slice's worth or more, and may be overdrawn.

    Overdrawn, because a file's size is known only when it goes: the debt is waited for before the next slice.
    """

    def __init__(self, per_s: int, now_s: float) -> None:
        self._per_s = per_s
        self._least = max(per_s * SLICE_S, 1.0)
        self._most = 2 * self._least
        self._left = self._least
        self._at_s = now_s

    def take(self, now_s: float) -> int:
        """All that may be spent now; 0 if it is not worth a slice yet. What is not spent comes back by `give_back`."""
        self._left = min(self._most, self._left + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        if self._left < self._least:
            return 0
        taken = int(self._left)
        self._left -= taken
        return taken

    def give_back(self, n: int) -> None:
        """Return what was taken and not spent; negative if more was spent."""
        self._left += n

    def wait_s(self) -> float:
        """Seconds until something can be taken; 0 if it can now."""
        return max(0.0, (self._least - self._left) / self._per_s)
