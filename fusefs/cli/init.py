"""trashd init."""

from __future__ import annotations

import os
from typing import NamedTuple

import click

from fusefs.cli import output
from fusefs.cli.options import Command, PathBytes, json_option
from fusefs.core.errors import errors_about
from fusefs.core.printable_names import printable
from fusefs.core.results import Finding
from fusefs.linux.kernel import Kernel
from fusefs.linux.runtime_directories import runtime_dir
from fusefs.store.init_store import choose_among_copies, initialise
from fusefs.store.mounted_paths import open_shown
from fusefs.store.registry_lines import UNNOTED
from fusefs.store.root_squash import squash_told
from fusefs.store.swap import own_folder
from fusefs.store.tidy_folder import passed_over, told


class RefusedFolders(NamedTuple):
    """What is called like a user's folder and is not used as such."""

    refused: tuple[Finding, ...]


@click.command("init", cls=Command, short_help="Make the trash store of a volume.", no_args_is_help=True)
@click.argument("volume", type=PathBytes())
@click.option("--known", "is_known", is_flag=True, help="Root made the store that is there: use it.")
@click.option("--replace", "replaces", is_flag=True, help="Replace what has the name .trashd and is not root's.")
@json_option
def command(volume: bytes, is_known: bool, replaces: bool, as_json: bool) -> int:
    """Make the trash store of VOLUME: the root of a filesystem, or a directory given to trashd.

    The store that root makes is VOLUME/.trashd. It serves all users, each in a folder that only that user (and root)
    can read. The store that a user makes is VOLUME/.trashd-UID, and serves that user alone; so is root's in a container
    without CAP_SYS_ADMIN. Doing it again changes nothing.

    A .trashd that other users could change, or could have made of root's directories, is refused. --replace puts a new
    store in its place by one atomic exchange, with the old one in it; each owner's next command takes their orphans out
    of that, kept until they ask for their end. Where root made it on another machine (on a network filesystem), or a
    copy lost the attribute that shows it, --known keeps it.

    \b
    Examples:
      trashd init /scratch
      trashd init --known /mnt/shared
      trashd init --replace /scratch
    """
    from fusefs.service.state_files import nudge

    kernel = Kernel()
    path = os.path.realpath(volume)
    with errors_about(path), squash_told(kernel, path):
        base = open_shown(kernel, path)
        store, done = initialise(kernel, base, path, is_known=is_known, replaces=replaces)
    with store:
        own_folder(store).fd.close()
        refused = passed_over(store, os.geteuid() or None)
        copies = choose_among_copies(store)
    nudge(runtime_dir())  # a running service serves it at once
    if as_json:
        output.as_json(done, RefusedFolders(tuple(refused)))
        return 0
    how = "one atomic exchange" if done.volume.exchange else "two renames (this filesystem can't exchange)"
    print(f"{printable(done.path)}: {'made' if done.made else 'is there'}; swap is {how}")
    for line in done.repaired:
        print(f"  repaired: {line}")
    for copy in copies:
        print(f"  {printable(copy)} has the same id, as a copy has: until the next boot this one is the volume")
    if done.unnoted:
        output.warn(f"{UNNOTED}: {done.unnoted}")
    for problem in refused:
        output.warn(told(problem))
    return 0
