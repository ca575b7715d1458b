"""`trashd reap` without click."""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from typing import Any, NamedTuple

from fusefs.cli import output
from fusefs.cli.confirm import can_be_asked
from fusefs.cli.early_question import ask_about
from fusefs.cli.plain_line import MOST_WORKERS, PlainLine, PlainOption, number
from fusefs.cli.reap_choice import Choice, by_retention, choose, tell_choice, tell_would_go
from fusefs.cli.reap_foreground import ReapOptions, has_expired, is_named, is_unpinned, reap_all
from fusefs.cli.settle_first import tended
from fusefs.cli.typed_paths import existing
from fusefs.cli.wall_clock import tell_kept_by_clock, watched
from fusefs.core.errors import BrokenStore, Incomplete, TrashdError, UsageError
from fusefs.core.lifecycle import State
from fusefs.core.sizes import parse_size
from fusefs.core.slice_budget import Speed
from fusefs.store.find_orphans import all_entries, find_container
from fusefs.store.list_orphans import ListedContainer

_REAPABLE = (State.ORPHANS, State.REAPING)


class ReapLine(NamedTuple):
    """What a command line asks for, named as click's parameters in cli/reap.py."""

    identifiers: tuple[str, ...] = ()
    everything: bool = False
    pinned: bool = False
    now: bool = False
    wanted_bytes: int | None = None
    one: bool = False
    dry: bool = False
    yes: bool = False
    n_workers: int | None = None
    max_rate: int | None = None
    max_bytes: int | None = None
    paced: bool = False
    counts: bool = False
    waits: bool = False
    with_stores: bool = False
    volumes: tuple[bytes, ...] = ()
    as_json: bool = False
    job: Any = None

    def check(self) -> None:
        """Raises  UsageError for options that don't go together"""
        if self.identifiers and (self.everything or self.pinned):
            raise UsageError(
                f"ID with {'--all' if self.everything else '--pinned'}", "name orphans, or take all of them"
            )
        if self.with_stores and not self.identifiers:
            raise UsageError("--with-stores without ID", "name the orphan whose stores are to go with it")
        if self.pinned and not self.now:
            raise UsageError("--pinned without --now", "what is pinned has no term that could end: say --now, too")
        if self.now and not (self.identifiers or self.everything or self.pinned):
            raise UsageError("--now alone", "name those that may go before their time (trashd list)")
        if self.wanted_bytes is not None and (self.identifiers or self.everything or self.pinned or self.now):
            raise UsageError("--free with what is to go", "it chooses by itself, and asks")
        if self.one and (self.identifiers or self.wanted_bytes is not None):
            raise UsageError(
                f"--one with {'ID' if self.identifiers else '--free'}", "it takes whichever is due and free"
            )
        if self.job is not None and self.paced:
            raise UsageError(
                "--mpi with --paced", "that listens to one machine's disk; --max-rate is for all ranks together"
            )


LINE = PlainLine(
    "identifiers",
    tuple,
    {
        "--all": PlainOption("everything"),
        "--pinned": PlainOption("pinned"),
        "--now": PlainOption("now"),
        "--free": PlainOption("wanted_bytes", parse_size),
        "--one": PlainOption("one"),
        "-n": PlainOption("dry"),
        "--dry-run": PlainOption("dry"),
        "--yes": PlainOption("yes"),
        "--threads": PlainOption("n_workers", number(1, MOST_WORKERS)),
        "--paced": PlainOption("paced"),
        "--count": PlainOption("counts"),
        "--wait": PlainOption("waits"),
        "--with-stores": PlainOption("with_stores"),
        "--volume": PlainOption("volumes", os.fsencode, many=True),
        "--json": PlainOption("as_json"),
    },
)


def run(told: dict[str, Any]) -> int:
    """Do what a plain line says; the exit code."""
    existing(told.get("volumes", ()))
    return reap_told(ReapLine(**told))


def reap_told(told: ReapLine) -> int:
    """Do what a command line asks for; the exit code."""
    told.check()
    kernel, clocks = tended(told.volumes), watched()
    lost: list[TrashdError] = []
    if told.identifiers:
        choice = Choice([find_container(kernel, told.volumes, one, clocks) for one in told.identifiers])
    else:
        found = [entry for entry in all_entries(kernel, told.volumes, lost, clocks) if entry.state in _REAPABLE]
        choice = choose(found, everything=told.everything, pinned=told.pinned, now=told.now)
    waiting, ended = by_retention(choice.chosen)
    due, soon = choice.chosen if told.now else ended, list[ListedContainer]()
    if told.wanted_bytes is not None:
        from fusefs.cli.reap_free import enough_to_free

        due, soon = enough_to_free(kernel, told.volumes, ended, waiting, told.wanted_bytes, yes=told.yes or told.dry)
        due, waiting = [*due, *soon], []
    broken = [output.failed(error, as_json=told.as_json) for error in lost if isinstance(error, BrokenStore)]
    early = waiting if told.identifiers and not told.now else []
    if not told.now and not told.as_json:
        tell_kept_by_clock(waiting, time.time_ns())
    if not due and broken:
        return output.exit_code(broken)
    if not due and not early and not told.as_json:
        print("no orphans to reap" if told.now else "no orphan has expired", file=sys.stderr)
    for entry in early:
        output.warn(f"{entry.id} is still kept; --now reaps it all the same")
    if not (told.dry and told.as_json):
        tell_choice(choice, as_json=told.as_json)
    refused = Incomplete.exit_code if early or lost else 0
    if told.dry:
        tell_would_go(due[:1] if told.one else due, as_json=told.as_json)
        return refused
    if told.now and len(waiting) > 1 and not (told.yes or told.one or told.as_json) and can_be_asked():
        ask_about(waiting)
    expired, is_told = partial(has_expired, clocks=clocks), told.now and (told.identifiers or told.pinned)
    is_meant = is_named if is_told else is_unpinned if told.now or soon else expired
    tempo = Speed(told.max_rate, told.max_bytes)
    how = ReapOptions(told.n_workers, tempo, told.counts, told.waits, told.paced, told.with_stores, is_meant)
    how = how._replace(only_one=told.one, job=told.job)
    return reap_all(kernel, told.volumes, due, how, as_json=told.as_json) or refused
