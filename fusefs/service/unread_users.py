"""Users of a volume of whom something could not be read: each is looked at again by a clock of their own."""

from __future__ import annotations

import math
from collections.abc import Iterable

from fusefs.service import timers
from fusefs.service.user_state import RetryClock
from fusefs.store.user_folders import FolderRefusal


class UnreadUsers:
    """Those users, and why."""

    def __init__(self) -> None:
        self._clocks: dict[int, RetryClock] = {}
        self._refused: dict[int, list[FolderRefusal]] = {}

    def __contains__(self, uid: int) -> bool:
        return uid in self._refused

    def resting(self, now_s: float) -> set[int]:
        """Those who are not looked at now."""
        return {uid for uid, clock in self._clocks.items() if clock.at_s > now_s}

    def note(self, unread: Iterable[FolderRefusal], resting: set[int], now_s: float) -> None:
        """Take in what a look could not read, of those who did not rest."""
        failed: dict[int, list[FolderRefusal]] = {}
        for refusal in unread:
            failed.setdefault(refusal.uid, []).append(refusal)
        for uid in self._clocks.keys() - failed.keys() - resting:
            del self._clocks[uid], self._refused[uid]
        for uid, refused in failed.items():
            clock = self._clocks.setdefault(
                uid, RetryClock(timers.current.unread_pause_s, timers.current.last_unread_pause_s)
            )
            if uid not in resting:
                clock.failed(now_s)
            self._refused[uid] = refused

    def refused(self) -> list[FolderRefusal]:
        """What could not be read of them."""
        return [refusal for refused in self._refused.values() for refusal in refused]

    def next_at_s(self) -> float:
        """When one of them is looked at again; infinity if there are none."""
        return min((clock.at_s for clock in self._clocks.values()), default=math.inf)
