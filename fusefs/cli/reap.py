"""trashd reap, as click reads it; cli/reap_fast_lane.py does it."""

from __future__ import annotations

from typing import Any

import click

from fusefs.cli.id_completion import OrphanId
from fusefs.cli.mpi_option import mpi_option
from fusefs.cli.options import ParsedValue, json_option, tempo_options, threads_option, volume_option
from fusefs.cli.reap_fast_lane import ReapLine, reap_told
from fusefs.core.sizes import parse_size


def _by_ranks(job: Any) -> Any:
    from fusefs.reaper.remove_by_ranks import RemovalByRanks  # with one machine nobody needs it

    return RemovalByRanks(job)


@click.command("reap", short_help="Delete orphans for good.")
@click.argument("identifiers", nargs=-1, metavar="[ID…]", type=OrphanId())
@click.option("--all", "everything", is_flag=True, help="All of your own orphans but the pinned ones.")
@click.option("--pinned", is_flag=True, help="All of your own that are pinned (trashd keep); only with --now.")
@click.option("--now", is_flag=True, help="Don't wait for their retention to end.")
@click.option(
    "--free",
    "wanted_bytes",
    type=ParsedValue("size", parse_size),
    metavar="SIZE",
    help="As many as take so much: expired ones first, then it asks.",
)
@click.option("--one", is_flag=True, help="The first of them that no other process has, and no more.")
@click.option("-n", "--dry-run", "dry", is_flag=True, help="Only say which would go.")
@click.option("--yes", is_flag=True, help="Don't ask before several go before their time.")
@threads_option
@tempo_options
@click.option("--count", "counts", is_flag=True, help="Count first, so that the progress bar knows the end.")
@click.option(
    "--wait", "waits", is_flag=True, help="Wait for the space, and name each process that keeps deleted files open."
)
@click.option("--with-stores", is_flag=True, help="With ID: trash stores in it go too, but for what is pinned there.")
@volume_option
@json_option
@mpi_option(_by_ranks)
def command(**options: Any) -> int:
    """Delete orphans whose retention has ended, in the foreground; what is reaped can't be restored.

    Without ID: all that have expired (as root: everybody's, each with its owner's authority). An orphan that is
    named, or --all, is reaped before its time only with --now. What is pinned goes only if it is named, or by
    --pinned, which --all doesn't imply. A user's own store that is not in his registry may be a copy: what is in it
    goes only if it is named. What can't be deleted goes to quarantine. After Ctrl-C, or however it ended,
    the next reap goes on where it was.

    Where a trash store in an orphan holds something, the reaper leaves that store and what it holds, and the rest of
    the orphan goes. --with-stores deletes it too; an orphan that is pinned in it stays all the same.

    On a terminal it asks before more than one goes before its time; --yes is the answer. Without a terminal, and with
    --json, it never asks. --dry-run says which would go, and deletes nothing.

    With --one it reaps the first that no other process has, and ends; where there is none it has done what it should.
    So an array of a scheduler's tasks shares a volume.

    With --mpi, started as `mpiexec -n N trashd reap --mpi ID` by the orphan's owner, N ranks on as many machines share
    one tree; each needs the volume at the same path. The first rank alone says something.

    With --free only as many go as take so much, counted first: of those that have expired the oldest; if that is not
    enough, it asks whether others may go that can still be restored, the soonest to expire first.

    With --paced it goes as trashd service run does: others on the disk should not notice. With --max-rate or
    --max-bytes never faster than that. Files are looked at before they go then, and large ones are cut in steps of
    64 MiB.

    \b
    Examples:
      trashd reap
      trashd reap --now 20261121T032253.555Z-job-2fe7e4cb8ba8
      trashd reap --dry-run
      trashd reap --free 200G --volume /scratch
      trashd reap --wait
      sbatch --array=1-64 --wrap 'trashd reap --one --volume /scratch'
      trashd reap --paced
      trashd reap --max-rate 5000/s --max-bytes 200M/s
    """
    return reap_told(ReapLine(**options))
