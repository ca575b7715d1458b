"""What the rows of bench/results/mount.jsonl say: the verdict on each target, and the tables of docs/performance.md."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.listing_steps import NO_XATTRS
from bench.mount_parts import FIO_STEPS, PARTS, PEERS, TREE_STEPS
from bench.operations import AGAIN, CHANGES, MISS, NAMES, SCAN
from bench.subjects import CPU, HP, NATIVE, OURS, SINGLE, Row, conditions, markdown

Medians = Mapping[str, Mapping[str, float]]
"""Of a subject, by step."""
Place = tuple[str, str]
"""A filesystem, and how many cores."""

BEST_PEER = "the best peer"
N_ROUNDS = 5
"""Of a complete run, at least."""
EVERYBODY = (NATIVE, OURS, SINGLE, *PEERS[2:])
_REASON_LENGTH = 160
_LISTINGS = ("ls -l", NO_XATTRS, SCAN)


class Target(NamedTuple):
    """How fast one subject is to be, beside another."""

    part: str
    steps: tuple[str, ...]
    rival: str
    limit: float
    who: str = OURS
    is_time: bool = False  # at most so many times the rival's time, not at least so many times its speed

    @property
    def told(self) -> str:
        """Such as `at least 0.9 of native's speed`."""
        return f"at {'most' if self.is_time else 'least'} {self.limit:g} of {_whose(self.rival, self.is_time)}"


class Verdict(NamedTuple):
    """What a row says of a target, for one of its steps."""

    target: Target
    step: str
    ratio: float
    rival: str  # the best of the peers has a name

    @property
    def word(self) -> str:
        """The answer."""
        is_met = self.ratio <= self.target.limit if self.target.is_time else self.ratio >= self.target.limit
        return "met" if is_met else "MISSED"

    @property
    def told(self) -> str:
        """All of it but where."""
        who = "" if self.target.who == OURS else f", {self.target.who}"
        found = f"{self.ratio:.3g} of {_whose(self.rival, self.target.is_time)}"
        return f"{self.step}{who}: {found} ({self.target.told}): {self.word}"


def _whose(rival: str, is_time: bool) -> str:
    return f"{rival}'s {'time' if is_time else 'speed'}"


TARGETS = (
    Target("listing", _LISTINGS, BEST_PEER, 1.8),
    Target("listing", tuple(step + AGAIN for step in _LISTINGS), NATIVE, 0.9),
    Target("listing", (NAMES + AGAIN,), NATIVE, 1.5),
    Target("files", ("open, read 4 KiB, close", "open, append, close"), BEST_PEER, 1.1),
    Target("files", ("append 128 bytes",), NATIVE, 0.8),
    Target("files", (MISS,), BEST_PEER, 0.65),
    Target("data", ("read", "write", "mmap read", *FIO_STEPS), NATIVE, 0.95),
    Target("changes", tuple(one.name for one in CHANGES), BEST_PEER, 0.9, SINGLE),
    Target("changes", tuple(one.name for one in CHANGES), BEST_PEER, 0.6),
    Target("tree", tuple(step + AGAIN for step in TREE_STEPS), NATIVE, 1.15, is_time=True),
)
CPU_TARGET = Target("", (CPU,), HP, 1.0, is_time=True)
_CPU_TOLD = "the daemon's processor time"


def judged(row: Row) -> Iterator[Verdict]:
    """Of each step that a target is about, and that was measured."""
    medians = medians_of(row)
    for target in TARGETS:
        for step in target.steps if target.part == row["part"] else ():
            rival = _best_peer(medians, step) if target.rival == BEST_PEER else target.rival
            mine, its = (medians.get(name or "", {}).get(step) for name in (target.who, rival))
            if rival is not None and mine is not None and its is not None:
                yield Verdict(target, step, mine / its if target.is_time else its / mine, rival)


def _best_peer(medians: Medians, step: str) -> str | None:
    peers = [name for name in medians if name not in (NATIVE, OURS, SINGLE) and step in medians[name]]
    return min(peers, key=lambda name: medians[name][step], default=None)


def judged_cpu(rows: Sequence[Row]) -> Verdict | None:
    """Of the whole benchmark in one place; None: not all of it has run there."""
    used = _cpu(rows)
    return Verdict(CPU_TARGET, _CPU_TOLD, used[OURS] / used[HP], HP) if used else None


def _cpu(rows: Sequence[Row]) -> dict[str, float]:
    """Seconds of the daemons, over all parts that passthrough_hp got done (it needs an fd for each file)."""
    if {row["part"] for row in rows} != set(PARTS):
        return {}
    found = [medians for medians in map(medians_of, rows) if OURS in medians and HP in medians]
    names = [name for name in found[0] if all(name in one for one in found)] if found else []
    return {name: sum(one[name][CPU] for one in found) for name in names}


def verdicts(row: Row) -> Iterator[str]:
    """Each target that this row can judge, met or MISSED; and what it can't."""
    for name in (OURS, SINGLE):
        if "failed" in row["subjects"].get(name, {}):
            yield f"{title(row)}: {name} failed, every target MISSED: {row['subjects'][name]['failed']}"
    found = list(judged(row))
    yield from (f"{title(row)}: {verdict.told}" for verdict in found)
    seen = {(verdict.target, verdict.step) for verdict in found}
    for target in TARGETS:
        for step in target.steps if target.part == row["part"] else ():
            if (target, step) not in seen:
                yield f"{title(row)}: {step}, {target.who}: not judged: somebody did not do it"


