"""Neighbours of a fixed rate while a tree is deleted: what they feel of it, with confidence intervals.

    python -m bench.steady --filesystem ext4                    the disk that the images are on; a quarter of an hour
    python -m bench.steady --filesystem xfs --slow              a disk each of whose requests takes 0.2 ms
    python -m bench.steady --filesystem ext4 --before ../main   another source tree's service takes turns with ours
    python -m bench.steady --table

bench/neighbour.py asks how long a call takes; a neighbour who is held up calls less often there, and one long wait is
one call of his. Here each call is due at its time and waited for from then on, however late the one before was. Three
neighbours on one loop-mounted volume: one appends 4 KiB and fsyncs, one reads random 4 KiB past the caches, one lists
a directory. In each turn they are alone, then a tree is deleted beside them, then they are alone again, on a copy of
the same image; modes take turns, the order rotates. A ratio is that of percentiles within a turn, beside to alone; the
figure is the geometric mean over the rounds, its interval by drawing rounds again (bootstrap). The rate is that of the
inodes that went while they were looked at.

All rates, durations and percentiles are constants here, fixed before the first run. Each run appends a line to
`steady.jsonl` beside the other results. As root only.
"""

import argparse
import contextlib
import errno
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench.images import Fresh, equal_slow_volumes, equal_volumes
from bench.neighbour import MODES, n_inodes, options, read, within
from bench.neighbours import Neighbours, fill, neighbours
from bench.reap import VICTIM, set_caches
from bench.support import TRASHD, keep, make_tree, measuring, percentile, print_progress, time_command, wait
from tests.support.mount_namespaces import see_own_mounts_only

RESULTS = Path(__file__).with_name("results") / "steady.jsonl"
RATES = MappingProxyType({"append": 50.0, "read": 100.0, "list": 5.0})
"""Calls a second: so many that a percentile means something, and few enough that the slow disk has time for them (the
first run asked for twice as many, of a disk of 1 ms: they waited for each other for seconds, without any reaper).
"""
ALONE_S, BESIDE_S, SETTLE_S = 4.0, 10.0, 2.0
"""Before and after, and between them; and at each border nothing is kept for so long: bench/neighbour.py says how soon
the reaper steps back.
"""
SLOW_US = 200
PERCENTILES = (50, 95, 99)
N_FILES, N_ROUNDS, SIZE_MB = 200_000, 8, 1536
CONFIDENCE, _N_DRAWN = 95, 2000
_GLANCE_S = 0.05
_BEFORE = "before"


@contextlib.contextmanager
def from_tree(source: Path | None) -> Iterator[None]:
    """Commands run from another source tree in this block."""
    before = os.environ.get("PYTHONPATH")
    if source is not None:
        os.environ["PYTHONPATH"] = os.fspath(source.resolve())
    try:
        yield
    finally:
        os.environ.pop("PYTHONPATH", None)
        if before is not None:
            os.environ["PYTHONPATH"] = before


def take_turn(mode: str, fresh: Fresh, scratch: Path, other: Path | None) -> dict[str, Any]:
    """One turn of one mode: percentiles of all neighbours alone and beside it, and its rate."""
    deleter, source = (MODES["service"], other) if mode == _BEFORE else (MODES[mode], None)
    with fresh() as root:
        set_caches(root, cold=False)
        with neighbours(root, scratch, RATES) as all_of_them:
            alone = [_pass(ALONE_S)]
            with from_tree(source), deleter(root) as pid:
                time.sleep(SETTLE_S)
                began_s, before = time.monotonic(), n_inodes(root)
                while wait(pid, _GLANCE_S) is None and time.monotonic() < began_s + BESIDE_S:
                    pass
                beside, n_gone = (began_s, time.monotonic()), before - n_inodes(root)
            alone.append(_pass(ALONE_S))
            all_of_them.stop()
    figures = {kind: _percentiles(all_of_them, kind, alone, beside) for kind in RATES}
    if any(figures[kind]["alone"][0] * rate > 1e6 for kind, rate in RATES.items()):
        raise OSError(errno.EBUSY, "the neighbours are too much for this disk without anybody beside them")
    return {"rate": round(n_gone / (beside[1] - beside[0])), **figures}


def _pass(seconds: float) -> tuple[float, float]:
    """When that span of time began and ended."""
    time.sleep(SETTLE_S)
    began_s = time.monotonic()
    time.sleep(seconds)
    return began_s, time.monotonic()


def _percentiles(
    them: Neighbours, kind: str, alone: Sequence[tuple[float, float]], beside: tuple[float, float]
) -> dict[str, list[int]]:
    """Microseconds at each percentile, alone and beside."""
    spans = {"alone": [one for span in alone for one in within(them.latencies[kind], span)]}
    spans["beside"] = within(them.latencies[kind], beside)
    return {name: [round(percentile(some, part) * 1e6) for part in PERCENTILES] for name, some in spans.items()}


def ratios(turns: Sequence[dict[str, Any]], kind: str, at: int) -> list[float]:
    """Beside to alone at one of the percentiles, of each turn."""
    return [turn[kind]["beside"][at] / turn[kind]["alone"][at] for turn in turns]


