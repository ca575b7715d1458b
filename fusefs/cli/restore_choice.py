"""Which orphan `trashd restore` means: by its id, or by the path that it came from."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import TypeVar

import click

from fusefs.cli import output
from fusefs.cli.count_orphan import size_by
from fusefs.core.durations import format_duration
from fusefs.core.errors import NotFound, NotPermitted, Refused, TrashdError, UsageError
from fusefs.core.names import join
from fusefs.core.printable_names import printable
from fusefs.linux.act_as_user import user_name
from fusefs.linux.kernel import Kernel
from fusefs.store.find_by_origin import CameFrom, came_from
from fusefs.store.find_orphans import ID_LEAST_CHARS, all_entries, not_looked_at, the_one_called

_MOST_TOLD = 20
_PATIENCE_S = 0.5
T = TypeVar("T")


def chosen(
    kernel: Kernel, volumes: Sequence[bytes], word: bytes, inside: bytes | None, uid: int | None, *, as_json: bool
) -> CameFrom:
    """What a word means, an id or a path; and which part of it is wanted.

    inside  a path in that
    uid     whose orphan; None: by its id anybody's that the caller may see, by a path the caller's own
    Raises  TrashdError; UsageError where it could be several, and nobody can be asked
    """
    if uid not in (None, os.geteuid()) and os.geteuid():
        raise NotPermitted("--user of somebody else", "root alone restores another user's orphans")
    if not word:
        raise UsageError("an empty word is neither an id nor a path")
    lost: list[TrashdError] = []
    silent: list[bytes] = []
    listed = all_entries(kernel, volumes, lost, (), silent)
    may_be_id = b"/" not in word and len(word) >= ID_LEAST_CHARS
    by_id = the_one_called(volumes, os.fsdecode(word), listed) if may_be_id else None
    found = came_from(kernel, volumes, word, listed)
    if by_id is not None and uid in (None, by_id.uid):
        if found:
            raise UsageError(f"{printable(word)} is a part of an id, and a name here", "for the name: ./ before it")
        return CameFrom(by_id, inside)
    whose = os.geteuid() if uid is None else uid
    own = [one for one in found if one.entry.uid == whose]
    if not own:
        others = sorted({user_name(one.entry.uid) for one in found})
        if others:  # the origin in a record is its owner's word
            raise Refused(word, f"{' and '.join(others)} took something away there: --user NAME says whose is meant")
        if lost:
            raise lost[0]
        raise NotFound(word, not_looked_at(silent) or "trashd list shows what there is, and where it came from")
    one = own[0] if len(own) == 1 else _asked(kernel, volumes, word, own, as_json=as_json)
    if not as_json and len(own) == 1:
        click.echo(_lines(kernel, volumes, [one])[0], err=True)
    return one if inside is None else CameFrom(one.entry, join(one.inside or b"", inside))


def _asked(
    kernel: Kernel, volumes: Sequence[bytes], word: bytes, found: Sequence[CameFrom], *, as_json: bool
) -> CameFrom:
    """Which of several, as a person at a terminal says. Raises  UsageError: there is none"""
    shown = found[:_MOST_TOLD]
    if as_json or not (sys.stdin.isatty() and sys.stderr.isatty()):
        ids = ", ".join(one.entry.id for one in shown)
        more = f", and {len(found) - len(shown)} older ones" if len(found) > len(shown) else ""
        raise UsageError(f"{len(found)} orphans came from {printable(word)}", f"name one by its id: {ids}{more}")
    for number, line in enumerate(_lines(kernel, volumes, shown), 1):
        click.echo(f"{number:>3}  {line}", err=True)
    number = click.prompt("Which one", type=click.IntRange(1, len(shown)), default=1, err=True)
    return shown[number - 1]


def _lines(kernel: Kernel, volumes: Sequence[bytes], found: Sequence[CameFrom]) -> list[str]:
    """One for each; what they take is counted for a moment, and told as far as it is known by then."""
    now_ns, end_s, lines = time.time_ns(), time.monotonic() + _PATIENCE_S, []
    for entry, inside in found:
        part = f", {printable(inside)} of it" if inside is not None else ""
        size = size_by(kernel, volumes, entry, end_s)
        age = format_duration(entry.age_s(now_ns))
        lines.append(f"{entry.id}: {output.origin(entry.origin)}{part}, taken {age} ago, {size}")
    return lines
