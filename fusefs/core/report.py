"""What a loop over many items did: it goes on after a failure and returns this."""

from __future__ import annotations

from typing import NamedTuple


class Failure(NamedTuple):
    """One thing that could not be done.

    name   path of the entry inside the tree
    errno  what the kernel said
    call   the call that it said it to
    """

    name: bytes
    errno: int
    call: str


class Report(NamedTuple):
    """Entries removed, failures (the first ones, see `MAX_FAILURES`), and how many failed in all."""

    removed: int
    failures: tuple[Failure, ...]
    n_failed: int


MAX_FAILURES = 50
"""Failures kept by name: a record must stay below 64 KiB, and nobody reads the millionth."""
