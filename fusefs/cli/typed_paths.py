"""Paths that a command line names, or standard input."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from fusefs.core.errors import UsageError, errors_about

_CHUNK = 1 << 16


def existing(volumes: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """The volumes as they were given. Raises  TrashdError if one can't be looked at: it would seem to be empty"""
    for volume in volumes:
        with errors_about(volume):
            os.stat(volume)
    return volumes


def every_path(paths: tuple[bytes, ...], *, null: bool) -> Iterator[bytes]:
    """The paths of the command line, then those of standard input as they come.

    Raises  UsageError if there are none at all
    """
    if not paths and not null:
        raise UsageError("no path was given", "name at least one, or use -0 to read them from standard input")
    yield from paths
    if null:
        yield from _read_null(standard_input())


def standard_input() -> int:
    """Its fd. Raises  UsageError if it was closed: what has its number now is something else"""
    if sys.__stdin__ is None:
        raise UsageError("standard input is closed", "what it should be read from must be open")
    return sys.__stdin__.fileno()


def _read_null(fd: int) -> Iterator[bytes]:
    rest = b""
    while chunk := os.read(fd, _CHUNK):
        *complete, rest = (rest + chunk).split(b"\0")
        yield from (path for path in complete if path)
    if rest:
        yield rest
