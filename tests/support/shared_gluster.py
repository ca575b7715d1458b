"""GlusterFS: one brick on a tmpfs, two FUSE clients."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.cut_network import SERVER, network
from tests.support.shared_filesystems import MountedClient, SharedFilesystem, daemon, mounted, until

_OWN = ("unshare", "--mount", "--propagation=private", "--pid", "--fork", "--kill-child", "--mount-proc", "--")
_SERVE = """
for place in /var/lib/glusterd /var/log/glusterfs /run /mnt; do mount -t tmpfs tmpfs $place; done
mkdir -p /run/gluster /mnt/brick /var/log/glusterfs/bricks
glusterd -N &
wait
"""
"""Its places are compiled in. The shell takes what is left of a killed brick, which glusterd would think alive."""
_GONE_S = 5
"""After so long a client and a server that hear nothing give each other up; 42 by itself."""
_LIMIT_S = 30.0


@contextmanager
def gluster_filesystem(base: Path) -> Iterator[SharedFilesystem]:
    """Mounted at base/a and base/b."""
    with ExitStack() as stack:
        net = stack.enter_context(network())
        server = stack.enter_context(daemon(net.server, [*_OWN, "bash", "-c", _SERVE], base / "server.log"))
        until(lambda: _children(server.pid), "glusterd")
        (inside,) = _children(server.pid)

        def gluster(*words: str) -> bool:
            argv = ["nsenter", "-t", str(inside), "--mount", "--net", "--pid", "--", "gluster", "--mode=script", *words]
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_LIMIT_S, check=False)
            return done.returncode == 0

        until(lambda: gluster("volume", "create", "shared", f"{SERVER}:/mnt/brick", "force"), "volume create")
        for what in ("network.ping-timeout", "server.tcp-user-timeout"):
            assert gluster("volume", "set", "shared", what, str(_GONE_S))
        assert gluster("volume", "start", "shared")

        def restart() -> None:
            for pid in _bricks(inside):
                os.kill(pid, signal.SIGKILL)
            assert gluster("volume", "start", "shared", "force")

        def client(n: int, point: Path) -> MountedClient:
            argv = ["glusterfs", "-N", f"--log-file={point}.own.log", f"--volfile-server={SERVER}"]
            return stack.enter_context(mounted(net, n, [*argv, "--volfile-id=shared", point], point))

        a, b = client(0, base / "a"), client(1, base / "b")
        yield SharedFilesystem((a, b), restart, 1.5)


def _children(pid: int) -> list[int]:
    """The processes that one has started."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _bricks(glusterd: int) -> list[int]:
    """The processes that serve the contents: the first process of that namespace has got them."""
    return [pid for pid in _children(glusterd) if b"glusterfsd" in Path(f"/proc/{pid}/cmdline").read_bytes()]
