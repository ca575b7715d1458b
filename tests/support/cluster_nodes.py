"""Nodes that have mounted one shared filesystem: each has a machine id, a boot id, a host name and a mount of its own.

A node is a mount and a UTS namespace on this kernel: `ClusterNodes` is what tests use, whoever makes them.
What runs in a node and may hang there is in a process of its own; the test waits for it with a limit,
and frees it by force.
"""

import ctypes
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypeVar

import pytest

from fusefs.cli.main import run as run_trashd
from fusefs.linux.kernel import Kernel
from fusefs.linux.machine_identity import boot_id
from tests.support.machine_capabilities import FAKETIME
from tests.support.proc_stat import all_stats
from tests.support.shared_filesystems import (
    MountedClient,
    SharedFilesystem,
    ceph_filesystem,
    gluster_filesystem,
    juicefs_filesystem,
    moosefs_filesystem,
    sshfs_filesystem,
)
from tests.support.trashd_command import TRASHD, CommandResult, environment, instead_of_exec

T = TypeVar("T")
LIMIT_S = 60.0
_END_S = 10.0
_GLANCE_S = 0.005
_BROKEN = 111

# $1 host name, $2 machine id, $3 boot id, $4 what is mounted, $5 where it is seen. What a machine remembers is empty.
_BE = """
hostname "$1"
mount -t tmpfs tmpfs /run && mount -t tmpfs tmpfs /var/lib && mkdir /var/lib/trashd
echo "$2" >/run/machine-id && mount --bind /run/machine-id /etc/machine-id
echo "$3" >/run/boot-id && mount --bind /run/boot-id /proc/sys/kernel/random/boot_id
mount --bind "$4" "$5"
for path in "${@:6}"; do umount --lazy --no-mtab "$path"; done
echo ready
read -r
"""


class Hung(Exception):
    """What ran in a node was not over in time, and was freed by force; or the mount is of no use any more."""


class NodeCommand(Protocol):
    """A command of trashd's in a node, with all its processes."""

    def is_held(self) -> bool:
        """Wait until it has stopped itself at its call, which is true, or has ended before."""

    def freeze(self) -> None:
        """SIGSTOP to each of its processes, and wait until they have stopped, or hang in a call."""

    def thaw(self) -> None:
        """Let all go on."""

    def kill(self) -> None:
        """SIGKILL to each of them. One that hangs in a call ends when that does."""

    def end(self, limit_s: float = LIMIT_S) -> CommandResult:
        """Wait for its end. Raises  Hung"""


class ClusterNode(Protocol):
    """One machine that has mounted the filesystem.

    volume  where it sees it; the same path in each node
    boot    its boot id
    """

    name: str
    volume: Path
    boot: str

    def trashd(self, *words: str | Path, clock_s: int = 0, limit_s: float = LIMIT_S) -> CommandResult:
        """Run a command there, with a clock that is ahead by so much. Raises  Hung"""

    def run(self, body: Callable[[], T], limit_s: float = LIMIT_S) -> T:
        """Call a function there; return its result, or raise its exception. Both have to be picklable.

        Raises  Hung
        """

    def start(self, *words: str | Path, hold_at: int | None = None, call: str | None = None) -> NodeCommand:
        """Start a command there, which stops with all its threads before its n-th call to the kernel (from 0).

        call  of that name; calls of its children do not count
        """

    def calls(self, *words: str | Path) -> list[str]:
        """Run a command, and give the names of the calls it has made, without those of its children."""

    def cut(self) -> None:
        """Nothing of what it sends arrives."""

    def mend(self) -> None:
        """Its way is free again; what it has sent may be done now."""

    def freeze(self) -> None:
        """Its client of the filesystem stops where it is."""

    def thaw(self) -> None:
        """It goes on."""


class ClusterNodes(NamedTuple):
    """Two nodes on a fresh directory of a filesystem, which is their volume.

    restart  kill -9 of the servers, and start them again; None: that would end the mounts
    cache_s  so long another node may see what was before
    """

    a: ClusterNode
    b: ClusterNode
    filesystem: str
    restart: Callable[[], None] | None
    cache_s: float


