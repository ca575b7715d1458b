"""A tree swapped through its mount: how soon a client sees the empty directory, and how long others are kept waiting.

    python -m bench.swap_through            200,000 files, all known to the kernel, on tmpfs and ext4; six minutes
    python -m bench.swap_through --quick    20,000, one round; half a minute
    python -m bench.swap_through --table    what the newest results say

swap  `trashd swap DIR` on the mounted name
mv    `mv DIR .trashd/drop/`, which leaves nothing in its place

Two clients work beside the tree all the time, a third waits to see it go. Seen is from the call of renameat2 to the end
of a listing without an entry (mv: to no such name). What others waited is the longest operation that was under way in
the second after the call; that of a second before anything stands beside it, since other programs make clients wait
too. The tree comes back, and all of it is known again, before the other way has its turn. Native is where the
filesystem lies. Medians of all turns, and the worst.

Each scene appends a line to bench/results/swap_through.jsonl. As root only, in a mount namespace of its own.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from bench import processor_time, uring
from bench.listing_scenes import scene
from bench.listing_steps import Work, taking_part
from bench.subjects import DEVICE, NATIVE, OURS, Row, Words, all_subjects, conditions, markdown, summary, versions
from bench.support import compiled, keep, make_flat, measuring, print_progress
from bench.swap_clients import KINDS, clients_in, make_room, watching, worst_s
from fusefs.linux.kernel import Kernel
from fusefs.linux.syscalls import renameat2
from tests.support.mount_namespaces import see_own_mounts_only
from tests.support.store_verbs import init, restore, swap

RESULTS = Path(__file__).with_name("results") / "swap_through.jsonl"
N_FILES, N_FILES_QUICK = 200_000, 20_000
N_ROUNDS = 5
EMPTY, STALL, STALL_ALONE = "seen after", "others wait", "others wait, alone"
SWAP, MV = "swap", "mv"
LIMITS_S = MappingProxyType({EMPTY: 1e-3, STALL: 5e-3})
SHARED = "trashd, shared"
_WINDOW_S = 1.0
_SETTLE_S = 0.3
_VICTIM = "victim"
_RENAME_NOREPLACE = 1

TakeBack = Callable[[], object]


def words() -> Words:
    """What each subject runs; ours also where the tree may change behind it, and without io_uring."""
    found = all_subjects()
    return {
        NATIVE: (),
        OURS: found[OURS],
        SHARED: tuple("shared" if word == "exclusive" else word for word in found[OURS]),
        **{name: found[name] for name in (DEVICE,) if name in found},
    }


def make(source: Path, n: int) -> None:
    """The tree, the store, and what the clients use."""
    source.mkdir()
    init(source)
    make_room(source)
    make_flat(source / _VICTIM, n)
    os.sync()


def take_turn(work: Work) -> dict[str, float]:
    """Seconds, by way and figure.

    Raises  Unable
    """
    found: dict[str, float] = {}
    with taking_part(work, words()) as (path, fuse):
        drop = path / ".trashd" / ("drop" if fuse else f"u/{os.geteuid()}/drop")
        for way, act in ((SWAP, _swap), (MV, partial(_move, drop))):
            _let_all_be_known(path / _VICTIM, work.n)
            found |= {named(way, figure): seconds for figure, seconds in _take_way(path, act).items()}
    return found


def named(way: str, figure: str) -> str:
    """A figure of one of the two; that of the swap has none but its own."""
    return figure if way == SWAP else f"{way}: {figure}"


def _take_way(path: Path, act: Callable[[Path], tuple[int, TakeBack]]) -> dict[str, float]:
    with clients_in(path) as clients, watching(path / _VICTIM) as watcher:
        time.sleep(_SETTLE_S + _WINDOW_S)
        before_ns = time.monotonic_ns()
        called_ns, take_back = act(path / _VICTIM)
        empty_ns = watcher.result()
        time.sleep(_WINDOW_S)
        tooks = clients.results()
    take_back()
    window_ns = int(_WINDOW_S * 1e9)
    alone = worst_s(tooks, before_ns - window_ns, before_ns)
    beside = worst_s(tooks, called_ns, called_ns + window_ns)
    return {
        EMPTY: (empty_ns - called_ns) / 1e9,
        STALL: max(beside.values()),
        STALL_ALONE: max(alone.values()),
        **beside,
    }


class _Timed(Kernel):
    """Tells when the exchange was called."""

    called_ns = 0

    def exchange(self, old_dir: int, old: bytes, new_dir: int, new: bytes) -> None:
        """See Kernel."""
        self.called_ns = time.monotonic_ns()
        super().exchange(old_dir, old, new_dir, new)


def _swap(victim: Path) -> tuple[int, TakeBack]:
    """When renameat2 was called, and what takes it back."""
    kernel = _Timed()
    swapped = swap(victim, kernel)
    return kernel.called_ns, lambda: restore(victim.parent, swapped.id)


def _move(drop: Path, victim: Path) -> tuple[int, TakeBack]:
    """When renameat2 was called as mv(1) does, from a path to a name in an open directory; what takes it back."""
    name = os.fsencode(victim.name)
    drop_fd = os.open(drop, os.O_PATH | os.O_DIRECTORY)
    above_fd = os.open(victim.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        called_ns = time.monotonic_ns()
        renameat2(above_fd, name, drop_fd, name, _RENAME_NOREPLACE)
    finally:
        os.close(drop_fd)
        os.close(above_fd)
    return called_ns, lambda: (drop / victim.name).rename(victim)


def _let_all_be_known(victim: Path, n: int) -> None:
    with os.scandir(victim) as entries:
        assert sum(entry.stat(follow_symlinks=False).st_nlink for entry in entries) == n


def measure(where: str, arguments: argparse.Namespace) -> Row:
    """Measure one scene. Returns  its row"""
    n = arguments.files or (N_FILES_QUICK if arguments.quick else N_FILES)
    n_rounds = arguments.rounds or (1 if arguments.quick else N_ROUNDS)
    load_before = round(os.getloadavg()[0], 2)
    turns: dict[str, list[dict[str, float]]] = {subject: [] for subject in words()}
    with scene(where, lambda path: make(path, n)) as source:
        for number in range(n_rounds):
            begin = number % len(turns)
            for subject in (*list(turns)[begin:], *list(turns)[:begin]):
                turn = take_turn(Work(subject, where, source, n, None))
                turns[subject].append(turn)
                text = ", ".join(f"{key} {turn[key] * 1e3:.2f}" for way in (SWAP, MV) for key in _printed_keys(way))
                print_progress(f"{where}: round {number + 1} of {n_rounds}: {subject}: {text} ms")
    return {
        "scene": where,
        "n_files": n,
        "options": {"quick": arguments.quick, "n_rounds": n_rounds},
        "n_cpus": len(os.sched_getaffinity(0)),
        "versions": versions(),
        "subjects": {subject: summary(found) for subject, found in turns.items()},
        "load_before": load_before,
    }


def _printed_keys(way: str) -> list[str]:
    return [named(way, figure) for figure in (EMPTY, STALL, STALL_ALONE)]


class Line(NamedTuple):
    """What a row says of one target."""

    row: Row
    subject: str
    way: str
    figure: str

    @property
    def most_s(self) -> float:
        """The target."""
        return LIMITS_S[self.figure]

    @property
    def median_s(self) -> float:
        """Of all turns."""
        return float(self.row["subjects"][self.subject]["medians"][named(self.way, self.figure)])

    @property
    def worst_s(self) -> float:
        """Of all turns."""
        return float(max(self.row["subjects"][self.subject]["seconds"][named(self.way, self.figure)]))

    @property
    def is_met(self) -> bool:
        """By the median."""
        return self.median_s <= self.most_s

    @property
    def description(self) -> str:
        """Return the figure, its limit and the verdict as text."""
        alone_s = self.row["subjects"][self.subject]["medians"][named(self.way, STALL_ALONE)]
        alone = f", alone {alone_s * 1e3:.2f}" if self.figure == STALL else ""
        return (
            f"{self.row['scene']}, {self.row['n_files']:,} files, {self.subject}, {self.way}: {self.figure} "
            f"{self.median_s * 1e3:.2f} ms (at most {self.most_s * 1e3:g}{alone}; worst {self.worst_s * 1e3:.2f}): "
            f"{'met' if self.is_met else 'MISSED'}"
        )

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        names = {"scene": self.row["scene"], "subject": self.subject, "way": self.way, "figure": self.figure}
        found = {"seconds": self.median_s, "worst_s": self.worst_s, "most_s": self.most_s}
        return names | found | {"verdict": "met" if self.is_met else "MISSED"}


def judged(row: Row) -> Iterator[Line]:
    """Each target: eight of a scene."""
    for subject in (OURS, SHARED):
        for way in (SWAP, MV):
            for figure in LIMITS_S:
                yield Line(row, subject, way, figure)


def table(rows: Sequence[Row]) -> str:
    """The Markdown of docs/internals/benchmarks."""
    heads = ["ms, medians (worst)", "subject", "way", EMPTY, STALL, "alone", *KINDS]
    lines = [
        [row["scene"], subject, way, *(_cell(found, named(way, key)) for key in (EMPTY, STALL, STALL_ALONE, *KINDS))]
        for row in rows
        for subject, found in row["subjects"].items()
        for way in (SWAP, MV)
    ]
    verdicts = [f"- {line.description}" for row in rows for line in judged(row)]
    measured = [f"- {conditions(row, row['scene'])}" for row in rows]
    return "\n\n".join([markdown(heads, lines), "\n".join(verdicts), "\n".join(measured)])


def _cell(figures: Row, key: str) -> str:
    return f"{figures['medians'][key] * 1e3:.2f} ({max(figures['seconds'][key]) * 1e3:.2f})"


def newest() -> list[Row]:
    """The last complete run of each scene."""
    found: dict[str, Row] = {}
    for line in RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else ():
        row = json.loads(line)
        if row["n_files"] >= N_FILES and row["options"]["n_rounds"] >= N_ROUNDS:
            found[row["scene"]] = row
    return list(found.values())


def main() -> None:
    """Measure, append the results, print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of less")
    parser.add_argument("--scene", choices=("tmpfs", "ext4"), help="only there")
    parser.add_argument("--files", type=int, help="in the tree")
    parser.add_argument("--rounds", type=int, help="turns of each subject")
    parser.add_argument("--table", action="store_true", help="measure nothing; print what the newest results say")
    arguments = parser.parse_args()
    if arguments.table:
        rows = newest()
        print(table(rows) if rows else "nothing measured yet")
        return
    if os.geteuid():
        sys.exit("only root may mount for all, and drop caches")
    with measuring(), compiled(), uring.switched_on(), processor_time.groups():
        see_own_mounts_only()
        for where in (arguments.scene,) if arguments.scene else ("tmpfs", "ext4"):
            row = keep(RESULTS, measure(where, arguments))
            print("\n".join([table([row]), ""]), flush=True)


if __name__ == "__main__":
    main()
