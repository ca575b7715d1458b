"""For how long a name is missing where the filesystem can't exchange: a swap's gap against that of two bare renames.

    python -m bench.gap                 an sshfs of a tmpfs, on this machine
    python -m bench.gap NAME=DIR...     directories of other filesystems, mounted here

`two renames` is as short as the filesystem allows; `mkdir first` takes the name by mkdir and renames onto that, as it
must be where no rename spares a taken name: the name is missing until the mkdir. All take turns; each run appends a
line per filesystem to bench/results/gap.jsonl.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.support import TRASHD, keep, time_command
from fusefs.linux.kernel import Kernel
from fusefs.store.stage import SwapOptions
from fusefs.store.swap_path import swap_path
from tests.support.sshfs_volumes import sshfs_volume

RESULTS = Path(__file__).with_name("results") / "gap.jsonl"
MAX_TIMES = 1.3
UNCACHED = ("dir_cache=no", "entry_timeout=0", "attr_timeout=0")


def two_renames(work: Path) -> float:
    """Seconds between the end of the old and the beginning of the new."""
    began = time.perf_counter()
    os.rename(work / "name", work / "aside")
    os.rename(work / "fresh", work / "name")
    return time.perf_counter() - began


def mkdir_first(work: Path) -> float:
    """Seconds up to a mkdir; onto what that made the fresh one is renamed."""
    began = time.perf_counter()
    os.rename(work / "name", work / "aside")
    os.mkdir(work / "name")
    seconds = time.perf_counter() - began
    os.rename(work / "fresh", work / "name")
    return seconds


def a_swap(work: Path) -> float:
    """As the product says it."""
    swapped = swap_path(Kernel(), os.fsencode(work / "name"), SwapOptions())
    assert swapped.gap_ns is not None
    (work / "aside").mkdir()
    return swapped.gap_ns / 1e9


WAYS: dict[str, Callable[[Path], float]] = {"two renames": two_renames, "mkdir first": mkdir_first, "swap": a_swap}


def measure(volume: Path, n_rounds: int) -> dict[str, Any]:
    """One filesystem's figures, in seconds."""
    time_command([TRASHD, "init", "--known", volume])
    work = volume / "bench-gap"
    work.mkdir()
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(n_rounds):
        for name, way in WAYS.items():
            (work / "name").mkdir()
            if way is not a_swap:
                (work / "fresh").mkdir()
            seconds[name].append(way(work))
            for left in ("name", "aside"):
                (work / left).rmdir()
    work.rmdir()
    time_command([TRASHD, "reap", "--all", "--now", "--yes", "--volume", volume])
    return {name: {"median": statistics.median(got), "p95": p95(got), "max": max(got)} for name, got in seconds.items()}


def p95(seconds: list[float]) -> float:
    """The one that a twentieth take longer than."""
    return sorted(seconds)[int(len(seconds) * 0.95)]


def table(rows: list[dict[str, Any]]) -> str:
    """The Markdown table of docs/performance.md: medians, and in brackets the slowest twentieth."""
    heads = ["filesystem", *WAYS, "swap / two renames"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for row in rows:
        cells = [f"{row[name]['median'] * 1e3:.2f} ms ({row[name]['p95'] * 1e3:.1f})" for name in WAYS]
        lines.append(f"| {row['filesystem']} | {' | '.join(cells)} | {times(row):.2f} |")
    return "\n".join(lines)


def times(row: dict[str, Any]) -> float:
    """How many times as long as need be."""
    return float(row["swap"]["median"] / row["two renames"]["median"])


@contextmanager
def volumes(named: list[str]) -> Iterator[dict[str, Path]]:
    """What is to be measured, by name."""
    if named:
        yield {name: Path(path) for name, _, path in (one.partition("=") for one in named)}
    else:
        with sshfs_volume(UNCACHED, limit_s=300) as served:
            yield {"sshfs": served.path}


def main() -> None:
    """Measure, append the results, print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("volumes", nargs="*", metavar="NAME=DIR")
    parser.add_argument("--rounds", type=int, default=100)
    asked = parser.parse_args()
    rows = []
    with volumes(asked.volumes) as there:
        for name, path in there.items():
            found = {"filesystem": name, "n_rounds": asked.rounds, **measure(path, asked.rounds)}
            keep(RESULTS, found)
            rows.append(found)
    print(table(rows))
    for row in rows:
        verdict = "met" if times(row) <= MAX_TIMES else "MISSED"
        print(f"{row['filesystem']}: {times(row):.2f} times two renames (at most {MAX_TIMES:g}): {verdict}")


if __name__ == "__main__":
    main()
