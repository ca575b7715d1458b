"""What happened over time when neighbours came and went while a tree was deleted, drawn as an SVG."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bench.neighbours import KINDS, Latency
from bench.support import percentile

COME_S, GO_S, END_S = 2.0, 8.0, 13.0


class Moment(NamedTuple):
    """A step of time: entries a second that went in it, and the share of it in which a process stalled for a disk."""

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


# The picture: a column for each mode, a row for each thing that is seen.

_WIDTH, _HEIGHT, _GAP, _LEFT, _TOP = 400, 110, 34, 62, 58
_FONT = 'font-family="sans-serif" font-size="11" fill="#333"'
_COLOURS = {"append": "#c0392b", "read": "#2471a3", "rate": "#1e8449", "io": "#7d3c98"}
TITLES = {"rm": "beside rm -rf", "paced": "beside trashd reap --paced"}


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


def draw(filesystem: str, n_files: int, lines: dict[str, Timeline]) -> str:
    """The picture of some timelines beside each other: an SVG."""
    width, height = _LEFT + len(lines) * (_WIDTH + _GAP), _TOP + 3 * (_HEIGHT + _GAP) + 24
    most_ms = max(value for line in lines.values() for kind in KINDS for _, value in _slowest(line.latencies[kind]))
    most_rate = max(one.rate for line in lines.values() for one in line.moments)
    story = f"come after {COME_S:.0f} s and go after {GO_S:.0f} s, while {n_files:,} files are deleted"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {_FONT}>',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="18" font-size="14">Neighbours on {filesystem} {story}</text>',
    ]
    for column, (mode, line) in enumerate(lines.items()):
        x = _LEFT + column * (_WIDTH + _GAP)
        parts.append(f'<text x="{x}" y="{_TOP - 20}" font-size="13" font-weight="bold">{TITLES[mode]}</text>')
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
