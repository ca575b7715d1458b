"""What all runs say: tables of targets, two runs beside each other, and each target over commits as an SVG."""

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from bench.declared import targets_of
from bench.program_rows import READERS
from bench.runner import Result
from bench.runs import RESULTS, RUNS, from_row, read
from bench.subjects import markdown
from bench.verdicts import Verdict

_LINE, _WIDTH, _LEFT, _RIGHT, _TOP = 22, 420, 620, 260, 56
_MOST = 4.0
"""Times the limit, or its inverse, that the height of a line shows."""
_FONT = 'font-family="sans-serif" font-size="11" fill="#333"'
_MET, _MISSED, _LIMIT = "#1e8449", "#c0392b", "#999"


def all_results() -> list[Result]:
    """The oldest first."""
    kept = [Result(run, targets_of(run)) for run in map(from_row, read(RUNS))]
    others = (one for name, reader in READERS.items() for row in read(RESULTS / f"{name}.jsonl") for one in reader(row))
    return sorted([*kept, *others], key=lambda one: one.run.at)


def newest(results: Sequence[Result]) -> list[Result]:
    """The last of each benchmark, case and size."""
    return list({one.run.title: one for one in results}.values())


def table(results: Sequence[Result]) -> str:
    """All targets, the machines, and how many are met and missed."""
    verdicts = [(one, verdict) for one in results for verdict in one.verdicts()]
    heads = ["measured", "target", "wanted", "found [interval]", "rounds", ""]
    lines = [[one.run.title, verdict.target.description, *_cells(verdict)] for one, verdict in verdicts]
    words = [verdict.word for _, verdict in verdicts]
    counts = ", ".join(f"{words.count(word)} {word}" for word in ("met", "met?", "MISSED?", "MISSED"))
    machines = dict.fromkeys(_conditions(one) for one in results)
    left_out = dict.fromkeys(f"- {one.run.benchmark}: {each}" for one in results for each in one.run.left_out.items())
    parts = [markdown(heads, lines), f"Targets: {counts}.", "\n".join(machines)]
    return "\n\n".join([*parts, *([f"Left out:\n\n{chr(10).join(left_out)}"] if left_out else [])])


def _cells(verdict: Verdict) -> list[str]:
    estimate, target = verdict.estimate, verdict.target
    return [
        target.requirement,
        estimate.format_interval(".3g") + target.unit,
        f"{estimate.n} ({estimate.confidence:.0%})",
        verdict.word,
    ]


def _conditions(one: Result) -> str:
    on, run = one.run.machine, one.run
    return (
        f"- {run.title}: {run.at}, commit {run.commit or 'not told'}, load {run.load[0]:g} to {run.load[1]:g}, Linux "
        f"{on['kernel']}, {on['n_cpus']} x {on['cpu']}, {on['memory_gib']} GiB, Python {on['python']}"
    )


class Moment(NamedTuple):
    """A target at one time."""

    result: Result
    verdict: Verdict

    @property
    def where(self) -> str:
        """On the line of commits: the day, where the commit was not told."""
        return self.result.run.commit or self.result.run.at[:10]


def series(results: Sequence[Result]) -> dict[tuple[str, str], list[Moment]]:
    """Each target of each case and size, the oldest first."""
    found: dict[tuple[str, str], list[Moment]] = {}
    for one in results:
        for verdict in one.verdicts():
            found.setdefault((one.run.title, verdict.target.description), []).append(Moment(one, verdict))
    return found


def comparison(results: Sequence[Result], commit: str) -> str:
    """The newest figure of each target beside the one before, or of the last run of a commit."""
    lines = []
    for (title, description), moments in series(results).items():
        *earlier, now = moments
        before = [one for one in earlier if one.where.startswith(commit)]
        if before:
            lines.append([title, description, before[-1].where, *_compared(before[-1].verdict, now.verdict), now.where])
    return markdown(["measured", "target", "before", "found", "now", "", "commit"], lines)


def _compared(before: Verdict, now: Verdict) -> list[str]:
    """Both, and whether they differ: intervals that overlap say nothing."""
    ends = [sorted(map(now.target.times, (one.estimate.low, one.estimate.high))) for one in (before, now)]
    word = "worse" if ends[1][0] > ends[0][1] else "better" if ends[1][1] < ends[0][0] else "the same"
    is_known = before.estimate.n > 1 and now.estimate.n > 1
    return [
        before.estimate.format_interval(".3g"),
        now.estimate.format_interval(".3g"),
        word if is_known else "not known",
    ]


def draw(results: Sequence[Result]) -> str:
    """A line for each target: how many times its limit was found, over commits; its end in words."""
    lines = series(results)
    places = list(dict.fromkeys(one.where for moments in lines.values() for one in moments))
    ordered = sorted(places, key=lambda where: min(_at(moments, where) for moments in lines.values()))
    width, height = _LEFT + _WIDTH + _RIGHT, _TOP + len(lines) * _LINE + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {_FONT}>',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        '<text x="10" y="20" font-size="14">Each target over commits: below the grey line it is met</text>',
        f'<text x="{_LEFT}" y="{_TOP - 12}">{escape(ordered[0])}</text>' if ordered else "",
        f'<text x="{_LEFT + _WIDTH}" y="{_TOP - 12}" text-anchor="end">{escape(ordered[-1])}</text>' if ordered else "",
    ]
    for number, ((title, description), moments) in enumerate(lines.items()):
        parts += _drawn(_TOP + number * _LINE, f"{title}: {description}", moments, ordered)
    return "\n".join([*filter(None, parts), "</svg>", ""])


def _at(moments: Sequence[Moment], where: str) -> str:
    return min((one.result.run.at for one in moments if one.where == where), default="9")


def _drawn(top: float, name: str, moments: Sequence[Moment], places: Sequence[str]) -> Iterator[str]:
    last = moments[-1].verdict
    middle = top + _LINE / 2
    yield f'<text x="{_LEFT - 8}" y="{middle + 4}" text-anchor="end">{escape(name)}</text>'
    yield f'<line x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{middle}" y2="{middle}" stroke="{_LIMIT}"/>'
    points = []
    for one in moments:
        x = _LEFT + (places.index(one.where) + 0.5) / len(places) * _WIDTH
        estimate = one.verdict.estimate
        low, y, high = (_y(top, one.verdict, each) for each in (estimate.low, estimate.median, estimate.high))
        colour = _MET if one.verdict.is_met else _MISSED
        points.append(f"{x:.1f},{y:.1f}")
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}" stroke="{colour}" stroke-width="2"/>'
        text = f"{one.where}, {one.result.run.at}: {estimate.format_interval('.3g')}{one.verdict.target.unit}"
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"><title>{escape(text)}</title></circle>'
    yield f'<polyline points="{" ".join(points)}" fill="none" stroke="#bbb" stroke-width="1"/>'
    text = f"{last.estimate.format_interval('.3g')}{last.target.unit} ({last.target.requirement})"
    yield f'<text x="{_LEFT + _WIDTH + 8}" y="{middle + 4}">{escape(text)}</text>'


def _y(top: float, verdict: Verdict, value: float) -> float:
    """Return the vertical position of a value: the limit is in the middle; the scale ends at _MOST times the limit."""
    share = math.log(verdict.target.times(value), _MOST) if value > 0 else -1.0
    return top + _LINE * (0.5 - 0.45 * min(1.0, max(-1.0, share)))
