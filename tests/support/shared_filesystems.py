"""Filesystems that several nodes mount, from Debian's packages: servers on this machine, and two clients of each.

Each is a `SharedFilesystem` of a context manager, NAME_filesystem, with a time limit on all that may hang.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tests.support.fuse_watchdog import FuseMount, fuse_mount
from tests.support.machine_capabilities import JUICEFS, SFTP_SERVER
from tests.support.proc_stat import all_stats, stop
from tests.support.real_filesystems import tmpfs_volume

SERVER = "10.99.0.1"
"""The server's address, whichever link one comes by; some servers refuse 127.0.0.1."""
_COMMAND_S = 20.0


class Host(NamedTuple):
    """A network namespace; pid is of the process that keeps it."""

    pid: int

    def enter(self) -> tuple[str, ...]:
        """What is put before a command that runs there; the pid stays that of the command."""
        return ("nsenter", f"--net=/proc/{self.pid}/ns/net", "--")

    def run(self, *command: str | Path) -> str:
        """What a command says there, which has to succeed. Raises  OSError with what it said else"""
        done = subprocess.run(
            [*self.enter(), *command], stdin=subprocess.DEVNULL, capture_output=True, timeout=_COMMAND_S, check=False
        )
        if done.returncode:
            raise OSError(f"{command}: {(done.stderr or done.stdout).decode(errors='replace').strip()}")
        return os.fsdecode(done.stdout)


class Network(NamedTuple):
    """Each client has one link to the server."""

    server: Host
    clients: Sequence[Host]

    def cut(self, client: int) -> None:
        """Nothing arrives any more, in either direction; nobody is told."""
        self.server.run("ip", "link", "set", f"to{client}", "down")

    def mend(self, client: int) -> None:
        """What is sent again arrives."""
        self.server.run("ip", "link", "set", f"to{client}", "up")

    def wait_for(self, port: int) -> None:
        """Wait until somebody listens there. Raises  OSError, subprocess.TimeoutExpired"""
        self.server.run("bash", "-c", f"until : </dev/tcp/{SERVER}/{port}; do sleep 0.05; done 2>/dev/null")


@contextmanager
def network() -> Iterator[Network]:
    """One that nothing else of this machine is on; it ends with the block."""
    with ExitStack() as stack:
        server, *clients = (stack.enter_context(_host()) for _ in range(3))
        server.run("ip", "link", "set", "lo", "up")
        server.run("ip", "addr", "add", f"{SERVER}/32", "dev", "lo")
        for n, client in enumerate(clients):
            names = f"to{n}", "up0"
            server.run(
                "ip", "link", "add", names[0], "type", "veth", "peer", "name", names[1], "netns", str(client.pid)
            )
            server.run("ip", "addr", "add", f"10.99.{n + 1}.1/24", "dev", names[0])
            server.run("ip", "link", "set", names[0], "up")
            client.run("ip", "link", "set", "lo", "up")
            client.run("ip", "addr", "add", f"10.99.{n + 1}.2/24", "dev", names[1])
            client.run("ip", "link", "set", names[1], "up")
            client.run("ip", "route", "add", "default", "via", f"10.99.{n + 1}.1")
        yield Network(server, clients)


@contextmanager
def _host() -> Iterator[Host]:
    """A process that says when it is in a namespace of its own, and does nothing more."""
    argv = ("unshare", "--net", "--", "bash", "-c", "echo; read -r")
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as keeper:
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        try:
            if not keeper.stdout.readline():
                raise OSError("no network namespace")
            yield Host(keeper.pid)
        finally:
            keeper.kill()


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
        """Stop its daemon where it is, as on a machine that is paused; returns when each of its threads has stopped."""
        for pid in [pid for pid, fields in all_stats() if int(fields[2]) == self.mount.pid]:
            stop(pid)

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

    clients: tuple[MountedClient, MountedClient]  # at base/a and base/b
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


