"""Rows of the programs, each of which appends to bench/results in a form of its own, as runs with targets."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from types import MappingProxyType
from typing import Any

from bench import depth, listing_targets, mount_targets, neighbour_table, swap_through
from bench.runner import Result
from bench.runs import Run
from bench.subjects import OURS
from bench.verdicts import Figure, Round, Target, times, value

Row = Mapping[str, Any]


def _to_results(
    row: Row, benchmark: str, case: str, n: int, rounds: list[Round], targets: Sequence[Target]
) -> Iterator[Result]:
    machine = {key: found for key, found in row["machine"].items() if key != "load"}
    after = float(row["machine"]["load"])
    commit = row.get("versions", {}).get("commit", "")
    left_out = {
        name: "; ".join(f"{kind}: {found[kind]}" for kind in ("missing", "failed") if kind in found)
        for name, found in row.get("subjects", {}).items()
        if isinstance(found, Mapping) and ("missing" in found or "failed" in found)
    }
    load = (float(row.get("load_before", after)), after)
    run = Run(benchmark, case, n, tuple(rounds), left_out, row["at"], commit, machine, load)
    yield Result(run, targets)


def by_round(columns: Mapping[str, list[float]]) -> list[Round]:
    """The rounds of what was kept by subject."""
    return [
        {key: value for key, value in zip(columns, values, strict=True) if value is not None}
        for values in zip_longest(*columns.values())
    ]


def _neighbour(row: Row) -> Iterator[Result]:
    """Percentiles beside it, times those alone; and how much goes, beside what rm does."""
    columns: dict[str, list[float]] = {}
    for mode, found in row.get("modes", {}).items():
        columns[f"{mode}, rate"] = [turn["rate"] for turn in found["turns"]]
        for kind in ("append", "read"):
            for at, part in enumerate(row["percentiles"]):
                columns[f"{mode}, {kind} p{part}"] = [
                    turn[kind]["beside"][at] / turn[kind]["alone"][at] for turn in found["turns"]
                ]
    targets = [
        Target(f"{kind} p99 beside {mode}, times alone", value(f"{mode}, {kind} p99"), neighbour_table.TARGET)
        for mode in ("paced", "service")
        for kind in ("append", "read")
    ]
    targets += [
        Target(f"{mode}: the rate, of rm's", times(f"{mode}, rate", "rm, rate"), 0.1, is_least=True)
        for mode in ("paced", "service")
    ]
    return _to_results(row, "neighbour", row["filesystem"], row["n_files"], by_round(columns), targets)


# Of the mount's benchmarks a figure is a step of a subject's.


def _key(name: str, step: str) -> str:
    return f"{name}: {step}"


def _steps(row: Row) -> list[Round]:
    return by_round(
        {
            _key(name, step): list(each)
            for name, found in row["subjects"].items()
            for step, each in found.get("seconds", {}).items()
        }
    )


def _mount(row: Row) -> Iterator[Result]:
    """Of each target the step that decides it, by the medians; the program itself judges by means."""
    case = f"{row['part']} {row['scene']} {row['cores']}"
    targets = list(map(_deciding, filter(lambda finding: finding.verdicts, mount_targets.judged(dict(row)))))
    yield from _to_results(row, "mount", case, row["n_files"], _steps(row), targets)


def _deciding(finding: mount_targets.Finding) -> Target:
    """The worst step, or the worst of the best so many."""
    ordered = sorted(finding.verdicts, key=lambda verdict: verdict.ratio)
    worst = ordered[min(len(ordered), finding.target.n_needed or len(ordered)) - 1]
    of = times(_key(finding.ours, worst.step), _key(worst.rival, worst.step))
    return Target(f"{worst.step}, {finding.target.requirement} ({finding.ours})", of, finding.target.limit)


def _listing(row: Row) -> Iterator[Result]:
    targets = [
        Target(f"{one.description}", _judged_by(one.judge), one.limit, one.is_least, one.unit)
        for one in listing_targets.TARGETS
        if one.part == row["part"] and row["scene"] in one.scenes
    ]
    return _to_results(row, "listing", f"{row['part']} {row['scene']}", row["n_files"], _steps(row), targets)


def _judged_by(judge: listing_targets.Judge) -> Figure:
    def figure(rounds: Sequence[Round]) -> Sequence[float]:
        found = []
        for one in rounds:
            by_subject: dict[str, dict[str, float]] = {}
            for key, each in one.items():
                name, _, step = key.partition(": ")
                by_subject.setdefault(name, {})[step] = each
            found.append(judge(by_subject))
        return [each for each in found if each is not None]

    return figure


def _swap_through(row: Row) -> Iterator[Result]:
    targets = [
        Target(
            f"{line.subject}, {line.way}: {line.figure}",
            value(_key(line.subject, swap_through.named(line.way, line.figure)), 1e3),
            line.most_s * 1e3,
            unit=" ms",
        )
        for line in swap_through.judged(dict(row))
    ]
    return _to_results(row, "swap_through", row["scene"], row["n_files"], _steps(row), targets)


def _depth(row: Row) -> Iterator[Result]:
    n = row["n_levels"]
    targets = [
        Target(
            f"{OURS}, {what}: of one at {n // depth.PARTS}",
            times(_key(OURS, f"{what} at {n:,}"), _key(OURS, f"{what} at {n // depth.PARTS:,}")),
            depth.TARGET,
        )
        for what in depth.LEVELS
    ]
    return _to_results(row, "depth", row["filesystem"], n, _steps(row), targets)


READERS = MappingProxyType[str, Callable[[Row], Iterator[Result]]](
    {"neighbour": _neighbour, "mount": _mount, "listing": _listing, "swap_through": _swap_through, "depth": _depth}
)
