"""trashd doctor."""

from __future__ import annotations

import os

import click

from fusefs.cli import output
from fusefs.cli.options import PathBytes, json_option
from fusefs.cli.tending import tended
from fusefs.core.errors import NotFound, TrashdError, UsageError, from_os
from fusefs.core.names import printable
from fusefs.linux.kernel import Kernel
from fusefs.store.adopt import Problem
from fusefs.store.check import check_folder, check_store
from fusefs.store.find import each_folder
from fusefs.store.layout import open_store
from fusefs.store.mounted import open_shown

EXIT_PROBLEMS = 1


@click.command("doctor", short_help="Check a store, and repair it.", no_args_is_help=True)
@click.argument("volume", type=PathBytes())
@click.option("--repair", is_flag=True, help="First complete or undo what killed commands left.")
@click.option(
    "--ended",
    multiple=True,
    metavar="BOOT",
    help="With --repair: nothing of that boot of some machine works here any more (may be repeated).",
)
@json_option
def command(volume: bytes, repair: bool, ended: tuple[str, ...], as_json: bool) -> int:
    """Check a trash store against its invariants; silent, with exit code 0, if all is well.

    VOLUME is the directory that holds `.trashd`. Everybody's own folder is checked, as root everybody's. Nothing
    is ever deleted that is not understood: it is kept, and listed here.

    On a network filesystem locks of other machines may not be seen here. What another boot, or another mount of the
    filesystem, left half done is repaired only when somebody says by --ended, with the boot's id, that it is over.

    \b
    Examples:
      trashd doctor /scratch
      trashd doctor --repair /scratch
      trashd doctor --repair --ended 7a9b0c6e-52f4-4c1f-9d51-2f3b7f0d6e11 /scratch
    """
    if ended and not repair:
        raise UsageError("--ended without --repair", "it only says what may be repaired")
    kernel = Kernel()
    path = os.path.realpath(volume)
    try:
        base = open_shown(kernel, path)
        store = open_store(kernel, base.fd, path, base.mounted)
    except OSError as error:
        raise from_os(error, path) from error
    if store is None:
        raise NotFound(path, "there is no store; trashd init makes one")
    if repair:
        tended([path], kernel, ended)
    with store:
        problems = [*check_store(store)]
        lost: list[TrashdError] = []
        for part in each_folder(kernel, [path], check_folder, list[Problem], lost):
            problems += part
        problems += [Problem(printable(path), error.message(), error.hint) for error in lost]
    for problem in dict.fromkeys(problems):
        if as_json:
            output.as_json(problem)
        else:
            print(f"{printable(os.fsencode(problem.where))}: {problem.what}\n  hint: {problem.hint}")
    return EXIT_PROBLEMS if problems else 0
