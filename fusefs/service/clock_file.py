"""State that a service leaves to the next one: how far the wall clock is ahead."""

from __future__ import annotations

import os
from contextlib import suppress

from fusefs.core import orphan_age
from fusefs.core.orphan_age import Clock
from fusefs.linux.atomic_files import replace_file
from fusefs.linux.boot_id import boot_id
from fusefs.linux.clocks import clocks_ns
from fusefs.linux.runtime_directories import make_dir

_FILE = b"clock.json"
_COMMANDS_FILE = b"clock-of-commands.json"
_MOST_BYTES = 4096


def load_clock(state: bytes) -> tuple[int, Clock]:
    """When the last service looked last (wall time, now if there was none), and the clock as it left it, brought up
    to now; without one the wall clock is believed.
    """
    try:
        saved = _read(state, _FILE)
    except OSError as error:
        _warn("what the last service remembered can't be read: %s", error.strerror)
        saved = None
    now = _up_to_now(saved)
    return now.wall_ns if saved is None else saved.wall_ns, now


def _read(state: bytes, name: bytes) -> Clock | None:
    """What was saved; None for nothing, or what is not understood. Raises  OSError"""
    try:
        with open(os.path.join(state, name), "rb") as file:
            return orphan_age.decode(file.read(_MOST_BYTES))
    except FileNotFoundError:
        return None


def _up_to_now(saved: Clock | None) -> Clock:
    now_ns, boot_ns = clocks_ns()
    return orphan_age.started(now_ns, boot_ns, boot_id(), saved)


def watched_clocks(state: bytes, *, notes: bool) -> tuple[Clock, ...]:
    """What the service and the commands of a state directory remember of the wall clock, each brought up to now.

    notes  note now for the next command, which then learns of a clock that is set between the two; or not, where
           that can't be written
    """
    clocks = []
    for name in (_FILE, _COMMANDS_FILE):
        saved = None
        with suppress(OSError):
            saved = _read(state, name)
        clocks.append(_up_to_now(saved))
    with suppress(OSError):
        if notes:
            make_dir(state)
            replace_file(os.path.join(state, _COMMANDS_FILE), orphan_age.encode(clocks[-1]), 0o600, is_durable=False)
    return tuple(clocks)


def save_clock(state: bytes, now: Clock, *, is_durable: bool = True) -> None:
    """Leave it for the next service. A full disk costs the memory, not the service."""
    path = os.path.join(state, _FILE)
    try:
        make_dir(state)
        replace_file(path, orphan_age.encode(now), 0o600, is_durable=is_durable)
    except OSError as error:
        _warn("%s can't be written: %s", os.fsdecode(path), error.strerror)


def _warn(text: str, *values: str | None) -> None:
    import logging  # commands look at clocks too, and log nothing

    logging.getLogger(__name__).warning(text, *values)
