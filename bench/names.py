"""Names changed in a mount: each call timed in C, by root and as the caller, by several clients, and beside busy ones.

The client is names.c, so that what a call takes is the kernel's and the daemon's. Each turn has a fresh tree.
"""

import contextlib
import os
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Self

from bench.listing_steps import Work, mounted
from bench.messages import counted
from bench.operations import MISS
from bench.processor_time import CLIENTS, move, used_s
from bench.subjects import CPU, SINGLE, USER, cpu_s
from bench.support import print_progress, program
from tests.support.fuse_watchdog import FuseMount

OPERATIONS = MappingProxyType(
    {
        MISS: "missing",
        "create, close": "create",
        "open, close": "open",
        "append 128 bytes": "append",
        "rename": "rename",
        "unlink": "unlink",
        "mkdir": "mkdir",
        "rmdir": "rmdir",
    }
)
"""What names.c calls each; in this order, since one leaves what the next one needs. The first four are about files."""
P50, USED = ", p50", ", processor time"
"""What follows a step's name where its figure is the median call, or the processor time of daemon and client."""
ALL_USED = "eight operations" + USED
N_CLIENTS = (1, 2, 4, 8)
N_BUSY = 8
_TEAM = 72_100
_SOURCE = Path(__file__).with_name("names.c")


class Caller(NamedTuple):
    """Who works, and whose directory it is."""

    suffix: str
    uid: int = 0
    groups: tuple[int, ...] = ()
    owner: int = 0

    @property
    def directory(self) -> str:
        """Where he works."""
        return f"by-{self.uid}-{self.owner}"


ROOT = Caller("")
OWNER = Caller(", a user", USER, (USER,), USER)
MEMBER = Caller(", by a group", USER, (USER, _TEAM - 1, _TEAM))
"""In a directory of root's, which he may use as a member of a group: his groups are read and taken."""
CALLERS = (ROOT, OWNER, MEMBER)
_WARM, _N_WARM = "warm", 50
_SETTLE_S, _SETTLE_MAX_S, _SETTLED_S = 0.1, 3.0, 0.002


class Timed(NamedTuple):
    """Of one operation."""

    mean_s: float
    p50_s: float
    used_s: float