class LocalNode:
    """A `ClusterNode` by namespaces."""

    def __init__(self, name: str, boot: str, volume: Path, client: MountedClient, keeper: int) -> None:
        self.name = name
        self.boot = boot
        self.volume = volume
        self._client = client
        self._keeper = keeper

    def trashd(self, *words: str | Path, clock_s: int = 0, limit_s: float = LIMIT_S) -> CommandResult:
        argv, env = [TRASHD, *words], environment(_clock(clock_s))
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=env,
                start_new_session=True,
                preexec_fn=instead_of_exec(argv, env, partial(_enter, self._keeper)),  # noqa: PLW1509
            )
            code = self._end(process.pid, limit_s)
            process.returncode = code  # reaped by us
            out.seek(0)
            err.seek(0)
            return CommandResult(code, os.fsdecode(out.read()), os.fsdecode(err.read()))

    def run(self, body: Callable[[], T], limit_s: float = LIMIT_S) -> T:
        with tempfile.TemporaryFile() as output_file:

            def act() -> int:
                try:
                    result: object = (True, body())
                except Exception as error:
                    error.add_note(traceback.format_exc())
                    result = (False, error)
                output_file.write(pickle.dumps(result))
                output_file.flush()
                return 0

            code = self._end(self._forked(act), limit_s)
            output_file.seek(0)
            assert code == 0, f"{self.name}: exit code {code}"
            is_well, value = pickle.load(output_file)
            if not is_well:
                raise value
            result: T = value
            return result

    def start(self, *words: str | Path, hold_at: int | None = None, call: str | None = None) -> NodeCommand:
        return _LocalRunning(self, [str(word) for word in words], hold_at, call)

    def calls(self, *words: str | Path) -> list[str]:
        with tempfile.TemporaryFile() as output_file:

            def act() -> int:
                own = os.getpid()

                def hook(call: str) -> None:
                    if os.getpid() == own:
                        os.write(output_file.fileno(), f"{call}\n".encode())

                return _act_as_trashd([str(word) for word in words], None, hook)

            code = self._end(self._forked(act), LIMIT_S)
            assert code == 0, f"trashd {' '.join(map(str, words))}: {code}"
            output_file.seek(0)
            return output_file.read().decode().split()

    def cut(self) -> None:
        self._client.cut()

    def mend(self) -> None:
        self._client.mend()

    def freeze(self) -> None:
        self._client.freeze()

    def thaw(self) -> None:
        self._client.thaw()

    def _forked(self, act: Callable[[], int]) -> int:
        """The pid of a child in the node's namespaces, which leads a session of its own."""
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            code = _BROKEN
            try:
                os.setsid()
                _enter(self._keeper)
                boot_id.cache_clear()
                code = act()
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        return pid

    def _end(self, pid: int, limit_s: float) -> int:
        """How a child of ours ended; all of its session are gone then. Raises  Hung"""
        fd = os.pidfd_open(pid)
        try:
            if not select.select([fd], [], [], limit_s)[0]:
                signal_session(pid, signal.SIGKILL)
                if not select.select([fd], [], [], _END_S)[0]:
                    self._client.mount.abort()
                os.waitpid(pid, 0)
                raise Hung(f"{self.name}: not over in {limit_s} s")
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        finally:
            os.close(fd)
        signal_session(pid, signal.SIGKILL)
        return code


