"""How long a stat takes while a tree is swapped through the mount, again and again, and another is reaped."""

import contextlib
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.listing_steps import LIMIT_S, Work, taking_part
from bench.subjects import all_subjects
from bench.support import TRASHD, make_flat, percentile, running, time_command, wait

KNOWN, ASKED = "stat of a known name", "stat of a new name"
"""The kernel answers the first; for the second it asks the daemon."""
ALONE, BESIDE = "p99 alone", "p99 beside"
KINDS = (KNOWN, ASKED)
STAT, REAPED, SWAPPED = "stat", "reaped", "swapped"
N_NAMES = 1000
ALONE_S = 2.0
_BATCH = 50


def take_turn(work: Work) -> dict[str, float]:
    """The 99th percentiles, in seconds; native is swapped and reaped in where it lies.

    Raises  Unable
    """
    for victim in (REAPED, SWAPPED):
        shutil.rmtree(work.source / victim, ignore_errors=True)
        make_flat(work.source / victim, work.n)
    with taking_part(work, all_subjects()) as (path, _fuse):
        orphan = _swap(path / REAPED)
        time_command(["ls", "-l", path / SWAPPED], timeout_s=LIMIT_S)
        alone = _watch(path, _for(ALONE_S))
        reap: list[str | Path] = [TRASHD, "reap", "--now", "--volume", work.source, orphan]
        with running(reap) as reaper, _swaps(path / SWAPPED, work.source):
            beside = _watch(path, lambda: wait(reaper, 0) is not None)
    both = ((ALONE, alone), (BESIDE, beside))
    return {f"{kind}, {when}": percentile(seen[kind], 99) for when, seen in both for kind in KINDS}


def make(source: Path, _n: int) -> None:
    """What is looked at; each turn makes its victims."""
    source.mkdir()
    make_flat(source / STAT, N_NAMES)


def _swap(victim: Path) -> str:
    """The orphan's id."""
    done = subprocess.run([TRASHD, "swap", "--json", victim], stdout=subprocess.PIPE, check=True, timeout=LIMIT_S)
    return str(json.loads(done.stdout)["id"])


@contextlib.contextmanager
def _swaps(victim: Path, source: Path) -> Iterator[None]:
    """A process that swaps a directory and takes it back, all the time."""
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            time_command([TRASHD, "restore", "--volume", source, _swap(victim)], timeout_s=LIMIT_S)

    with ThreadPoolExecutor(1) as threads:
        worker = threads.submit(work)
        try:
            yield
        finally:
            stop.set()
            worker.result()


def _for(seconds: float) -> Callable[[], bool]:
    until_s = time.monotonic() + seconds
    return lambda: time.monotonic() >= until_s


def _watch(path: Path, is_over: Callable[[], bool]) -> dict[str, list[float]]:
    """Seconds of each stat, by kind, until it is over."""
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    names = [path / STAT / f"f{number}" for number in range(N_NAMES)]
    for name in names:
        name.lstat()
    n_asked = 0
    while not is_over():
        for _ in range(_BATCH):
            known = names[n_asked % N_NAMES]
            found[KNOWN].append(_time(known))
            n_asked += 1
            found[ASKED].append(_time(path / STAT / f"no-{n_asked}"))
    return found


def _time(path: Path) -> float:
    name = os.fspath(path)
    began = time.perf_counter()
    os.access(name, os.F_OK, follow_symlinks=False)
    return time.perf_counter() - began
