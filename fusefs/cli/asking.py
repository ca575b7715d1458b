"""Before something goes for good: what would go, and the question, which is asked on a terminal only."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import click

from fusefs.cli import output
from fusefs.core.durations import format_duration
from fusefs.core.errors import Refused
from fusefs.linux.credentials import user_name
from fusefs.store.listing import Entry

_SHOWN_MAX = 10


def ask_about(early: Sequence[Entry], *, as_json: bool) -> None:
    """Ask a person about several that would go before their time; a program, and who asks for one, is not asked.

    Raises  Refused if the answer is no
    """
    if len(early) < 2 or as_json or not (os.isatty(0) and os.isatty(2)):
        return
    now_ns = time.time_ns()
    for entry in early[:_SHOWN_MAX]:
        click.echo(_line(entry, now_ns), err=True)
    if len(early) > _SHOWN_MAX:
        click.echo(f"and {len(early) - _SHOWN_MAX:,} more (--dry-run shows all)", err=True)
    if not click.confirm(f"Delete these {len(early):,} for good, before their time?", err=True):
        raise Refused("nothing was deleted")


def tell_would_go(due: Sequence[Entry], *, as_json: bool) -> None:
    """Print what a reap would take, as `trashd list` has it."""
    now_ns = time.time_ns()
    for entry in due:
        if as_json:
            output.as_json({**output.plain(entry), "restorable_for_s": left_s(entry, now_ns)})
        else:
            print(f"would be reaped: {_line(entry, now_ns)}")


def left_s(entry: Entry, now_ns: int) -> int | None:
    """Seconds until its term ends, negative if it has; None: never by itself."""
    return None if entry.expires_ns is None else (entry.expires_ns - now_ns) // 1_000_000_000


def _line(entry: Entry, now_ns: int) -> str:
    left = left_s(entry, now_ns)
    term = "kept" if left is None else f"{format_duration(left)} left" if left > 0 else "expired"
    return f"{entry.id}  {user_name(entry.uid)}  {output.origin(entry.origin)}  ({term})"
