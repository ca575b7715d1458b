"""What the rows of bench/results/listing.jsonl say: the verdict on each target, and the tables of the documents."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from bench import listing_million as million
from bench import listing_stalls as stalls
from bench import listing_xattrs as xattrs
from bench.listing_scenes import ABOUT_XATTRS, SERVERS, SLOW
from bench.listing_steps import DROPPED, STAT
from bench.operations import AGAIN, MISS, SCAN
from bench.subjects import CPU, NATIVE, OURS, Row, conditions, markdown

Medians = Mapping[str, Mapping[str, float]]
"""Of a subject, by step."""
Judge = Callable[[Medians], float | None]

BEST_PEER = "the best peer"
N_ROUNDS = 5
"""Of a complete run, at least."""


class Target(NamedTuple):
    """Something that a row is to show."""

    part: str
    scenes: tuple[str, ...]
    description: str
    judge: Judge  # None: the row does not say
    limit: float
    is_least: bool = True
    unit: str = ""


def faster(step: str, rival: str, medians: Medians) -> float | None:
    """How many times as fast as a rival ours is."""
    times = {name: found[step] for name, found in medians.items() if step in found}
    peers = [took for name, took in times.items() if name not in (NATIVE, OURS)]
    took = min(peers, default=None) if rival == BEST_PEER else times.get(rival)
    return took / times[OURS] if took is not None and OURS in times else None


def slower(step: str, rival: str, medians: Medians) -> float | None:
    """How many times a rival's time ours is."""
    ratio = faster(step, rival, medians)
    return None if ratio is None else 1 / ratio


def faster_than_first(step: str, suffix: str, medians: Medians) -> float | None:
    """How many times as fast as direct's first time ours is: first, again or when dropped."""
    ours, direct = medians.get(OURS, {}).get(step + suffix), medians.get(NATIVE, {}).get(step)
    return direct / ours if ours and direct else None


def times_alone(kind: str, medians: Medians) -> float | None:
    """How many times as long it takes beside others."""
    ours = medians.get(OURS, {})
    alone = ours.get(f"{kind}, {stalls.ALONE}")
    return ours[f"{kind}, {stalls.BESIDE}"] / alone if alone else None


def figure(step: str, scale: float, medians: Medians) -> float | None:
    """Our own, in another unit."""
    own = medians.get(OURS, {}).get(step)
    return None if own is None else own * scale


def of_the_cache(medians: Medians) -> float | None:
    """Bytes of an entry that it remembers besides, of its own will."""
    ours = medians.get(OURS, {})
    return ours[million.KNOWN] - ours[million.UNCACHED] if million.UNCACHED in ours else None


def _is_faster(part: str, scenes: Sequence[str], step: str, limit: float, rival: str) -> Target:
    known_as = "direct" if rival == NATIVE and SLOW in scenes else rival
    text = f"{step}{'' if step.endswith(AGAIN) else ' first'}: times as fast as {known_as}"
    return Target(part, tuple(scenes), text, partial(faster, step, rival), limit)


def _beside_direct(step: str, suffix: str, limit: float) -> Target:
    text = f"{step}{suffix or ' first'}: times as fast as direct"
    return Target("xattrs", _SUPPORTED, text, partial(faster_than_first, step, suffix), limit)


_SUPPORTED = tuple(name for name in ABOUT_XATTRS if SERVERS[name].xattrs)
_LOCAL = ("tmpfs", "ext4")
_SLOW_LISTINGS = ("ls -l", "ls --color=always")
_BYTES = (200.0, False, " bytes an entry")
_TREE_STEPS = ("find -newer", "find", "du -s", "git status")
# Plain find asks for no file: on slow backing there is nothing to be fifty times faster at.
_SLOW_TREE_STEPS = ("find -newer", "du -s", "git status", "git status, one thread")

TARGETS = (
    *(_is_faster("local", _LOCAL, step, 1.8, BEST_PEER) for step in ("ls -l", SCAN)),
    *(_is_faster("local", _LOCAL, step + AGAIN, 0.25, NATIVE) for step in ("ls -l", SCAN)),
    _is_faster("local", _LOCAL, STAT + AGAIN, 0.9, NATIVE),
    _is_faster("local", _LOCAL, MISS + AGAIN, 1.5, NATIVE),
    *(_is_faster("slow", (SLOW,), step, 20, rival) for step in _SLOW_LISTINGS for rival in (NATIVE, "mergerfs")),
    *(_is_faster("slow", (SLOW,), step + AGAIN, 100, NATIVE) for step in _SLOW_LISTINGS),
    Target("slow", (SLOW,), "ls first", partial(figure, "ls", 1e3), 60, is_least=False, unit=" ms"),
    *(
        _beside_direct(step.name, suffix, limit)
        for step in xattrs.LISTINGS
        for suffix, limit in (("", 15), (AGAIN, 50), (DROPPED, 20))
    ),
    *(_beside_direct(step.name, AGAIN, 10) for step in xattrs.COPIES),
    *(
        Target(
            "tree", _LOCAL, f"{step} again: times native's", partial(slower, step + AGAIN, NATIVE), 1.3, is_least=False
        )
        for step in _TREE_STEPS
    ),
    *(_is_faster("tree on slow", (SLOW,), step + AGAIN, 50, NATIVE) for step in _SLOW_TREE_STEPS),
    Target("million", _LOCAL, million.FIRST, partial(figure, million.FIRST, 1e3), 50, is_least=False, unit=" ms"),
    Target("million", _LOCAL, million.PASSING, partial(figure, million.PASSING, 1), *_BYTES),
    Target("memory", _LOCAL, "memory: beyond what the kernel makes it remember", of_the_cache, *_BYTES),
    *(
        Target(
            "stalls", _LOCAL, f"{kind}: p99 beside others, times alone", partial(times_alone, kind), 3, is_least=False
        )
        for kind in stalls.KINDS
    ),
)


