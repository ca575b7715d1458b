"""Each subject's speed beside native, step by step, in each place: drawn as an SVG."""

import math
from collections.abc import Iterator, Sequence

from bench.listing_plot import COLOURS
from bench.mount_tables import format_place
from bench.mount_targets import Place, Seconds, means_of, place
from bench.names import P50, USED
from bench.subjects import CPU, NATIVE, OURS, Row

_WIDTH, _LINE, _LEFT, _TOP, _GAP = 400, 16, 160, 64, 50
_PER_ROW, _PER_LINE = 2, 5
_POWERS = (-3, 1)  # of ten: of native's speed
_FONT = 'font-family="sans-serif" font-size="11" fill="#333"'


def draw(all_rows: Sequence[Row]) -> str:
    """A panel for each place; a line for each step, and a dot for each subject."""
    rows = [row for row in all_rows if row["part"] != "busy"]  # its steps are those of another part
    places = list(dict.fromkeys(map(place, rows)))
    steps = list(dict.fromkeys(step for row in rows for step in means_of(row).get(NATIVE, ()) if _is_drawn(step)))
    row_height = len(steps) * _LINE + _TOP
    width = _LEFT + _PER_ROW * (_WIDTH + _GAP)
    height = math.ceil(len(places) / _PER_ROW) * row_height + 80
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {_FONT}>',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        '<text x="10" y="20" font-size="14">Times as fast as native: further right is better</text>',
    ]
    for number, where in enumerate(places):
        row, column = divmod(number, _PER_ROW)
        top = _TOP + row * row_height
        if column == 0:
            parts += _names(top, steps)
        found = [means_of(one) for one in rows if place(one) == where]
        parts += _panel(_LEFT + column * (_WIDTH + _GAP), top, where, steps, found)
    names = dict.fromkeys(name for row in rows for name in means_of(row) if name != NATIVE)
    parts += _legend(height - 46, list(names))
    return "\n".join([*parts, "</svg>", ""])


def _is_drawn(step: str) -> bool:
    return step != CPU and not step.endswith(P50) and USED not in step


def _names(top: float, steps: Sequence[str]) -> Iterator[str]:
    for number, step in enumerate(steps):
        yield f'<text x="{_LEFT - 8}" y="{_y(top, number) + 4}" text-anchor="end">{step}</text>'


def _y(top: float, number: int) -> float:
    return top + (number + 0.5) * _LINE


def _x(left: float, ratio: float) -> float:
    least, most = _POWERS
    return left + (min(max(math.log10(ratio), least), most) - least) / (most - least) * _WIDTH


def _panel(left: float, top: float, where: Place, steps: Sequence[str], means: Sequence[Seconds]) -> Iterator[str]:
    bottom = top + len(steps) * _LINE
    yield f'<rect x="{left}" y="{top}" width="{_WIDTH}" height="{bottom - top}" fill="#f7f7f7"/>'
    yield f'<text x="{left}" y="{top - 8}" font-weight="bold">{format_place(where)}</text>'
    for power in range(_POWERS[0], _POWERS[1] + 1):
        x, colour = _x(left, 10.0**power), "#999" if power == 0 else "#ddd"
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}" stroke="{colour}"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">{10.0**power:g}</text>'
    for medians in means:
        native = medians.get(NATIVE, {})
        # Ours last: on top of the others.
        for name in sorted((name for name in medians if name != NATIVE), key=lambda name: name == OURS):
            for step, seconds in medians[name].items():
                if step in native and _is_drawn(step):
                    x, y = _x(left, native[step] / seconds), _y(top, steps.index(step))
                    radius = 5 if name == OURS else 3.5
                    yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{COLOURS[name]}"/>'


def _legend(top: float, names: Sequence[str]) -> Iterator[str]:
    for at, name in enumerate(names):
        x, y = _LEFT + at % _PER_LINE * 174, top + at // _PER_LINE * _LINE
        yield f'<circle cx="{x + 5}" cy="{y - 4}" r="5" fill="{COLOURS[name]}"/>'
        yield f'<text x="{x + 15}" y="{y}">{name}</text>'
