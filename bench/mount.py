"""`trashd mount` against the filesystem below it and against other FUSE daemons that pass everything through.

    python -m bench.mount            on ext4 in memory, five rounds; 3 to 4 minutes
    python -m bench.mount --quick    one round of less; half a minute
    python -m bench.mount --table    the tables of docs/performance.md

All subjects take turns in one run on the same volume, each with a fresh tree and a fresh mount; the order rotates,
and the figures are medians. Cold is after the caches of the whole machine were dropped. One more turn of each, not
timed, counts what the kernel asks the daemon. A subject that is not installed or has failed is left out, and named.

bindfs and mergerfs are Debian's packages, mergerfs with its caches on. passthroughfs is the example in pyfuse3's
source: pip fetches it into ~/.cache/trashd-bench, or --example names it. On one core: taskset --cpu-list 0 python ...

Each run appends a line to bench/results/mount.jsonl. As root only; in a mount namespace of its own, so that nothing
stays mounted, however it ends.
"""

import argparse
import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.messages import can_count, counted
from bench.operations import OPERATIONS, Operation, Worker, prepare
from bench.subjects import (
    NATIVE,
    OURS,
    SUBJECTS,
    Row,
    Unable,
    conditions,
    cpu_s,
    markdown,
    served,
    summary,
    versions,
)
from bench.support import keep, measuring, tell, volume
from tests.support.fuse import FuseMount
from tests.support.namespaces import see_own_mounts_only

RESULTS = Path(__file__).with_name("results") / "mount.jsonl"
N_ROUNDS, N_ROUNDS_QUICK, SHARE_QUICK = 5, 1, 0.25
SHARE_COUNTED = 0.25


class Course(NamedTuple):
    """What every subject is to do, and where."""

    root: Path
    operations: Sequence[Operation]
    example: Path | None = None

    def of(self, share: float) -> "Course":
        """The same, with less of each operation."""
        return self._replace(operations=[operation.of(share) for operation in self.operations])


@contextlib.contextmanager
def turn_of(name: str, course: Course) -> Iterator[tuple[Worker, FuseMount | None]]:
    """A worker in a fresh tree, as a subject shows it.

    Raises  Unable: also for what fails in the body
    """
    source = course.root / "source"
    prepare(source, course.operations)
    try:
        with served(name, source, course.example) as (path, fuse), Worker(path) as worker:
            yield worker, fuse
    except (OSError, RuntimeError) as error:
        raise Unable("failed", str(error)) from error
    finally:
        shutil.rmtree(source)


def time_turn(name: str, course: Course) -> dict[str, float]:
    """Seconds of each operation, and of the daemon's processor time.

    Raises  Unable
    """
    with turn_of(name, course) as (worker, fuse):
        cpu_before = cpu_s(fuse) if fuse else 0.0
        seconds = {operation.name: worker.do(operation) for operation in course.operations}
        return seconds | {"cpu": cpu_s(fuse) - cpu_before if fuse else 0.0}


def count_turn(name: str, course: Course) -> dict[str, Any]:
    """The messages that each operation takes, by opcode, the most frequent first.

    What comes once or twice a pass, however often the operation is done in it, does not count.
    Raises  Unable
    """
    with turn_of(name, course) as (worker, fuse):
        if fuse is None:
            return {}
        found = {}
        with counted(int(fuse.connection.name)) as messages:
            for operation in course.operations:
                worker.do(operation)
                found[operation.name] = {
                    opcode: round(count / operation.n_passes / operation.n, 5)
                    for opcode, count in messages.take().most_common()
                    if count > 2 * operation.n_passes
                }
        return found


def compete(names: Sequence[str], course: Course, n_rounds: int) -> dict[str, Any]:
    """What each subject took and what it was asked, or why it is left out."""
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    messages: dict[str, dict[str, Any]] = {}
    out: dict[str, dict[str, str]] = {}
    for number in range(n_rounds + 1):
        begin = number % len(names)
        for name in (*names[begin:], *names[:begin]):
            if name in out:
                continue
            tell(f"round {number} of {n_rounds}: {name}" if number else f"counting: {name}")
            try:
                if number:
                    turns[name].append(time_turn(name, course))
                else:
                    messages[name] = count_turn(name, course.of(SHARE_COUNTED)) if can_count() else {}
            except Unable as error:
                out[name] = {error.kind: error.told}
                tell(f"{name}: {error}")
    return {name: out.get(name) or {**summary(turns[name]), "messages": messages[name]} for name in names}


