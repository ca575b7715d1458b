"""The service's small files: its status, pauses that only its own user writes, and the clock for the next service.

The sizes of each user's orphans are in a file that only that user may read, and in one that only root may read.
"""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import suppress
from typing import NamedTuple

import msgspec

from fusefs.core import orphan_age
from fusefs.core.orphan_age import Clock
from fusefs.core.printable_names import printable
from fusefs.core.record import quote_path, unquote_path
from fusefs.core.service_status import (
    HeldByUser,
    ObservedStatus,
    Status,
    VolumeStatus,
    age_s,
    decode_status,
    encode_status,
)
from fusefs.linux.file_locks import holds_service_lock
from fusefs.linux.machine_identity import boot_id, clocks_ns
from fusefs.linux.runtime_directories import NEW, make_dir, read_file, replace_file

FILE = b"status.json"
_SIZES_DIRECTORY, _ALL_SIZES = b"sizes", b"all"
_STATUS_MOST_BYTES = 64 << 20
Held = dict[str, tuple[HeldByUser, ...]]
"""The sizes of orphans, by the volume's path in the status."""


def write_status(directory: bytes, status: Status) -> None:
    """Write the status atomically, with a time stamp of the clock that can't be set.

    The write is not durable: after a power failure, there is no service to report about.
    Raises  OSError
    """
    now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    volumes = tuple(msgspec.structs.replace(volume, held=()) for volume in status.volumes)
    text = encode_status(msgspec.structs.replace(status, updated_boot_ns=now_ns, volumes=volumes))
    replace_file(directory + b"/" + FILE, text, 0o644, ignores_umask=True)


