"""trashd list --sum-by: what is held by user, project or age."""

from __future__ import annotations

from collections.abc import Sequence

import click

from fusefs.cli import output
from fusefs.cli.json_objects import SummedBy
from fusefs.cli.orphan_filters import OrphanFilter
from fusefs.cli.wall_clock import watched
from fusefs.core.durations import format_duration
from fusefs.core.errors import TrashdError
from fusefs.core.orphan_sums import OrphanSum, OrphanSums, SumBy, SumKey
from fusefs.core.printable_names import printable
from fusefs.core.sizes import format_size
from fusefs.linux.act_as_user import user_name
from fusefs.linux.kernel import Kernel
from fusefs.store.find_orphans import sum_entries
from fusefs.store.list_orphans import ListedContainer

_UNKNOWN = "?"


def tell_sums(
    volumes: Sequence[bytes], by: SumBy, depth: int, wanted: OrphanFilter, least: int | None, *, as_json: bool
) -> int:
    """Print the sums of those that are wanted; the exit code. least: bytes that each is known to take"""

    def is_meant(entry: ListedContainer, now_ns: int) -> bool:
        is_large = least is None or (entry.size is not None and entry.size.n_bytes >= least)
        return is_large and wanted.is_meant(entry, now_ns)

    lost: list[TrashdError] = []
    sums = sum_entries(Kernel(), volumes, lambda: OrphanSums(by, depth), is_meant, lost, watched(notes=False))
    found = list(sums)
    codes = [output.failed(error, as_json=as_json) for error in lost]
    if as_json:
        for key, one in found:
            output.as_json(SummedBy(by.value), key, one)
    elif not found:
        click.echo("no orphans", err=True)
    else:
        head = ("ORPHANS", "SIZE", "UNKNOWN", "DUE", "OLDEST", by.value.upper())
        for line in output.aligned([head, *(_row(by, *one) for one in found)], output.terminal_width()):
            print(line)
    return max(codes, default=0)


def _row(by: SumBy, key: SumKey, one: OrphanSum) -> tuple[str, ...]:
    bound = ">=" if one.is_at_least else ""
    oldest = _UNKNOWN if one.oldest_s is None else format_duration(one.oldest_s)
    counts = (f"{one.n_orphans:,}", bound + format_size(one.n_bytes), f"{one.n_unknown:,}", f"{one.n_due:,}")
    return (*counts, oldest, _name(by, key))


def _name(by: SumBy, key: SumKey) -> str:
    match by:
        case SumBy.USER:
            return _UNKNOWN if key.uid is None else user_name(key.uid)
        case SumBy.PROJECT:
            return _UNKNOWN if key.project is None else printable(key.project)
        case SumBy.AGE if key.from_s is None:
            return _UNKNOWN
        case SumBy.AGE:
            begins = "" if not key.from_s else f"{format_duration(key.from_s)} "
            return f"{begins}to {format_duration(key.under_s)}" if key.under_s else f"from {begins}".rstrip()
