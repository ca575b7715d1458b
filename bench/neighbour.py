"""Who works on the same disk while a tree is deleted: what he feels of it, and how fast it goes.

    python -m bench.neighbour --filesystem ext4                   five rounds of all modes; a quarter of an hour
    python -m bench.neighbour --filesystem xfs --mode paced --rounds 2
    python -m bench.neighbour --filesystem ext4 --reaction        how soon the reaper steps back, and comes again
    python -m bench.neighbour --filesystem ext4 --plot docs/neighbour.svg
    python -m bench.neighbour --table                             the tables of docs/internals/benchmarks

One process appends 4 KiB and fsyncs, another reads random 4 KiB past the caches, both with pauses of 2 ms, on a
loop-mounted volume (bench/neighbours.py). In each turn they have it to themselves first, then the tree of 300,000
files is deleted beside them, on a copy of the same image; modes take turns, the order rotates. A ratio is that of
percentiles within a turn, beside to alone, so that the disk's own moods fall out; medians over the rounds. The rate is
that of the inodes that went while they were there.

Each run appends a line to bench/results/neighbour.jsonl. As root only.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench.images import Fresh, equal_volumes
from bench.neighbour_plot import COME_S, END_S, GO_S, TITLES, Moment, Timeline, draw
from bench.neighbour_table import tables
from bench.neighbours import KINDS, Latency, Neighbours, fill, neighbours
from bench.reap import VICTIM, set_caches
from bench.support import (
    TRASHD,
    keep,
    make_tree,
    measuring,
    only_orphan,
    percentile,
    print_progress,
    program,
    running,
    time_command,
    wait,
)
from tests.support.mount_namespaces import see_own_mounts_only
from tests.support.service_process import places, service

RESULTS = Path(__file__).with_name("results") / "neighbour.jsonl"
FILESYSTEMS = ("ext4", "xfs")
N_FILES, N_ROUNDS = 300_000, 5
SIZE_MB = 3072
ALONE_S, BESIDE_S = 4.0, 6.0
_WARM_S = 0.5
"""Of each neighbour's first calls nothing is kept, nor of a deleter's."""
_GLANCE_S = 0.05
PERCENTILES = (50, 95, 99)
MANY = 4
"""Times the files of a turn, so that deletion still goes on when the neighbours are gone."""
STEP_S = 0.1
_EVEN_PER_S = 6000
"""Of the mode `even`: about a tenth of rm's rate on this project's machines."""
_PRESSURE = Path("/proc/pressure/io")
_SLOW, _PART, _FULL = 2.0, 0.125, 0.7
"""More than so many times the rate that it holds, and more than that part of its full rate: not stepped back yet. And
that part of it is full again.
"""

Deleter = Callable[[Path], AbstractContextManager[int]]
"""Starts what deletes the victim of a volume; its pid. It ends with the `with`."""


@contextlib.contextmanager
def _command(*words: str | Path) -> Iterator[int]:
    """A command whose forked workers are gone at the end too, or the volume would still be busy."""
    with open(os.devnull, "wb") as null, running(words, stderr=null.fileno()) as pid:
        yield pid
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.killpg(pid, 0)
            time.sleep(_GLANCE_S)


def _reap(root: Path, *options: str) -> AbstractContextManager[int]:
    time_command([TRASHD, "swap", root / VICTIM])
    return _command(TRASHD, "reap", "--now", "--volume", root, only_orphan(root), *options)


@contextlib.contextmanager
def _serve(root: Path) -> Iterator[int]:
    """The service as systemd starts it; a tmpfs lies over /run/trashd meanwhile."""
    with places() as base, service(base, root, config="") as one:
        time_command([TRASHD, "swap", "--keep-for", "0s", root / VICTIM])
        yield one.process.pid


def _unlink_evenly(root: Path) -> AbstractContextManager[int]:
    """The least that any deletion of a tenth of rm's rate does to others."""
    return _command(program(Path(__file__).with_name("even_unlinks.c")), str(_EVEN_PER_S), root / VICTIM)


MODES = MappingProxyType[str, Deleter](
    {
        "rm": lambda root: _command("rm", "-rf", root / VICTIM),
        "rm idle": lambda root: _command("ionice", "-c3", "nice", "-n19", "rm", "-rf", root / VICTIM),
        "paced": lambda root: _reap(root, "--paced"),
        "full": _reap,
        "even": _unlink_evenly,
        "service": _serve,
    }
)
"""Another one is added by a line here."""


def n_inodes(root: Path) -> int:
    """In use on a volume."""
    stat = os.statvfs(root)
    return stat.f_files - stat.f_ffree


