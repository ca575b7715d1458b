"""docs/orphan-states.svg and docs/swap.svg: the states of an orphan, and the one exchange of a swap.

python -m bench.pictures docs
"""

from __future__ import annotations

import html
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

_WIDTH_PX, _LINE_PX = 760, 16
_STYLE = """
text { fill: #1f2328; font: 12px sans-serif }
.title { font-weight: bold } .command { font: 11px monospace } .faint { fill: #59636e }
.middle { text-anchor: middle } .end { text-anchor: end }
.arrow { fill: none; stroke: #1f2328 } .back { stroke-dasharray: 4 3 } .tip { fill: #1f2328 }
.ground { fill: #fff } .outside { fill: #f6f8fa; stroke: #818b98 } .store { fill: #fdf6e8; stroke: #b08c3c }
@media (prefers-color-scheme: dark) {
text, .tip { fill: #e6edf3 } .faint { fill: #9198a1 } .arrow { stroke: #e6edf3 }
.ground { fill: #0d1117 } .outside { fill: #21262d } .store { fill: #2b2516 }
}
@media print {
text, .faint, .tip { fill: #000 } .arrow { stroke: #000 } .ground, .outside, .store { fill: #fff }
}
"""
_TIP = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path class="tip" d="M0 0L8 4L0 8z"/></marker></defs>'
)

Point = tuple[int, int]


class Label(NamedTuple):
    """A line of text. kind: its classes"""

    at: Point
    text: str
    kind: str = "faint"

    def draw(self) -> Iterator[str]:
        x, y = self.at
        yield f'<text class="{self.kind}" x="{x}" y="{y}">{html.escape(self.text)}</text>'


class Box(NamedTuple):
    """A box with a title and lines of text. kind: its class"""

    at: Point
    width: int
    height: int
    kind: str
    title: str
    lines: tuple[str, ...] = ()

    def draw(self) -> Iterator[str]:
        x, y = self.at
        yield f'<rect class="{self.kind}" x="{x}" y="{y}" width="{self.width}" height="{self.height}" rx="4"/>'
        yield from Label((x + 10, y + 19), self.title, "title").draw()
        for number, line in enumerate(self.lines, 1):
            yield from Label((x + 10, y + 19 + number * _LINE_PX), line).draw()


class Arrow(NamedTuple):
    """A line through some points, with a tip at its end. kind: its classes"""

    points: tuple[Point, ...]
    kind: str = "arrow"

    def draw(self) -> Iterator[str]:
        joined = " ".join(f"{x},{y}" for x, y in self.points)
        yield f'<polyline class="{self.kind}" points="{joined}" marker-end="url(#tip)"/>'


Part = Box | Label | Arrow


def picture(title: str, height: int, parts: Sequence[Part]) -> str:
    """An SVG whose texts stay texts, on a ground of its own: readable in light, in dark and on paper."""
    size = f'viewBox="0 0 {_WIDTH_PX} {height}" width="{_WIDTH_PX}" height="{height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            f"<title>{html.escape(title)}</title>",
            f"<style>{_STYLE}</style>",
            _TIP,
            f'<rect class="ground" width="{_WIDTH_PX}" height="{height}"/>',
            *(line for part in parts for line in part.draw()),
            "</svg>\n",
        ]
    )


def states() -> str:
    """The states, and what moves an orphan from one to another: LEGAL_MOVES in fusefs/core/container_states.py."""
    wide, high = 132, 48
    return picture("States of an orphan, and the commands that change them", 428, [
        Box((12, 20), 128, 208, "outside", "original path", ("your directory", "before the swap,", "after a restore")),
        Box((270, 20), wide, high, "store", "stage", ("being moved",)),
        Box((500, 20), wide, high, "store", "orphans", ("can be restored",)),
        Box((270, 180), wide, high, "store", "restoring", ("being put back",)),
        Box((500, 180), wide, high, "store", "reaping", ("being deleted",)),
        Box((270, 312), wide, high, "store", "quarantine", ("deletion failed",)),
        Box((692, 180), 56, high, "outside", "gone"),
        Arrow(((140, 36), (268, 36))),
        Label((204, 30), "swap, rm, sweep,", "middle command"),
        Label((204, 50), "mv to drop/", "middle command"),
        Arrow(((270, 58), (142, 58)), "arrow back"),
        Label((204, 74), "killed: undone", "middle faint"),
        Arrow(((402, 44), (498, 44))),
        Label((450, 37), "moved", "middle faint"),
        Arrow(((330, 180), (330, 104), (530, 104), (530, 70)), "arrow back"),
        Label((430, 98), "name in use, or only a part", "middle faint"),
        Arrow(((556, 68), (556, 136), (372, 136), (372, 178))),
        Label((464, 130), "restore, undo", "middle command"),
        Arrow(((584, 180), (584, 70)), "arrow back"),
        Arrow(((612, 68), (612, 178))),
        Label((622, 114), "expired, or"),
        Label((622, 130), "reap --now", "command"),
        Arrow(((500, 200), (404, 200))),
        Label((452, 194), "restore", "middle command"),
        Label((452, 216), "(the rest)", "middle faint"),
        Arrow(((270, 200), (142, 200))),
        Label((205, 194), "moved back", "middle faint"),
        Arrow(((632, 204), (690, 204))),
        Label((661, 198), "deleted", "middle faint"),
        Arrow(((530, 228), (530, 326), (404, 326))),
        Label((466, 320), "can't be deleted", "middle faint"),
        Arrow(((402, 346), (590, 346), (590, 230))),
        Label((496, 361), "reap ID", "middle command"),
        Arrow(((372, 312), (372, 230))),
        Label((380, 276), "restore ID", "command"),
        Arrow(((310, 228), (310, 310)), "arrow back"),
        Label((302, 276), "name in use", "end faint"),
        Label((12, 396), "A state is a directory of the store, .trashd/u/UID/STATE/ID/, and only a rename changes it."),
        Label((12, 414), "Dashed: undone, or given back. From reaping only on shared filesystems, if pinned since."),
    ])  # fmt: skip


def swap() -> str:
    """Two names and two directories, before and after the exchange."""
    story = "Open files and working directories stay in the old tree. The name leads to one or the other at any moment."
    parts: list[Part] = [Label((12, 204), story)]
    for x, title, state in ((12, "Before", "stage"), (396, "After one renameat2(RENAME_EXCHANGE)", "orphans")):
        old_y, new_y = (84, 154) if state == "stage" else (154, 84)
        parts += [
            Label((x, 24), title, "title"),
            Label((x, 46), "names"),
            Label((x + 222, 46), "directories"),
            Box((x, 60), 150, 48, "outside", "/scratch/job", ("your path",)),
            Box((x, 130), 150, 48, "store", f"…/{state}/ID/tree", ("in the trash store",)),
            Box((x + 222, 60), 130, 48, "outside", "old tree", ("1,000,000 files",)),
            Box((x + 222, 130), 130, 48, "outside", "new directory", ("empty",)),
            Arrow(((x + 150, old_y), (x + 220, 84))),
            Arrow(((x + 150, new_y), (x + 220, 154))),
        ]
    return picture("A swap exchanges the names of two directories", 218, parts)


if __name__ == "__main__":
    for _name, _text in (("orphan-states.svg", states()), ("swap.svg", swap())):
        Path(sys.argv[1], _name).write_text(_text, encoding="utf-8")