_CEPH_PORT, _N_TRIES = 6789, 5
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
    """CephFS: a monitor, an OSD in memory, a metadata server, two clients by ceph-fuse."""
    with ExitStack() as stack:
        disk = stack.enter_context(tmpfs_volume("3g"))
        net = stack.enter_context(network())
        for name in ("run", "log", "mon", "osd", "mds"):
            (disk / name).mkdir()
        cluster, osd = str(uuid.uuid4()), str(uuid.uuid4())
        told = disk / "ceph.conf"
        told.write_text(_CONFIGURATION.format(cluster=cluster, server=SERVER, port=_CEPH_PORT, disk=disk))
        conf = f"--conf={told}"
        run = net.server.run
        run("ceph-authtool", "--create-keyring", disk / "keyring", "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
        run("monmaptool", "--create", "--addv", "a", f"[v1:{SERVER}:{_CEPH_PORT}]", "--fsid", cluster, disk / "monmap")
        run("ceph-mon", conf, "--mkfs", "-i", "a", "--monmap", disk / "monmap", "--keyring", disk / "keyring")
        stack.enter_context(daemon(net.server, ["ceph-mon", conf, "-i", "a", "-f"], base / "mon.log"))
        net.wait_for(_CEPH_PORT)

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
    """GlusterFS: one brick on a tmpfs, two FUSE clients."""
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


_REDIS_PORT = 6379
_REDIS = ("redis-server", "--bind", SERVER, "--port", str(_REDIS_PORT), "--protected-mode", "no", "--save", "")
_LASTING = ("--appendonly", "yes", "--appendfsync", "always")
_META = f"redis://{SERVER}:{_REDIS_PORT}/1"
_QUIET = ("--no-usage-report", "--no-syslog")


@contextmanager
def juicefs_filesystem(base: Path) -> Iterator[SharedFilesystem]:
    """JuiceFS: Redis for names, a directory for contents, two FUSE clients. `make shared-packages` fetches it."""
    with ExitStack() as stack:
        disk = stack.enter_context(tmpfs_volume("2g"))
        net = stack.enter_context(network())
        redis_argv: list[str | Path] = [*_REDIS, *_LASTING, "--dir", disk]
        redis = stack.enter_context(daemon(net.server, redis_argv, base / "redis.log"))
        net.wait_for(_REDIS_PORT)
        home = ("env", f"HOME={disk}", str(JUICEFS))
        form = ("format", "--storage=file", f"--bucket={disk}/contents", "--trash-days=0", "--no-update")
        net.clients[0].run(*home, *form, _META, "shared")

        def restart() -> None:
            redis.restart()
            net.wait_for(_REDIS_PORT)

        def client(n: int, point: Path) -> MountedClient:
            places = f"--cache-dir={disk}/{point.name}", "-o", "allow_other"
            argv: list[str | Path] = [*home, "mount", *_QUIET, "--enable-xattr", *places, _META, point]
            return stack.enter_context(mounted(net, n, argv, point))

        a, b = client(0, base / "a"), client(1, base / "b")
        yield SharedFilesystem((a, b), restart, 1.5)


_EMPTY = Path("/var/lib/mfs/metadata.mfs.empty")
_TO_CLIENTS, _TO_CHUNKSERVERS = 9421, 9420
_USER = "WORKING_USER=root\nWORKING_GROUP=root\n"


@contextmanager
def moosefs_filesystem(base: Path) -> Iterator[SharedFilesystem]:
    """MooseFS: a master, a chunkserver on a tmpfs that has more than the GiB which it keeps free, two FUSE clients."""
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


_OPTIONS = "passive,allow_other,default_permissions,dcache_timeout=1"
"""Its own cache keeps what was seen for 20 s by itself; the kernel's for one more."""


@contextmanager
def sshfs_filesystem(base: Path) -> Iterator[SharedFilesystem]:
    """sshfs: a directory by two sftp servers, one for each client; they see no lock of each other."""
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
    return MountedClient(mount, partial(stop, server), partial(os.kill, server, signal.SIGCONT))
