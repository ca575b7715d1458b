"""trashd reaper."""

from __future__ import annotations

import os

import click

from fusefs.cli.options import PathBytes


@click.command("reaper", short_help="Be the service that reaps in the background.")
@click.option(
    "--config",
    "directory",
    type=PathBytes(),
    metavar="DIR",
    help="Read DIR/config.toml and DIR/config.d/; default: /etc/trashd, or ~/.config/trashd for a user.",
)
@click.option(
    "--volume",
    "volumes",
    type=PathBytes(),
    multiple=True,
    metavar="DIR",
    help="Serve the store in DIR only (may be repeated); default: every one, mounted now or later.",
)
def command(directory: bytes | None, volumes: tuple[bytes, ...]) -> int:
    """Reap what is due on all volumes, in the background, and make way for whoever uses the disk.

    Run by systemd (trashd service install); in a terminal it logs there, and Ctrl-C ends it. As root it serves all
    users, each with his own rights; as anybody else what is his own. SIGHUP reads the configuration again, SIGTERM
    ends it within a second. What it was doing then, or when it was killed, the next one goes on with.

    \b
    Examples:
      systemctl start trashd-reaper
      trashd reaper --volume /scratch
      trashd status --watch
    """
    from fusefs.linux.configfiles import load_config
    from fusefs.linux.journal import make_handler, send_to
    from fusefs.reaper.service import Wanted, serve

    send_to(make_handler("trashd"))
    # By the path that policies and pauses know it by.
    serve(Wanted(lambda: load_config(directory), tuple(map(os.path.realpath, volumes))))
    return 0
