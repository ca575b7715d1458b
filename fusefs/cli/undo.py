"""trashd undo."""

from __future__ import annotations

import click

from fusefs.cli.options import json_option, volume_option
from fusefs.cli.restore import restore_last
from fusefs.cli.settle_first import tended


@click.command("undo", short_help="Take back what the last command took away.")
@volume_option
@json_option
def command(volumes: tuple[bytes, ...], as_json: bool) -> int:
    """Take back all that your last swap, rm or sweep in this terminal took away.

    It is said first what that is. What has been taken back already is not meant any more, so that another undo takes
    back what the command before took. The same as `trashd restore --last`.

    \b
    Examples:
      trashd rm results/ old.log
      trashd undo
    """
    return restore_last(tended(volumes), volumes, as_json=as_json)
