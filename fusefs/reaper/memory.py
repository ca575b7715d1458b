"""What a service remembers for the next one: how far the wall clock is ahead."""

from __future__ import annotations

import logging
import os

from fusefs.core import clock
from fusefs.core.clock import Clock
from fusefs.linux.host import boot_id
from fusefs.linux.places import make_dir
from fusefs.linux.replacing import replace_file
from fusefs.reaper.context import clocks_ns

_LOG = logging.getLogger(__name__)
_FILE = b"clock.json"
_MOST_BYTES = 4096


def load_clock(state: bytes) -> tuple[int, Clock]:
    """When the last service looked last (wall time, now if there was none), and the clock as it left it, brought up
    to now; without one the wall clock is believed.
    """
    saved = None
    try:
        with open(os.path.join(state, _FILE), "rb") as file:
            saved = clock.decode(file.read(_MOST_BYTES))
    except FileNotFoundError:
        pass
    except OSError as error:
        _LOG.warning("what the last service remembered can't be read: %s", error.strerror)
    now_ns, boot_ns = clocks_ns()
    began = clock.started(now_ns, boot_ns, boot_id(), saved)
    return now_ns if saved is None else saved.wall_ns, began


def save_clock(state: bytes, now: Clock, *, is_durable: bool = True) -> None:
    """Leave it for the next service. A full disk costs the memory, not the service."""
    path = os.path.join(state, _FILE)
    try:
        make_dir(state)
        replace_file(path, clock.encode(now), 0o600, is_durable=is_durable)
    except OSError as error:
        _LOG.warning("%s can't be written: %s", os.fsdecode(path), error.strerror)
