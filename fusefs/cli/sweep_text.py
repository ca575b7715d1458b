"""What a sweep did, or would do, in lines for a person."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from fusefs.cli import output
from fusefs.cli.json_objects import PlannedRule, SweepAction, SweepOutcome, ToldSums
from fusefs.core.printable_names import printable
from fusefs.core.record import Failure
from fusefs.core.sizes import format_size
from fusefs.core.sweep_result import (
    DOTS,
    KEPT_BY_OTHERS,
    LOCKED_BY_OTHERS,
    LOCKED_BY_UNKNOWN,
    NOT_GIVEN,
    NOT_TAKEN,
    OUTSIDE,
    UNCLEAR,
    Match,
    Swept,
)
from fusefs.core.timestamps import in_calendar

_TOLD = 10
_LAST_DAY = "after 9999"


def as_json(action: SweepAction, swept: Swept, *first: PlannedRule) -> None:
    """Print a sweep's result for programs. first: whose sweep it was"""
    sums = ToldSums(*(getattr(swept.sums, name) for name in ToldSums._fields))
    if not swept.looks:
        sums = sums._replace(n_bytes=None)
    undo = None if swept.orphan is None else output.restore_command(swept.orphan, swept.volume)
    output.as_json(*first, action, swept, SweepOutcome(sums, undo), without="looks")


def told(swept: Swept, did: str) -> Iterator[str]:
    """What became of the matches. did: `deleted`, `would be deleted`"""
    yield f"{printable(swept.directory)}: {_sum(swept, did)}"
    if swept.orphan is not None:
        yield f"  id    {swept.orphan}"
        yield f"  undo  {output.restore_command(swept.orphan, swept.volume)}"
        yield f"  until {output.until(swept.expires_ns)}"
    for line in (*_matches("largest", swept.largest), *_matches("oldest", swept.oldest), *beside(swept)):
        yield f"  {line}"


def _sum(swept: Swept, did: str) -> str:
    sums = swept.sums
    if not (sums.n_matched or sums.n_vanished or swept.is_limited or swept.is_stopped):
        return "nothing matches"
    size = f" ({format_size(sums.n_bytes)})" if swept.looks else ""
    inside = f", with {output.counted(sums.n_inside, 'entry', 'entries')} in them" if sums.n_inside else ""
    vanished = f"; {output.counted(sums.n_vanished, 'match', 'matches')} vanished meanwhile" if sums.n_vanished else ""
    return f"{output.counted(sums.n_done, 'match', 'matches')}{size} {did}{inside}{vanished}"


def beside(swept: Swept) -> Iterator[str]:
    """What is to be known beside the count."""
    yield from _first([_failed(one) for one in swept.failures], swept.sums.n_failed)
    spared = [f"left: {printable(one.name) or '.'} ({one.why})" for one in swept.spared]
    yield from _first(spared, swept.sums.n_spared)
    if swept.sums.n_missing:
        is_one = swept.sums.n_missing == 1
        yield f"{output.counted(swept.sums.n_missing, 'path')} of the list {'is' if is_one else 'are'} not there"
    if swept.sums.n_unmatched:
        does = "does" if swept.sums.n_unmatched == 1 else "do"
        yield f"{output.counted(swept.sums.n_unmatched, 'path')} of the list {does} not match the selection"
        yield "  (directories match only with --type d)"
    if not swept.sums.n_seen and (swept.sums.n_missing or any(one.call == OUTSIDE for one in swept.failures)):
        yield "hint: none of the list was found; its paths are relative to where you are, as find tells them from there"
    if swept.sums.n_mounts:
        yield f"not entered: {output.counted(swept.sums.n_mounts, 'mount')}"
    if swept.is_limited:
        yield "there are more matches: the rest is left"
    if swept.why:
        yield f"stopped: {swept.why}"
    elif swept.is_stopped:
        yield "stopped; the same command does the rest"


def _failed(one: Failure) -> str:
    if one.call in (OUTSIDE, DOTS, UNCLEAR, KEPT_BY_OTHERS, LOCKED_BY_OTHERS, LOCKED_BY_UNKNOWN):
        return f"{one.call}: {printable(one.name) or '.'}"
    if one.call in (NOT_TAKEN, NOT_GIVEN):
        return f"left: {printable(one.name) or '.'} ({one.call})"
    return f"{one.call} {printable(one.name) or '.'}: {os.strerror(one.errno)}"


def _first(lines: Sequence[str], count: int) -> Iterator[str]:
    """The first lines of so many."""
    yield from lines[:_TOLD]
    n_more = count - min(len(lines), _TOLD)
    if n_more > 0:
        yield f"and {n_more:,} more"


def _matches(head: str, matches: Sequence[Match]) -> Iterator[str]:
    for match in matches:
        day = in_calendar(match.time_ns, "%Y-%m-%d", _LAST_DAY)
        yield f"{head:<8}{format_size(match.n_bytes):>10}  {day}  {printable(match.path)}"
        head = ""