def title(row: Row) -> str:
    """Its part and its place."""
    return f"{row['part']}, {told((row['scene'], row['cores']))}"


def place(row: Row) -> Place:
    """Where a row was measured."""
    return row["scene"], row["cores"]


def told(where: Place) -> str:
    return f"{where[0]}, {where[1]}"


def medians_of(row: Row) -> Medians:
    return {name: found["medians"] for name, found in row["subjects"].items() if "medians" in found}


def table(rows: Sequence[Row]) -> str:
    """All medians of one place, who is left out, and who had fewer turns than the others."""
    names = [name for name in EVERYBODY if any(name in medians_of(row) for row in rows)]
    lines = [line for row in rows for line in _lines(row, names)]
    used = _cpu(rows)
    if used:
        lines.append(_cpu_line(f"{_CPU_TOLD}, all parts", used, names))
    remarks = [remark for row in rows for remark in _remarks(row)]
    heads = [told(place(rows[0])), *names, f"{OURS} / best peer"]
    return "\n".join([markdown(heads, lines), *(["", *remarks] if remarks else [])])


def _lines(row: Row, names: Sequence[str]) -> Iterator[list[str]]:
    medians = medians_of(row)
    for step in dict.fromkeys(step for found in medians.values() for step in found if step != CPU):
        n, unit = (row["counts"].get(step, {}).get(key) for key in ("n", "unit"))
        native = medians.get(NATIVE, {}).get(step)
        cells = [step if unit in (None, "ops") else f"{step}, {'a MiB' if unit == 'MiB' else 'an entry'}"]
        for name in names:
            found = medians.get(name, {}).get(step)
            ratio = f" ({native / found:.2g})" if found and native and name != NATIVE else ""
            cells.append("-" if found is None else _time(found / (n or 1)) + ratio)
        best, ours = _best_peer(medians, step), medians.get(OURS, {}).get(step)
        cells.append(f"{medians[best][step] / ours:.2f}" if best and ours else "-")
        yield cells
    yield _cpu_line(f"{_CPU_TOLD}, {row['part']}", {name: found[CPU] for name, found in medians.items()}, names)


def _cpu_line(what: str, used: Mapping[str, float], names: Sequence[str]) -> list[str]:
    return [what, *(_time(used[name]) if used.get(name) else "-" for name in names), "-"]


def _time(seconds: float) -> str:
    """Three digits."""
    unit, size = next(
        ((unit, size) for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)) if seconds >= size), ("ns", 1e-9)
    )
    return f"{seconds / size:.3g} {unit}"


