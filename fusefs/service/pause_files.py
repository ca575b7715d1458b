"""Pauses: small files beside the status, which only the service's own user can write. What is there is in force."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from typing import NamedTuple

import msgspec

from fusefs.core.printable_names import printable
from fusefs.core.record import quote, unquote
from fusefs.linux.atomic_files import NEW, replace_file
from fusefs.linux.runtime_directories import make_dir

_DIRECTORY = b"pause"
_ALL = b"all"
_MOST_BYTES = 16_384
_FOREVER_S = 10 * 365 * 86_400.0


class Pause(NamedTuple):
    """Why, and until when (wall time in seconds; None: until it is resumed)."""

    why: str
    until_s: float | None

    def left_s(self, now_s: float) -> float:
        """Seconds until it ends by itself."""
        return _FOREVER_S if self.until_s is None else max(0.0, self.until_s - now_s)


class _PauseFile(msgspec.Struct):
    volume: str | None
    why: str
    until_s: float | None


def pause_dir(runtime: bytes) -> bytes:
    """The directory of the pauses of a service, made if missing. Raises  OSError"""
    return make_dir(os.path.join(runtime, _DIRECTORY))


def write_pause(runtime: bytes, volume: bytes | None, pause: Pause) -> None:
    """Pause a volume, or all of them. Raises  OSError"""
    path = os.path.join(pause_dir(runtime), _name(volume))
    text = msgspec.json.encode(_PauseFile(None if volume is None else quote(volume), pause.why, pause.until_s))
    replace_file(path, text, 0o644)


def remove_pause(runtime: bytes, volume: bytes | None) -> bool:
    """End one; whether there was one. Raises  OSError"""
    try:
        os.unlink(os.path.join(runtime, _DIRECTORY, _name(volume)))
    except FileNotFoundError:
        return False
    return True


def nudge(runtime: bytes) -> None:
    """Have a running service look at its pauses, and for new volumes; without one nothing happens."""
    path = os.path.join(runtime, _DIRECTORY, b"nudge" + NEW)
    with suppress(OSError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        os.unlink(path)


def read_pauses(runtime: bytes, now_s: float) -> dict[bytes | None, Pause]:
    """The pauses in force by volume, None for all of them; a file that says nothing sensible pauses everything."""
    found: dict[bytes | None, Pause] = {}
    directory = os.path.join(runtime, _DIRECTORY)
    with suppress(FileNotFoundError):
        for name in os.listdir(directory):
            if name.endswith(NEW):
                continue
            volume, pause = _read(os.path.join(directory, name))
            if pause.left_s(now_s) > 0:
                found[volume] = pause
    return found


def _read(path: bytes) -> tuple[bytes | None, Pause]:
    try:
        with open(path, "rb") as file:
            said = msgspec.json.decode(file.read(_MOST_BYTES), type=_PauseFile)
        volume = None if said.volume is None else unquote(said.volume)
    except (OSError, ValueError, msgspec.MsgspecError):
        return None, Pause(f"{printable(path)} can't be read", None)
    return volume, Pause(said.why, said.until_s)


def _name(volume: bytes | None) -> bytes:
    return _ALL if volume is None else hashlib.sha256(volume).hexdigest()[:32].encode()
