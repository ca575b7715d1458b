"""CephFS: a monitor, an OSD in memory, a metadata server, two clients by ceph-fuse."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tests.support.cut_network import SERVER, network
from tests.support.real_filesystems import tmpfs_volume
from tests.support.shared_filesystems import MountedClient, SharedFilesystem, daemon, mounted, until

_PORT, _N_TRIES = 6789, 5
_CONFIGURATION = """
[global]
fsid = {cluster}
mon host = [v1:{server}:{port}]
public addr = {server}
auth supported = none
auth cluster required = none
auth service required = none
auth client required = none
osd pool default size = 1
osd pool default min size = 1
mon allow pool size one = true
mon data avail crit = 1
osd crush chooseleaf type = 0
osd crush initial weight = 1
osd objectstore = memstore
memstore device bytes = 1073741824
mds beacon grace = 4
mds beacon interval = 1
mds reconnect timeout = 6
mds session blocklist on timeout = false
mds session blocklist on evict = false
client reconnect stale = true
run dir = {disk}/run
log file = {disk}/log/$name.log
admin socket = {disk}/run/$name.$pid.asok
mon data = {disk}/mon
osd data = {disk}/osd
mds data = {disk}/mds
keyring = {disk}/keyring
"""
"""A metadata server that was killed is missed soon, and waits for its clients not for long; a client that it has given
up, since others waited for what it held, may come back.
"""
_GIVEN_UP_S = "30"
"""The least that Ceph takes."""


@contextmanager
def ceph_filesystem(base: Path) -> Iterator[SharedFilesystem]:
    """Mounted at base/a and base/b."""
    with ExitStack() as stack:
        disk = stack.enter_context(tmpfs_volume("3g"))
        net = stack.enter_context(network())
        for name in ("run", "log", "mon", "osd", "mds"):
            (disk / name).mkdir()
        cluster, osd = str(uuid.uuid4()), str(uuid.uuid4())
        told = disk / "ceph.conf"
        told.write_text(_CONFIGURATION.format(cluster=cluster, server=SERVER, port=_PORT, disk=disk))
        conf = f"--conf={told}"
        run = net.server.run
        run("ceph-authtool", "--create-keyring", disk / "keyring", "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
        run("monmaptool", "--create", "--addv", "a", f"[v1:{SERVER}:{_PORT}]", "--fsid", cluster, disk / "monmap")
        run("ceph-mon", conf, "--mkfs", "-i", "a", "--monmap", disk / "monmap", "--keyring", disk / "keyring")
        stack.enter_context(daemon(net.server, ["ceph-mon", conf, "-i", "a", "-f"], base / "mon.log"))
        net.wait_for(_PORT)

        def ceph(*words: str) -> str:
            for _ in range(_N_TRIES):
                with suppress(OSError):  # EPERM from a monitor that has much to do
                    return run("ceph", conf, *words)
            return run("ceph", conf, *words)

        ceph("osd", "new", osd)
        run("ceph-osd", conf, "-i", "0", "--mkfs", "--osd-uuid", osd)
        stack.enter_context(daemon(net.server, ["ceph-osd", conf, "-i", "0", "-f"], base / "osd.log"))
        mds = stack.enter_context(daemon(net.server, ["ceph-mds", conf, "-i", "a", "-f"], base / "mds.log"))
        ceph("osd", "pool", "create", "names", "8")
        ceph("osd", "pool", "create", "contents", "8")
        ceph("fs", "new", "shared", "names", "contents")
        ceph("fs", "set", "shared", "session_timeout", _GIVEN_UP_S)
        ceph("fs", "set", "shared", "session_autoclose", _GIVEN_UP_S)

        def wait_active() -> None:
            until(lambda: "up:active}" in ceph("mds", "stat"), "the metadata server")

        def restart() -> None:
            mds.restart()
            until(lambda: "up:active}" not in ceph("mds", "stat"), "its monitor's notice that it is another")
            wait_active()

        wait_active()

        def client(n: int, point: Path) -> MountedClient:
            return stack.enter_context(mounted(net, n, ["ceph-fuse", conf, "--admin-socket=", "-f", point], point))

        a, b = client(0, base / "a"), client(1, base / "b")
        yield SharedFilesystem((a, b), restart, 1.5)
