"""A user's FUSE mount that never answers: whoever asks it anything waits beyond SIGKILL."""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.volumes import mounts, unmount

_SOURCE = b"silent"


@contextmanager
def silent_fuse(target: Path, uid: int, gid: int | None = None, root_mode: int = stat.S_IFDIR) -> Iterator[None]:
    """The mount's daemon, this process, answers nothing but the first handshake.

    uid, gid   whose requests it keeps waiting (gid: the uid's number by default); all others are refused
    root_mode  S_IFREG to mount it on a file
    """
    fd = os.open("/dev/fuse", os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={fd},rootmode={root_mode:o},user_id={uid},group_id={uid if gid is None else gid}".encode()
    try:
        assert libc.mount(_SOURCE, os.fsencode(target), b"fuse", ctypes.c_ulong(0), options) == 0
        request = os.read(fd, 1 << 17)
        unique, major, minor = struct.unpack_from("=QII", request, 8)[0], *struct.unpack_from("=II", request, 40)
        init = struct.pack("=IIIIHHIII", major, minor, 1 << 16, 0, 16, 12, 1 << 16, 1, 0)
        init = init.ljust(64, b"\0")
        os.write(fd, struct.pack("=IiQ", 16 + len(init), 0, unique) + init)
        yield
    finally:
        os.close(fd)
        for mount in mounts():
            if mount.source == _SOURCE:
                unmount(mount.mount_point)
