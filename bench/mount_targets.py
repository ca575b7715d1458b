"""How good the mount must be, and what the rows of bench/results/mount.jsonl say of each target.

Some targets are for trashd over /dev/fuse, some for trashd over io_uring. Means over rounds are judged.
"""

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.listing_steps import OF_SIZE
from bench.mount_parts import ALL_CORES, FIO_STEPS, ONE_CORE, PARTS, PEERS, TREE_STEPS, sizes
from bench.names import N_CLIENTS, OPERATIONS, format_clients
from bench.operations import AGAIN
from bench.projects import STEPS
from bench.subjects import (
    BINDFS,
    DEVICE,
    EXAMPLE,
    HP,
    HP_URING,
    LL_CHECKED,
    NATIVE,
    OURS,
    Row,
)

Seconds = Mapping[str, Mapping[str, float]]
"""Of a subject, by step."""
Place = tuple[str, str]
"""A filesystem, and how many cores."""
Rival = Callable[[Row, str], tuple[str, float] | None]
"""Who is compared in a row and a step, and the seconds; None: nobody did it."""

N_ROUNDS = 5
"""Of a complete run, at least."""
SINGLE_THREADED = (BINDFS, EXAMPLE)
_EITHER = (DEVICE, OURS)
_NAMES = tuple(OPERATIONS)


def means_of(row: Row) -> Seconds:
    """Over all rounds."""
    return {
        name: {step: statistics.fmean(each) for step, each in found["seconds"].items()}
        for name, found in row["subjects"].items()
        if "seconds" in found
    }


def medians_of(row: Row) -> Seconds:
    """Over all rounds."""
    return {name: found["medians"] for name, found in row["subjects"].items() if "medians" in found}


def traits_of(row: Row, name: str) -> dict[str, Any]:
    """What is known of a subject; nothing, of one that is not there or of an old row."""
    found: dict[str, Any] = row["subjects"].get(name, {}).get("traits", {})
    return found


def one(name: str) -> Rival:
    """Only this one. The peer over io_uring is none if it had to do without."""

    def rival(row: Row, step: str) -> tuple[str, float] | None:
        seconds = row["subjects"].get(name, {}).get("seconds", {}).get(step)
        is_itself = name != HP_URING or traits_of(row, name).get("transport") == "io_uring"
        return (name, statistics.fmean(seconds)) if seconds and is_itself else None

    return rival


def best(names: Sequence[str], trait: str | None = None) -> Rival:
    """The quickest of some, or of those among them who have a trait."""

    def rival(row: Row, step: str) -> tuple[str, float] | None:
        found = [one(name)(row, step) for name in names if trait is None or traits_of(row, name).get(trait)]
        return min((each for each in found if each), key=lambda each: each[1], default=None)

    return rival


class Target(NamedTuple):
    """How long ours may take, beside somebody else.

    ours      over /dev/fuse, over io_uring, or either
    steps     of the part; of listings, what follows their sizes
    rival     finds the rival in a row; rival_name: its name in texts
    limit     at most so many times his time
    n_needed  in so many of the steps; None: in all
    is_below  not as long, either
    """

    part: str
    steps: tuple[str, ...]
    ours: tuple[str, ...]
    rival_name: str
    rival: Rival
    limit: float
    cores: str = ALL_CORES
    n_needed: int | None = None
    is_below: bool = False

    @property
    def requirement(self) -> str:
        """Return the requirement as text, such as `at most 0.5 of bindfs`."""
        how = "below" if self.is_below else "at most"
        many = "" if self.n_needed is None else f", in {self.n_needed} of {len(self.steps)}"
        times = "" if self.limit == 1 else f"{self.limit:.3g} of "
        return f"{how} {times}{self.rival_name}{many}"

    def steps_in(self, row: Row) -> Sequence[str]:
        """Those that a row is to have."""
        if self.part != "listing":
            return self.steps
        return [OF_SIZE.format(f"{size:,}") + suffix for size in sizes(row["n_files"]) for suffix in self.steps]


class Verdict(NamedTuple):
    """What a row says of a target, for one of its steps."""

    target: Target
    step: str
    seconds: float
    rival: str
    rival_seconds: float
    of_native: float | None  # times native's time

    @property
    def ratio(self) -> float:
        """Times the rival's time."""
        return self.seconds / self.rival_seconds

    @property
    def is_met(self) -> bool:
        """By this step."""
        return self.ratio < self.target.limit if self.target.is_below else self.ratio <= self.target.limit


