"""A user's FUSE mount that never answers: a process that asks it anything waits beyond SIGKILL."""

import ctypes
import os
import select
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.real_filesystems import mounts, unmount

_SOURCE = b"silent"
_OPEN = 14
_LIMIT_S = 30


@contextmanager
def silent_fuse(target: Path, uid: int, gid: int | None = None, root_mode: int = stat.S_IFDIR) -> Iterator[int]:
    """The mount's daemon, this process, answers nothing but the first handshake; the fd that it has of /dev/fuse.

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
        yield fd
    finally:
        os.close(fd)
        for mount in mounts():
            if mount.source == _SOURCE:
                unmount(mount.mount_point)


@contextmanager
def sent_to_be_closed(target: Path, send: Callable[[int], None]) -> Iterator[None]:
    """`send`, called in a process with an fd of a file: who closes that waits to the end of the block, beyond SIGKILL.

    target  a file to mount it on, by root
    """
    with ExitStack() as after, silent_fuse(target, 0, root_mode=stat.S_IFREG) as fuse:
        pid = os.fork()
        if pid == 0:
            try:
                os.close(fuse)
                send(os.open(target, os.O_RDWR))
            finally:
                os._exit(0)
        after.callback(os.waitpid, pid, 0)
        _length, opcode, unique = struct.unpack_from("=IIQ", os.read(fuse, 1 << 17))
        assert opcode == _OPEN, opcode
        os.write(fuse, struct.pack("=IiQQQ", 32, 0, unique, 1, 0))
        assert select.select([fuse], [], [], _LIMIT_S)[0], "nobody closes it"
        yield
