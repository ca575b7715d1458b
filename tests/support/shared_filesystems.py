"""Filesystems that several nodes mount, from Debian's packages: servers on this machine, and two clients of each.

Each is a `SharedFilesystem` by a context manager of tests/support/shared_*.py, with a time limit on all that may hang.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.support.cut_network import Host, Network
from tests.support.fuse_watchdog import FuseMount, fuse_mount

LIMIT_S = float(os.environ.get("TRASHD_TEST_SHARED_LIMIT_S", "4800"))
"""How long a filesystem is mounted at the most: as long as its worker lives, and CI lets it."""
_GLANCE_S = 0.05


@dataclass(frozen=True, slots=True)
class MountedClient:
    """One node's mount.

    cut, mend  its way to the server is cut: a call hangs, and what was sent may be done when it is mended
    """

    mount: FuseMount
    cut: Callable[[], None]
    mend: Callable[[], None]

    def freeze(self) -> None:
        """Its daemon stops where it is, as it does on a machine that is paused."""
        os.killpg(self.mount.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Its daemon goes on."""
        with suppress(ProcessLookupError):
            os.killpg(self.mount.pid, signal.SIGCONT)


@dataclass(frozen=True, slots=True)
class SharedFilesystem:
    """A filesystem with two clients.

    restart  kill -9 of what serves names and contents, and start it again; None where that ends the mounts
    cache_s  so long the other client may see what was before
    """

    clients: tuple[MountedClient, MountedClient]
    restart: Callable[[], None] | None
    cache_s: float


@contextmanager
def mounted(network: Network, n: int, argv: Sequence[str | Path], point: Path) -> Iterator[MountedClient]:
    """The mount of the n-th host by a daemon in the foreground; what that says is in a file beside the mount point."""
    host = network.clients[n]
    told = ["bash", "-c", 'exec "$@" >>"$0" 2>&1', point.with_suffix(".log"), *argv]
    point.mkdir()
    with fuse_mount([*host.enter(), *told], point, LIMIT_S) as mount:
        yield MountedClient(mount, partial(network.cut, n), partial(network.mend, n))


class Daemon:
    """A server process in the foreground, which can be killed and started again."""

    def __init__(self, host: Host, argv: Sequence[str | Path], log: Path) -> None:
        self._argv = [*host.enter(), *argv]
        self._log = log
        self._process = self._started()

    @property
    def pid(self) -> int:
        """Of the process, and its group."""
        return self._process.pid

    def kill(self) -> None:
        """kill -9 of all its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def restart(self, *words: str) -> None:
        """kill -9, and start it once more, with more words."""
        self.kill()
        self._argv += [word for word in words if word not in self._argv]
        self._process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                self._argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )


@contextmanager
def daemon(host: Host, argv: Sequence[str | Path], log: Path) -> Iterator[Daemon]:
    """It lives to the end of the block."""
    running = Daemon(host, argv, log)
    try:
        yield running
    finally:
        running.kill()


def until(condition: Callable[[], object], what: str, limit_s: float = 60) -> None:
    """Wait for something that nothing announces. Raises  TimeoutError"""
    ends_at = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > ends_at:
            raise TimeoutError(f"{what}: not within {limit_s} s")
        time.sleep(_GLANCE_S)
