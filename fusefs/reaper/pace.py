"""What a removal asks before each slice: how much may be done now, and how long to wait if nothing may."""

from __future__ import annotations

import time
from typing import NamedTuple, Protocol

from fusefs.core.budget import AT_ONCE, SLICE_S, SMALL_SLICE_S, Allowance, Budget, Tempo
from fusefs.core.slices import Outcome

GLANCE_S = 0.2
"""How long a change of mind may go unseen."""


class Leads(Protocol):
    """Who says how fast it goes: a person once and for all, or somebody who watches the disk."""

    def tempo(self) -> Tempo:
        """How fast it may be now; asked at least before each slice."""

    def done(self, n_entries: int, n_bytes: int, busy_s: float) -> None:
        """A slice did so much, and took a worker that long."""

    def wait(self, seconds: float) -> None:
        """Wait that long, or until the tempo changes."""


class Constant(NamedTuple):
    """The same all the time."""

    always: Tempo

    def tempo(self) -> Tempo:
        """See Leads."""
        return self.always

    def done(self, n_entries: int, n_bytes: int, busy_s: float) -> None:
        """See Leads."""

    def wait(self, seconds: float) -> None:
        """See Leads."""
        time.sleep(seconds)


FULL_SPEED = Constant(AT_ONCE)


class Pace:
    """A tempo as budgets for slices."""

    def __init__(self, leads: Leads) -> None:
        self._leads = leads
        self._tempo = AT_ONCE
        self._entries: Allowance | None = None
        self._bytes: Allowance | None = None
        self.was_always_limited = True
        self.follow()

    def follow(self) -> Tempo:
        """The tempo as it is now."""
        tempo = self._leads.tempo()
        if tempo != self._tempo:
            now = time.monotonic()
            slice_s = _slice_s(tempo)
            self._entries = _changed(self._entries, tempo.entries_per_s, now, slice_s)
            self._bytes = _changed(self._bytes, tempo.bytes_per_s, now, slice_s)
            self._tempo = tempo
        return tempo

    def budget(self) -> Budget | None:
        """What a slice may do now; None if it has to wait."""
        tempo = self.follow()
        now = time.monotonic()
        n_entries = None if self._entries is None else self._entries.take(now)
        n_bytes = None if self._bytes is None else self._bytes.take(now)
        budget = Budget(_slice_s(tempo), n_entries, n_bytes)
        if n_entries == 0 or n_bytes == 0:
            self.give_back(budget)
            return None
        self.was_always_limited &= tempo.is_limited()
        return budget

    def done(self, budget: Budget, outcome: Outcome) -> None:
        """Take in what a slice did with its budget."""
        self.give_back(budget, outcome.removed, outcome.n_bytes)
        self._leads.done(outcome.removed, outcome.n_bytes, outcome.busy_s)

    def give_back(self, budget: Budget, n_entries: int = 0, n_bytes: int = 0) -> None:
        """Return what a slice did not spend; what it overspent is waited for."""
        if self._entries is not None and budget.n_entries is not None:
            self._entries.give_back(budget.n_entries - n_entries)
        if self._bytes is not None and budget.n_bytes is not None:
            self._bytes.give_back(budget.n_bytes - n_bytes)

    def sleep(self) -> None:
        """Wait until there is a budget again, or long enough to look whether to stop."""
        waits = [allowance.wait_s() for allowance in (self._entries, self._bytes) if allowance is not None]
        self._leads.wait(min(max(waits, default=0.0), GLANCE_S))


def _slice_s(tempo: Tempo) -> float:
    return SLICE_S if tempo.is_alone else SMALL_SLICE_S


def _changed(allowance: Allowance | None, per_s: int | None, now_s: float, slice_s: float) -> Allowance | None:
    if per_s is None:
        return None
    if allowance is None:
        return Allowance(per_s, now_s, slice_s)
    allowance.change(per_s, now_s, slice_s)
    return allowance
