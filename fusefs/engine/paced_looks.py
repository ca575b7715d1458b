"""A walk that only looks, at a pace that others on the disk don't feel: in slices, as a removal goes."""

from __future__ import annotations

import math
import time
from typing import NamedTuple

from fusefs.core.report import Stops
from fusefs.core.slice_budget import SliceBudget
from fusefs.engine.slice_pace import SetsSpeed, SlicePace


class _Looked(NamedTuple):
    """See engine.slice_pace.SliceDone."""

    removed: int
    n_bytes: int
    busy_s: float


class PacedLooks:
    """Called before each entry; returns when that may be looked at."""

    def __init__(self, pacer: SetsSpeed, stops: Stops) -> None:
        """stops: asked while it waits; after a yes it waits no more"""
        self._pace = SlicePace(pacer)
        self._stops = stops
        self._budget: SliceBudget | None = None
        self._n = 0
        self._most: float = 0
        self._began_s = self._ends_s = 0.0

    def __call__(self) -> None:
        """Wait, if a slice is over, for the next one."""
        now_s = time.monotonic()
        if self._n >= self._most or now_s >= self._ends_s:
            if self._budget is not None:
                self._pace.done(self._budget, _Looked(self._n, 0, now_s - self._began_s))
            self._await_budget()
        self._n += 1

    def _await_budget(self) -> None:
        self._n, self._most, self._budget = 0, math.inf, self._pace.budget()
        while self._budget is None and not self._stops():
            self._pace.sleep()
            self._budget = self._pace.budget()
        self._began_s = time.monotonic()
        self._ends_s = math.inf if self._budget is None else self._began_s + self._budget.seconds
        if self._budget is not None and self._budget.n_entries is not None:
            self._most = self._budget.n_entries
