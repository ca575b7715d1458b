"""The free space of a volume: what there is, where it goes, and whether the reaper hurries; pure."""

from __future__ import annotations

from fusefs.core.policy import VolumePolicy, hurries
from fusefs.reaper.volume import Space

_TREND_S = 30.0
"""Over which a trend is told: long enough that a single file is none."""


class Room:
    """What was seen last, and before."""

    def __init__(self) -> None:
        self.space: Space | None = None
        self.hurries = False
        self.trend_bytes_per_s: float | None = None
        self._since_s = 0.0
        self._since_bytes = 0

    def look(self, space: Space, policy: VolumePolicy, now_s: float) -> bool:
        """Take in what there is now; whether hurrying began or ended with it."""
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
        return self.hurries != before
