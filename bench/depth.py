"""What a level of a deep tree costs through a mount: the table of docs/internals/benchmarks.

    python -m bench.depth

Trees of so many levels, each a directory in the one before, and a hundred times as many of a hundredth; both have as
many directories. A level of the deep one is to take at most 1.5 times as long: processor time of the client and of the
daemon, since nobody else's work on the machine is in that. All on one filesystem in memory, in turn; as root only, in a
mount namespace of its own.
"""

import argparse
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.listing_million import wait_until_idle
from bench.subjects import (
    NATIVE,
    OURS,
    SUBJECTS,
    Row,
    Unable,
    all_subjects,
    cpu_s,
    markdown,
    served,
    take_turns,
)
from bench.support import keep, measuring, print_progress, time_command, volume
from tests.support.foreground_mount import forget_all
from tests.support.fuse_watchdog import FuseMount
from tests.support.make_trees import make_chain, walk_chain
from tests.support.mount_namespaces import see_own_mounts_only
from tests.support.real_filesystems import bind_mount

RESULTS = Path(__file__).with_name("results") / "depth.jsonl"
BOUND = "native, bind mount"
"""To go up by `..`, the kernel looks at all that is above: where a mount shows no filesystem's root, as ours do."""
MAKE, WALK, AGAIN, REMOVE, DROP = "make", "walk", "walk again", "rm -rf", "drop"
LEVELS = (MAKE, WALK, AGAIN, REMOVE, DROP)
TARGET = 1.5
PARTS = 100
_PATIENCE_S, _LIMIT_S = 300.0, 300.0
_SETTLE_S = 1.1  # what the kernel is told of a directory lasts if it has not changed for a second


def used_s(fuse: FuseMount | None) -> float:
    """Seconds of processor time so far: ours, that of commands which have ended, and the daemon's."""
    times = os.times()
    return sum(times[:4]) + cpu_s(fuse)


def take_levels(root: Path, fuse: FuseMount | None, n_levels: int, n_chains: int) -> dict[str, float]:
    """Seconds of processor time a level, of all chains together; that of a drop is over when the daemon has no more."""
    tops = [root / f"chain-{number}" for number in range(n_chains)]
    found = {}

    def timed(what: str, act: Callable[[], object]) -> None:
        began = used_s(fuse)
        act()
        found[what] = (used_s(fuse) - began) / n_levels / n_chains

    def make() -> None:
        for top in tops:
            make_chain(top, n_levels)

    def walk_all() -> None:
        for top in tops:
            walk_chain(top)

    def drop() -> None:
        assert fuse
        for top in tops:
            top.rename(root / ".trashd/drop" / f"{top.name}-{time.monotonic_ns()}")
        wait_until_idle(fuse)

    timed(MAKE, make)
    time.sleep(_SETTLE_S)
    if fuse:
        forget_all(root)
    timed(WALK, walk_all)
    timed(AGAIN, walk_all)
    timed(REMOVE, lambda: time_command(["rm", "-rf", *tops], timeout_s=_LIMIT_S))
    if fuse and (root / ".trashd").exists():
        make()
        timed(DROP, drop)
    return found


@contextlib.contextmanager
def shown(name: str, source: Path) -> Iterator[tuple[Path, FuseMount | None]]:
    """A directory as a subject shows it. Raises  Unable"""
    if name == BOUND:
        target = source.with_name("bound")
        target.mkdir(exist_ok=True)
        with bind_mount(source, target):
            yield target, None
        return
    with served(name, source, words={**all_subjects(), **SUBJECTS}, limit_s=_LIMIT_S) as (path, fuse):
        yield path, fuse


def take_turn(name: str, source: Path, n_levels: int) -> dict[str, float]:
    """All figures of a subject. Raises  Unable"""
    found: dict[str, float] = {}
    for n, n_chains in ((n_levels // PARTS, PARTS), (n_levels, 1)):
        with shown(name, source) as (path, fuse):
            found |= {_at(what, n): seconds for what, seconds in take_levels(path, fuse, n, n_chains).items()}
    return found


def _at(what: str, n_levels: int) -> str:
    return f"{what} at {n_levels:,}"


def table(row: Row) -> str:
    """Microseconds, and how many times those at a hundredth of the depth."""
    deep = row["n_levels"]
    lines = []
    for name, told in row["subjects"].items():
        medians = told.get("medians", {})
        cells = [name]
        for what in LEVELS:
            shallow_s, deep_s = (medians.get(_at(what, n)) for n in (deep // PARTS, deep))
            cells.append(f"{deep_s * 1e6:.0f} ({deep_s / shallow_s:.2f})" if deep_s and shallow_s else "-")
        lines.append(cells)
    return markdown(["", *LEVELS], lines)


def verdicts(row: Row) -> Iterator[str]:
    """Each target, met or MISSED."""
    deep = row["n_levels"]
    medians = row["subjects"].get(OURS, {}).get("medians", {})
    for what in LEVELS:
        if _at(what, deep) in medians:
            ratio = medians[_at(what, deep)] / medians[_at(what, deep // PARTS)]
            yield f"{OURS}, {what}: {ratio:.2f} (at most {TARGET}): {'met' if ratio <= TARGET else 'MISSED'}"


def main() -> None:
    """Measure, keep and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--filesystem", default="ext4")
    parser.add_argument("--levels", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    see_own_mounts_only()
    with measuring(Unable), volume(arguments.filesystem) as root:
        source = root / "source"
        source.mkdir()
        subjects = take_turns(
            [NATIVE, BOUND, OURS],
            arguments.rounds,
            _PATIENCE_S,
            lambda name: take_turn(name, source, arguments.levels),
        )
    row = {"filesystem": arguments.filesystem, "n_levels": arguments.levels, "subjects": subjects}
    keep(RESULTS, row)
    print_progress(table(row))
    for verdict in verdicts(row):
        print_progress(verdict)


if __name__ == "__main__":
    main()
