"""The two neighbours of bench/neighbour.py: one appends 4 KiB and fsyncs, one reads random 4 KiB past the caches.

    python -m bench.neighbours append FILE LATENCIES PAUSE_S     until SIGTERM; then the latencies are written

Each call is timed alone; the pause after it is no part of it.
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.support import PYTHON, running, wait

KINDS = ("append", "read")
BLOCK = 4096
DATA_MB = 256
PAUSE_S = 0.002
_PAIR = struct.Struct("=dd")
_LOG_BLOCKS = 25_000


class Latency(NamedTuple):
    """One call: when it began (CLOCK_MONOTONIC), and how long it took."""

    at_s: float
    seconds: float


class Neighbours:
    """Both, from the moment that they are there."""

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
    """What they work on: a file of noise, and an empty log."""
    with (root / "read").open("wb") as file:
        for _ in range(DATA_MB):
            file.write(random.randbytes(1 << 20))
    (root / "append").touch()


@contextlib.contextmanager
def neighbours(root: Path, scratch: Path, pause_s: float = PAUSE_S) -> Iterator[Neighbours]:
    """Both neighbours at work on a volume; killed at the end of the `with` unless they were stopped before."""
    files = {kind: scratch / f"{kind}.latencies" for kind in KINDS}
    with contextlib.ExitStack() as stack:
        pids = {}
        for kind in KINDS:
            command: list[str | Path] = [PYTHON, "-m", "bench.neighbours", kind, root / kind, files[kind], str(pause_s)]
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


def main(arguments: Sequence[str]) -> None:
    """Be one of them."""
    kind, path, latencies, pause = arguments
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: ended.append(number))
    act = {"append": _appends, "read": _reads}[kind](path)
    pause_s = float(pause)
    pairs = []
    while not ended:
        began = time.monotonic()
        act()
        pairs.append(_PAIR.pack(began, time.monotonic() - began))
        time.sleep(pause_s)
    Path(latencies).write_bytes(b"".join(pairs))


if __name__ == "__main__":
    main(sys.argv[1:])
