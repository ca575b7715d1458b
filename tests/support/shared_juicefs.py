"""JuiceFS: Redis for names, a directory for contents, two FUSE clients. `make shared-packages` fetches it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.fuse_watchdog import fuse_mount
from tests.support.machine_capabilities import JUICEFS
from tests.support.real_filesystems import tmpfs_volume
from tests.support.shared_filesystems import LIMIT_S, SharedFilesystem, client_of, daemon, logged
from tests.support.shared_network import SERVER, network

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

        clients = []
        for n, name in enumerate(("a", "b")):
            (point := base / name).mkdir()
            argv = [*net.clients[n].enter(), *home, "mount", *_QUIET, "--enable-xattr", f"--cache-dir={disk}/{name}"]
            argv += ["-o", "allow_other", _META, str(point)]
            clients.append(
                client_of(stack.enter_context(fuse_mount(logged(argv, base / f"{name}.log"), point, LIMIT_S)), net, n)
            )
        yield SharedFilesystem((clients[0], clients[1]), restart, 1.5)
