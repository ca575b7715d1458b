"""The neighbours of bench/neighbour.py and bench/steady.py: one appends 4 KiB and fsyncs, one reads random 4 KiB past
the caches, one lists a directory as `ls -l` does.

    python -m bench.neighbours append FILE LATENCIES pause 0.002      until SIGTERM; then the latencies are written
    python -m bench.neighbours append FILE LATENCIES every 0.01

`pause`: each call is timed alone; the pause after it is no part of it. Who is held up does less then, so that one long
wait counts as one call, however many would have been made meanwhile. `every`: each call is due at its time, and its
latency is from then on: a long wait is felt by all that were due in it.
"""

import contextlib
import itertools
import mmap
import os
import random
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from bench.support import PYTHON, make_flat, running, wait

KINDS = ("append", "read")
N_LISTED = 2000
BLOCK = 4096
DATA_MB = 256
PAUSE_S = 0.002
_PAIR = struct.Struct("=dd")
_LOG_BLOCKS = 25_000
_NO_RATES = MappingProxyType[str, float]({})


class Latency(NamedTuple):
    """One call: when it began or was due (CLOCK_MONOTONIC), and how long it took from then on."""

    at_s: float
    seconds: float


class Neighbours:
    """All of them, from the moment that they are there."""

    def __init__(self, pids: dict[str, int], files: dict[str, Path]) -> None:
        self._pids = pids
        self._files = files
        self.latencies: dict[str, list[Latency]] = {}

    def stop(self) -> None:
        """End them, and have their latencies."""
        for pid in self._pids.values():
            os.kill(pid, signal.SIGTERM)
        for kind, pid in self._pids.items():
            wait(pid)
            self.latencies[kind] = [Latency(*pair) for pair in _PAIR.iter_unpack(self._files[kind].read_bytes())]


def fill(root: Path) -> None:
    """What they work on: a file of noise, an empty log, and a directory."""
    with (root / "read").open("wb") as file:
        for _ in range(DATA_MB):
            file.write(random.randbytes(1 << 20))
    (root / "append").touch()
    make_flat(root / "list", N_LISTED)


@contextlib.contextmanager
def neighbours(root: Path, scratch: Path, rates: Mapping[str, float] = _NO_RATES) -> Iterator[Neighbours]:
    """Neighbours at work on a volume; killed at the end of the `with` unless they were stopped before.

    rates  calls a second of each kind; without them KINDS are there, each as fast as it can with pauses
    """
    whens = {kind: ("every", str(1 / rate)) for kind, rate in rates.items()}
    whens = whens or dict.fromkeys(KINDS, ("pause", str(PAUSE_S)))
    files = {kind: scratch / f"{kind}.latencies" for kind in whens}
    with contextlib.ExitStack() as stack:
        pids = {}
        for kind, when in whens.items():
            command: list[str | Path] = [PYTHON, "-m", "bench.neighbours", kind, root / kind, files[kind], *when]
            pids[kind] = stack.enter_context(running(command))
        yield Neighbours(pids, files)


def _appends(path: str) -> Callable[[], None]:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    block = random.randbytes(BLOCK)
    count = itertools.count(1)

    def append() -> None:
        if next(count) % _LOG_BLOCKS == 0:
            os.ftruncate(fd, 0)  # as a log is rotated; else it would grow for ever
        os.write(fd, block)
        os.fsync(fd)

    return append


def _reads(path: str) -> Callable[[], None]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    n_blocks = os.fstat(fd).st_size // BLOCK
    buffer = mmap.mmap(-1, BLOCK)

    def read() -> None:
        os.preadv(fd, [buffer], random.randrange(n_blocks) * BLOCK)

    return read


def _lists(path: str) -> Callable[[], None]:
    def show() -> None:
        with os.scandir(path) as entries:
            sorted((entry.name, entry.stat(follow_symlinks=False).st_size) for entry in entries)

    return show


def main(arguments: Sequence[str]) -> None:
    """Be one of them."""
    kind, path, latencies, when, seconds = arguments
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: ended.append(number))
    act = {"append": _appends, "read": _reads, "list": _lists}[kind](path)
    wait_s = float(seconds)
    pairs = []
    due_s = time.monotonic()
    while not ended:
        act()
        now_s = time.monotonic()
        pairs.append(_PAIR.pack(due_s, now_s - due_s))
        due_s = due_s + wait_s if when == "every" else now_s + wait_s
        time.sleep(max(due_s - now_s, 0.0))
        if when == "pause":
            due_s = time.monotonic()
    Path(latencies).write_bytes(b"".join(pairs))


if __name__ == "__main__":
    main(sys.argv[1:])
