"""The service's status as a file in its runtime directory: written by the service, read by everybody."""

from __future__ import annotations

import os
import time

import msgspec

from fusefs.core.status import Seen, Status, age_s, decode, encode
from fusefs.linux.host import boot_id
from fusefs.linux.servicelock import is_held

FILE = b"status.json"


def write_status(directory: bytes, status: Status) -> None:
    """Put the status where others find it, stamped with the clock that nobody sets; at once or not at all.

    Not durable: after a power failure there is no service that it could speak of.
    Raises  OSError
    """
    path = directory + b"/" + FILE
    fresh = path + b".new"
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    with open(fd, "wb") as file:
        os.fchmod(fd, 0o644)
        now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        file.write(encode(msgspec.structs.replace(status, updated_boot_ns=now_ns)))
    os.rename(fresh, path)


def read_status(directory: bytes) -> Seen | None:
    """The last status of a directory's service; None if none ever ran there. Raises  TrashdError, OSError"""
    try:
        with open(directory + b"/" + FILE, "rb") as file:
            status = decode(file.read())
    except (FileNotFoundError, NotADirectoryError):
        return None
    age = age_s(status, boot_id(), time.clock_gettime_ns(time.CLOCK_BOOTTIME), time.time_ns())
    return Seen(status, is_held(directory, status.pid), age)
