"""The status file in the service's runtime directory: written by the service, readable for every user.

What orphans take is nobody's business but their owner's: service/held_files.py.
"""

from __future__ import annotations

import time

import msgspec

from fusefs.core.service_status import SeenStatus, Status, VolumeStatus, age_s, decode, encode
from fusefs.linux.atomic_files import replace_file
from fusefs.linux.boot_id import boot_id
from fusefs.linux.file_locks import holds_service_lock

FILE = b"status.json"


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
