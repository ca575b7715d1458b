"""What happens over time when neighbours come and go while a tree is deleted: measured, and drawn as an SVG."""

import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.images import Fresh
from bench.neighbour import MODES, N_FILES, filled, n_inodes, percentile
from bench.neighbours import KINDS, Latency, neighbours
from bench.reap import set_caches
from bench.support import wait

MANY = 4
"""Times the files of a turn, so that somebody still deletes when the neighbours are gone."""
COME_S, GO_S, END_S = 2.0, 8.0, 13.0
STEP_S = 0.1
_PRESSURE = Path("/proc/pressure/io")
_SLOW, _PART, _FULL = 2.0, 0.125, 0.7
"""More than so many times the rate that it holds, and more than that part of its full rate: not stepped back yet. And
that part of it is full again.
"""


class Moment(NamedTuple):
    """A step of time: entries a second that went in it, and the share of it in which somebody stalled for a disk."""

    at_s: float
    rate: float
    io: float


class Timeline(NamedTuple):
    """Of one deletion. Seconds from its start; None where it was done before.

    came_s, went_s  the neighbours' first call and their last
    """

    moments: list[Moment]
    latencies: dict[str, list[Latency]]
    came_s: float
    went_s: float


def record(mode: str, fresh: Fresh) -> Timeline:
    """What happens beside one mode."""
    with tempfile.TemporaryDirectory(prefix="trashd-bench-", dir="/dev/shm") as scratch, fresh() as root:
        set_caches(root, cold=False)
        with MODES[mode](root) as pid:
            began = time.monotonic()
            moments = _watch(root, pid, began, COME_S)
            with neighbours(root, Path(scratch)) as both:
                moments += _watch(root, pid, began, GO_S)
                both.stop()
            moments += _watch(root, pid, began, END_S)
    latencies = {kind: [Latency(one.at_s - began, one.seconds) for one in both.latencies[kind]] for kind in KINDS}
    first = min(calls[0].at_s for calls in latencies.values())
    last = max(calls[-1].at_s + calls[-1].seconds for calls in latencies.values())
    return Timeline(moments, latencies, first, last)


def _watch(root: Path, pid: int, began_s: float, until_s: float) -> list[Moment]:
    moments = []
    n_before, stalled_before, before_s = n_inodes(root), _stalled_s(), time.monotonic()
    while before_s - began_s < until_s:
        wait(pid, 0)
        time.sleep(max(before_s + STEP_S - time.monotonic(), 0.0))
        n, stalled, now_s = n_inodes(root), _stalled_s(), time.monotonic()
        took_s = now_s - before_s
        moments.append(Moment(before_s - began_s, (n_before - n) / took_s, (stalled - stalled_before) / took_s))
        n_before, stalled_before, before_s = n, stalled, now_s
    return moments


def _stalled_s() -> float:
    return int(_PRESSURE.read_text(encoding="ascii").partition("total=")[2].split()[0]) / 1e6


def watch_reaction(filesystem: str, n_rounds: int, mode: str = "paced") -> dict[str, Any]:
    """Seconds from the neighbours' coming until it is at the rate that it holds, and from their going until it is at
    full speed again.
    """
    found: dict[str, Any] = {"steps back": [], "full again": [], "full rate": [], "held rate": []}
    with filled(filesystem, MANY * N_FILES) as fresh:
        for _ in range(n_rounds):
            reaction = react(record(mode, fresh))
            for what, value in reaction.items():
                found[what].append(value)
    return found


