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
from fusefs.store.init_store import initialise, record_chosen_disk
from fusefs.store.mounted_paths import open_both_sides
from fusefs.store.registry_lines import NO_ROOT_MARK
from fusefs.store.root_squash import convert_squash_errors
from fusefs.store.swap import open_own_folder
from fusefs.store.tidy_folder import find_refused_names, format_finding


class RefusedFolders(NamedTuple):
    """Entries that have the name of a user's folder but are not used as one."""

    refused: tuple[Finding, ...]


@click.command("init", cls=Command, short_help="Create or repair the trash store of a volume.")
@click.argument("volume", type=PathBytes())
@click.option("--known", "is_known", is_flag=True, help="Trust the existing store: you confirm that root created it.")
@click.option(
    "--replace",
    "replaces",
    is_flag=True,
    help="Replace a .trashd that is not root's, keeping the old one in the new store.",
)
@json_option
def command(volume: bytes, is_known: bool, replaces: bool, as_json: bool) -> int:
    """Create the trash store of VOLUME, or check and repair it. VOLUME is a mount point, or a directory in a volume.

    When run by root, init creates VOLUME/.trashd, which serves all users: each user has a folder in it that only they
    and root can read. When run by another user, init creates VOLUME/.trashd-UID, which serves only that user. If the
    store is intact, running init again changes nothing.

    An existing .trashd is refused if init can't verify that root created it; in that case, use --known or --replace.

    \b
    Examples:
      trashd init /scratch
      trashd init --known /mnt/shared
      trashd init --replace /scratch
    """
    from fusefs.service.state_files import nudge

    kernel = Kernel()
    path = os.path.realpath(volume)
    with errors_about(path), convert_squash_errors(kernel, path):
        base = open_both_sides(kernel, path)
        store, done = initialise(kernel, base, path, is_made_by_root=is_known, replaces=replaces)
    with store:
        open_own_folder(store).fd.close()
        refused = find_refused_names(store, os.geteuid() or None)
        copies = record_chosen_disk(store)
    nudge(runtime_dir())  # so that a running service serves the store at once
    if as_json:
        output.as_json(done, RefusedFolders(tuple(refused)))
        return 0
    how = "one atomic exchange" if done.volume.exchange else "two renames (this filesystem has no atomic exchange)"
    print(f"{printable(done.path)}: {'created' if done.made else 'exists'}; a swap is {how}")
    for line in done.repaired:
        print(f"  repaired: {line}")
    for copy in copies:
        print(
            f"  {printable(copy)} is a copy with the same volume ID; until the next boot, the service ignores that copy"
        )
    if done.unnoted:
        output.warn(f"{NO_ROOT_MARK}: {done.unnoted}")
    for problem in refused:
        output.warn(format_finding(problem))
    return 0
