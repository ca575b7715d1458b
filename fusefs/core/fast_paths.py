"""The fast paths of a mount: without one the mount does the same, slower. Each can be switched off by tests."""

from __future__ import annotations

from enum import Enum
from typing import Final

import msgspec

from fusefs.core.errors import TrashdError


class FastPath(Enum):
    """By the names that people use.

    ENGINE       requests are read and answered without libfuse and pyfuse3; all others rest on it
    URING        requests come by io_uring, to a thread on the core of who asks
    NATIVE       the commonest requests are answered in C; it rests on ENGINE
    PARALLEL     a lookup does not wait for others in the same directory
    LISTINGS     the kernel keeps listings, until a directory changes
    ROOT_ACL     the kernel keeps the ACL of the mount's root
    UNOPENED     the kernel opens and closes directories without a message
    LINKS        the kernel keeps where symbolic links lead
    KILLPRIV     what serves a write takes away set-user-ID bits and file capabilities; else the kernel asks for
                 them at each write
    PASSTHROUGH  reads, writes and mmap go to the file below, past the daemon
    """

    ENGINE = "engine"
    URING = "uring"
    NATIVE = "native-core"
    PARALLEL = "parallel-lookups"
    LISTINGS = "kept-listings"
    ROOT_ACL = "kept-root-acl"
    UNOPENED = "unopened-directories"
    LINKS = "kept-links"
    KILLPRIV = "kill-privileges"
    PASSTHROUGH = "passthrough"


SAVES: Final = {
    FastPath.ENGINE: "libfuse's and pyfuse3's part of each request",
    FastPath.URING: "waking another core for each message",
    FastPath.NATIVE: "Python's part of the commonest requests",
    FastPath.PARALLEL: "waiting for others in the same directory",
    FastPath.LISTINGS: "asking for a listing again",
    FastPath.ROOT_ACL: "asking for the root's ACL each time that a user passes it",
    FastPath.UNOPENED: "two messages each time that a directory is listed",
    FastPath.LINKS: "asking again where a link leads",
    FastPath.KILLPRIV: "asking for capabilities at each write",
    FastPath.PASSTHROUGH: "the daemon's part in reads, writes and mmap",
}


SLOW: Final = "SRC answers slowly: Python answers from memory, and has threads ask for the rest"
"""Why NATIVE is off for now."""
ALWAYS: Final = frozenset({FastPath.ENGINE, FastPath.PARALLEL, FastPath.KILLPRIV})
"""Those that every mount has, but for plain mode and an unusual kernel: users read of one only where it is off."""


class FastPathState(msgspec.Struct, frozen=True):
    """Whether a mount has a fast path.

    name  of this version's, or of another's whose daemon tells
    why   what it saves if it is on, what keeps it off if not
    """

    name: str
    is_on: bool
    why: str


class FastPathReport(msgspec.Struct, frozen=True):
    """What a mount's daemon tells of its fast paths. device: st_dev of the mount"""

    device: int
    pid: int
    fast_paths: tuple[FastPathState, ...]


def encode(told: FastPathReport) -> bytes:
    """As a text."""
    return msgspec.json.format(msgspec.json.encode(told)) + b"\n"


def decode(text: bytes) -> FastPathReport:
    """From a text. Raises  TrashdError: it is something else"""
    try:
        return msgspec.json.decode(text, type=FastPathReport)
    except (msgspec.MsgspecError, ValueError) as error:
        hint = "is its daemon of another version? Mount it anew"
        raise TrashdError(f"the fast paths of a mount are not understood ({error})", hint) from error
