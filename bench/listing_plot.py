"""Listing time by directory size for each subject, local and slow, first and again: drawn as an SVG."""

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from bench.listing_scenes import SLOW
from bench.listing_steps import OF_SIZE
from bench.operations import AGAIN
from bench.subjects import (
    BEFORE,
    BINDFS,
    DEVICE,
    EXAMPLE,
    HP,
    HP_NO_XATTR,
    HP_URING,
    LL,
    LL_CHECKED,
    MERGERFS,
    NATIVE,
    OURS,
    SINGLE,
    Row,
)

PARTS = ("sizes", "sizes on slow")

_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _LEFT, _TOP = 360, 220, 70, 56, 70, 64
_FONT = 'font-family="sans-serif" font-size="11" fill="#333"'
COLOURS = MappingProxyType(
    {
        NATIVE: "#7f8c8d",
        OURS: "#c0392b",
        SINGLE: "#e59866",
        BINDFS: "#2471a3",
        MERGERFS: "#1e8449",
        EXAMPLE: "#7d3c98",
        HP: "#b9770e",
        LL: "#17202a",
        DEVICE: "#f1948a",
        BEFORE: "#d7bde2",
        HP_URING: "#f4d03f",
        HP_NO_XATTR: "#7e5109",
        LL_CHECKED: "#5d6d7e",
    }
)

Points = Sequence[tuple[int, float]]  # entries, seconds


class _Panel(NamedTuple):
    """A square of the picture, both axes in powers of ten."""

    x: float
    y: float
    sizes: tuple[int, int]  # powers of ten, the first and the last
    times: tuple[int, int]

    def place(self, n: float, seconds: float) -> tuple[float, float]:
        """A point on the paper."""
        right = (math.log10(n) - self.sizes[0]) / (self.sizes[1] - self.sizes[0])
        up = (math.log10(seconds) - self.times[0]) / (self.times[1] - self.times[0])
        return self.x + right * _WIDTH, self.y + (1 - up) * _HEIGHT

    def line(self, points: Points, colour: str, *, is_ours: bool) -> Iterator[str]:
        """Points, marked and joined."""
        placed = [self.place(*point) for point in points]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        width = 2.6 if is_ours else 1.4
        yield f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="{width}"/>'
        for x, y in placed:
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{width}" fill="{colour}"/>'

    def frame(self, title: str) -> Iterator[str]:
        """What is around it: a line for each power of ten."""
        yield f'<rect x="{self.x}" y="{self.y}" width="{_WIDTH}" height="{_HEIGHT}" fill="#f7f7f7"/>'
        yield f'<text x="{self.x}" y="{self.y - 7}" font-weight="bold">{title}</text>'
        for power in range(self.times[0], self.times[1] + 1):
            _, y = self.place(10 ** self.sizes[0], 10.0**power)
            yield f'<line x1="{self.x}" x2="{self.x + _WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
            yield f'<text x="{self.x - 6}" y="{y + 4:.1f}" text-anchor="end">{_time(power)}</text>'
        for power in range(self.sizes[0], self.sizes[1] + 1):
            x, _ = self.place(10**power, 10.0 ** self.times[0])
            yield f'<text x="{x:.1f}" y="{self.y + _HEIGHT + 15}" text-anchor="middle">{10**power:,}</text>'


def _time(power: int) -> str:
    return (
        f"{10**power} s" if power >= 0 else f"{10 ** (power + 3)} ms" if power >= -3 else f"{10.0 ** (power + 3):g} ms"
    )


def draw(rows: Sequence[Row]) -> str:
    """The picture of the newest rows of both parts; a column for first and one for again."""
    shown = [row for row in rows if row["part"] in PARTS]
    width, height = _LEFT + 2 * _WIDTH + _GAP_X + 36, _TOP + len(shown) * (_HEIGHT + _GAP_Y) + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {_FONT}>',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="20" font-size="14">ls -l by the number of entries</text>',
    ]
    for number, row in enumerate(shown):
        parts += _panels(_TOP + number * (_HEIGHT + _GAP_Y), row)
    names = dict.fromkeys(name for row in shown for name in _lines(row, ""))
    parts += _legend(height - 10, list(names))
    return "\n".join([*parts, "</svg>", ""])


def _panels(y: float, row: Row) -> Iterator[str]:
    where = "where each lookup takes 1 ms" if row["scene"] == SLOW else f"on {row['scene']}"
    both = {"": "first", AGAIN: "again"}
    lines = {suffix: _lines(row, suffix) for suffix in both}
    points = [point for found in lines.values() for line in found.values() for point in line]
    sizes, times = (_powers([point[axis] for point in points]) for axis in (0, 1))
    for column, (suffix, told) in enumerate(both.items()):
        panel = _Panel(_LEFT + column * (_WIDTH + _GAP_X), y, sizes, times)
        yield from panel.frame(f"{told}, {where}")
        for name, line in lines[suffix].items():
            yield from panel.line(line, COLOURS[name], is_ours=name == OURS)


def _lines(row: Row, suffix: str) -> Mapping[str, Points]:
    """Of each subject that got it done."""
    found = {}
    for name, told in row["subjects"].items():
        steps = {OF_SIZE.format(10**power) + suffix: 10**power for power in range(8)}
        points = [(steps[step], seconds) for step, seconds in told.get("medians", {}).items() if step in steps]
        if points:
            found[name] = sorted(points)
    return found


def _powers(values: Sequence[float]) -> tuple[int, int]:
    """The powers of ten between which they are."""
    least, most = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return least, max(most, least + 1)


def _legend(y: float, names: Sequence[str]) -> Iterator[str]:
    for at, name in enumerate(names):
        x = _LEFT + at * 150
        told = "native (slow: direct)" if name == NATIVE else name
        yield f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{COLOURS[name]}"/>'
        yield f'<text x="{x + 15}" y="{y}">{told}</text>'
