"""A real filesystem without RENAME_EXCHANGE: sshfs, with neither network nor sshd."""

import contextlib
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.fuse_watchdog import FuseVolume, fuse_mount
from tests.support.machine_capabilities import SFTP_SERVER
from tests.support.real_filesystems import tmpfs_volume

_END_S = 5.0


@contextlib.contextmanager
def sshfs_volume(options: Sequence[str] = (), limit_s: float = 60) -> Iterator[FuseVolume]:
    """An sshfs of a tmpfs, open to all users. The server is root: what a user makes there belongs to root.

    options   such as dcache_timeout=0; sshfs remembers attributes for 20 s by itself
    Raises    TimeoutError: it hung, see fuse_mount
    """
    with tmpfs_volume() as base:
        (backing := base / "backing").mkdir()
        with sshfs_of(backing, base / "mount", options, limit_s) as served:
            yield served


@contextlib.contextmanager
def sshfs_of(
    backing: Path, mount_point: Path, options: Sequence[str] = (), limit_s: float = 60
) -> Iterator[FuseVolume]:
    """An sshfs of a directory that is there; a second one of it is another machine's, as far as locks go."""
    mount_point.mkdir()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        server = subprocess.Popen([str(SFTP_SERVER), "-e"], stdin=theirs.fileno(), stdout=theirs.fileno())
        theirs.close()
        all_options = ",".join(("passive", "allow_other", "default_permissions", *options))
        argv = ["sshfs", "-f", "-o", all_options, f":{backing}", str(mount_point)]
        try:
            with fuse_mount(argv, mount_point, limit_s, stdio=ours.fileno()):
                ours.close()  # so that the server sees the end of sshfs
                yield FuseVolume(mount_point, backing)
        finally:
            ours.close()
            try:
                server.wait(_END_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
