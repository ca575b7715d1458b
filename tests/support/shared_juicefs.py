"""JuiceFS: Redis for names, a directory for contents, two FUSE clients. `make shared-packages` fetches it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.cut_network import SERVER, network
from tests.support.machine_capabilities import JUICEFS
from tests.support.real_filesystems import tmpfs_volume
from tests.support.shared_filesystems import MountedClient, SharedFilesystem, daemon, mounted

_PORT = 6379
_REDIS = ("redis-server", "--bind", SERVER, "--port", str(_PORT), "--protected-mode", "no", "--save", "")
_LASTING = ("--appendonly", "yes", "--appendfsync", "always")
_META = f"redis://{SERVER}:{_PORT}/1"
_QUIET = ("--no-usage-report", "--no-syslog")


@contextmanager
def juicefs_filesystem(base: Path) -> Iterator[SharedFilesystem]:
    """Mounted at base/a and base/b."""
    with ExitStack() as stack:
        disk = stack.enter_context(tmpfs_volume("2g"))
        net = stack.enter_context(network())
        redis_argv: list[str | Path] = [*_REDIS, *_LASTING, "--dir", disk]
        redis = stack.enter_context(daemon(net.server, redis_argv, base / "redis.log"))
        net.wait_for(_PORT)
        home = ("env", f"HOME={disk}", str(JUICEFS))
        form = ("format", "--storage=file", f"--bucket={disk}/contents", "--trash-days=0", "--no-update")
        net.clients[0].run(*home, *form, _META, "shared")

        def restart() -> None:
            redis.restart()
            net.wait_for(_PORT)

        def client(n: int, point: Path) -> MountedClient:
            places = f"--cache-dir={disk}/{point.name}", "-o", "allow_other"
            argv: list[str | Path] = [*home, "mount", *_QUIET, "--enable-xattr", *places, _META, point]
            return stack.enter_context(mounted(net, n, argv, point))

        a, b = client(0, base / "a"), client(1, base / "b")
        yield SharedFilesystem((a, b), restart, 1.5)
