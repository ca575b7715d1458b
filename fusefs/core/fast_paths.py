"""What makes a mount fast: four things that `trashd mount --explain` and `trashd status` report."""

from __future__ import annotations

from enum import Enum
from typing import Final

import msgspec

from fusefs.core.errors import TrashdError


class FastPath(Enum):
    """By the names that people read. Without the engine (plain mode) there is none of the others."""

    ENGINE = "engine"
    URING = "uring"
    PASSTHROUGH = "passthrough"
    LISTINGS = "kept-listings"


ON: Final = {
    FastPath.ENGINE: "requests are answered in C",
    FastPath.URING: "requests come by io_uring, to a thread on the caller's core",
    FastPath.PASSTHROUGH: "reads, writes and mmap go to the file below, past the daemon",
    FastPath.LISTINGS: "the kernel lists an unchanged directory without a request",
}
"""What each does where nothing limits it."""
SLOW: Final = "SRC answers slowly: Python answers from memory, and has threads ask for the rest"
"""What limits the engine for now."""


class FastPathState(msgspec.Struct, frozen=True):
    """Whether a mount has a fast path. why: what it does, what limits it, or what keeps it off"""

    name: str
    is_on: bool
    why: str


class FastPathReport(msgspec.Struct, frozen=True):
    """What a mount's daemon reports. device: st_dev of the mount"""

    device: int
    pid: int
    fast_paths: tuple[FastPathState, ...]


def encode(report: FastPathReport) -> bytes:
    """As a text."""
    return msgspec.json.format(msgspec.json.encode(report)) + b"\n"


def decode(text: bytes) -> FastPathReport:
    """From a text. Raises  TrashdError: it is something else"""
    try:
        return msgspec.json.decode(text, type=FastPathReport)
    except (msgspec.MsgspecError, ValueError) as error:
        hint = "is its daemon of another version? Mount it anew"
        raise TrashdError(f"the fast paths of a mount are not understood ({error})", hint) from error
