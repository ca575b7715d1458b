"""A volume's figures while the service runs: free space and its trend, work done, and recent rates; no I/O."""

from __future__ import annotations

import math
from collections import deque

from fusefs.core.policy import SpaceNeeded, VolumePolicy, hurries
from fusefs.core.service_status import MOST_FAULTS, StatusFault
from fusefs.service.open_volume import VolumeSpace

_TREND_S = 30.0
"""The period of a trend, long enough to smooth out the effect of a single file."""
_LATELY_S = 5.0
_USUAL_ENTRIES = 1000.0
"""The assumed number of entries in an orphan, until the first one is reaped."""
_WEIGHT = 0.1


class VolumeFigures:
    """A volume's free space and its trend, whether the reaper hurries, work done, and recent rates.

    why_kept  if space is low or a quota is exceeded: why no orphan is deleted early; empty if some are, or if unknown
    """

    def __init__(self) -> None:
        self.hurries_since_s = 0.0
        self._since_bytes = 0
        self.forget_space()
        self.n_entries = 0
        self.n_bytes = 0
        self.busy_s = 0.0
        self.n_reaped = 0
        self.usual_entries = _USUAL_ENTRIES
        self.faults: deque[StatusFault] = deque(maxlen=MOST_FAULTS)
        self._lately: deque[tuple[float, int, int]] = deque()

    def forget_space(self) -> None:
        """Forget the free space and its trend, because the volume is gone or is a different one now."""
        self.space: VolumeSpace | None = None
        self.hurries = self.is_over_quota = False
        self.why_kept = ""
        self.trend_bytes_per_s: float | None = None
        self._since_s = -math.inf

    def note_space(self, space: VolumeSpace, policy: VolumePolicy, now_s: float) -> bool:
        """Note the current space, and return whether the reaper started or stopped hurrying."""
        self.space = space
        elapsed_s = now_s - self._since_s
        if elapsed_s > 2 * _TREND_S:
            self._since_s, self._since_bytes, self.trend_bytes_per_s = now_s, space.free_bytes, None
        elif elapsed_s >= 1.0:
            rate = (space.free_bytes - self._since_bytes) / elapsed_s
            weight = min(elapsed_s / _TREND_S, 1.0) if self.trend_bytes_per_s is not None else 1.0
            self.trend_bytes_per_s = rate * weight + (self.trend_bytes_per_s or 0.0) * (1.0 - weight)
            self._since_s, self._since_bytes = now_s, space.free_bytes
        before = self.hurries
        wants_blocks = hurries(policy.blocks, space.free_share(), before)
        self.hurries = wants_blocks or hurries(policy.inodes, space.free_inode_share(), before)
        if self.hurries and not before:
            self.hurries_since_s = now_s
        return self.hurries != before

    def needed_space(self, policy: VolumePolicy) -> SpaceNeeded:
        """Return how much space must be freed before the reaper can stop hurrying."""
        space = self.space
        if space is None:
            return SpaceNeeded()
        n_inodes = n_bytes = 0
        if policy.blocks is not None:
            n_bytes = max(int(policy.blocks.high * space.total_bytes) - space.free_bytes, 0)
        if policy.inodes is not None and space.total_inodes and space.free_inodes is not None:
            n_inodes = max(int(policy.inodes.high * space.total_inodes) - space.free_inodes, 0)
        return SpaceNeeded(n_inodes, n_bytes)

    def add(self, n_entries: int, n_bytes: int, busy_s: float) -> None:
        self.n_entries += n_entries
        self.n_bytes += n_bytes
        self.busy_s += busy_s

    def count_reaped(self, n_entries: int) -> None:
        self.n_reaped += 1
        self.usual_entries += _WEIGHT * (n_entries - self.usual_entries)

    def note_rates(self, now_s: float) -> None:
        """Note the current totals, from which rates are computed."""
        self._lately.append((now_s, self.n_entries, self.n_bytes))
        while now_s - self._lately[0][0] > _LATELY_S:
            self._lately.popleft()

    def rates(self) -> tuple[float, float]:
        """Return the recent rates, in entries and bytes per second."""
        if len(self._lately) < 2:
            return 0.0, 0.0
        (began_s, *first), (ended_s, *last) = self._lately[0], self._lately[-1]
        seconds = max(ended_s - began_s, 0.001)
        return (last[0] - first[0]) / seconds, (last[1] - first[1]) / seconds

    def eta_s(self, n_due: int, n_removed: int) -> float | None:
        """Estimate the seconds until all due orphans are deleted, assuming that they are as large as earlier ones.

        n_removed  entries already removed from the orphan that is being reaped
        """
        entries_per_s, _ = self.rates()
        if not n_due or entries_per_s <= 0 or n_removed > 2 * self.usual_entries or not self.n_reaped:
            return None
        return max(n_due * self.usual_entries - n_removed, 0.0) / entries_per_s

    def note_idle(self) -> None:
        self._lately.clear()

    def fault(self, at_ns: int, text: str) -> None:
        """Note an error, whose text must not contain file names."""
        self.faults.append(StatusFault(at_ns, text))
