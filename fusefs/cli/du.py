"""trashd du."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import click

from fusefs.cli import output
from fusefs.cli.count_orphan import CountedOrphan, count_orphan
from fusefs.cli.id_completion import OrphanId
from fusefs.cli.json_objects import CountEnd, WhoseCount
from fusefs.cli.options import ParsedValue, json_option, volume_option
from fusefs.cli.orphan_filters import OrphanFilter, filter_options
from fusefs.cli.settle_first import tended
from fusefs.cli.stop_signals import StopSignals
from fusefs.cli.wall_clock import watched
from fusefs.core.durations import format_duration
from fusefs.core.errors import Incomplete, NotFound, TrashdError
from fusefs.core.names import ID_RANDOM_CHARS
from fusefs.core.sizes import format_size, parse_size
from fusefs.linux.act_as_user import user_name
from fusefs.linux.low_priority import be_idle
from fusefs.store.find_orphans import all_entries, the_one_called
from fusefs.store.list_orphans import ListedContainer


@click.command("du", short_help="Count what orphans take.")
@click.argument("identifiers", metavar="[ID]…", nargs=-1, type=OrphanId())
@filter_options
@click.option("--larger", "least", type=ParsedValue("size", parse_size), metavar="SIZE", help="Only those that are.")
@volume_option
@json_option
def command(
    identifiers: tuple[str, ...],
    uid: int | None,
    older_s: int | None,
    within_s: int | None,
    glob: str | None,
    state: str | None,
    least: int | None,
    volumes: tuple[bytes, ...],
    as_json: bool,
) -> int:
    """Count what orphans take, the largest first, and of each user all together.

    Each tree is walked, by its owner, at idle priority: a list tells no sizes since that would take long. Counted are
    the blocks of each inode once. What reflinks or snapshots share may stay when it is reaped, and so do files that
    have other names outside, which is told; what could not be counted, or not to the end (Ctrl-C), is told as `at
    least`. Everybody counts his own, root everybody's.

    \b
    Examples:
      trashd du
      trashd du --larger 10G --user alice
      trashd du 2fe7e4cb8ba8 --json | jq .n_bytes
    """
    kernel = tended(volumes)
    lost: list[TrashdError] = []
    now_ns = time.time_ns()
    found = OrphanFilter(uid, older_s, within_s, glob, state).picks(
        all_entries(kernel, volumes, lost, watched(notes=False)), now_ns
    )
    if identifiers:
        found = [_called(volumes, identifier, found) for identifier in identifiers]
    be_idle()
    with StopSignals() as stop:
        counted = []
        for entry in found:
            if stop():
                break
            try:
                counted.append(count_orphan(kernel, volumes, entry, stop))
            except TrashdError as error:
                lost.append(error)
        codes = [output.failed(error, as_json=as_json) for error in lost]
        counted = sorted(
            (one for one in counted if least is None or one.seen.n_bytes >= least), key=lambda one: -one.seen.n_bytes
        )
        _tell(counted, now_ns, as_json=as_json)
        if stop():
            return stop.exit_code()
    return output.exit_code([*codes, Incomplete.exit_code if any(one.seen.n_failed for one in counted) else 0])


def _called(volumes: Sequence[bytes], identifier: str, found: Sequence[ListedContainer]) -> ListedContainer:
    """Raises  NotFound; UsageError: several are called so"""
    entry = the_one_called(volumes, identifier, found)
    if entry is None:
        raise NotFound(os.fsencode(identifier))
    return entry


def _tell(counted: Sequence[CountedOrphan], now_ns: int, *, as_json: bool) -> None:
    if as_json:
        for one in counted:
            whose = WhoseCount(one.entry.id, one.entry.uid, one.entry.origin)
            output.as_json(whose, one.seen, CountEnd(one.is_stopped))
        return
    if not counted:
        click.echo("no orphans", err=True)
        return
    rows = [("SIZE", "ENTRIES", "OWNER", "AGE", "ID", "ORIGIN"), *(_row(one, now_ns) for one in counted)]
    for line in output.aligned(rows, output.terminal_width()):
        print(line)
    for uid in sorted({one.entry.uid for one in counted}):
        own = [one for one in counted if one.entry.uid == uid]
        bound = "at least " if any(one.is_bound() for one in own) else ""
        total = format_size(sum(one.seen.n_bytes for one in own))
        print(f"{user_name(uid)}: {bound}{total} in {output.counted(len(own), 'orphan')}")


def _row(one: CountedOrphan, now_ns: int) -> tuple[str, ...]:
    entry, seen = one.entry, one.seen
    bound = ">=" if one.is_bound() else ""
    stays = f"  ({format_size(seen.linked_bytes)} stay: other names have it)" if seen.linked_bytes else ""
    age = format_duration(entry.age_s(now_ns))
    return (
        bound + format_size(seen.n_bytes), f"{bound}{seen.n_entries:,}", user_name(entry.uid), age,
        entry.id[-ID_RANDOM_CHARS:], output.origin(entry.origin) + stays,
    )  # fmt: skip
