"""sshfs: a directory by two sftp servers, each the only one that a client knows; they see no lock of each other."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from tests.support.fuse_watchdog import FuseMount, fuse_mount
from tests.support.machine_capabilities import SFTP_SERVER
from tests.support.real_filesystems import tmpfs_volume
from tests.support.shared_filesystems import LIMIT_S, MountedClient, SharedFilesystem

_OPTIONS = "passive,allow_other,default_permissions,dcache_timeout=1"
"""Its own cache keeps what was seen for 20 s by itself; the kernel's for one more."""


@contextmanager
def sshfs_filesystem(base: Path) -> Iterator[SharedFilesystem]:
    """Mounted at base/a and base/b."""
    with ExitStack() as stack:
        disk = stack.enter_context(tmpfs_volume("256m"))
        a, b = (stack.enter_context(_client(disk, base / name)) for name in ("a", "b"))
        yield SharedFilesystem((a, b), None, 2.5)


@contextmanager
def _client(disk: Path, point: Path) -> Iterator[MountedClient]:
    point.mkdir()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        server = subprocess.Popen([SFTP_SERVER, "-e"], stdin=theirs.fileno(), stdout=theirs.fileno())
        theirs.close()
        argv = ["sshfs", "-f", "-o", _OPTIONS, f":{disk}", str(point)]
        try:
            with fuse_mount(argv, point, LIMIT_S, stdio=ours.fileno()) as mount:
                ours.close()  # so that the server sees the end of sshfs
                yield _cut_at_server(mount, server.pid)
        finally:
            server.kill()
            server.wait()


def _cut_at_server(mount: FuseMount, server: int) -> MountedClient:
    """What is sent waits in the socket, and is done when the server goes on."""
    return MountedClient(mount, partial(os.kill, server, signal.SIGSTOP), partial(os.kill, server, signal.SIGCONT))
