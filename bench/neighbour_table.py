"""What the newest rows of bench/results/neighbour.jsonl say, for docs/internals/benchmarks."""

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TARGET = 1.15


def tables(results: Path) -> str:
    """All of it."""
    rows = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    newest: dict[tuple[str, bool], Any] = {}
    for row in rows:
        newest[row["filesystem"], "reaction" in row] = row
    return "\n".join(line for key in sorted(newest) for line in _lines(newest[key]))


def _lines(row: dict[str, Any]) -> Iterator[str]:
    if "reaction" in row:
        yield from _reaction(row)
        return
    yield f"{row['filesystem']}, {row['n_files']:,} files, {row['options']['n_rounds']} rounds, {row['at'][:10]}"
    yield ""
    yield "| beside | rate | append+fsync p50, p95, p99 (ms) | x alone | read p50, p95, p99 (ms) | x alone |"
    yield "|---|---:|---:|---:|---:|---:|"
    first = next(iter(row["modes"].values()))
    yield f"| nobody | - | {_ms(first['append alone us'])} | - | {_ms(first['read alone us'])} | - |"
    for mode, found in row["modes"].items():
        cells = [f"{found['rate']:,.0f}/s"]
        for kind in ("append", "read"):
            cells += [_ms(found[f"{kind} beside us"]), " ".join(f"{one:.2f}" for one in found[f"{kind} ratio"])]
        yield f"| {mode} | {' | '.join(cells)} |"
    alone = {name: statistics.median(seconds) for name, seconds in row["nobody_there_s"].items()}
    yield ""
    yield (
        f"Nobody there: paced {alone['paced']:.2f} s, unpaced {alone['full']:.2f} s: "
        f"{alone['full'] / alone['paced']:.2f} of its rate."
    )
    yield ""


def _reaction(row: dict[str, Any]) -> Iterator[str]:
    found = row["reaction"]
    yield f"{row['filesystem']}, {row['options']['n_rounds']} rounds, {row['at'][:10]}:"
    for what in ("steps back", "full again"):
        seconds = found[what]
        told = "never" if None in seconds else f"{statistics.median(seconds):.2f} s (worst {max(seconds):.2f} s)"
        yield f"- {what}: {told}"
    yield ""


def _ms(us: list[float]) -> str:
    return " ".join(f"{one / 1e3:.2f}" for one in us)
