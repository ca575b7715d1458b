"""trashd keep."""

from __future__ import annotations

import time

import click

from fusefs.cli import output
from fusefs.cli.options import DURATION, Command, OrphanId, json_option, tended, volume_option
from fusefs.core.errors import UsageError, errors_about
from fusefs.core.human_units import format_duration
from fusefs.store.orphans import (
    DefaultRetention,
    NewRetention,
    PinnedOrphan,
    RetentionFromNow,
    change_retention,
    find_container,
)


@click.command("keep", cls=Command, short_help="Keep an orphan longer, or until you release it.")
@click.argument("identifier", metavar="ID", type=OrphanId())
@click.option(
    "--for",
    "seconds",
    type=DURATION,
    metavar="DURATION",
    help="Keep the orphan for DURATION from now. [default: until released]",
)
@click.option(
    "--release", is_flag=True, help="Let the orphan expire as usual again, by default 24h after it was trashed."
)
@volume_option
@json_option
def command(identifier: str, seconds: int | None, release: bool, volumes: tuple[bytes, ...], as_json: bool) -> int:
    """Pin an orphan (a trashed tree), so that it does not expire until you release it, however full the volume is.

    With --for, the orphan expires after that time instead, which may be earlier or later than before. Unlike a pinned
    orphan, it may be deleted sooner if the volume runs low on space. A released orphan may expire at once.

    Any unique prefix or suffix of the ID will do. An orphan that is being deleted, or is in quarantine, can't be kept:
    trashd restore recovers what remains of it.

    \b
    Examples:
      trashd keep 2fe7e4cb8ba8
      trashd keep 2fe7e4cb8ba8 --for 7d
      trashd keep 2fe7e4cb8ba8 --release
    """
    if release and seconds is not None:
        raise UsageError("--release can't be combined with --for")
    kernel = tended(volumes)
    entry = find_container(kernel, volumes, identifier)
    term: NewRetention = DefaultRetention() if release else RetentionFromNow(seconds)
    with errors_about(entry.id):
        kept = change_retention(kernel, volumes, entry, term)
    if as_json:
        output.as_json(kept)
    else:
        print(f"{kept.id}: {_format_term(kept, seconds)}")
    return 0


def _format_term(kept: PinnedOrphan, requested_s: int | None) -> str:
    if kept.expires_ns is None:
        return f"pinned until you release it (trashd keep --release {kept.id})"
    if requested_s:
        return f"expires in {format_duration(requested_s)}"
    remaining_s = (kept.expires_ns - time.time_ns()) // 1_000_000_000
    return (
        f"no longer kept; expires in {format_duration(remaining_s)}"
        if remaining_s > 0
        else "no longer kept; already expired"
    )
