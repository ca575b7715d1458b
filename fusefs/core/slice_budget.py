"""How much a slice may do, and how fast slices may follow each other."""

from __future__ import annotations

import math
from typing import NamedTuple

SLICE_S = 0.05
"""Of work in one slice: short enough to stop and step back at once, long enough that handing it out costs nothing."""
SMALL_SLICE_S = 0.00015
"""A slice where others work on the disk: what they wait for is never behind more than a few of our calls (twice as
long is felt by one in a hundred of theirs on xfs, measured; half as long is mostly overhead).
"""
NAMES_AT_ONCE = 512
"""Between two looks at the clock, at most: two or three milliseconds' work on a local disk."""
_FEW_AT_ONCE = 128
_LOOK_S = SLICE_S / 10
"""By so much a slice may be longer than it is to be, if its entries cost what they did so far."""
_GROWS = 4
_STEP_BACK = 8
"""A slice begins with that part of what the last one came to: its entries may take longer."""
CUT_BYTES = 64 << 20
"""A large file is cut by as much at a time when paced (RocksDB and Pebble found the same step)."""


class SliceBudget(NamedTuple):
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


class NamesPerLook:
    """How many entries a worker takes between two looks at the clock: few where each is a server's answer.

    It lasts from slice to slice: each begun with one entry would go several times around before it has found its size.
    """

    def __init__(self) -> None:
        self.n, self._most = 1, NAMES_AT_ONCE

    def begin(self, slice_s: float) -> None:
        """A slice of that length begins; in a small one the number of its entries is what ends it."""
        if slice_s > SMALL_SLICE_S:
            self.n, self._most = max(1, self.n // _STEP_BACK), NAMES_AT_ONCE
        else:
            self.n = self._most = _FEW_AT_ONCE

    def took(self, n: int, seconds: float) -> None:
        """So many took so long."""
        fits = int(n * _LOOK_S / max(seconds, 1e-6))
        self.n = max(1, min(fits, _GROWS * self.n, self._most))


class Speed(NamedTuple):
    """How fast a removal may be at the moment.

    entries_per_s, bytes_per_s  None: as fast as the kernel; 0: wait
    is_alone  no other process uses the disk: several workers beside each other, and slices as long as they like to be
    rests     slices end before the common rests (core.pacing), in which that is looked for
    share     of the time in which the kernel may work for us, whatever a call takes
    """

    entries_per_s: int | None = None
    bytes_per_s: int | None = None
    is_alone: bool = True
    rests: bool = False
    share: float = 1.0

    def is_limited(self) -> bool:
        """Whether entries or bytes are counted."""
        return self.entries_per_s is not None or self.bytes_per_s is not None

    def holds(self) -> bool:
        """Whether nothing may be done."""
        return self.entries_per_s == 0 or self.bytes_per_s == 0


AT_ONCE = Speed()
HOLD = Speed(entries_per_s=0, is_alone=False)


class TokenBucket:
    """A rate as a bucket: it fills as time goes by, gives out a slice's worth or more, and may be overdrawn.

    Overdrawn, because a file's size is known only when it goes: the debt is waited for before the next slice.
    """

    def __init__(self, per_s: int, now_s: float, slice_s: float = SLICE_S) -> None:
        self._at_s = now_s
        self._set(per_s, slice_s)
        self._left = self._least

    def _set(self, per_s: int, slice_s: float) -> None:
        self._per_s = per_s
        self._least = max(per_s * slice_s, 1.0)
        self._most = 2 * self._least

    def change(self, per_s: int, now_s: float, slice_s: float = SLICE_S) -> None:
        """Fill at another rate from now on; what was saved up at the old one, or is owed, stays."""
        self._fill(now_s)
        self._set(per_s, slice_s)

    def _fill(self, now_s: float) -> None:
        self._left = min(self._most, self._left + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s

    def take(self, now_s: float) -> int:
        """All that may be spent now; 0 if it is not worth a slice yet. What is not spent comes back by `give_back`."""
        self._fill(now_s)
        if self._left < self._least:
            return 0
        taken = int(self._left)
        self._left -= taken
        return taken

    def give_back(self, n: int) -> None:
        """Return what was taken and not spent; negative if more was spent."""
        self._left += n

    def wait_s(self) -> float:
        """Seconds until something can be taken; 0 if it can now; infinite at a rate of 0."""
        missing = max(0.0, self._least - self._left)
        if not self._per_s:
            return math.inf if missing else 0.0
        return missing / self._per_s