def interval(values: Sequence[float], of: Callable[[Sequence[float]], float]) -> tuple[float, float, float]:
    """A figure of some rounds, and between what it is likely to be: as it is if rounds are drawn again, many times."""
    draw = random.Random(0)
    found = sorted(of(draw.choices(values, k=len(values))) for _ in range(_N_DRAWN))
    out = round(_N_DRAWN * (100 - CONFIDENCE) / 200)
    return of(values), found[out], found[-1 - out]


def compete(
    modes: Sequence[str], fresh: Fresh, n_rounds: int, other: Path | None = None
) -> dict[str, list[dict[str, Any]]]:
    """All turns of all modes."""
    turns: dict[str, list[dict[str, Any]]] = {mode: [] for mode in modes}
    with tempfile.TemporaryDirectory(prefix="trashd-bench-", dir="/dev/shm") as scratch:
        for number in range(n_rounds):
            begin = number % len(modes)
            for mode in (*modes[begin:], *modes[:begin]):
                turn = take_turn(mode, fresh, Path(scratch), other)
                turns[mode].append(turn)
                text = "; ".join(
                    f"{kind} "
                    + " ".join(f"p{p} x{ratios([turn], kind, at)[0]:.2f}" for at, p in enumerate(PERCENTILES))
                    for kind in RATES
                )
                print_progress(f"round {number + 1} of {n_rounds}: {mode}: {turn['rate']:,}/s; {text}")
    return turns


@contextlib.contextmanager
def filled(filesystem: str, n_files: int, delay_us: int) -> Iterator[Fresh]:
    """What mounts a volume with a victim, a store, and what the neighbours work on."""

    def make(root: Path) -> None:
        time_command([TRASHD, "init", root])
        make_tree(root / VICTIM, n_files)
        fill(root)

    n = n_files + n_files // 10 + 60_000
    if delay_us:
        volumes = equal_slow_volumes(filesystem, SIZE_MB, n, make, delay_us)
    else:
        volumes = equal_volumes(filesystem, SIZE_MB, n, make)
    with volumes as fresh:
        yield fresh


def table(results: Path) -> str:
    """What the newest run of each filesystem on each disk says."""
    rows = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    newest = {(row["filesystem"], row["delay_us"]): row for row in rows}
    return "\n".join(line for key in sorted(newest) for line in _lines(newest[key]))


def _lines(row: dict[str, Any]) -> Iterator[str]:
    disk = f"a disk of {row['delay_us'] / 1e3:g} ms" if row["delay_us"] else "the disk of this machine"
    rounds = len(next(iter(row["turns"].values())))
    load = f"load {row['load_before']} before, {row['machine']['load']} after"
    yield f"{row['filesystem']} on {disk}, {row['n_files']:,} files, {rounds} rounds, {row['at'][:10]}, {load}"
    yield ""
    yield "| beside | entries/s | " + " | ".join(f"{kind} p50, p95, p99 (ms), x alone" for kind in RATES) + " |"
    yield "|---|---:|" + "---:|" * len(RATES)
    of_rm = [turn["rate"] for turn in row["turns"].get("rm", [])]
    for mode, turns in row["turns"].items():
        rate, low, high = interval([turn["rate"] for turn in turns], statistics.median)
        share = f", {rate / statistics.median(of_rm):.1%} of rm" if of_rm and mode != "rm" else ""
        cells = [f"{rate:,.0f} ({low:,.0f} to {high:,.0f}){share}"]
        for kind in RATES:
            beside = (statistics.median(turn[kind]["beside"][at] for turn in turns) / 1e3 for at in range(3))
            found = (interval(ratios(turns, kind, at), statistics.geometric_mean) for at in range(3))
            text = " ".join(f"{ms:.2f}" for ms in beside)
            cells.append(
                f"{text}: " + ", ".join(f"{one:.2f} ({least:.2f} to {most:.2f})" for one, least, most in found)
            )
        yield f"| {mode} | {' | '.join(cells)} |"
    yield ""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line asks for."""
    parser = options(__doc__, N_ROUNDS)
    parser.add_argument(
        "--slow", action="store_true", help=f"a disk in memory each of whose requests takes {SLOW_US} us"
    )
    parser.add_argument("--before", type=Path, metavar="DIR", help="a source tree whose service takes turns with ours")
    return read(parser, arguments)


def main() -> None:
    """Measure, append the result, print it."""
    arguments = parse()
    if not arguments.table:
        modes = [*(arguments.mode or ("rm", "service")), *([_BEFORE] if arguments.before else ())]
        with measuring(subprocess.CalledProcessError):
            see_own_mounts_only()
            load_before = round(os.getloadavg()[0], 2)
            delay_us = SLOW_US if arguments.slow else 0
            with filled(arguments.filesystem, N_FILES, delay_us) as fresh:
                turns = compete(modes, fresh, arguments.rounds, arguments.before)
            row = {"filesystem": arguments.filesystem, "delay_us": delay_us, "n_files": N_FILES, "turns": turns}
            keep(RESULTS, {**row, "load_before": load_before})
    print(table(RESULTS))


if __name__ == "__main__":
    main()