@contextlib.contextmanager
def filled(filesystem: str, n_files: int) -> Iterator[Fresh]:
    """What mounts a volume with a victim, a store, and what the neighbours work on."""

    def make(root: Path) -> None:
        time_command([TRASHD, "init", root])
        make_tree(root / VICTIM, n_files)
        fill(root)

    with equal_volumes(filesystem, SIZE_MB, n_files + n_files // 10 + 60_000, make) as fresh:
        yield fresh


def take_turn(mode: str, fresh: Fresh, scratch: Path) -> dict[str, Any]:
    """One turn of one mode: percentiles of both neighbours alone and beside it, and its rate."""
    with fresh() as root:
        set_caches(root, cold=False)
        with neighbours(root, scratch) as both:
            time.sleep(_WARM_S)
            alone = time.monotonic(), time.monotonic() + ALONE_S
            time.sleep(ALONE_S)
            with MODES[mode](root) as pid:
                time.sleep(_WARM_S)
                began, before = time.monotonic(), n_inodes(root)
                while wait(pid, _GLANCE_S) is None and time.monotonic() < began + BESIDE_S:
                    pass
                beside = began, time.monotonic()
                n_gone = before - n_inodes(root)
            both.stop()
    ratios = {kind: _percentiles(both, kind, alone, beside) for kind in KINDS}
    return {"rate": round(n_gone / (beside[1] - beside[0])), **ratios}


def _percentiles(both: Neighbours, kind: str, alone: tuple[float, float], beside: tuple[float, float]) -> Any:
    """Microseconds at each percentile, alone and beside."""
    return {
        name: [round(percentile(within(both.latencies[kind], span), part) * 1e6) for part in PERCENTILES]
        for name, span in (("alone", alone), ("beside", beside))
    }


def within(latencies: Sequence[Latency], span: tuple[float, float]) -> list[float]:
    """Seconds of the calls that began in a span of time."""
    return [one.seconds for one in latencies if span[0] <= one.at_s < span[1]]


def quiet_s(options: Sequence[str], fresh: Fresh) -> float:
    """Seconds of a reap without neighbours."""
    with fresh() as root:
        time_command([TRASHD, "swap", root / VICTIM])
        set_caches(root, cold=False)
        return time_command([TRASHD, "reap", "--now", "--volume", root, only_orphan(root), *options])


def compete(modes: Sequence[str], fresh: Fresh, n_rounds: int, pause: Callable[[], None]) -> dict[str, Any]:
    """All turns of all modes, and what a reap takes without neighbours.

    pause  called between two turns
    """
    turns: dict[str, list[dict[str, Any]]] = {mode: [] for mode in modes}
    alone: dict[str, list[float]] = {"paced": [], "full": []}
    with tempfile.TemporaryDirectory(prefix="trashd-bench-", dir="/dev/shm") as scratch:
        for number in range(n_rounds):
            begin = number % len(modes)
            for mode in (*modes[begin:], *modes[:begin]):
                turn = take_turn(mode, fresh, Path(scratch))
                turns[mode].append(turn)
                print_progress(f"round {number + 1} of {n_rounds}: {mode}: {format_turn(turn)}")
                pause()
            for name, options in (("paced", ["--paced"]), ("full", [])):
                alone[name].append(quiet_s(options, fresh))
            print_progress(f"nobody there: paced {alone['paced'][-1]:.2f} s, full {alone['full'][-1]:.2f} s")
            pause()
    return {"modes": {mode: summary(turns[mode]) for mode in modes}, "nobody_there_s": alone}


def format_turn(turn: dict[str, Any]) -> str:
    """Return one line for a turn."""
    parts = [
        f"{kind} " + " ".join(f"p{p} x{b / a:.2f}" for p, a, b in zip(PERCENTILES, *turn[kind].values(), strict=True))
        for kind in KINDS
    ]
    return f"{turn['rate']:,}/s; " + "; ".join(parts)


def summary(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds, and all turns."""
    medians: dict[str, Any] = {"rate": statistics.median(turn["rate"] for turn in turns)}
    for kind in KINDS:
        for name in ("alone", "beside"):
            columns = zip(*(turn[kind][name] for turn in turns), strict=True)
            medians[f"{kind} {name} us"] = [round(statistics.median(column)) for column in columns]
        ratios = [[b / a for a, b in zip(turn[kind]["alone"], turn[kind]["beside"], strict=True)] for turn in turns]
        medians[f"{kind} ratio"] = [round(statistics.median(column), 2) for column in zip(*ratios, strict=True)]
    return {**medians, "turns": list(turns)}


# Over time.


def record(mode: str, fresh: Fresh) -> Timeline:
    """What happens beside one mode."""
    with tempfile.TemporaryDirectory(prefix="trashd-bench-", dir="/dev/shm") as scratch, fresh() as root:
        set_caches(root, cold=False)
        with MODES[mode](root) as pid:
            began = time.monotonic()
            moments = _watch(root, pid, began, COME_S)
            with neighbours(root, Path(scratch)) as both:
                moments += _watch(root, pid, began, GO_S)
                both.stop()
            moments += _watch(root, pid, began, END_S)
    latencies = {kind: [Latency(one.at_s - began, one.seconds) for one in both.latencies[kind]] for kind in KINDS}
    first = min(calls[0].at_s for calls in latencies.values())
    last = max(calls[-1].at_s + calls[-1].seconds for calls in latencies.values())
    return Timeline(moments, latencies, first, last)


def _watch(root: Path, pid: int, began_s: float, until_s: float) -> list[Moment]:
    moments = []
    n_before, stalled_before, before_s = n_inodes(root), _stalled_s(), time.monotonic()
    while before_s - began_s < until_s:
        wait(pid, 0)
        time.sleep(max(before_s + STEP_S - time.monotonic(), 0.0))
        n, stalled, now_s = n_inodes(root), _stalled_s(), time.monotonic()
        took_s = now_s - before_s
        moments.append(Moment(before_s - began_s, (n_before - n) / took_s, (stalled - stalled_before) / took_s))
        n_before, stalled_before, before_s = n, stalled, now_s
    return moments


def _stalled_s() -> float:
    return int(_PRESSURE.read_text(encoding="ascii").partition("total=")[2].split()[0]) / 1e6


def watch_reaction(filesystem: str, n_rounds: int, mode: str = "paced") -> dict[str, Any]:
    """Seconds from the neighbours' coming until it is at the rate that it holds, and from their going until it is at
    full speed again.
    """
    found: dict[str, Any] = {"steps back": [], "full again": [], "full rate": [], "held rate": []}
    with filled(filesystem, MANY * N_FILES) as fresh:
        for _ in range(n_rounds):
            reaction = react(record(mode, fresh))
            for what, value in reaction.items():
                found[what].append(value)
    return found


def react(line: Timeline) -> dict[str, float | None]:
    """One round of it."""
    full = statistics.median(one.rate for one in line.moments if 0.5 <= one.at_s < line.came_s - STEP_S)
    beside = [one for one in line.moments if line.came_s <= one.at_s < line.went_s - STEP_S]
    held = sum(one.rate for one in beside[len(beside) // 2 :]) / len(beside[len(beside) // 2 :])
    fast = [one.at_s + STEP_S for one in beside if one.rate > max(_SLOW * held, _PART * full)]
    after = [one for one in line.moments if one.at_s >= line.went_s]
    again = (one.at_s for at, one in enumerate(after) if _mean(after[at : at + 5]) >= _FULL * full)
    again_s = next(again, None)
    return {
        "steps back": max(fast, default=line.came_s) - line.came_s,
        "full again": None if again_s is None else again_s - line.went_s,
        "full rate": round(full),
        "held rate": round(held),
    }


def _mean(moments: Sequence[Moment]) -> float:
    return sum(one.rate for one in moments) / len(moments)


def plot(filesystem: str) -> str:
    """An SVG of rm -rf and of ours beside the same neighbours."""
    with filled(filesystem, MANY * N_FILES) as fresh:
        lines = {mode: record(mode, fresh) for mode in TITLES}
    return draw(filesystem, MANY * N_FILES, lines)


def measure(arguments: argparse.Namespace, pause: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Measure all modes, or the reaction. Returns  the row of this run"""
    modes = arguments.mode or list(MODES)
    load_before = round(os.getloadavg()[0], 2)
    if arguments.reaction:
        found: dict[str, Any] = {"reaction": watch_reaction(arguments.filesystem, arguments.rounds)}
    else:
        with filled(arguments.filesystem, arguments.files) as fresh:
            found = compete(modes, fresh, arguments.rounds, pause)
    options = {
        "files": arguments.files,
        "n_rounds": arguments.rounds,
        "modes": arguments.mode,
        "seconds": [ALONE_S, BESIDE_S],
    }
    row = {"filesystem": arguments.filesystem, "n_files": arguments.files, "percentiles": PERCENTILES}
    return {**row, "options": options, **found, "load_before": load_before}


def options(description: str | None, n_rounds: int) -> argparse.ArgumentParser:
    """Return the parser of the options that these measurements share. description: the text of --help"""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--filesystem", choices=FILESYSTEMS)
    parser.add_argument("--rounds", type=int, default=n_rounds)
    parser.add_argument("--mode", action="append", choices=list(MODES), help="only this one (may be repeated)")
    parser.add_argument("--table", action="store_true", help="measure nothing; print what the newest results say")
    return parser


def read(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """What the command line asks for, which can be done."""
    parsed = parser.parse_args(arguments)
    if not parsed.table:
        if not parsed.filesystem:
            parser.error("--filesystem, or --table")
        if os.geteuid():
            parser.error("only root may mount")
    return parsed


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line asks for."""
    parser = options(__doc__, N_ROUNDS)
    parser.add_argument("--files", type=int, default=N_FILES)
    parser.add_argument("--reaction", action="store_true", help="how soon it steps back and comes again, instead")
    parser.add_argument("--plot", type=Path, metavar="SVG", help="draw what happens over time, instead")
    return read(parser, arguments)


def main() -> None:
    """Measure, append the result, print it."""
    arguments = parse()
    if arguments.table:
        print(tables(RESULTS))
        return
    with measuring(subprocess.CalledProcessError):
        see_own_mounts_only()  # an image that another's namespace has mounted too is not written when we unmount it
        if arguments.plot:
            arguments.plot.write_text(plot(arguments.filesystem), encoding="utf-8")
        else:
            keep(RESULTS, measure(arguments))
    if not arguments.plot:
        print(tables(RESULTS))


if __name__ == "__main__":
    main()
