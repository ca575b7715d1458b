"""What the rows of bench/results/mount.jsonl say, as the Markdown of docs/internals/benchmarks and as JSON."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench import swap_through
from bench.mount_parts import EVERYBODY, PEERS
from bench.mount_targets import Finding, Place, Seconds, judged, means_of, medians_of, place, traits_of
from bench.names import ALL_USED, CALLERS, P50, ROOT, USED
from bench.subjects import CPU, DEVICE, NATIVE, OURS, SINGLE, Row, conditions, markdown

_NAMES = (*EVERYBODY[:3], SINGLE, *EVERYBODY[3:])
_REASON_LENGTH = 160
_SHARE = "acting's share"
_ACTING = tuple(caller.suffix for caller in CALLERS if caller is not ROOT)


def format_place(where: Place) -> str:
    """Return a place as text."""
    return f"{where[0]}, {where[1]}"


def table(row: Row) -> str:
    """The means of one part in one place, who is left out, and who had fewer turns than the others."""
    means = means_of(row)
    names = [name for name in _NAMES if name in means]
    has_callers = any(step.endswith(_ACTING) for step in means.get(_ours(means), {}))
    ours = _ours(means)
    heads = [f"{row['part']}, {format_place(place(row))}", *names, f"{ours} / native", f"{ours} / best peer"]
    heads += [_SHARE] if has_callers else []
    lines = list(_lines(row, names, has_callers=has_callers))
    remarks = [*_list_traits(row), *_remarks(row)]
    return "\n".join([markdown(heads, lines), *(["", *remarks] if remarks else [])])


def _ours(means: Seconds) -> str:
    """Which of ours is compared: over io_uring, if that was measured."""
    return OURS if OURS in means else DEVICE


def _lines(row: Row, names: Sequence[str], *, has_callers: bool) -> Iterator[list[str]]:
    means = means_of(row)
    steps = dict.fromkeys(step for found in means.values() for step in found if _is_shown(row["part"], step))
    for step in sorted(steps, key=lambda step: USED in step):
        unit = row["counts"].get(step, {}).get("unit", "ops")
        cells = [step if unit == "ops" else f"{step}, {'a MiB' if unit == 'MiB' else 'an entry'}"]
        cells += [_cell(row, name, step) for name in names]
        peers = [means[name][step] for name in PEERS if step in means.get(name, ())]
        ours = means.get(_ours(means), {}).get(step)
        for rival in (means.get(NATIVE, {}).get(step), min(peers, default=None)):
            cells.append(f"{ours / rival:.2f}" if ours and rival else "-")
        yield [*cells, *([_share(means, step)] if has_callers else [])]
    used = [means[name].get(CPU) for name in names]
    cells = ["the daemon's processor time, a turn", *(_time(each) if each else "-" for each in used), "-", "-"]
    yield [*cells, *(["-"] if has_callers else [])]


def _is_shown(part: str, step: str) -> bool:
    """Not what is told beside others; of names, processor time of all eight together."""
    is_used_by_one = USED in step and not step.startswith(ALL_USED) and part != "clients"
    return step != CPU and not step.endswith(P50) and not is_used_by_one


def _cell(row: Row, name: str, step: str) -> str:
    """The mean, and the median call or round; of several clients, what they do in a second."""
    mean, medians = means_of(row)[name].get(step), medians_of(row)[name]
    if mean is None:
        return "-"
    if row["part"] == "clients" and USED not in step:
        return f"{1 / mean:,.0f}/s"
    n = row["counts"].get(step, {}).get("n", 1)
    return f"{_time(mean / n)} ({_time(medians.get(step + P50, medians[step]) / n)})"


def _share(means: Seconds, step: str) -> str:
    """How much of what a caller's takes is not in root's."""
    for suffix in _ACTING:
        if suffix in step:
            his, roots = (means.get(_ours(means), {}).get(each) for each in (step, step.replace(suffix, "")))
            return f"{1 - roots / his:.0%}" if his and roots else "-"
    return "-"


def _time(seconds: float) -> str:
    """Three digits."""
    unit, size = next(
        ((unit, size) for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)) if seconds >= size), ("ns", 1e-9)
    )
    return f"{seconds / size:.3g} {unit}"


def _list_traits(row: Row) -> Iterator[str]:
    """Yield a line for each subject: its transport, and whether the kernel checks permissions."""
    for name in row["subjects"]:
        if name != NATIVE and (traits := traits_of(row, name)):
            checks = "the kernel checks permissions" if traits["checks"] else "the kernel checks no permissions"
            answers = "answers GETXATTR" if traits["getxattr"] else "does not answer GETXATTR"
            version = f", {row['versions'][name]}" if name in row["versions"] and name in PEERS else ""
            yield f"- {name}{version}: {traits['transport']}; {checks}; {answers}"


def _remarks(row: Row) -> Iterator[str]:
    n_rounds = row["options"]["n_rounds"]
    fewer = []
    for name, found in row["subjects"].items():
        for kind in ("missing", "failed"):
            if kind in found:
                yield f"- {name}: {kind}: {found[kind][:_REASON_LENGTH]}"
        n_turns = len(found["seconds"][CPU]) if "seconds" in found else n_rounds
        if n_turns < n_rounds:
            fewer.append(f"{name} {n_turns}")
    if fewer:
        yield f"- fewer turns than {n_rounds}, long as they are: {', '.join(fewer)}"
    if row["left_out"]:
        yield f"- left out: {row['left_out']}"


def verdicts(rows: Sequence[Row]) -> str:
    """Each target that these rows can judge."""
    findings = [finding for row in rows for finding in judged(row)]
    heads = ["subject", "work", "place", "target", "found", "verdict"]
    return markdown(heads, map(_judged, findings))


def _judged(finding: Finding) -> list[str]:
    word = finding.word if finding.word == "met" else f"**{finding.word}**"
    target = finding.target
    return [finding.ours, target.part, format_place(finding.place), target.requirement, finding.description, word]


def in_all(rows: Sequence[Row], swaps: Sequence[Row]) -> str:
    """How many are met, missed and not judged."""
    words = [finding.word for row in rows for finding in judged(row)]
    words += ["met" if line.is_met else "MISSED" for row in swaps for line in swap_through.judged(row)]
    return ", ".join(f"{words.count(word)} {word.lower()}" for word in ("met", "MISSED", "not judged"))


def tables(rows: Sequence[Row], swaps: Sequence[Row]) -> str:
    """The Markdown of docs/internals/benchmarks: verdicts, times, messages, and what it was measured on."""
    by_place = [[row for row in rows if place(row) == where] for where in dict.fromkeys(map(place, rows))]
    parts = [
        in_all(rows, swaps),
        "The targets; what was found is how many times the rival's time ours is, by the means:",
        verdicts(rows),
        "Means over rounds; in brackets the median call, or where a step is one, the median round:",
        *map(table, rows),
        "Messages for each operation, entry or MiB, without those that come once or twice in all:",
        *(text for of_place in by_place[:1] for text in _messages(of_place)),
        "Measured on:",
        "\n".join(line for of_place in by_place for line in _conditions(of_place)),
    ]
    return "\n\n".join(parts)


def as_json(rows: Sequence[Row], swaps: Sequence[Row]) -> dict[str, Any]:
    """The verdicts with their figures, and all that was measured."""
    return {
        "verdicts": [finding.as_json() for row in rows for finding in judged(row)],
        "swap": [line.as_json() for row in swaps for line in swap_through.judged(row)],
        "rows": list(rows),
    }


def _conditions(rows: Sequence[Row]) -> Iterator[str]:
    """Of one place; more than one line if the programs changed between its parts."""
    for commit in dict.fromkeys(row["versions"]["commit"] for row in rows):
        of_commit = [row for row in rows if row["versions"]["commit"] == commit]
        busiest = max(of_commit, key=lambda row: float(row["load_before"]))
        parts = ", ".join(row["part"] for row in of_commit)
        yield f"- {format_place(place(busiest))}: {conditions(busiest, parts)}"


def _messages(rows: Sequence[Row]) -> Iterator[str]:
    found = [
        (row, {name: asked for name in row["subjects"] if (asked := traits_of(row, name).get("messages"))})
        for row in rows
    ]
    names = list(dict.fromkeys(name for _, asked in found for name in asked))
    lines = [
        [step, *(_format_counts(asked[name].get(step)) if name in asked else "-" for name in names)]
        for _, asked in found
        for step in dict.fromkeys(step for of_one in asked.values() for step in of_one)
    ]
    if lines:
        yield markdown(["operation", *names], lines)


def _format_counts(counts: Mapping[str, float] | None) -> str:
    """Return counts of messages as text, such as `lookup, read 8`."""
    return ", ".join(_count(opcode.lower(), each) for opcode, each in (counts or {}).items()) or "none"


def _count(opcode: str, each: float) -> str:
    return opcode if f"{each:.2g}" == "1" else f"{opcode} {each:.2g}" if each < 100 else f"{opcode} {each:.0f}"