class _LocalRunning:
    """A `NodeCommand` of a LocalNode: a child of ours, which leads a session."""

    def __init__(self, node: LocalNode, words: list[str], hold_at: int | None, call: str | None) -> None:
        self._node = node
        self._output_file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        read_fd, self._held_fd = os.pipe()
        hook = _no_hook if hold_at is None else _Holding(hold_at, call, self._held_fd)
        self._pid = node._forked(lambda: _act_as_trashd(words, self._output_file.fileno(), hook))
        os.close(self._held_fd)
        self._reads = read_fd
        self._fd = os.pidfd_open(self._pid)

    def is_held(self) -> bool:
        ready = select.select([self._reads, self._fd], [], [], LIMIT_S)[0]
        if self._reads in ready and os.read(self._reads, 1):
            self._wait_stopped()
            return True
        return False

    def freeze(self) -> None:
        signal_session(self._pid, signal.SIGSTOP)
        self._wait_stopped()

    def thaw(self) -> None:
        signal_session(self._pid, signal.SIGCONT)

    def kill(self) -> None:
        signal_session(self._pid, signal.SIGKILL)

    def end(self, limit_s: float = LIMIT_S) -> CommandResult:
        try:
            code = self._node._end(self._pid, limit_s)
        finally:
            os.close(self._reads)
            os.close(self._fd)
        self._output_file.seek(0)
        with self._output_file:
            return CommandResult(code, "", os.fsdecode(self._output_file.read()))

    def _wait_stopped(self) -> None:
        """Wait until none runs; one that is in a call (D) stops after it."""
        ends_at = time.monotonic() + LIMIT_S
        while any(state in "RS" for _, state in _session(self._pid)):
            assert time.monotonic() < ends_at, _session(self._pid)
            time.sleep(_GLANCE_S)


class _Holding:
    """A hook that stops the whole session before the n-th call (from 0) of that name.

    held_fd  gets a byte before the session stops
    """

    def __init__(self, n: int, call: str | None, held_fd: int) -> None:
        self.left = n
        self.name = call
        self.held_fd = held_fd
        self.pid = 0

    def __call__(self, call: str) -> None:
        self.pid = self.pid or os.getpid()
        if self.pid != os.getpid() or self.name not in (None, call):
            return  # it counts not, or is of a child of the command
        self.left -= 1
        if self.left == -1:
            os.write(self.held_fd, b".")
            os.killpg(0, signal.SIGSTOP)


def _no_hook(_call: str) -> None:
    """Let every call pass."""


def _act_as_trashd(words: list[str], out: int | None, hook: Callable[[str], None]) -> int:
    """Be `trashd WORDS`; what it says goes to a file."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd, number in ((null, 0), (null if out is None else out, 1), (null if out is None else out, 2)):
        os.dup2(fd, number)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    Kernel.__init__.__defaults__ = (hook,)  # every Kernel that a command makes for itself
    os.environ.update(environment({}))
    try:
        return run_trashd(words)
    except BaseException:
        traceback.print_exc()
        return _BROKEN


def _clock(ahead_s: int) -> Mapping[str, str]:
    """Variables by which a process has another wall clock; times of files and other clocks are what they are."""
    if not ahead_s:
        return {}
    variables = {
        "LD_PRELOAD": str(FAKETIME),
        "FAKETIME": f"{ahead_s:+d}s",
        "NO_FAKE_STAT": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }
    return {**variables, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}


def _enter(pid: int) -> None:
    """Be in the namespaces of a process. Source  setns(2)"""
    libc = ctypes.CDLL(None, use_errno=True)
    for name in ("uts", "mnt"):
        fd = os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY)
        if libc.setns(fd, 0):
            raise OSError(ctypes.get_errno(), f"setns {name}")
        os.close(fd)


def _session(leader: int) -> list[tuple[int, str]]:
    """Pid and state of each process of a session."""
    return [(pid, fields[0]) for pid, fields in all_stats() if int(fields[3]) == leader]


def signal_session(leader: int, number: signal.Signals) -> None:
    """Send a signal to each process of a session."""
    for pid, state in _session(leader):
        if state != "Z":
            with suppress(ProcessLookupError):
                os.kill(pid, number)


@contextmanager
def local_nodes(name: str, filesystem: SharedFilesystem, base: Path) -> Iterator[ClusterNodes]:
    """Two nodes whose volume is a fresh directory.

    base  where the clients are mounted
    """
    fresh = uuid.uuid4().hex
    (volume := base / "volume").mkdir(exist_ok=True)
    a, b = filesystem.clients
    with ExitStack() as stack:
        _limited(["mkdir", a.mount.path / fresh], a)
        hides = [client.mount.path for client in filesystem.clients]
        # Until the other's cache knows it, too.
        _limited(["bash", "-c", f"until [[ -d {b.mount.path / fresh} ]]; do sleep 0.05; done"], b)
        nodes = [
            stack.enter_context(_local_node(f"node-{letter}", client, client.mount.path / fresh, volume, hides))
            for letter, client in (("a", a), ("b", b))
        ]
        yield ClusterNodes(nodes[0], nodes[1], name, filesystem.restart, filesystem.cache_s)


@contextmanager
def _local_node(name: str, client: MountedClient, source: Path, volume: Path, hides: list[Path]) -> Iterator[LocalNode]:
    boot = str(uuid.uuid4())
    argv: list[str | Path] = ["unshare", "--mount", "--uts", "--propagation=private", "--", "bash", "-euc", _BE, name]
    argv += [name, uuid.uuid4().hex, boot, source, volume, *hides]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as keeper:
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        try:
            if not select.select([keeper.stdout], [], [], LIMIT_S)[0] or not keeper.stdout.readline():
                raise Hung(f"{name} does not start")
            yield LocalNode(name, boot, volume, client, keeper.pid)
        finally:
            client.mend()
            client.thaw()
            keeper.kill()


def _limited(argv: list[str | Path], client: MountedClient) -> None:
    """Run a command on a client's mount. Raises  Hung"""
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
    try:
        code = process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        client.mount.abort()
        process.wait()
        raise Hung(f"{argv} on {client.mount.path}") from None
    if code:
        raise Hung(f"{argv} on {client.mount.path}: exit code {code}")