class Client:
    """A process that changes names in a directory; a `with` of it ends it."""

    def __init__(self, directory: Path, caller: Caller = ROOT) -> None:
        pipe = subprocess.PIPE
        ids = ",".join(map(str, (caller.uid, *caller.groups)))
        command = (program(_SOURCE), directory, ids)
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        move(CLIENTS, self._process.pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # What it waits for in a mount, the mount's watchdog ends.
        self._process.kill()
        self._process.communicate()

    def time(self, operation: str, n: int, fuse: FuseMount | None) -> Timed:
        """What one takes, of so many.

        Raises  OSError: it failed, with what the client said
        """
        before_s = self._used_s(fuse)
        mean_ns, p50_ns = self._ask(f"{OPERATIONS[operation]} {n}")
        return Timed(mean_ns / 1e9, p50_ns / 1e9, (self._used_s(fuse) - before_s) / n)

    def share(self, n_clients: int, ms: int, fuse: FuseMount | None) -> Timed:
        """What one of all operations takes while so many clients do them for some time: wall time by what all did.

        Raises  OSError: it failed, with what the client said
        """
        before_s = self._used_s(fuse)
        n_done, took_ns = self._ask(f"clients {n_clients} {ms}")
        took_s = took_ns / n_done / 1e9
        return Timed(took_s, took_s, (self._used_s(fuse) - before_s) / n_done)

    def _used_s(self, fuse: FuseMount | None) -> float:
        return used_s(CLIENTS, self._process.pid) + cpu_s(fuse)

    def _ask(self, line: str) -> tuple[float, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        answer = ""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        if not answer:
            raise OSError(self._process.stderr.read().strip() or f"{line}: the client ended")
        first, second = map(float, answer.split())
        return first, second


def take_names(work: Work) -> dict[str, float]:
    """Each operation by each caller; what a subject refuses a caller is not among it.

    Raises  Unable
    """
    with _fresh(work) as (path, fuse):
        began_s = cpu_s(fuse)
        found: dict[str, float] = {}
        for caller in CALLERS if work.subject != SINGLE else (OWNER,):
            with contextlib.suppress(_Refused):
                found |= _by(caller, path, fuse, work)
        return found | {CPU: cpu_s(fuse) - began_s}


class _Refused(Exception):
    """A user may not do what he may do natively."""


def _by(caller: Caller, path: Path, fuse: FuseMount | None, work: Work) -> dict[str, float]:
    found: dict[str, float] = {}
    with Client(path / caller.directory, caller) as client:
        for operation in OPERATIONS:
            try:
                timed = client.time(operation, work.n, fuse)
            except OSError as error:
                if caller == ROOT:
                    raise
                print_progress(f"{work.subject}{caller.suffix}: {error}")
                raise _Refused from error
            step = operation + caller.suffix
            found |= {step: timed.mean_s, step + P50: timed.p50_s, step + USED: timed.used_s}
    used = [seconds for step, seconds in found.items() if step.endswith(USED)]
    return found | {ALL_USED + caller.suffix: sum(used) / len(used)}


def take_clients(work: Work) -> dict[str, float]:
    """An operation's share of the time while several clients do all of them; work.n is in milliseconds.

    Raises  Unable
    """
    with _fresh(work) as (path, fuse), Client(path / ROOT.directory) as client:
        began_s = cpu_s(fuse)
        found: dict[str, float] = {}
        for n_clients in N_CLIENTS:
            timed = client.share(n_clients, work.n, fuse)
            found |= {format_clients(n_clients): timed.mean_s, format_clients(n_clients) + USED: timed.used_s}
        return found | {CPU: cpu_s(fuse) - began_s}


def format_clients(n: int) -> str:
    """Return the name of the step for this number of clients."""
    return f"{n} client{'s' if n > 1 else ''}"


def take_beside_busy(work: Work) -> dict[str, float]:
    """Each operation by root while others compute; they start when all is mounted.

    Raises  Unable
    """
    with _fresh(work) as (path, fuse), _busy():
        began_s = cpu_s(fuse)
        return _by(ROOT, path, fuse, work) | {CPU: cpu_s(fuse) - began_s}


@contextlib.contextmanager
def _busy() -> Iterator[None]:
    busy = [subprocess.Popen(("sh", "-c", "while :; do :; done")) for _ in range(N_BUSY)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
        for process in busy:
            process.wait()


def count_names(work: Work, n: int) -> Mapping[str, Counter[str]]:
    """The messages of n of each operation by root, by opcode. Raises  Unable"""
    found: dict[str, Counter[str]] = {}
    with _fresh(work) as (path, fuse):
        if fuse is not None:
            with counted(int(fuse.connection.name)) as messages, Client(path / ROOT.directory) as client:
                for operation in OPERATIONS:
                    client.time(operation, n, fuse)
                    found[operation] = messages.take()
    return found


@contextlib.contextmanager
def _fresh(work: Work) -> Iterator[tuple[Path, FuseMount | None]]:
    """A directory for each caller as a subject shows it. Raises  Unable: also for what fails in the body"""
    tree = work.source.with_name("turn")
    _make(tree, USER if work.subject == SINGLE else 0)
    try:
        with mounted(work, tree) as (path, fuse):
            _warm_up(path / _WARM, OWNER if work.subject == SINGLE else ROOT, fuse)
            yield path, fuse
    finally:
        shutil.rmtree(tree)


def _warm_up(directory: Path, caller: Caller, fuse: FuseMount | None) -> None:
    """Have a daemon that has begun to serve, and does nothing of its own any more."""
    with Client(directory, caller) as client:
        for operation in OPERATIONS:
            client.time(operation, _N_WARM, fuse)
    deadline_s, before_s = time.monotonic() + _SETTLE_MAX_S, -1.0
    while (now_s := cpu_s(fuse)) - before_s > _SETTLED_S and time.monotonic() < deadline_s:
        before_s = now_s
        time.sleep(_SETTLE_S)


def _make(tree: Path, uid: int) -> None:
    (tree / _WARM).mkdir(parents=True)
    for path in (tree, tree / _WARM):
        os.chown(path, uid, uid)
    for caller in CALLERS:
        path = tree / caller.directory
        path.mkdir()
        os.chown(path, caller.owner, _TEAM if caller is MEMBER else caller.owner)
        path.chmod(0o770)