def react(line: Timeline) -> dict[str, float | None]:
    """One round of it."""
    full = median(one.rate for one in line.moments if 0.5 <= one.at_s < line.came_s - STEP_S)
    beside = [one for one in line.moments if line.came_s <= one.at_s < line.went_s - STEP_S]
    held = sum(one.rate for one in beside[len(beside) // 2 :]) / len(beside[len(beside) // 2 :])
    fast = [one.at_s + STEP_S for one in beside if one.rate > max(_SLOW * held, _PART * full)]
    after = [one for one in line.moments if one.at_s >= line.went_s]
    again = (one.at_s for at, one in enumerate(after) if _mean(after[at : at + 5]) >= _FULL * full)
    again_s = next(again, None)
    return {
        "steps back": max(fast, default=line.came_s) - line.came_s,
        "full again": None if again_s is None else again_s - line.went_s,
        "full rate": round(full),
        "held rate": round(held),
    }


def _mean(moments: Sequence[Moment]) -> float:
    return sum(one.rate for one in moments) / len(moments)


# The picture: a column for each mode, a row for each thing that is seen.

_WIDTH, _HEIGHT, _GAP, _LEFT, _TOP = 400, 110, 34, 62, 58
_FONT = 'font-family="sans-serif" font-size="11" fill="#333"'
_COLOURS = {"append": "#c0392b", "read": "#2471a3", "rate": "#1e8449", "io": "#7d3c98"}
_TITLES = {"rm": "beside rm -rf", "paced": "beside trashd reap --paced"}


class _Panel(NamedTuple):
    """Where something is drawn, and how much of it is the height."""

    x: float
    y: float
    most: float

    def point(self, at_s: float, value: float) -> str:
        """A point on the paper."""
        x = self.x + min(at_s / END_S, 1.0) * _WIDTH
        return f"{x:.1f},{self.y + _HEIGHT - min(value / self.most, 1.0) * _HEIGHT:.1f}"

    def line(self, points: Sequence[tuple[float, float]], colour: str) -> str:
        """Points, joined."""
        joined = " ".join(self.point(*one) for one in points)
        return f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="1.4"/>'


def plot(filesystem: str) -> str:
    """An SVG of rm -rf and of ours beside the same neighbours."""
    with filled(filesystem, MANY * N_FILES) as fresh:
        lines = {mode: record(mode, fresh) for mode in _TITLES}
    return draw(filesystem, lines)


def draw(filesystem: str, lines: dict[str, Timeline]) -> str:
    """The picture of some timelines beside each other."""
    width, height = _LEFT + len(lines) * (_WIDTH + _GAP), _TOP + 3 * (_HEIGHT + _GAP) + 24
    most_ms = max(value for line in lines.values() for kind in KINDS for _, value in _slowest(line.latencies[kind]))
    most_rate = max(one.rate for line in lines.values() for one in line.moments)
    story = f"come after {COME_S:.0f} s and go after {GO_S:.0f} s, while {MANY * N_FILES:,} files are deleted"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {_FONT}>',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="18" font-size="14">Neighbours on {filesystem} {story}</text>',
    ]
    for column, (mode, line) in enumerate(lines.items()):
        x = _LEFT + column * (_WIDTH + _GAP)
        parts.append(f'<text x="{x}" y="{_TOP - 20}" font-size="13" font-weight="bold">{_TITLES[mode]}</text>')
        parts += _column(x, line, most_ms, most_rate, is_first=column == 0)
    parts += _legend(height - 8)
    return "\n".join([*parts, "</svg>", ""])


def _column(x: float, line: Timeline, most_ms: float, most_rate: float, *, is_first: bool) -> Iterator[str]:
    rows = (
        ("slowest calls (p99), ms", most_ms),
        ("entries removed, 1000/s", most_rate / 1e3),
        ("pressure (io), %", 100.0),
    )
    panels = [_Panel(x, _TOP + at * (_HEIGHT + _GAP), most) for at, (_, most) in enumerate(rows)]
    for panel, (title, most) in zip(panels, rows, strict=True):
        yield f'<rect x="{x}" y="{panel.y}" width="{_WIDTH}" height="{_HEIGHT}" fill="#f7f7f7"/>'
        come, go = (x + at_s / END_S * _WIDTH for at_s in (line.came_s, line.went_s))
        yield f'<rect x="{come:.1f}" y="{panel.y}" width="{go - come:.1f}" height="{_HEIGHT}" fill="#fdebd0"/>'
        yield f'<text x="{x}" y="{panel.y - 5}">{title}</text>'
        if is_first:
            yield f'<text x="{x - 6}" y="{panel.y + 9}" text-anchor="end">{most:.0f}</text>'
            yield f'<text x="{x - 6}" y="{panel.y + _HEIGHT}" text-anchor="end">0</text>'
    for kind in KINDS:
        yield panels[0].line(_slowest(line.latencies[kind]), _COLOURS[kind])
    yield panels[1].line([(one.at_s, one.rate / 1e3) for one in line.moments], _COLOURS["rate"])
    yield panels[2].line([(one.at_s, one.io * 100) for one in line.moments], _COLOURS["io"])
    for at_s in range(0, int(END_S) + 1, 2):
        at = x + at_s / END_S * _WIDTH
        yield f'<text x="{at:.1f}" y="{panels[2].y + _HEIGHT + 14}" text-anchor="middle">{at_s} s</text>'


def _legend(y: float) -> Iterator[str]:
    told = {"append": "append 4 KiB and fsync", "read": "read 4 KiB", "rate": "deletion", "io": "somebody stalls"}
    for at, (what, text) in enumerate(told.items()):
        x = _LEFT + at * 170
        yield f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{_COLOURS[what]}"/>'
        yield f'<text x="{x + 15}" y="{y}">{text}</text>'


def _slowest(latencies: Sequence[Latency]) -> list[tuple[float, float]]:
    """The 99th percentile of each quarter of a second, in milliseconds."""
    quarters: dict[int, list[float]] = {}
    for one in latencies:
        quarters.setdefault(int(one.at_s * 4), []).append(one.seconds)
    return [(at / 4 + 0.125, percentile(values, 99) * 1e3) for at, values in sorted(quarters.items())]
