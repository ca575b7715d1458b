"""FUSE mounts without root: fusermount3, a setuid program, makes and unmakes them for us."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence

from fusefs.linux.fd import Fd

_PROGRAM = "fusermount3"
_CHANNEL = "_FUSE_COMMFD"


class FusermountFailed(Exception):
    """It said no; the text is its own."""


def mount(target: bytes, options: bytes) -> Fd:
    """The /dev/fuse fd of a new mount.

    options  as in `-o`; see `escaped` for a value with commas
    Raises   FusermountFailed, FileNotFoundError without the program
    Source   libfuse's lib/mount.c, fuse_mount_fusermount()
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        _run([b"-o", options, b"--", target], {_CHANNEL: str(theirs.fileno())}, [theirs.fileno()])
        theirs.close()
        _byte, fds, _flags, _address = socket.recv_fds(ours, 1, 1)
    if not fds:
        raise FusermountFailed(f"{_PROGRAM} mounted nothing")
    return Fd(fds[0])


def unmount(target: bytes, *, lazily: bool) -> None:
    """Unmount a mount of this user.

    Raises  FusermountFailed, FileNotFoundError without the program
    """
    _run([b"-u", *([b"-z"] if lazily else []), b"--", target], {}, [])


def escaped(value: bytes) -> bytes:
    """The value of fsname or subtype, as `mount` wants it."""
    return value.replace(b"\\", b"\\\\").replace(b",", b"\\,")


def _run(arguments: list[bytes], variables: dict[str, str], pass_fds: Sequence[int]) -> None:
    done = subprocess.run(
        [_PROGRAM, *arguments],
        env={**os.environ, **variables, "LC_ALL": "C"},
        pass_fds=pass_fds,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    if done.returncode:
        raise FusermountFailed(os.fsdecode(done.stderr).strip() or f"{_PROGRAM}: exit code {done.returncode}")
