"""What a row of bench/results/reap.jsonl says: the verdict on each target, and the tables of docs/performance.md."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.shapes import SHAPES

Row = dict[str, Any]

OURS = "trashd"
RM, RMZ = "rm -rf", "rmz"
MAX_ABOVE_INTERPRETER_KIB = 64 << 10
MAX_FDS = 128


class Target(NamedTuple):
    """Our median is to be at most that many times a rival's."""

    limit: float
    rival: str | None  # None: the best of those that got it done
    applies: Callable[[str, str, bool], bool]  # to a filesystem, a shape, dropped caches?


TARGETS = (
    Target(1.15, RMZ, lambda filesystem, shape, _cold: filesystem == "ext4" and shape == "tree"),
    Target(0.6, RM, lambda filesystem, shape, _cold: filesystem == "ext4" and shape == "tree"),
    Target(0.75, None, lambda filesystem, shape, cold: filesystem == "ext4" and _is_flat(shape) and not cold),
    Target(0.8, None, lambda filesystem, shape, cold: filesystem == "ext4" and _is_flat(shape) and cold),
    Target(1.1, None, lambda filesystem, _shape, _cold: filesystem in ("xfs", "btrfs")),
    Target(1.5, None, lambda _filesystem, shape, _cold: shape == "chain"),
)


def _is_flat(shape: str) -> bool:
    return shape.startswith("flat")


def verdicts(row: Row) -> Iterator[str]:
    """Each target that this run can judge, met or MISSED."""
    ours = row["subjects"].get(OURS, {})
    if "failed" in ours:
        yield f"{title(row)}: {OURS} failed, every target MISSED: {ours['failed']}"
    medians = _medians(row)
    for target in TARGETS:
        rival = target.rival or _best_rival(medians)
        if OURS in medians and rival in medians and target.applies(row["filesystem"], row["shape"], row["cold"]):
            ratio = medians[OURS] / medians[rival]
            yield _verdict(row, f"{ratio:.2f} x {rival}", f"{target.limit:g}", is_met=ratio <= target.limit)
    if not row["peak"] and ours:
        yield f"{title(row)}: not watched to its end; memory and open fds MISSED"
    if row["peak"]:
        above_kib = row["peak"]["pss_kib"] - row["interpreter"]["pss_kib"]
        is_met = above_kib <= MAX_ABOVE_INTERPRETER_KIB
        yield _verdict(row, f"{_mib(above_kib)} above the interpreter", _mib(MAX_ABOVE_INTERPRETER_KIB), is_met=is_met)
        n_fds = row["peak"]["n_fds"]
        yield _verdict(row, f"{n_fds} open fds", str(MAX_FDS), is_met=n_fds <= MAX_FDS)


def _verdict(row: Row, found: str, limit: str, *, is_met: bool) -> str:
    return f"{title(row)}: {found} (at most {limit}): {'met' if is_met else 'MISSED'}"


def _medians(row: Row) -> dict[str, float]:
    """Of those that got it done."""
    return {name: found["median"] for name, found in row["subjects"].items() if "median" in found}


def _best_rival(medians: dict[str, float]) -> str | None:
    return min((name for name in medians if name != OURS), key=lambda name: medians[name], default=None)


def title(row: Row) -> str:
    """The filesystem, the shape and the caches of a row."""
    return f"{row['filesystem']} {row['shape']} {_caches(row)}"


def _caches(row: Row) -> str:
    return "cold" if row["cold"] else "warm"


def _mib(kib: int) -> str:
    return f"{kib / 1024:.0f} MiB"


def details(row: Row) -> str:
    """One run, a line for each subject: the medians, the least, and every single timing."""
    told = [f"{title(row)}, {row['n_files']:,} files, {row['options']['n_rounds']} rounds; seconds"]
    ours = _medians(row).get(OURS)
    for name, found in row["subjects"].items():
        if "median" not in found:
            told.append(f"  {name:<13} {_absence(found)}")
            continue
        ratio = f"{ours / found['median']:.2f}" if ours else "-"
        single = " ".join(f"{value:.2f}" for value in found["seconds"])
        told.append(
            f"  {name:<13} {found['median']:6.2f}  least {found['least']:6.2f}  until synced {found['synced']:6.2f}"
            f"  ours/its {ratio}  all: {single}"
        )
    return "\n".join(told)


def _absence(found: dict[str, Any]) -> str:
    return ", ".join(f"{kind}: {told}" for kind, told in found.items())


def newest(results: Path) -> list[Row]:
    """The last complete run of each filesystem, shape and state of the caches: full size, all subjects."""
    if not results.exists():
        return []
    found: dict[tuple[str, str, bool], Row] = {}
    for line in results.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if not row["options"]["files"] and not row["options"]["subjects"]:
            found[row["filesystem"], row["shape"], row["cold"]] = row
    shapes = list(SHAPES)
    return sorted(found.values(), key=lambda row: (shapes.index(row["shape"]), row["filesystem"], row["cold"]))


def tables(rows: Sequence[Row]) -> str:
    """The Markdown of docs/performance.md: times, times until synced, what it took, verdicts, machines."""
    parts = [
        "Seconds of the whole command, medians:",
        _times(rows, "median"),
        "The same until a sync of the volume after it has ended:",
        _times(rows, "synced"),
        "What `trashd reap` took at its peak, all its processes together:",
        _peaks(rows),
        "Targets:",
        "\n".join(f"- {line}" for row in rows for line in verdicts(row)),
        "Measured on:",
        "\n".join(f"- {line}" for line in dict.fromkeys(map(_machine, rows))),
    ]
    return "\n\n".join(parts)


def _times(rows: Sequence[Row], key: str) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row["subjects"]))
    heads = ["shape", "filesystem", "caches", *names, f"{OURS} / best rival"]
    return _markdown(heads, (_time_cells(row, key, names) for row in rows))


def _time_cells(row: Row, key: str, names: Sequence[str]) -> list[str]:
    found = {name: row["subjects"].get(name, {}) for name in names}
    times = {name: one[key] for name, one in found.items() if key in one}
    best = _best_rival(times)
    ratio = f"{times[OURS] / times[best]:.2f}" if best and OURS in times else "-"
    cells = [f"{one[key]:.2f}" if key in one else "failed" if "failed" in one else "-" for one in found.values()]
    return [SHAPES[row["shape"]].told, row["filesystem"], _caches(row), *cells, ratio]


def _peaks(rows: Sequence[Row]) -> str:
    heads = [
        "shape",
        "filesystem",
        "caches",
        "memory",
        "above the interpreter",
        "sum of RSS",
        "processes",
        "fds of one",
    ]
    return _markdown(heads, (_peak_cells(row) for row in rows if row["peak"]))


def _peak_cells(row: Row) -> list[str]:
    peak, bare = row["peak"], row["interpreter"]
    cells = [SHAPES[row["shape"]].told, row["filesystem"], _caches(row), _mib(peak["pss_kib"])]
    cells += [_mib(peak["pss_kib"] - bare["pss_kib"]), _mib(peak["rss_kib"])]
    return [*cells, str(peak["n_processes"]), str(peak["n_fds"])]


def _machine(row: Row) -> str:
    on = row["machine"]
    return f"Linux {on['kernel']}, {on['n_cpus']} x {on['cpu']}, {on['memory_gib']} GiB, Python {on['python']}"


def _markdown(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *lines))
