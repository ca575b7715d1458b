"""MooseFS: a master, a chunkserver on a tmpfs that has more than the GiB which it keeps free, two FUSE clients."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.cut_network import SERVER, network
from tests.support.real_filesystems import tmpfs_volume
from tests.support.shared_filesystems import MountedClient, SharedFilesystem, daemon, mounted, until

_EMPTY = Path("/var/lib/mfs/metadata.mfs.empty")
_TO_CLIENTS, _TO_CHUNKSERVERS = 9421, 9420
_USER = "WORKING_USER=root\nWORKING_GROUP=root\n"


@contextmanager
def moosefs_filesystem(base: Path) -> Iterator[SharedFilesystem]:
    """Mounted at base/a and base/b."""
    with ExitStack() as stack:
        disk = stack.enter_context(tmpfs_volume("4g"))
        net = stack.enter_context(network())
        for name in ("master", "chunkserver", "chunks"):
            (disk / name).mkdir()
        shutil.copy(_EMPTY, disk / "master/metadata.mfs")
        (disk / "exports").write_text("* / rw,alldirs,admin,maproot=0:0\n")
        (disk / "topology").touch()
        (disk / "disks").write_text(f"{disk}/chunks\n")
        (disk / "master.cfg").write_text(
            f"{_USER}DATA_PATH={disk}/master\nEXPORTS_FILENAME={disk}/exports\nTOPOLOGY_FILENAME={disk}/topology\n"
            "SESSION_SUSTAIN_TIME=60\n"  # a day else: so long the locks of a client that is away stay
            + "".join(f"{name}_LISTEN_HOST={SERVER}\n" for name in ("MATOML", "MATOCS", "MATOCL"))
        )
        (disk / "chunkserver.cfg").write_text(
            f"{_USER}DATA_PATH={disk}/chunkserver\nHDD_CONF_FILENAME={disk}/disks\nHDD_LEAVE_SPACE_DEFAULT=64MiB\n"
            f"MASTER_HOST={SERVER}\nCSSERV_LISTEN_HOST={SERVER}\nBIND_HOST={SERVER}\n"
        )
        master_argv: list[str | Path] = ["mfsmaster", "-f", "-c", disk / "master.cfg"]
        master = stack.enter_context(daemon(net.server, master_argv, base / "master.log"))
        net.wait_for(_TO_CHUNKSERVERS)
        chunks_argv: list[str | Path] = ["mfschunkserver", "-f", "-c", disk / "chunkserver.cfg"]
        stack.enter_context(daemon(net.server, chunks_argv, base / "chunkserver.log"))
        net.wait_for(_TO_CLIENTS)

        def restart() -> None:
            master.restart("-a")  # with what its log has more than its last picture of all
            net.wait_for(_TO_CLIENTS)

        def client(n: int, point: Path) -> MountedClient:
            argv: list[str | Path] = ["mfsmount", "-f", "-H", SERVER, point, "-o", "allow_other"]
            return stack.enter_context(mounted(net, n, argv, point))

        a, b = client(0, base / "a"), client(1, base / "b")
        until(lambda: shutil.disk_usage(base / "a").free, "room in the chunkserver")
        yield SharedFilesystem((a, b), restart, 1.5)