def verdicts(row: Row) -> Iterator[str]:
    """Each target that this row can judge, met or MISSED."""
    failed = row["subjects"].get(OURS, {}).get("failed")
    if failed:
        yield f"{title(row)}: {OURS} failed, every target MISSED: {failed}"
    medians = _medians(row)
    for target in TARGETS:
        if target.part != row["part"] or row["scene"] not in target.scenes:
            continue
        found = target.judge(medians)
        if found is not None:
            is_met = found >= target.limit if target.is_least else found <= target.limit
            bound = f"at {'least' if target.is_least else 'most'} {target.limit:g}"
            text = f"{title(row)}: {target.description}: {found:.3g}{target.unit} ({bound})"
            yield f"{text}: {'met' if is_met else 'MISSED'}"


def title(row: Row) -> str:
    """Its part, its scene and its size."""
    where = row["part"] if row["scene"] == SLOW else f"{row['part']}, {row['scene']}"
    return f"{where}, {row['n_files']:,} files"


def _medians(row: Row) -> Medians:
    return {name: found["medians"] for name, found in row["subjects"].items() if "medians" in found}


def table(row: Row) -> str:
    """All medians of a row, who is left out, and who had fewer turns than the others."""
    medians = _medians(row)
    fullest_first = sorted(medians.values(), key=len, reverse=True)
    steps = list(dict.fromkeys(step for found in fullest_first for step in found if step != CPU))
    heads = [f"{title(row)}; ms", *(_called(name, row) for name in medians)]
    lines = ([step, *(_cell(step, found, medians.get(NATIVE, {})) for found in medians.values())] for step in steps)
    remarks = [f"- {_called(name, row)}: {remark}" for name in row["subjects"] for remark in _remarks(name, row)]
    return "\n".join([markdown(heads, lines), *(["", *remarks] if remarks else [])])


def _called(name: str, row: Row) -> str:
    return "direct" if name == NATIVE and row["scene"] in SERVERS else name


def _remarks(name: str, row: Row) -> Iterator[str]:
    found, n_rounds = row["subjects"][name], row["options"]["n_rounds"]
    if "medians" not in found:
        yield from (f"{kind}: {reason}" for kind, reason in found.items())
        return
    n_turns = max(map(len, found["seconds"].values()))
    if n_turns < n_rounds:
        yield f"{n_turns} of {n_rounds} turns, long as they are"
    if row["scene"] in ABOUT_XATTRS and name in xattrs.REMARKS:
        yield xattrs.REMARKS[name]


def _cell(step: str, figures: Mapping[str, float], native: Mapping[str, float]) -> str:
    """Return three digits; in brackets how many times as fast as native, or as its first time if it ran once."""
    if step not in figures:
        return "-"
    if step in (*million.BYTES, xattrs.MEMORY):
        return f"{figures[step]:.0f} bytes an entry"
    own = f"{figures[step] * 1e3:.4g}" if figures[step] >= 1e-4 else f"{figures[step] * 1e3:.2g}"
    rival_s = native.get(step) or native.get(step.removesuffix(AGAIN).removesuffix(DROPPED))
    return own if rival_s is None or figures is native else f"{own} ({rival_s / figures[step]:.2g})"


def tables(rows: Sequence[Row]) -> str:
    """The Markdown of docs/internals/benchmarks."""
    measured = dict.fromkeys(f"- {title(row)}: {conditions(row, row['scene'])}" for row in rows)
    parts = [
        "Milliseconds, medians; in brackets how many times as fast as native, or direct:",
        *map(table, rows),
        "Targets:",
        "\n".join(f"- {line}" for row in rows for line in verdicts(row)),
        "Measured on:",
        "\n".join(measured),
    ]
    return "\n\n".join(parts)


def newest(results: Path, places: Sequence[tuple[str, str]]) -> list[Row]:
    """The last complete run of each part and scene, in this order: full size, all its subjects."""
    found: dict[tuple[str, str], Row] = {}
    for line in results.read_text(encoding="utf-8").splitlines() if results.exists() else ():
        row = json.loads(line)
        options = row["options"]
        if not options["quick"] and not options["subjects"] and options["n_rounds"] >= N_ROUNDS:
            found[row["part"], row["scene"]] = row
    return [found[place] for place in places if place in found]
