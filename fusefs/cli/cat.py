"""trashd cat."""

from __future__ import annotations

import os
import sys

import click

from fusefs.cli.options import volume_option, whose_option
from fusefs.cli.restore_choice import inside_argument, look_at_inside
from fusefs.core.errors import UsageError
from fusefs.core.names import RelPath
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.store.layout import UserFolder
from fusefs.store.list_orphans import ListedContainer
from fusefs.store.look_inside import content_of


@click.command("cat", short_help="Print a file of an orphan.", no_args_is_help=True)
@inside_argument
@whose_option
@volume_option
def command(word: bytes, uid: int | None, volumes: tuple[bytes, ...]) -> int:
    """Print a file of an orphan as it is; nothing is changed.

    \b
    Examples:
      trashd cat 2fe7e4cb8ba8:results/final.csv
      trashd cat /scratch/job/results/final.csv | diff - /scratch/job/results/final.csv
    """
    if sys.__stdout__ is None:
        raise UsageError("standard output is closed", "that is where it is printed")
    look_at_inside(volumes, word, uid, _print, None)
    return 0


def _print(kernel: Kernel, fd: Fd, _folder: UserFolder, _entry: ListedContainer, within: RelPath) -> None:
    """By the orphan's owner, who has our standard output."""
    for part in content_of(kernel, fd, within):
        while part:
            part = part[os.write(1, part) :]
