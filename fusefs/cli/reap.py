"""trashd reap."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import click

from fusefs.cli import output
from fusefs.cli.options import json_option, volume_option
from fusefs.core.errors import Incomplete, TrashdError, UsageError, from_os
from fusefs.core.lifecycle import State
from fusefs.core.names import printable
from fusefs.core.report import Progress, Reaped
from fusefs.linux.kernel import Kernel
from fusefs.store.find import act_on, all_entries, find_container, tend_all
from fusefs.store.layout import UserFolder
from fusefs.store.listing import Entry
from fusefs.store.visible import Visible

_REAPABLE = (State.ORPHANS, State.REAPING)


@click.command("reap", short_help="Delete orphans for good.")
@click.argument("identifiers", nargs=-1, metavar="[ID…]")
@click.option("--all", "everything", is_flag=True, help="All of your own orphans, not only those named.")
@click.option("--now", is_flag=True, help="Don't wait for their retention to end.")
@volume_option
@json_option
def command(
    identifiers: tuple[str, ...], everything: bool, now: bool, volumes: tuple[bytes, ...], as_json: bool
) -> int:
    """Delete orphans whose retention has ended, in the foreground; what is reaped can't be restored.

    Without ID: all that have expired (as root: everybody's, each with its owner's authority). An orphan that is
    named, or --all, is reaped before its time only with --now. What can't be deleted goes to quarantine.

    \b
    Examples:
      trashd reap
      trashd reap --now 20261121T032253.555Z-job-2fe7e4cb8ba8
      trashd reap --all --now
    """
    if identifiers and everything:
        raise UsageError("ID with --all", "name orphans, or take all of them")
    if now and not identifiers and not everything:
        raise UsageError("--now alone", "name orphans, or add --all for all of your own")
    kernel = Kernel()
    for problem in tend_all(kernel, volumes):
        output.warn(problem)
    lost: list[TrashdError] = []
    if identifiers:
        chosen = [find_container(kernel, volumes, one) for one in identifiers]
    else:
        own = [e for e in all_entries(kernel, volumes, lost) if not everything or e.uid == os.geteuid()]
        chosen = [e for e in own if e.state in _REAPABLE and (not everything or now or not _waits(e))]
    due = [entry for entry in chosen if now or not _waits(entry)]
    early = [entry for entry in chosen if not now and _waits(entry)] if identifiers else []
    if not due and not early and not as_json:
        click.echo("no orphans to reap" if now else "no orphan has expired", err=True)
    for entry in early:
        output.warn(f"{entry.id} is still kept; --now reaps it all the same")
    return _reap_all(kernel, volumes, due, as_json=as_json) or (Incomplete.exit_code if early or lost else 0)


def _waits(entry: Entry) -> bool:
    """Whether its retention forbids to reap it; one that a reaper has begun is past that."""
    if entry.state is State.REAPING:
        return False
    return entry.expires_ns is None or entry.expires_ns > time.time_ns()


def reap_ids(kernel: Kernel, volumes: Sequence[bytes], identifiers: Sequence[str], *, as_json: bool) -> int:
    """Reap some containers at once; the exit code."""
    return _reap_all(kernel, volumes, [find_container(kernel, volumes, i) for i in identifiers], as_json=as_json)


def _reap_all(kernel: Kernel, volumes: Sequence[bytes], due: list[Entry], *, as_json: bool) -> int:
    codes = []
    for entry in due:
        try:
            with _bar(entry, as_json=as_json) as progress:
                reaped = act_on(kernel, volumes, entry, partial(_reap, entry, progress), Reaped)
            codes.append(_tell(entry, reaped, as_json=as_json))
        except TrashdError as error:
            codes.append(output.failed(error, as_json=as_json))
        except OSError as error:
            codes.append(output.failed(from_os(error, entry.id), as_json=as_json))
    bad = [code for code in codes if code]
    return bad[0] if len(codes) == 1 and bad else Incomplete.exit_code if bad else 0


def _reap(entry: Entry, progress: Progress, folder: UserFolder, _visible: Visible | None) -> Reaped:
    from fusefs.reaper.engine import Wishes
    from fusefs.reaper.reap import reap

    return reap(folder, entry.id, Wishes(progress=progress))


def _tell(entry: Entry, reaped: Reaped, *, as_json: bool) -> int:
    failed = reaped.report.n_failed
    if as_json:
        output.as_json(reaped)
    elif reaped.lost:
        print(f"{entry.id}: skipped, {'somebody else has it' if reaped.lost == 'busy' else 'it is gone already'}")
    elif failed:
        print(f"{entry.id}: {_entries(reaped.report.removed)} removed, {failed} could not be; it is in quarantine")
        for failure in reaped.report.failures[:10]:
            print(f"  {failure.call} {printable(failure.name)}: {os.strerror(failure.errno)}")
    else:
        print(f"{entry.id}: {_entries(reaped.report.removed)} removed")
    return Incomplete.exit_code if failed else 0


def _entries(count: int) -> str:
    return "1 entry" if count == 1 else f"{count:,} entries"


def _bar(entry: Entry, *, as_json: bool) -> AbstractContextManager[Progress]:
    """A counter for who looks at a terminal; nothing for the rest."""
    if as_json or not sys.stderr.isatty():
        return nullcontext(lambda _entries, _bytes: None)
    return _Bar(entry.id)


class _Bar(AbstractContextManager[Progress]):
    """Entries and rate, drawn by the thread that removes: a forked child has no other."""

    def __init__(self, title: str) -> None:
        from rich.console import Console
        from rich.progress import Progress as Bar
        from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

        columns: list[Any] = [
            SpinnerColumn(),
            TextColumn("{task.description}: {task.completed:,} entries, {task.fields[rate]:,}/s"),
            TimeElapsedColumn(),
        ]
        self._bar = Bar(*columns, console=Console(stderr=True), auto_refresh=False, transient=True)
        self._task = self._bar.add_task(title, total=None, rate=0)
        self._began = time.monotonic()
        self._drawn = 0.0

    def __enter__(self) -> Progress:
        self._bar.start()
        return self._advance

    def _advance(self, n_entries: int, _n_bytes: int) -> None:
        now = time.monotonic()
        self._bar.advance(self._task, n_entries)
        if now - self._drawn > 0.1:
            self._drawn = now
            done = self._bar.tasks[0].completed
            self._bar.update(self._task, rate=int(done / max(now - self._began, 0.001)))
            self._bar.refresh()

    def __exit__(self, *_error: object) -> None:
        self._bar.stop()