def read_status(directory: bytes) -> ObservedStatus | None:
    """Return the last status of the service in a directory; None if there is none. Raises  TrashdError, OSError"""
    try:
        status = decode_status(read_file(directory + b"/" + FILE, _STATUS_MOST_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return None
    age = age_s(status, boot_id(), time.clock_gettime_ns(time.CLOCK_BOOTTIME), time.time_ns())
    return ObservedStatus(status, holds_service_lock(directory, status.pid), age)


def served_volumes(directory: bytes) -> tuple[VolumeStatus, ...]:
    """Return the volumes of the service in a directory, if it is running. Raises  TrashdError, OSError"""
    snapshot = read_status(directory)
    return snapshot.status.volumes if snapshot is not None and snapshot.is_running else ()


class HeldFiles:
    """Writes the files with the sizes of users' orphans, but only after changes."""

    def __init__(self, runtime: bytes) -> None:
        """Delete the files of an earlier service, which may be outdated. runtime: the service's directory"""
        self._directory = os.path.join(runtime, _SIZES_DIRECTORY)
        self._written: dict[bytes, bytes] = {}
        with suppress(OSError):
            os.mkdir(self._directory, 0o711)
        with suppress(OSError):
            os.chmod(self._directory, 0o711)
            for name in os.listdir(self._directory):
                os.unlink(os.path.join(self._directory, name))

    def publish(self, status: Status) -> None:
        """Write the file of each user. Raises  OSError"""
        texts = {name: msgspec.json.encode(held) for name, held in _by_reader(status).items()}
        for name in self._written.keys() - texts.keys():
            os.unlink(os.path.join(self._directory, name))
            del self._written[name]
        for name, text in texts.items():
            if self._written.get(name) != text:
                owner = None if name == _ALL_SIZES else int(name)
                replace_file(os.path.join(self._directory, name), text, 0o400, ignores_umask=True, owner=owner)
                self._written[name] = text


def _by_reader(status: Status) -> dict[bytes, Held]:
    """Return the content of each file: one with all users and, in root's service, one for each user."""
    readers: dict[bytes, Held] = {_ALL_SIZES: {volume.path: volume.held for volume in status.volumes}}
    if os.geteuid():
        return readers
    for volume in status.volumes:
        for one in volume.held:
            if one.uid:
                readers.setdefault(b"%d" % one.uid, {})[volume.path] = (one,)
    return readers


def read_held(runtime: bytes) -> Held:
    """Return the orphans' sizes that a service has published: all sizes if we can read them, otherwise our own."""
    for name in (_ALL_SIZES, b"%d" % os.geteuid()):
        try:
            text = read_file(os.path.join(runtime, _SIZES_DIRECTORY, name), _STATUS_MOST_BYTES)
            return msgspec.json.decode(text, type=Held)
        except (OSError, msgspec.MsgspecError):
            continue
    return {}


_PAUSE_DIRECTORY = b"pause"
_ALL_VOLUMES = b"all"
_PAUSE_MOST_BYTES = 16_384
_FOREVER_S = 10 * 365 * 86_400.0


class Pause(NamedTuple):
    """The reason for a pause, and its end (wall time in seconds; None: until it is resumed)."""

    why: str
    until_s: float | None

    def remaining_s(self, now_s: float) -> float:
        """Return the seconds until the pause ends by itself."""
        return _FOREVER_S if self.until_s is None else max(0.0, self.until_s - now_s)


class _PauseFile(msgspec.Struct):
    volume: str | None
    why: str
    until_s: float | None


def pause_dir(runtime: bytes) -> bytes:
    """Return the directory of a service's pauses, and create it if missing. Raises  OSError"""
    return make_dir(os.path.join(runtime, _PAUSE_DIRECTORY))


def write_pause(runtime: bytes, volume: bytes | None, pause: Pause) -> None:
    path = os.path.join(pause_dir(runtime), _name(volume))
    text = msgspec.json.encode(_PauseFile(None if volume is None else quote_path(volume), pause.why, pause.until_s))
    replace_file(path, text, 0o644)


def remove_pause(runtime: bytes, volume: bytes | None) -> bool:
    """End a pause, and return whether there was one. Raises  OSError"""
    try:
        os.unlink(os.path.join(runtime, _PAUSE_DIRECTORY, _name(volume)))
    except FileNotFoundError:
        return False
    return True


def nudge(runtime: bytes) -> None:
    """Make a running service read its pauses and search for new volumes; do nothing if there is no service."""
    path = os.path.join(runtime, _PAUSE_DIRECTORY, b"nudge" + NEW)
    with suppress(OSError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        os.unlink(path)


def read_pauses(runtime: bytes, now_s: float) -> dict[bytes | None, Pause]:
    """Return the pauses in force by volume; None stands for all volumes, which an unreadable file also pauses."""
    pauses: dict[bytes | None, Pause] = {}
    directory = os.path.join(runtime, _PAUSE_DIRECTORY)
    with suppress(FileNotFoundError):
        for name in os.listdir(directory):
            if name.endswith(NEW):
                continue
            volume, pause = _read_pause(os.path.join(directory, name))
            if pause.remaining_s(now_s) > 0:
                pauses[volume] = pause
    return pauses


def _read_pause(path: bytes) -> tuple[bytes | None, Pause]:
    try:
        pause_file = msgspec.json.decode(read_file(path, _PAUSE_MOST_BYTES), type=_PauseFile)
        volume = None if pause_file.volume is None else unquote_path(pause_file.volume)
    except (OSError, ValueError, msgspec.MsgspecError):
        return None, Pause(f"{printable(path)} can't be read", None)
    return volume, Pause(pause_file.why, pause_file.until_s)


def _name(volume: bytes | None) -> bytes:
    return _ALL_VOLUMES if volume is None else hashlib.sha256(volume).hexdigest()[:32].encode()


_FILE = b"clock.json"
_COMMANDS_FILE = b"clock-of-commands.json"
_CLOCK_MOST_BYTES = 4096


def load_clock(state: bytes) -> tuple[int, Clock]:
    """Load the previous service's clock, and advance it to now; without a saved clock, the wall clock is trusted.

    Also return the wall time at which the clock was last saved; without a saved clock, the current time.
    """
    try:
        saved = _read_clock(state, _FILE)
    except OSError as error:
        _warn("the previous service's saved clock can't be read: %s", error.strerror)
        saved = None
    now = _up_to_now(saved)
    return now.wall_ns if saved is None else saved.wall_ns, now


def _read_clock(state: bytes, name: bytes) -> Clock | None:
    """Read a saved clock; None if there is none, or its text is invalid. Raises  OSError"""
    try:
        return orphan_age.decode_clock(read_file(os.path.join(state, name), _CLOCK_MOST_BYTES))
    except FileNotFoundError:
        return None


def _up_to_now(saved: Clock | None) -> Clock:
    now_ns, boot_ns = clocks_ns()
    return orphan_age.start_clock(now_ns, boot_ns, boot_id(), saved)


def watched_clocks(state: bytes, *, notes: bool) -> tuple[Clock, ...]:
    """Return the clocks that the service and the commands have saved in a state directory, each advanced to now.

    notes  save the current clock, so that the next command can notice if the wall clock is set in between; False if the
           directory is not writable
    """
    clocks = []
    for name in (_FILE, _COMMANDS_FILE):
        saved = None
        with suppress(OSError):
            saved = _read_clock(state, name)
        clocks.append(_up_to_now(saved))
    with suppress(OSError):
        if notes:
            make_dir(state)
            replace_file(
                os.path.join(state, _COMMANDS_FILE), orphan_age.encode_clock(clocks[-1]), 0o600, is_durable=False
            )
    return tuple(clocks)


def save_clock(state: bytes, now: Clock, *, is_durable: bool = True) -> None:
    """Save the clock for the next service. If the disk is full, only this information is lost."""
    path = os.path.join(state, _FILE)
    try:
        make_dir(state)
        replace_file(path, orphan_age.encode_clock(now), 0o600, is_durable=is_durable)
    except OSError as error:
        _warn("%s can't be written: %s", os.fsdecode(path), error.strerror)


def _warn(text: str, *values: str | None) -> None:
    import logging  # imported late: commands also read clocks, but log nothing

    logging.getLogger(__name__).warning(text, *values)
