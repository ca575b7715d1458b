"""trashd diff."""

from __future__ import annotations

import stat
import sys

import click

from fusefs.cli import output
from fusefs.cli.options import json_option, volume_option, whose_option
from fusefs.cli.restore_choice import inside_argument, look_at_inside
from fusefs.core.errors import Refused
from fusefs.core.names import RelPath
from fusefs.core.printable_names import printable
from fusefs.core.record import Method
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.store.compare_trees import differences
from fusefs.store.layout import UserFolder
from fusefs.store.list_orphans import ListedContainer
from fusefs.store.look_inside import there_now

_TOLD = {"gone": "in the orphan only", "new": "there now only", "changed": "changed", "unreadable": "unreadable"}


@click.command("diff", short_help="Tell what differs between an orphan and what is there now.", no_args_is_help=True)
@inside_argument
@whose_option
@volume_option
@json_option
def command(word: bytes, uid: int | None, volumes: tuple[bytes, ...], as_json: bool) -> int:
    """Tell what differs between an orphan, or a directory of it, and what is now where it came from.

    Files differ if their sizes do, or their contents, which are read where the times differ; links by where they lead.
    What is on one side alone is told once, whatever it holds. Of what a sweep took only that is compared.

    \b
    Examples:
      trashd diff 2fe7e4cb8ba8
      trashd diff /scratch/job
    """
    sys.stdout.flush()

    def compare(kernel: Kernel, fd: Fd, folder: UserFolder, entry: ListedContainer, within: RelPath) -> int:
        """By the orphan's owner, who has our standard output."""
        tells_new = entry.method is not Method.SWEEP
        if not stat.S_ISDIR(kernel.fstat(fd).st_mode):
            raise Refused(within or entry.id, "it is no directory: trashd cat prints it, for diff -")
        count = 0
        with there_now(kernel, folder, entry, within) as now:
            if not stat.S_ISDIR(kernel.fstat(now).st_mode):
                raise Refused(within or entry.id, "what is there now is no directory")
            for one in differences(kernel, fd, now, within, tells_new=tells_new):
                count += 1
                if as_json:
                    output.as_json(one)
                else:
                    print(f"{_TOLD[one.how]}: {printable(one.path)}")
        sys.stdout.flush()
        return count

    if not look_at_inside(volumes, word, uid, compare, int) and not as_json:
        click.echo("nothing differs", err=True)
    return 0
