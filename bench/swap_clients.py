"""What clients of a mount see while a tree is swapped through it: each a process that looks again and again."""

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, NamedTuple

from bench.support import make_files
from fusefs.linux import syscalls

KNOWN, ASKED, READ, LISTED, MADE = (
    "stat of a known name",
    "stat of a new name",
    "open, read 4 KiB, close",
    "ls of 100 names",
    "create and unlink",
)
KINDS = (KNOWN, ASKED, READ, LISTED, MADE)
"""The kernel answers the first; for the others it asks the daemon, of LISTED for the beginning alone."""
_N_NAMES = 100
_PAUSE_S = 200e-6
"""Between two rounds, or these clients alone would keep the daemon busy; a stall that counts is longer."""
_GLANCE_S = 20e-6
_SLACK_NS = 1000
_PR_SET_TIMERSLACK = 29
_LIMIT_S = 30.0
_FORKED = get_context("fork")

Act = Callable[[], object]


class Took(NamedTuple):
    """One operation, by the clock that all processes share."""

    began_ns: int
    ns: int


class Client(NamedTuple):
    """A process that observes a mount, and the connection for its result."""

    process: ForkProcess
    connection: Connection

    def result(self) -> Any:
        """Return its observations when it ends. Raises  EOFError: it ended without any"""
        return self.connection.recv()


class Clients(NamedTuple):
    """Those who work beside the tree."""

    stop: Event
    all: list[Client]

    def results(self) -> dict[str, list[Took]]:
        """All that they did, by kind; they do no more."""
        self.stop.set()
        return {kind: found for client in self.all for kind, found in client.result().items()}


def make_room(source: Path) -> None:
    """What the clients use."""
    room = source / "room"
    room.mkdir()
    make_files(room, _N_NAMES, b"x" * 4096)
    (room / "made").mkdir()


@contextlib.contextmanager
def clients_in(path: Path) -> Iterator[Clients]:
    """Two of them: one who asks the daemon for nothing, and one who does."""
    stop = _FORKED.Event()
    with contextlib.ExitStack() as stack:
        begun = [_client(_work, path / "room", kinds, stop) for kinds in ((KNOWN,), KINDS[1:])]
        yield Clients(stop, [stack.enter_context(client) for client in begun])


@contextlib.contextmanager
def watching(victim: Path) -> Iterator[Client]:
    """A client that waits for a directory to be empty, or gone; it tells when it saw that."""
    ready = _FORKED.Event()
    with _client(_watch, victim, ready) as client:
        if not ready.wait(_LIMIT_S):
            raise TimeoutError("a client does not get to look")
        yield client


@contextlib.contextmanager
def _client(work: Callable[..., object], *args: object) -> Iterator[Client]:
    receiver, sender = _FORKED.Pipe(duplex=False)
    process = _FORKED.Process(target=lambda: sender.send(work(*args)))
    process.start()
    sender.close()
    try:
        yield Client(process, receiver)
    finally:
        process.kill()
        process.join()


def worst_s(operations: Mapping[str, list[Took]], begin_ns: int, end_ns: int) -> dict[str, float]:
    """Return the seconds of the longest operation of each kind that overlaps an interval."""
    return {
        kind: max(took.ns for took in tooks if took.began_ns < end_ns and took.began_ns + took.ns > begin_ns) / 1e9
        for kind, tooks in operations.items()
    }


def _acts(room: Path) -> dict[str, Act]:
    n = 0
    known, read, made = (os.fspath(room / name) for name in ("f0", "f1", f"made/{os.getpid()}"))
    listed = os.fspath(room)

    def ask() -> None:
        nonlocal n
        n += 1
        os.access(f"{listed}/missing-{n}", os.F_OK)

    def open_and_read() -> None:
        fd = os.open(read, os.O_RDONLY)
        os.read(fd, 4096)
        os.close(fd)

    def make() -> None:
        os.close(os.open(made, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        os.unlink(made)

    return {
        KNOWN: lambda: os.stat(known),
        ASKED: ask,
        READ: open_and_read,
        LISTED: lambda: os.listdir(listed),
        MADE: make,
    }


def _work(room: Path, kinds: tuple[str, ...], stop: Event) -> dict[str, list[Took]]:
    gc.disable()
    syscalls.prctl(_PR_SET_TIMERSLACK, _SLACK_NS)
    acts = _acts(room)
    found: dict[str, list[Took]] = {kind: [] for kind in kinds}
    clock, sleep = time.monotonic_ns, time.sleep
    while not stop.is_set():
        for kind in kinds:
            act = acts[kind]
            began_ns = clock()
            act()
            found[kind].append(Took(began_ns, clock() - began_ns))
        sleep(_PAUSE_S)
    return found


def _watch(victim: Path, ready: Event) -> int:
    gc.disable()
    syscalls.prctl(_PR_SET_TIMERSLACK, _SLACK_NS)
    name = os.fspath(victim)
    before = os.stat(name).st_ino
    ready.set()
    with contextlib.suppress(FileNotFoundError):
        while os.stat(name).st_ino == before:
            time.sleep(_GLANCE_S)
        assert os.listdir(name) == []
    return time.monotonic_ns()
