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
from fusefs.linux.pressure import be_idle
from fusefs.store.orphans import ListedContainer, all_entries, the_one_called


@click.command("du", cls=Command, short_help="Tell what orphans take.")
@click.argument("identifiers", metavar="[ID]…", nargs=-1, type=OrphanId())
@filter_options
@click.option("--count", "anew", is_flag=True, help="Count all of it anew, on filesystems of a server, too.")
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
    """Tell what orphans take, the largest first, and of each user all together.

    Where the filesystem knows it (CephFS, a btrfs subvolume with quota groups, JuiceFS's Enterprise Edition), it is
    asked. Else each tree is walked once, by its owner, at idle priority and at a pace that others on the disk don't
    feel, and what was counted is noted in its record, for trashd list and status too. The reaper service does the same
    for orphans older than a minute, on local filesystems, while nobody else uses the disk. On filesystems of a server
    nothing is counted but what is named, or with --count, which also counts once more what is noted.

    Counted are the blocks of each inode once. FREES is what comes back when it goes: files that have other names
    outside stay, and of what reflinks or snapshots share as much may (`<=`). What could not be counted, or not to the
    end (Ctrl-C), is told as at least (`>=`), what is not known as unknown. Everybody sees his own, root everybody's.

    \b
    Examples:
      trashd du
      trashd du --larger 10G --user alice
      trashd du 2fe7e4cb8ba8 --json | jq .n_bytes
    """
    kernel = tended(volumes)
    lost: list[TrashdError] = []
    now_ns = time.time_ns()
    found = OrphanFilter(**filters).picks(all_entries(kernel, volumes, lost, watched(notes=False)), now_ns)
    if identifiers:
        found = [_called(volumes, identifier, found) for identifier in identifiers]
    how = CountOptions(anew, far=anew or bool(identifiers), paced=True)
    be_idle()
    with StopSignals() as stop:
        counted = []
        for entry in found:
            if stop():
                break
            try:
                counted.append(count_orphan(kernel, volumes, entry, stop, how))
            except TrashdError as error:
                lost.append(error)
        codes = [output.failed(error, as_json=as_json) for error in lost]
        counted = sorted(
            (one for one in counted if least is None or _n_bytes(one) >= least), key=lambda one: -_n_bytes(one)
        )
        _tell(counted, now_ns, as_json=as_json)
        if stop():
            return stop.exit_code()
    return output.exit_code([*codes, Incomplete.exit_code if any(one.n_failed for one in counted) else 0])


def _called(volumes: Sequence[bytes], identifier: str, found: Sequence[ListedContainer]) -> ListedContainer:
    """Raises  NotFound; UsageError: several are called so"""
    entry = the_one_called(volumes, identifier, found)
    if entry is None:
        raise NotFound(os.fsencode(identifier))
    return entry


def _n_bytes(one: CountedOrphan) -> int:
    """As far as it is known; what is not known at all comes last."""
    return -1 if one.size is None else one.size.n_bytes


def _tell(counted: Sequence[CountedOrphan], now_ns: int, *, as_json: bool) -> None:
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
        *_told(one.size), user_name(entry.uid), format_duration(entry.age_s(now_ns)), entry.id[-ID_RANDOM_CHARS:],
        output.origin(entry.origin) + _why_it_stays(one.size),
    )  # fmt: skip


def _told(size: TreeSize | None) -> tuple[str, str, str]:
    """What it takes, what it frees, and its entries."""
    if size is None:
        return in_column(size), "-", "-"
    bound = ">=" if size.is_at_least else ""
    # Of what is both, a part and shared with others, nothing is known.
    frees = "-" if size.is_at_least and size.may_share() else bound + ("<=" if size.may_share() else "")
    if frees != "-":
        frees += format_size(size.most_freed())
    entries = "-" if size.n_entries is None else f"{bound}{size.n_entries:,}"
    return in_column(size), frees, entries


def _why_it_stays(size: TreeSize | None) -> str:
    if size is None:
        return ""
    told = []
    if size.linked_bytes:
        told.append(f"{format_size(size.linked_bytes)} stay: other names have it")
    if size.shared_bytes:
        told.append(f"up to {format_size(size.shared_bytes)} may stay: shared with reflinks or snapshots")
    elif size.shared_bytes is None:
        told.append("the server's snapshots may keep it")
    return f"  ({'; '.join(told)})" if told else ""
