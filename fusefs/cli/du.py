"""trashd du."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import click

from fusefs.cli import output
from fusefs.cli.count_orphan import CountedOrphan, CountOptions, count_orphan, in_column
from fusefs.cli.json_objects import CountEnd, KnownSize, WhoseCount
from fusefs.cli.list import OrphanFilter, filter_options
from fusefs.cli.options import Command, OrphanId, json_option, tended, volume_option, watched
from fusefs.cli.stop_signals import StopSignals
from fusefs.core.errors import Incomplete, NotFound, TrashdError
from fusefs.core.human_units import format_duration, format_size
from fusefs.core.names import ID_RANDOM_CHARS
from fusefs.core.record import TreeSize
from fusefs.linux.children import user_name
from fusefs.linux.pressure import set_idle_priority
from fusefs.store.orphans import ListedContainer, list_all_containers, match_id


@click.command(
    "du",
    cls=Command,
    short_help="Show how much space orphans take.",
    headings={
        "Select": "--user --older --within --path --state --larger --volume",
        "Output": "--count --json",
    },
)
@click.argument("identifiers", metavar="[ID]…", nargs=-1, type=OrphanId())
@filter_options
@click.option("--count", "anew", is_flag=True, help="Measure all sizes again, even on network filesystems.")
@volume_option
@json_option
def command(
    identifiers: tuple[str, ...],
    least: int | None,
    anew: bool,
    volumes: tuple[bytes, ...],
    as_json: bool,
    **filters: Any,
) -> int:
    """Show how much space orphans take, the largest first, with a total for each user.

    Users see their own orphans; root sees everyone's. Sizes that are not yet known are measured once, at idle priority,
    and stored for trashd list. On network filesystems, only orphans that you name by ID are measured, unless you add
    --count.

    FREES is the space that deleting the orphan would free. Files that have other hard links outside the orphan are not
    included. ">=" marks an incomplete count; "<=" means that some data may be shared with reflinks or snapshots.

    \b
    Examples:
      trashd du
      trashd du --larger 10G --user alice
      trashd du 2fe7e4cb8ba8 --json | jq .n_bytes
    """
    kernel = tended(volumes)
    lost: list[TrashdError] = []
    now_ns = time.time_ns()
    entries = OrphanFilter(**filters).picks(list_all_containers(kernel, volumes, lost, watched(notes=False)), now_ns)
    if identifiers:
        entries = [_find(volumes, identifier, entries) for identifier in identifiers]
    how = CountOptions(anew, far=anew or bool(identifiers), paced=True)
    set_idle_priority()
    with StopSignals() as stop:
        counted = []
        for entry in entries:
            if stop():
                break
            try:
                counted.append(count_orphan(kernel, volumes, entry, stop, how))
            except TrashdError as error:
                lost.append(error)
        codes = [output.print_error(error, as_json=as_json) for error in lost]
        counted = sorted(
            (one for one in counted if least is None or _n_bytes(one) >= least), key=lambda one: -_n_bytes(one)
        )
        _print_sizes(counted, now_ns, as_json=as_json)
        if stop():
            return stop.exit_code()
    return output.exit_code([*codes, Incomplete.exit_code if any(one.n_failed for one in counted) else 0])


def _find(volumes: Sequence[bytes], identifier: str, entries: Sequence[ListedContainer]) -> ListedContainer:
    """Find an orphan by its ID. Raises  NotFound; UsageError if the ID is ambiguous"""
    entry = match_id(volumes, identifier, entries)
    if entry is None:
        raise NotFound(os.fsencode(identifier))
    return entry


def _n_bytes(one: CountedOrphan) -> int:
    """Return the sort key: the size in bytes, or -1 if it is unknown."""
    return -1 if one.size is None else one.size.n_bytes


def _print_sizes(counted: Sequence[CountedOrphan], now_ns: int, *, as_json: bool) -> None:
    if as_json:
        for one in counted:
            whose = WhoseCount(one.entry.id, one.entry.uid, one.entry.origin)
            output.as_json(whose, one.size or KnownSize(), CountEnd(one.n_failed, one.is_stopped))
        return
    if not counted:
        click.echo("no orphans", err=True)
        return
    rows = [("SIZE", "FREES", "ENTRIES", "OWNER", "AGE", "ID", "ORIGIN"), *(_row(one, now_ns) for one in counted)]
    for line in output.aligned(rows, output.terminal_width()):
        print(line)
    for uid in sorted({one.entry.uid for one in counted}):
        print(f"{user_name(uid)}: {_sum([one for one in counted if one.entry.uid == uid])}")


def _sum(own: Sequence[CountedOrphan]) -> str:
    bound = "at least " if any(one.size is None or one.size.is_at_least for one in own) else ""
    total = format_size(sum(one.size.n_bytes for one in own if one.size is not None))
    n_unknown = sum(one.size is None for one in own)
    unknown = f" ({n_unknown:,} of unknown size)" if n_unknown else ""
    return f"{bound}{total} in {output.counted(len(own), 'orphan')}{unknown}"


def _row(one: CountedOrphan, now_ns: int) -> tuple[str, ...]:
    entry = one.entry
    return (
        *_columns(one.size), user_name(entry.uid), format_duration(entry.age_s(now_ns)), entry.id[-ID_RANDOM_CHARS:],
        output.origin(entry.origin) + _why_it_stays(one.size),
    )  # fmt: skip


def _columns(size: TreeSize | None) -> tuple[str, str, str]:
    """Format the columns SIZE, FREES and ENTRIES."""
    if size is None:
        return in_column(size), "-", "-"
    bound = ">=" if size.is_at_least else ""
    # If some data may be shared, a lower bound of the size says nothing about the space that is freed.
    frees = "-" if size.is_at_least and size.may_share() else bound + ("<=" if size.may_share() else "")
    if frees != "-":
        frees += format_size(size.most_freed())
    entries = "-" if size.n_entries is None else f"{bound}{size.n_entries:,}"
    return in_column(size), frees, entries


def _why_it_stays(size: TreeSize | None) -> str:
    if size is None:
        return ""
    reasons = []
    if size.linked_bytes:
        reasons.append(f"{format_size(size.linked_bytes)} will not be freed: other hard links exist")
    if size.shared_bytes:
        reasons.append(
            f"up to {format_size(size.shared_bytes)} might not be freed: it is shared with reflinks or snapshots"
        )
    elif size.shared_bytes is None:
        reasons.append("snapshots on the server may keep the space in use")
    return f"  ({'; '.join(reasons)})" if reasons else ""
