"""trashd list."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from os import fsdecode
from typing import Any, NamedTuple

import click

from fusefs.cli import output
from fusefs.cli.count_orphan import in_column
from fusefs.cli.options import DURATION, Command, ParsedValue, json_option, tended, together, volume_option, watched
from fusefs.core.container_states import State
from fusefs.core.errors import WAY_OUT, TrashdError
from fusefs.core.human_units import format_duration, format_size, parse_size
from fusefs.core.names import ID_RANDOM_CHARS
from fusefs.core.orphan_sums import OrphanSum, OrphanSums, SumBy, SumKey
from fusefs.core.printable_names import printable
from fusefs.core.record import MAX_FAILURES, Method
from fusefs.linux.children import user_name
from fusefs.linux.kernel import Kernel
from fusefs.linux.user_ids import uid_of
from fusefs.store.orphans import ListedContainer, explain_failure, list_all_containers, sum_orphans

_PAST = (State.REAPING, State.QUARANTINE)
"""States in which the retention has no effect: a reaper is deleting the orphan, or a person has to decide."""
_UNKNOWN = "?"
_MOST_REASONS = 3
"""The number of reasons shown for each orphan in quarantine; --json has more."""
_STATES = {
    "restorable": State.ORPHANS, "reaping": State.REAPING, "quarantine": State.QUARANTINE,
    "restoring": State.RESTORING, "unfinished": State.STAGE,
}  # fmt: skip
_STATE_NAMES = {state: name for name, state in _STATES.items()}
_FOREVER_S = 1 << 62

filter_options = together(
    (
        click.option("--user", "uid", type=ParsedValue("user", uid_of), metavar="USER", help="Only orphans of USER."),
        click.option("--older", "older_s", type=DURATION, metavar="AGE", help="Only orphans older than AGE."),
        click.option(
            "--within", "within_s", type=DURATION, metavar="TIME", help="Only orphans that expire within TIME."
        ),
        click.option(
            "--path", "glob", metavar="GLOB", help="Only orphans whose original path matches GLOB; * also matches /."
        ),
        click.option("--state", type=click.Choice(list(_STATES)), help="Only orphans in this state."),
        click.option(
            "--larger",
            "least",
            type=ParsedValue("size", parse_size),
            metavar="SIZE",
            help="Only orphans of SIZE or more.",
        ),
    )
)


class OrphanFilter(NamedTuple):
    """The values of the filter options. least: the minimum size in bytes; an orphan of unknown size does not match"""

    uid: int | None
    older_s: int | None
    within_s: int | None
    glob: str | None
    state: str | None
    least: int | None = None

    def picks(self, entries: Iterable[ListedContainer], now_ns: int) -> list[ListedContainer]:
        """Return the matching entries. An unreadable entry has no age or path, so it matches no condition on these."""
        return [entry for entry in entries if self.matches(entry, now_ns)]

    def matches(self, entry: ListedContainer, now_ns: int) -> bool:
        if self.uid not in (None, entry.uid) or (self.state is not None and entry.state is not _STATES[self.state]):
            return False
        if self.older_s is not None and (entry.problem or entry.age_s(now_ns) <= self.older_s):
            return False
        if self.within_s is not None:
            remaining_s = None if entry.problem or entry.state is not State.ORPHANS else entry.remaining_s(now_ns)
            if remaining_s is None or remaining_s >= self.within_s:
                return False
        if self.least is not None and (entry.size is None or entry.size.n_bytes < self.least):
            return False
        return self.glob is None or (entry.origin is not None and fnmatchcase(fsdecode(entry.origin), self.glob))


ORDERS = ("age", "left", "path", "user", "size")


def in_order(entries: list[ListedContainer], order: str, now_ns: int) -> list[ListedContainer]:
    """Sort by one of ORDERS: age (oldest first), left (first to expire), path, user, size (largest first).

    When sorted by size, entries of unknown size are last.
    """

    def remaining_s(entry: ListedContainer) -> int:
        seconds = entry.remaining_s(now_ns)
        return _FOREVER_S if seconds is None else seconds

    keys: dict[str, Callable[[ListedContainer], Any]] = {
        "age": lambda entry: entry.created_ns,
        "left": remaining_s,
        "path": lambda entry: entry.origin or b"",
        "user": lambda entry: (entry.uid, entry.created_ns),
        "size": lambda entry: 1 if entry.size is None else -entry.size.n_bytes,
    }
    return sorted(entries, key=keys[order])


@click.command(
    "list",
    cls=Command,
    short_help="List the trashed trees that can be restored.",
    headings={
        "Select": "--user --older --within --path --state --larger --volume",
        "Output": "--sort --sum-by --depth --json",
    },
)
@filter_options
@click.option(
    "--sort",
    "order",
    type=click.Choice(ORDERS),
    default="age",
    show_default=True,
    help="Sort by age (oldest first), left (first to expire), path, user or size (largest first).",
)
@click.option(
    "--sum-by",
    type=click.Choice([one.value for one in SumBy]),
    help="Print totals per user, project or age instead of one line per orphan.",
)
@click.option(
    "--depth",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    metavar="N",
    help="With --sum-by project, use the first N directories of a path as the project.",
)
@volume_option
@json_option
def command(
    order: str, sum_by: str | None, depth: int, volumes: tuple[bytes, ...], as_json: bool, **filters: Any
) -> int:
    """List orphans: the trees that a swap, rm or sweep moved to the trash, and that can be restored.

    Users see their own orphans; root sees everyone's. IDs are shortened to their last characters, which every command
    accepts. Sizes are shown if they are known; trashd du measures the others. "(swept)" after an original path means
    that a sweep trashed some of the files there; the directory itself is still in place.

    \b
    Examples:
      trashd list
      trashd list --path '/scratch/*' --older 1d --sort left
      trashd list --within 1d               orphans that expire by tomorrow, for a login profile
      trashd list --volume /scratch --json | jq -r .id
      trashd list --state quarantine        orphans that the reaper could not delete, and why
      trashd list --volume /scratch --sum-by project --older 7d
    """
    selection = OrphanFilter(**filters)
    if sum_by is not None:
        return _print_sums(volumes, SumBy(sum_by), depth, selection, as_json=as_json)
    kernel = tended(volumes)
    now_ns = time.time_ns()
    lost: list[TrashdError] = []
    # Show the paths that users know, even below a mount that covers its source and whose daemon is dead.
    every = [_by_mount_point(entry) for entry in list_all_containers(kernel, volumes, lost, watched(notes=False))]
    entries = in_order(selection.picks(every, now_ns), order, now_ns)
    codes = [output.print_error(error, as_json=as_json) for error in lost]
    if as_json:
        from fusefs.cli.json_objects import RestorableFor

        for entry in entries:
            output.as_json(entry, RestorableFor(entry.remaining_s(now_ns)))
        return max(codes, default=0)
    if not entries:
        if not lost:
            click.echo("no orphans" if not every else "no orphan matches", err=True)
        return max(codes, default=0)
    owners = {uid: user_name(uid) for uid in {entry.uid for entry in entries}}
    rows = [_row(entry, owners[entry.uid], now_ns) for entry in entries]
    width = output.terminal_width()
    head, *lines = output.aligned([("ID", "AGE", "EXPIRY", "SIZE", "OWNER", "STATE", "ORIGIN"), *rows], width)
    printed = [head]
    for line, entry in zip(lines, entries, strict=True):
        note = f"  # {printable(entry.note.encode('utf-8', 'replace'))}" if entry.note else ""
        printed.append(line + note if width is None or len(line + note) <= width else line)
        printed += [f"  {reason}" for reason in _explain_quarantine(entry)]
    print("\n".join(printed))
    if any(entry.problem for entry in entries):
        output.warn(f"the record of an orphan can't be read: {WAY_OUT}")
    return max(codes, default=0)


def _by_mount_point(entry: ListedContainer) -> ListedContainer:
    if entry.origin is None or (origin := output.by_mount_point(entry.origin)) == entry.origin:
        return entry
    return entry._replace(origin=origin)


def _row(entry: ListedContainer, owner: str, now_ns: int) -> tuple[str, ...]:
    identifier = entry.id[-ID_RANDOM_CHARS:]  # every command accepts this part, and it leaves room for the path
    seconds = entry.remaining_s(now_ns)
    expiry = "pinned" if seconds is None else format_duration(seconds) if seconds > 0 else "expired"
    expiry = "-" if entry.state in _PAST else expiry
    state = _STATE_NAMES[entry.state]
    if entry.state is State.REAPING:
        state += " (stopped)" if entry.is_stopped else ""
    elif entry.partial:
        state += " (partly deleted)"
    if entry.problem:
        return (identifier, "?", "?", "?", owner, "unreadable", entry.problem)
    age = format_duration(entry.age_s(now_ns))
    swept = " (swept)" if entry.method is Method.SWEEP else ""
    origin = output.origin(entry.origin) + swept
    return (identifier, age, expiry, in_column(entry.size), owner, state, origin)


def _explain_quarantine(entry: ListedContainer) -> list[str]:
    """Return the first few reasons why an orphan could not be deleted; an empty list if it is not in quarantine."""
    if entry.state is not State.QUARANTINE or entry.problem:
        return []
    if not entry.failures:
        return ["no reason is recorded: the volume was full, or a user moved the orphan into quarantine"]
    reasons = [explain_failure(failure) for failure in entry.failures[:_MOST_REASONS]]
    n_more = entry.n_failed - len(reasons)
    if n_more > 0:
        more = f"{n_more}+" if entry.n_failed >= MAX_FAILURES else str(n_more)
        reasons.append(f"and {more} more (--json lists up to {MAX_FAILURES})")
    return reasons


def _print_sums(volumes: Sequence[bytes], by: SumBy, depth: int, selection: OrphanFilter, *, as_json: bool) -> int:
    """Print sums of the selected orphans; return the exit code."""
    lost: list[TrashdError] = []
    clocks = watched(notes=False)
    sums = sum_orphans(Kernel(), volumes, lambda: OrphanSums(by, depth), selection.matches, lost, clocks)
    rows = [
        (key if key.project is None else key._replace(project=output.by_mount_point(key.project)), one)
        for key, one in sums
    ]
    codes = [output.print_error(error, as_json=as_json) for error in lost]
    if as_json:
        from fusefs.cli.json_objects import SummedBy

        for key, one in rows:
            output.as_json(SummedBy(by.value), key, one)
    elif not rows:
        click.echo("no orphans", err=True)
    else:
        head = ("ORPHANS", "SIZE", "UNKNOWN", "EXPIRED", "OLDEST", by.value.upper())
        for line in output.aligned([head, *(_sum_row(by, *one) for one in rows)], output.terminal_width()):
            print(line)
    return max(codes, default=0)


def _sum_row(by: SumBy, key: SumKey, one: OrphanSum) -> tuple[str, ...]:
    bound = ">=" if one.is_at_least else ""
    oldest = _UNKNOWN if one.oldest_s is None else format_duration(one.oldest_s)
    counts = (f"{one.n_orphans:,}", bound + format_size(one.n_bytes), f"{one.n_unknown:,}", f"{one.n_due:,}")
    return (*counts, oldest, _sum_name(by, key))


def _sum_name(by: SumBy, key: SumKey) -> str:
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
