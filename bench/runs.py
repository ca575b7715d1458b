"""Runs as they are kept: a line each in bench/results/runs.jsonl, all in one form."""

import datetime
import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bench.support import machine
from bench.verdicts import Round

RESULTS = Path(__file__).with_name("results")
RUNS = RESULTS / "runs.jsonl"
SCHEMA = 2


class Run(NamedTuple):
    """What was measured of one case.

    rounds    what each subject took, in each round
    left_out  who has no figures, and why
    commit    of the program; "" if it is unknown
    load      of the machine, before and after
    """

    benchmark: str
    case: str
    n: int
    rounds: tuple[Round, ...]
    left_out: Mapping[str, str]
    at: str
    commit: str
    machine: Mapping[str, Any]
    load: tuple[float, float]

    @property
    def title(self) -> str:
        """The benchmark, the case and the size: what a run may be compared with has the same."""
        return f"{self.benchmark} {self.case}, {self.n:,}" if self.n else f"{self.benchmark} {self.case}".rstrip()

    def as_line(self) -> str:
        """Of the file."""
        return json.dumps({"schema": SCHEMA, **self._asdict()}) + "\n"


def from_row(row: Mapping[str, Any]) -> Run:
    """A run that as_line has told."""
    found = {**row, "rounds": tuple(row["rounds"]), "load": tuple(row["load"])}
    return Run(**{key: found[key] for key in Run._fields})


def keep(run: Run, results: Path = RUNS) -> Run:
    """Append a run to the stored ones."""
    results.parent.mkdir(exist_ok=True)
    with results.open("a", encoding="utf-8") as file:
        file.write(run.as_line())
    return run


def read(results: Path) -> Iterable[dict[str, Any]]:
    """The rows of a file, the oldest first."""
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    return map(json.loads, lines)


def now() -> str:
    """When a run ends."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def commit() -> str:
    """Of this checkout; marked where something was changed since, but for results."""
    command = ["git", "describe", "--always", "--exclude=*", "--abbrev=9"]
    changes = ["git", "status", "--porcelain", "--untracked-files=no", "--", "fusefs"]
    try:
        said, changed = (
            subprocess.run(words, capture_output=True, text=True, check=True, cwd=RESULTS.parents[1]).stdout.strip()
            for words in (command, changes)
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return f"{said}-dirty" if changed else said


def load() -> float:
    """How many processes want a processor, over the last minute."""
    return round(os.getloadavg()[0], 2)


def on_this_machine() -> dict[str, Any]:
    """What runs are measured on; the load stands beside it."""
    return {key: found for key, found in machine().items() if key != "load"}