_Maker = Callable[[Path], AbstractContextManager[SharedFilesystem]]


class Bed(Protocol):
    """A filesystem that is up, for many tests."""

    def nodes(self) -> AbstractContextManager[ClusterNodes]:
        """Two nodes whose volume is a fresh directory of it."""


class _LocalBed:
    """Servers and clients in namespaces of this machine; started anew when a test has left them of no use."""

    def __init__(self, name: str, make: _Maker) -> None:
        self._name = name
        self._make = make
        self._up = ExitStack()
        self._base = Path()
        self._filesystem: SharedFilesystem | None = None

    def close(self) -> None:
        """Stop all of it."""
        self._filesystem = None
        self._up.close()

    @contextmanager
    def nodes(self) -> Iterator[ClusterNodes]:
        """See Bed."""
        with ExitStack() as stack:
            try:
                made = stack.enter_context(local_nodes(self._name, self._served(), self._base))
            except Hung:
                self.close()
                made = stack.enter_context(local_nodes(self._name, self._served(), self._base))
            yield made

    def _served(self) -> SharedFilesystem:
        if self._filesystem is None:
            self._base = Path(self._up.enter_context(tempfile.TemporaryDirectory(prefix="shared-")))
            self._base.chmod(0o755)
            self._filesystem = self._up.enter_context(self._make(self._base))
        return self._filesystem


@contextmanager
def _local_bed(name: str, make: _Maker) -> Iterator[Bed]:
    served = _LocalBed(name, make)
    try:
        yield served
    finally:
        served.close()


BEDS: Mapping[str, Callable[[], AbstractContextManager[Bed]]] = MappingProxyType(
    {
        "glusterfs": partial(_local_bed, "glusterfs", gluster_filesystem),
        "moosefs": partial(_local_bed, "moosefs", moosefs_filesystem),
        "juicefs": partial(_local_bed, "juicefs", juicefs_filesystem),
        "sshfs": partial(_local_bed, "sshfs", sshfs_filesystem),
        "cephfs": partial(_local_bed, "cephfs", ceph_filesystem),
    }
)
"""Each is up for the block. What has nodes of another kind is one more line here."""
_OF_HOURS = ("cephfs",)
"""Those whose servers take a minute where little is to be had: `make shared` alone has them."""
PARAMETERS = [
    pytest.param(name, marks=pytest.mark.needs("root", "fuse", name, *(["hours"] if name in _OF_HOURS else [])))
    for name in BEDS
]
"""Of a fixture; in machine_capabilities the filesystems have the same names."""
