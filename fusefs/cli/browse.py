"""trashd browse."""

from __future__ import annotations

import locale
import os
import sys

import click

from fusefs.cli.options import Command, volume_option
from fusefs.core.errors import Refused


@click.command("browse", cls=Command, short_help="Look through orphans on the whole terminal.")
@volume_option
def command(volumes: tuple[bytes, ...]) -> int:
    """Look through orphans, into them, and take back, keep or delete what is found there: all by keys.

    What there is comes from trashd list and trashd ls, and is looked at again every few seconds; what is done is done
    by trashd restore, keep and reap, each in a process of its own and with its owner's rights. ? tells of the keys.

    It needs a terminal that can place its cursor, and textual, which the extra `browse` brings. With NO_COLOR, and on
    terminals without colours, it uses none.

    \b
    Examples:
      trashd browse
      trashd browse --volume /scratch
    """
    _check_terminal()
    try:
        from fusefs.browse.browser import Browser
    except ModuleNotFoundError as error:
        if (error.name or "fusefs").partition(".")[0] == "fusefs":
            raise
        hint = "where pipx installed trashd: pipx inject trashd textual; beside a package: docs/install.md"
        raise Refused(f"browsing needs textual, which can't be loaded ({error})", hint) from error
    # Textual takes Python's first standard error, whose buffer fusefs.cli.main has taken from it.
    terminal = open(os.dup(1), "w", encoding=locale.getpreferredencoding(), errors="replace")  # noqa: SIM115
    sys.__stderr__ = terminal  # type: ignore[misc]
    started = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]  # Python, how it was started, and what it runs
    return Browser(started, volumes).run(mouse=False) or 0


def _check_terminal() -> None:
    """Raises  Refused: nobody could read it, or not in places"""
    import curses

    if not (os.isatty(0) and os.isatty(1)):
        raise Refused("browsing needs a terminal", "for programs: trashd list --json, trashd ls --json")
    if os.environ.get("TERM", "dumb") in ("", "dumb", "unknown"):
        can_place, n_colours = False, 0
    else:
        try:
            curses.setupterm()
        except curses.error:  # it is not described here; all that are new enough for that can do it
            return
        can_place, n_colours = curses.tigetstr("cup") is not None, curses.tigetnum("colors")
    if not can_place:
        raise Refused("this terminal can't place its cursor (TERM)", "trashd list tells the same line by line")
    if n_colours <= 0:
        os.environ["NO_COLOR"] = "1"