_SHARED = tuple(map(format_clients, N_CLIENTS[1:]))
_ASKED = "the best that is asked for ACLs"
TARGETS = (
    Target("names", _NAMES, (DEVICE,), HP, one(HP), 1),
    Target("names", _NAMES, (DEVICE,), LL_CHECKED, one(LL_CHECKED), 1.2, n_needed=6),
    Target("names", _NAMES, (DEVICE,), HP, one(HP), 1.2, ONE_CORE, n_needed=6),
    Target("names", _NAMES, (OURS,), HP_URING, one(HP_URING), 1, n_needed=6),
    Target("names", _NAMES, (OURS,), HP_URING, one(HP_URING), 1.2),
    Target("clients", _SHARED, _EITHER, "every single-threaded peer's", best(SINGLE_THREADED), 1, is_below=True),
    Target("busy", _NAMES, (OURS,), DEVICE, one(DEVICE), 1),
    Target("listing", ("",), _EITHER, _ASKED, best(PEERS, "getxattr"), 0.5),
    Target("listing", (AGAIN,), _EITHER, NATIVE, one(NATIVE), 1.15),
    Target("tree", tuple(step + AGAIN for step in TREE_STEPS), _EITHER, NATIVE, one(NATIVE), 1.15),
    Target("data", ("read", "write", "mmap read", *FIO_STEPS), _EITHER, NATIVE, one(NATIVE), 1 / 0.95),
    Target("projects", tuple(STEPS), _EITHER, BINDFS, one(BINDFS), 0.5),
)


class Finding(NamedTuple):
    """What a row says of a target, for one of ours."""

    target: Target
    place: Place
    ours: str
    verdicts: list[Verdict]  # one for each step that both have done
    not_judged: list[str]  # the others

    @property
    def word(self) -> str:
        """The answer."""
        n_steps = len(self.verdicts) + len(self.not_judged)
        n_needed = self.target.n_needed or n_steps
        n_met = sum(verdict.is_met for verdict in self.verdicts)
        if n_met >= n_needed:
            return "met"
        return "MISSED" if n_met + len(self.not_judged) < n_needed else "not judged"

    @property
    def description(self) -> str:
        """Return the ratios as text, each with its rival if the target names no single one."""
        found = [f"{verdict.step} {verdict.ratio:.2f}{self._format_rival(verdict)}" for verdict in self.verdicts]
        missing = f"not done by both: {', '.join(self.not_judged)}" if self.not_judged else ""
        return "; ".join(filter(None, [", ".join(found), missing]))

    def _format_rival(self, verdict: Verdict) -> str:
        native = f" ({verdict.of_native:.2f} of native)" if self.target.part == "projects" and verdict.of_native else ""
        return ("" if verdict.rival == self.target.rival_name else f" of {verdict.rival}") + native

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        figures = {
            verdict.step: {
                "seconds": verdict.seconds,
                "rival": verdict.rival,
                "rival_seconds": verdict.rival_seconds,
                "ratio": round(verdict.ratio, 4),
                "of_native": verdict.of_native and round(verdict.of_native, 4),
                "met": verdict.is_met,
            }
            for verdict in self.verdicts
        }
        target, (where, cores) = self.target, self.place
        return {
            "part": target.part,
            "scene": where,
            "cores": cores,
            "ours": self.ours,
            "target": target.requirement,
            "verdict": self.word,
            "figures": figures,
            "not_judged": self.not_judged,
        }


def judged(row: Row) -> Iterator[Finding]:
    """Each target that is about a row, for each of ours that took part."""
    means = means_of(row)
    native = means.get(NATIVE, {})
    for target in TARGETS:
        if target.part != row["part"] or target.cores != row["cores"]:
            continue
        steps = target.steps_in(row)
        rivals = {step: target.rival(row, step) for step in steps}
        for name in filter(means.__contains__, target.ours):
            seconds = means[name]
            verdicts = [
                Verdict(target, step, seconds[step], *rival, seconds[step] / native[step] if native.get(step) else None)
                for step, rival in rivals.items()
                if rival and step in seconds
            ]
            found = {verdict.step for verdict in verdicts}
            yield Finding(target, place(row), name, verdicts, [step for step in steps if step not in found])


def place(row: Row) -> Place:
    """Where a row was measured."""
    return row["scene"], row["cores"]


def newest(results: Path) -> list[Row]:
    """The last complete run of each part in each place: full size, and enough rounds."""
    found: dict[tuple[str, Place], Row] = {}
    for line in results.read_text(encoding="utf-8").splitlines() if results.exists() else ():
        row = json.loads(line)
        options = row["options"]
        is_complete = not options["quick"] and options["n_rounds"] >= N_ROUNDS
        if is_complete:
            found[row["part"], place(row)] = row
    parts = list(PARTS)
    return sorted(found.values(), key=lambda row: (row["scene"] != "tmpfs", row["cores"], parts.index(row["part"])))
