"""Mounts that only another mount namespace has."""

import ctypes
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOTS = Path("/var/lib/trashd")
"""Where root's registry is, the machine's list of stores."""
_CLONE_NEWNS, _CLONE_NEWUTS = 0x20000, 0x4000000
_MS_BIND = 0x1000
_MS_REC_PRIVATE = 0x4000 | 0x40000


def be_machine(name: str, files: Mapping[Path, Path]) -> None:
    """From now on this process has a host name of its own, and in the places of some files others. Raises  OSError"""
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.unshare(_CLONE_NEWNS | _CLONE_NEWUTS)
    failed = failed or libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC_PRIVATE), None)
    for place, file in files.items():
        failed = failed or libc.mount(os.fsencode(file), os.fsencode(place), None, ctypes.c_ulong(_MS_BIND), None)
    if failed:
        raise OSError(ctypes.get_errno(), "a machine of its own")
    socket.sethostname(name)


def see_own_mounts_only() -> None:
    """From now on this process has a mount namespace of its own, and in it a list of stores of its own.

    What is made for a moment is no store that this machine should look for.
    Raises  OSError
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) or libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC_PRIVATE), None):
        raise OSError(ctypes.get_errno(), "a mount namespace of its own")
    ROOTS.mkdir(exist_ok=True)
    if libc.mount(b"tests", os.fsencode(ROOTS), b"tmpfs", ctypes.c_ulong(0), b"mode=0755"):
        raise OSError(ctypes.get_errno(), "a list of stores of its own")


@contextmanager
def bind_elsewhere(source: Path, target: Path) -> Iterator[None]:
    """`source` seen at `target` too, by a child in a mount namespace of its own, for the time of the `with`."""
    with _mounted_elsewhere(source, target, None, _MS_BIND):
        yield


@contextmanager
def tmpfs_elsewhere(target: Path) -> Iterator[None]:
    """A tmpfs on `target` that only a child in a mount namespace of its own sees."""
    with _mounted_elsewhere(Path("tmpfs"), target, b"tmpfs", 0):
        yield


@contextmanager
def _mounted_elsewhere(source: Path, target: Path, fs_type: bytes | None, flags: int) -> Iterator[None]:
    libc = ctypes.CDLL(None, use_errno=True)
    ready_read, ready_write = os.pipe()
    end_read, end_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(end_write)
            failed = libc.unshare(_CLONE_NEWNS)
            failed = failed or libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC_PRIVATE), None)
            how = os.fsencode(source), os.fsencode(target), fs_type, ctypes.c_ulong(flags), None
            failed = failed or libc.mount(*how)
            os.write(ready_write, b"x" if failed else b"y")
            os.read(end_read, 1)
        finally:
            os._exit(0)
    try:
        assert os.read(ready_read, 1) == b"y"
        yield
    finally:
        for fd in (ready_read, ready_write, end_read, end_write):
            os.close(fd)
        os.waitpid(pid, 0)
