"""What can be done, in view of others, to a name and a container."""

from __future__ import annotations

from enum import Enum


class VisibleMove(Enum):
    """What can be done to the name."""

    EXCHANGE = "the container's `tree` and the name's thing change places"
    ASIDE = "the name's thing goes to the container's `tree`"
    REPLACE = "the same, and the container's `fresh` gets the name at once: off local filesystems alone"
    ASIDE_FRESH = "the name's thing goes to the container's `fresh`"
    PLACE = "the container's `fresh` goes to the name, which is free"
    BACK = "the container's `tree` goes to the name, which is free"
