"""trashd sweep, as click reads it; cli/sweep_fast_lane.py does it."""

from __future__ import annotations

from typing import Any

import click

from fusefs.cli.mpi_option import mpi_option
from fusefs.cli.options import DURATION, NOTE, PathBytes, json_option, tempo_options, threads_option
from fusefs.cli.selection_options import selection_options
from fusefs.cli.sweep_fast_lane import run
from fusefs.core.listed_names import ListFormat


def _by_ranks(job: Any) -> Any:
    from fusefs.sweep.sweep_by_ranks import SweepByRanks  # with one machine nobody needs it

    return SweepByRanks(job)


@click.command("sweep", short_help="Trash, delete or move what a selection chooses.", no_args_is_help=True)
@click.argument("directory", type=PathBytes(), metavar="DIR")
@selection_options
@click.option(
    "--from",
    "source",
    type=PathBytes(),
    metavar="FILE",
    help="Only the paths in a list (-: standard input), as find tells them from here.",
)
@click.option("-0", "--null", is_flag=True, help="Its names end with NUL (find -print0), not with a newline.")
@click.option(
    "--from-format",
    "list_format",
    type=click.Choice([one.value for one in ListFormat]),
    help="Or it is as one of these writes it (lines).",
)
@click.option("--delete", is_flag=True, help="Delete the matches for good; directories only if they are empty.")
@click.option("--recursive", is_flag=True, help="With --delete: matching directories with all that they hold.")
@click.option("--move-to", "target", type=PathBytes(), metavar="DEST", help="Move them below DEST, keeping their tree.")
@click.option("--flat", is_flag=True, help="All into DEST itself.")
@click.option(
    "--if-exists",
    type=click.Choice(["skip", "number", "replace"]),
    default="skip",
    help="What to do where a name is taken in DEST: leave the match and say so, add a number, replace (skip).",
)
@click.option(
    "--copy", is_flag=True, help="DEST may be on another filesystem: copied, verified, and only then deleted."
)
@click.option("--print", "prints", is_flag=True, help="Only print their paths; with --json one object for each.")
@click.option("--print0", "prints_null", is_flag=True, help="The same, each ended by NUL.")
@click.option("--keep-for", type=DURATION, help="Trashed, they can be restored that long (24h).")
@click.option("--note", type=NOTE, default="", help="A sentence kept with the orphan.")
@click.option("--max-delete", "most", type=click.IntRange(0), metavar="N", help="Act on so many matches at most.")
@click.option("-n", "--dry-run", "dry", is_flag=True, help="Only count them, and show the largest and the oldest.")
@click.option("--confirm-above", "limit", type=click.IntRange(0), metavar="N", help="Ask first if more than N match.")
@click.option("--yes", is_flag=True, help="The answer to that question.")
@threads_option
@tempo_options
@json_option
@mpi_option(_by_ranks)
def command(directory: bytes, **options: Any) -> int:
    """Trash what a selection chooses below DIR: one orphan, restorable whole or in part. Or delete, move, print it.

    All that is told must hold, as with find. DIR itself is never chosen, a link is never followed, and what is mounted
    below DIR is neither entered nor taken. After Ctrl-C, or however it ended, the same command does the rest.

    With --mpi, started as `mpiexec -n N trashd sweep --mpi DIR … --delete`, N ranks on as many machines share it.

    \b
    Examples:
      trashd sweep /var/log/app --name '*.log' --older 30d --dry-run
      trashd sweep /var/log/app --name '*.log' --older 30d
      trashd sweep /scratch --size +1G --by atime --older 90d --delete --confirm-above 1000
      trashd sweep /data/in --name '*.csv' --move-to /data/done
      trashd sweep /srv/build --type d --name node_modules --delete --recursive
      find /data -newer mark -print0 | trashd sweep /data -0 --from -
      trashd sweep /gpfs/fs1 --older 90d --from purge.list.old --from-format mmapplypolicy
    """
    return run({"directory": directory, **options})
