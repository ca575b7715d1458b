"""What another machine has just made, and this one's cache does not show yet."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 0.8
"""Between two looks: each is twice as long as the one before."""

T = TypeVar("T")


def seen_in_time(look: Callable[[], T], most_s: float, *unseen: type[Exception]) -> T:
    """What a look finds, which is had again as long as it is not seen; the last one is after most_s at the earliest.

    unseen  what a look raises then
    Raises  what the last look does; anything else at once
    """
    ends_s, pause_s = time.monotonic() + most_s, _PAUSE_S
    while True:
        try:
            return look()
        except unseen:
            if time.monotonic() >= ends_s:
                raise
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
