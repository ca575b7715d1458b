"""The pace of a removal, asked before each slice: how much may be done now, and how long to wait if nothing may."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from fusefs.core.pacing import rest_at
from fusefs.core.slice_budget import AT_ONCE, SLICE_S, SMALL_SLICE_S, SliceBudget, Speed, TokenBucket

GLANCE_S = 0.2
"""How long a change of mind may go unseen."""
_NAP_S = 0.002
"""Shorter waits than that are slept through: no stop is looked for in them."""
_GAP_S = 0.0002
"""Between two looks whether the device has a gap for us."""
_MAKES_UP = 5.0
"""A slice that waited for a gap takes up to so many times as much, for those that it would have taken meanwhile."""
_PATIENCE_S = 0.1
"""On a device that never has one we take our small slice all the same: it must not starve."""


class KeepsTime(Protocol):
    """What tells seconds, and lets them pass: the module `time`, but where time is simulated."""

    def monotonic(self) -> float:
        """As time.monotonic."""

    def sleep(self, seconds: float, /) -> None:
        """As time.sleep."""


class SetsSpeed(Protocol):
    """Who says how fast it goes: a person once and for all, or what watches the disk."""

    def tempo(self) -> Speed:
        """How fast it may be now; asked at least before each slice."""

    def done(self, n_entries: int, n_bytes: int, busy_s: float) -> None:
        """A slice did so much, and took a worker that long."""

    def wait(self, seconds: float) -> None:
        """Wait that long, or until the tempo changes."""


class SliceDone(Protocol):
    """What a slice did, as far as its pace is concerned (core.slices.RemovalSliceResult)."""

    @property
    def removed(self) -> int:
        """Entries."""

    @property
    def n_bytes(self) -> int:
        """Freed."""

    @property
    def busy_s(self) -> float:
        """How long it took."""


class ConstantSpeed(NamedTuple):
    """One tempo all the time."""

    always: Speed

    def tempo(self) -> Speed:
        """See SetsSpeed."""
        return self.always

    def done(self, n_entries: int, n_bytes: int, busy_s: float) -> None:
        """See SetsSpeed."""

    def wait(self, seconds: float) -> None:
        """See SetsSpeed."""
        time.sleep(seconds)


FULL_SPEED = ConstantSpeed(AT_ONCE)


class SlicePace:
    """A tempo as budgets for slices."""

    def __init__(
        self,
        pacer: SetsSpeed,
        is_busy: Callable[[], bool] = lambda: False,
        afterwork: float = 0.0,
        clock: KeepsTime = time,
    ) -> None:
        """Be asked.

        is_busy    whether the device has anything to do right now; asked beside others alone
        afterwork  see Strategy
        """
        self._pacer = pacer
        self._tempo = AT_ONCE
        self._entries: TokenBucket | None = None
        self._bytes: TokenBucket | None = None
        self._clock = clock
        self._small = _SmallSlices(is_busy, afterwork, clock)
        self._rest_ends_s = 0.0
        self.was_always_limited = True
        self.follow()

    def follow(self) -> Speed:
        """The tempo as it is now."""
        tempo = self._pacer.tempo()
        if tempo != self._tempo and not tempo.holds():
            now = self._clock.monotonic()
            slice_s = SLICE_S if tempo.is_alone else SMALL_SLICE_S
            self._entries = _changed(self._entries, tempo.entries_per_s, now, slice_s)
            self._bytes = _changed(self._bytes, tempo.bytes_per_s, now, slice_s)
        self._tempo = tempo  # what is owed when a hold begins is still owed when it ends
        return tempo

    def budget(self) -> SliceBudget | None:
        """What a slice may do now; None if it has to wait."""
        tempo = self.follow()
        if tempo.holds() or (not tempo.is_alone and not self._small.may_begin()):
            return None
        now = self._clock.monotonic()
        seconds = self._seconds(tempo, now)
        if seconds <= 0.0:
            return None
        n_entries = None if self._entries is None else self._entries.take(now)
        n_bytes = None if self._bytes is None else self._bytes.take(now)
        if not tempo.is_alone and n_entries != 0:
            few = self._small.n_entries
            if self._entries is not None and n_entries is not None:
                self._entries.give_back(max(n_entries - few, 0))
            n_entries = few if n_entries is None else min(n_entries, few)
        budget = SliceBudget(seconds, n_entries, n_bytes)
        if n_entries == 0 or n_bytes == 0:
            self.give_back(budget)
            return None
        self.was_always_limited &= budget.is_paced()
        return budget

    def _seconds(self, tempo: Speed, now_s: float) -> float:
        """How long a slice may be that begins now; 0 in a rest."""
        seconds = SLICE_S if tempo.is_alone else SMALL_SLICE_S
        if not tempo.rests:
            return seconds
        begins_s, ends_s = rest_at(now_s, is_alone=tempo.is_alone)
        self._rest_ends_s = ends_s if begins_s <= now_s else 0.0
        return min(seconds, begins_s - now_s)

    def done(self, budget: SliceBudget, outcome: SliceDone) -> None:
        """Take in what a slice did with its budget."""
        self.give_back(budget, outcome.removed, outcome.n_bytes)
        if not self._tempo.is_alone:
            self._small.done(outcome, self._tempo.share, self._clock.monotonic())
        self._pacer.done(outcome.removed, outcome.n_bytes, outcome.busy_s)

    def give_back(self, budget: SliceBudget, n_entries: int = 0, n_bytes: int = 0) -> None:
        """Return what a slice did not spend; what it overspent is waited for."""
        if self._entries is not None and budget.n_entries is not None:
            self._entries.give_back(budget.n_entries - n_entries)
        if self._bytes is not None and budget.n_bytes is not None:
            self._bytes.give_back(budget.n_bytes - n_bytes)

    def sleep(self) -> None:
        """Wait until there is a budget again, or long enough to look whether to stop."""
        now = self._clock.monotonic()
        waits = [allowance.wait_s() for allowance in (self._entries, self._bytes) if allowance is not None]
        waits += [self._rest_ends_s - now, self._small.wait_s(now)]
        seconds = GLANCE_S if self._tempo.holds() else min(max(waits), GLANCE_S)
        if 0.0 < seconds < _NAP_S:
            self._clock.sleep(seconds)
        else:
            self._pacer.wait(max(seconds, 0.0))


class _SmallSlices:
    """Small slices beside others: a share of the time, each begun in a gap of the device."""

    def __init__(self, is_busy: Callable[[], bool], afterwork: float, clock: KeepsTime) -> None:
        self._is_busy = is_busy
        self._afterwork = afterwork
        self._clock = clock
        self._due_s = 0.0
        self._asked_s: float | None = None
        self._fit = 1
        self._share = 0.0
        self.n_entries = 1

    def may_begin(self) -> bool:
        """Whether a slice may begin. A gap is waited for here: the long way through the engine would be felt by others.

        False is for a moment only: there may be other things to do.
        """
        now_s = self._clock.monotonic()
        if now_s < self._due_s:
            return False
        if self._asked_s is None:
            self._asked_s = now_s
        nap_ends_s = now_s + _NAP_S
        while now_s - self._asked_s < _PATIENCE_S and self._is_busy():
            if now_s >= nap_ends_s:
                return False
            self._clock.sleep(_GAP_S)
            now_s = self._clock.monotonic()
        missed = (now_s - self._asked_s) * self._share / SMALL_SLICE_S
        self.n_entries = round(self._fit * min(1.0 + missed, _MAKES_UP))
        return True

    def done(self, outcome: SliceDone, share: float, now_s: float) -> None:
        """A slice was done, and we have that share of the time."""
        period_s = outcome.busy_s * (1.0 + self._afterwork) / share
        # What was not taken when it was due is made up for by shorter pauses, not by none.
        self._due_s = max(self._due_s + period_s, now_s + period_s / 2)
        self._asked_s = None
        self._share = share
        if outcome.removed:
            fits = SMALL_SLICE_S * outcome.removed / max(outcome.busy_s, 1e-6)
            self._fit = max(1, min(round((3 * self._fit + fits) / 4), 2 * self._fit))

    def wait_s(self, now_s: float) -> float:
        """Seconds until one may begin, as far as is known."""
        return self._due_s - now_s


def _changed(allowance: TokenBucket | None, per_s: int | None, now_s: float, slice_s: float) -> TokenBucket | None:
    if per_s is None:
        return None
    if allowance is None:
        return TokenBucket(per_s, now_s, slice_s)
    allowance.change(per_s, now_s, slice_s)
    return allowance
