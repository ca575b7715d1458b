"""The status file in the service's runtime directory: written by the service, readable for every user.

What each user's orphans take is in files that only that user may read, and in one that only root may.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress

import msgspec

from fusefs.core.service_status import HeldByUser, SeenStatus, Status, VolumeStatus, age_s, decode, encode
from fusefs.linux.atomic_files import replace_file
from fusefs.linux.boot_id import boot_id
from fusefs.linux.file_locks import holds_service_lock

FILE = b"status.json"
_DIRECTORY, _ALL = b"sizes", b"all"
_MOST_BYTES = 64 << 20
Held = dict[str, tuple[HeldByUser, ...]]
"""By the path of a volume, as the status has it."""


def write_status(directory: bytes, status: Status) -> None:
    """Put the status where others find it, stamped with the clock that can't be set; at once or not at all.

    Not durable: after a power failure there is no service that it could speak of.
    Raises  OSError
    """
    now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    volumes = tuple(msgspec.structs.replace(volume, held=()) for volume in status.volumes)
    text = encode(msgspec.structs.replace(status, updated_boot_ns=now_ns, volumes=volumes))
    replace_file(directory + b"/" + FILE, text, 0o644, whatever_umask=True)


def read_status(directory: bytes) -> SeenStatus | None:
    """The last status of a directory's service; None if none ever ran there. Raises  TrashdError, OSError"""
    try:
        with open(directory + b"/" + FILE, "rb") as file:
            status = decode(file.read())
    except (FileNotFoundError, NotADirectoryError):
        return None
    age = age_s(status, boot_id(), time.clock_gettime_ns(time.CLOCK_BOOTTIME), time.time_ns())
    return SeenStatus(status, holds_service_lock(directory, status.pid), age)


def served_volumes(directory: bytes) -> tuple[VolumeStatus, ...]:
    """The volumes of a directory's service, if it runs. Raises  TrashdError, OSError"""
    seen = read_status(directory)
    return seen.status.volumes if seen is not None and seen.is_running else ()


class HeldFiles:
    """Written anew where something has changed."""

    def __init__(self, runtime: bytes) -> None:
        """runtime: the service's directory. What another service left there may not be true: it goes."""
        self._directory = os.path.join(runtime, _DIRECTORY)
        self._written: dict[bytes, bytes] = {}
        with suppress(OSError):
            os.mkdir(self._directory, 0o711)
        with suppress(OSError):
            os.chmod(self._directory, 0o711)
            for name in os.listdir(self._directory):
                os.unlink(os.path.join(self._directory, name))

    def publish(self, status: Status) -> None:
        """Tell each user of his own. Raises  OSError"""
        told = {name: msgspec.json.encode(held) for name, held in _by_reader(status).items()}
        for name in self._written.keys() - told.keys():
            os.unlink(os.path.join(self._directory, name))
            del self._written[name]
        for name, text in told.items():
            if self._written.get(name) != text:
                owner = None if name == _ALL else int(name)
                replace_file(os.path.join(self._directory, name), text, 0o400, whatever_umask=True, owner=owner)
                self._written[name] = text


def _by_reader(status: Status) -> dict[bytes, Held]:
    """What each file has: root's that of all, and of each user that runs no service of his own his."""
    readers: dict[bytes, Held] = {_ALL: {volume.path: volume.held for volume in status.volumes}}
    if os.geteuid():
        return readers
    for volume in status.volumes:
        for one in volume.held:
            if one.uid:
                readers.setdefault(b"%d" % one.uid, {})[volume.path] = (one,)
    return readers


def read_held(runtime: bytes) -> Held:
    """What orphans take by the service of that directory, as far as this user may know: root all, others their own."""
    for name in (_ALL, b"%d" % os.geteuid()):
        try:
            with open(os.path.join(runtime, _DIRECTORY, name), "rb") as file:
                return msgspec.json.decode(file.read(_MOST_BYTES), type=Held)
        except (OSError, msgspec.MsgspecError):
            continue
    return {}
