"""trashd keep."""

from __future__ import annotations

import time

import click

from fusefs.cli import output
from fusefs.cli.options import DURATION, Command, OrphanId, json_option, tended, volume_option
from fusefs.core.errors import UsageError, errors_about
from fusefs.core.human_units import format_duration
from fusefs.store.orphans import KeepFor, PinnedOrphan, Term, UsualTerm, find_container, keep_by_id


@click.command("keep", cls=Command, short_help="Keep an orphan longer, or until you release it.", no_args_is_help=True)
@click.argument("identifier", metavar="ID", type=OrphanId())
@click.option(
    "--for", "seconds", type=DURATION, metavar="DURATION", help="So long from now on; default: until released."
)
@click.option("--release", is_flag=True, help="The usual time again, as if nobody had asked for another.")
@volume_option
@json_option
def command(identifier: str, seconds: int | None, release: bool, volumes: tuple[bytes, ...], as_json: bool) -> int:
    """Pin an orphan: nothing reaps it by itself, however full the volume is, until you release it.

    With --for it is kept so long from now on, longer or shorter than before, and may go earlier only where space is
    wanted. Released it goes after the usual time, counted from when it was swapped: perhaps at once. What is being
    reaped, or lies in quarantine, is no orphan any more: `trashd restore` takes back what is left. ID may be cut
    short as long as it is unique.

    \b
    Examples:
      trashd keep 2fe7e4cb8ba8
      trashd keep 2fe7e4cb8ba8 --for 7d
      trashd keep 2fe7e4cb8ba8 --release
    """
    if release and seconds is not None:
        raise UsageError("--release with --for", "it is one or the other")
    kernel = tended(volumes)
    entry = find_container(kernel, volumes, identifier)
    term: Term = UsualTerm() if release else KeepFor(seconds)
    with errors_about(entry.id):
        kept = keep_by_id(kernel, volumes, entry, term)
    if as_json:
        output.as_json(kept)
    else:
        print(f"{kept.id}: {_told(kept, seconds)}")
    return 0


def _told(kept: PinnedOrphan, asked_s: int | None) -> str:
    if kept.expires_ns is None:
        return f"kept until you release it (trashd keep --release {kept.id})"
    if asked_s:
        return f"kept for {format_duration(asked_s)}"
    left_s = (kept.expires_ns - time.time_ns()) // 1_000_000_000
    return f"no longer kept: it goes in {format_duration(left_s)}" if left_s > 0 else "no longer kept"