def measure(asked: argparse.Namespace) -> Row:
    """The row of one run."""
    n_rounds = asked.rounds or (N_ROUNDS_QUICK if asked.quick else N_ROUNDS)
    operations = [one.of(SHARE_QUICK) if asked.quick else one for one in OPERATIONS]
    names = asked.subject or list(SUBJECTS)
    load_before = round(os.getloadavg()[0], 2)
    with volume(asked.filesystem) as root:
        subjects = compete(names, Course(root, operations, asked.example), n_rounds)
    return {
        "filesystem": asked.filesystem,
        "options": {"quick": asked.quick, "n_rounds": n_rounds, "subjects": asked.subject},
        "n_cpus": len(os.sched_getaffinity(0)),
        "commands": {name: " ".join(SUBJECTS[name]) for name in names},
        "versions": versions(),
        "operations": {one.name: {"n": one.n, "n_passes": one.n_passes, "unit": one.unit} for one in operations},
        "subjects": subjects,
        "load_before": load_before,
    }


def tables(row: Row) -> str:
    """The Markdown of docs/performance.md: speeds, messages, and what it was measured on."""
    absent = [
        f"- {name}: {kind}: {found[kind]}"
        for name, found in row["subjects"].items()
        for kind in ("missing", "failed")
        if kind in found
    ]
    parts = [
        "In a second, medians; in brackets how many times native:",
        _speeds(row),
        "Messages for each operation, entry or MiB, without those that come once or twice in all:",
        _messages(row),
        *(["Left out:", "\n".join(absent)] if absent else []),
        f"Measured on {conditions(row, row['filesystem'])}.",
    ]
    return "\n\n".join(parts)


def _speeds(row: Row) -> str:
    rates = {name: _rates(row, found["medians"]) for name, found in row["subjects"].items() if "medians" in found}
    rivals = [name for name in rates if name not in (NATIVE, OURS)]
    lines = []
    for operation, about in row["operations"].items():
        native = rates[NATIVE][operation] if NATIVE in rates else None
        cells = [operation if about["unit"] == "ops" else f"{operation}, {about['unit']}"]
        cells += [_speed(of[operation], None if name == NATIVE else native) for name, of in rates.items()]
        best = max((rates[name][operation] for name in rivals), default=None)
        cells.append(f"{rates[OURS][operation] / best:.2f}" if best and OURS in rates else "-")
        lines.append(cells)
    cpu = ["the daemon's processor time, s", *(_cpu(row["subjects"][name]["medians"]["cpu"]) for name in rates), "-"]
    return markdown(["operation", *rates, f"{OURS} / best peer"], [*lines, cpu])


def _rates(row: Row, medians: dict[str, float]) -> dict[str, float]:
    return {name: about["n"] / medians[name] for name, about in row["operations"].items()}


def _speed(rate: float, native: float | None) -> str:
    """Three digits, and the ratio."""
    told = next((f"{rate / size:.3g} {sign}" for size, sign in ((1e6, "M"), (1e3, "k")) if rate >= size), f"{rate:.3g}")
    return f"{told} ({rate / native:.2g})" if native else told


def _cpu(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds else "-"


def _messages(row: Row) -> str:
    asked = {name: found["messages"] for name, found in row["subjects"].items() if found.get("messages")}
    lines = ([operation, *(_asked(of[operation]) for of in asked.values())] for operation in row["operations"])
    return markdown(["operation", *asked], lines)


def _asked(counts: dict[str, float]) -> str:
    """Such as `lookup, read 8`."""
    return ", ".join(_count(opcode.lower(), each) for opcode, each in counts.items()) or "none"


def _count(opcode: str, each: float) -> str:
    return opcode if f"{each:.2g}" == "1" else f"{opcode} {each:.2g}" if each < 100 else f"{opcode} {each:.0f}"


def newest(results: Path) -> Row | None:
    """The last complete run: full size, all subjects."""
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    complete = {"quick": False, "n_rounds": N_ROUNDS, "subjects": None}
    return next((row for row in map(json.loads, reversed(lines)) if row["options"] == complete), None)


def parse() -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round, a quarter of each operation")
    parser.add_argument("--filesystem", default="ext4", help="below the mounts: ext4, xfs, btrfs or tmpfs")
    parser.add_argument("--rounds", type=int, help="turns of each subject")
    parser.add_argument("--subject", action="append", choices=list(SUBJECTS), help="only this one (may be repeated)")
    parser.add_argument("--example", type=Path, help="pyfuse3's passthroughfs.py")
    parser.add_argument("--table", action="store_true", help="measure nothing; print what the newest result says")
    asked = parser.parse_args()
    if not asked.table and os.geteuid():
        parser.error("only root may mount for all, and drop caches")
    return asked


def main() -> None:
    """Measure, append the result, print it."""
    asked = parse()
    if asked.table:
        row = newest(RESULTS)
        print(tables(row) if row else "nothing measured yet")
        return
    with measuring():
        see_own_mounts_only()
        print(tables(keep(RESULTS, measure(asked))))


if __name__ == "__main__":
    main()