def _remarks(row: Row) -> Iterator[str]:
    n_rounds = row["options"]["n_rounds"]
    fewer = []
    for name, found in row["subjects"].items():
        for kind in ("missing", "failed"):
            if kind in found:
                yield f"- {row['part']}: {name}: {kind}: {found[kind][:_REASON_LENGTH]}"
        n_turns = len(found["seconds"][CPU]) if "seconds" in found else n_rounds
        if n_turns < n_rounds:
            fewer.append(f"{name} {n_turns}")
    if fewer:
        yield f"- {row['part']}: fewer turns than {n_rounds}, long as they are: {', '.join(fewer)}"
    if row["left_out"]:
        yield f"- {row['part']}: left out: {row['left_out']}"


def tables(rows: Sequence[Row]) -> str:
    """The Markdown of docs/performance.md: verdicts, times, messages, and what it was measured on."""
    places = list(dict.fromkeys(map(place, rows)))
    by_place = [[row for row in rows if place(row) == where] for where in places]
    parts = [
        "The targets. What was found is a ratio of speeds, or of times where it is to be at most so much:",
        _verdict_table(by_place),
        "Medians; in brackets how many times as fast as native:",
        *map(table, by_place),
        "Messages for each operation, entry or MiB, without those that come once or twice in all:",
        *_messages(by_place[0]),
        "Measured on:",
        "\n".join(line for of_place in by_place for line in _conditions(of_place)),
    ]
    return "\n\n".join(parts)


def _conditions(rows: Sequence[Row]) -> Iterator[str]:
    """Of one place; more than one line if the programs changed between its parts."""
    for commit in dict.fromkeys(row["versions"]["commit"] for row in rows):
        of_commit = [row for row in rows if row["versions"]["commit"] == commit]
        busiest = max(of_commit, key=lambda row: float(row["load_before"]))
        parts = ", ".join(row["part"] for row in of_commit)
        yield f"- {told(place(busiest))}: {conditions(busiest, parts)}"


def _verdict_table(by_place: Sequence[Sequence[Row]]) -> str:
    cells: dict[tuple[str, str], dict[Place, str]] = {}
    for rows in by_place:
        cpu = judged_cpu(rows)
        for verdict in (*(one for row in rows for one in judged(row)), *([cpu] if cpu else [])):
            who = "" if verdict.target.who == OURS else f", {verdict.target.who}"
            word = "met" if verdict.word == "met" else "**MISSED**"
            of_step = cells.setdefault((verdict.step + who, verdict.target.told), {})
            of_step[place(rows[0])] = f"{verdict.ratio:.2f} {word}"
    places = [place(rows[0]) for rows in by_place]
    lines = ([*key, *(found.get(where, "-") for where in places)] for key, found in cells.items())
    return markdown(["work", "target", *map(told, places)], lines)


def _messages(rows: Sequence[Row]) -> Iterator[str]:
    found = [
        (row, {name: of["messages"] for name, of in row["subjects"].items() if of.get("messages")}) for row in rows
    ]
    names = list(dict.fromkeys(name for _, asked in found for name in asked))
    lines = [
        [step, *(_asked(asked[name].get(step)) if name in asked else "-" for name in names)]
        for row, asked in found
        if asked
        for step in row["counts"]
    ]
    if lines:
        yield markdown(["operation", *names], lines)


def _asked(counts: Mapping[str, float] | None) -> str:
    """Such as `lookup, read 8`."""
    return ", ".join(_count(opcode.lower(), each) for opcode, each in (counts or {}).items()) or "none"


def _count(opcode: str, each: float) -> str:
    return opcode if f"{each:.2g}" == "1" else f"{opcode} {each:.2g}" if each < 100 else f"{opcode} {each:.0f}"


def newest(results: Path) -> list[Row]:
    """The last complete run of each part in each place: full size, all its subjects."""
    found: dict[tuple[str, Place], Row] = {}
    for line in results.read_text(encoding="utf-8").splitlines() if results.exists() else ():
        row = json.loads(line)
        options = row["options"]
        is_complete = not options["quick"] and not options["subjects"] and options["n_rounds"] >= N_ROUNDS
        if row.get("part") in PARTS and is_complete:  # the first rows had no parts
            found[row["part"], place(row)] = row
    parts = list(PARTS)
    return sorted(found.values(), key=lambda row: (row["scene"] != "tmpfs", row["cores"], parts.index(row["part"])))
