"""trashd browse."""

from __future__ import annotations

import locale
import os
import re
import sys

import click

from fusefs.cli.options import Command, volume_option
from fusefs.core.errors import Refused

_TEXTUAL = "8.2.5"
"""The oldest version that works, as in pyproject.toml; those of Debian 12 and 13 are older."""


@click.command("browse", cls=Command, short_help="Browse orphans interactively: open, restore, keep or delete them.")
@volume_option
def command(volumes: tuple[bytes, ...]) -> int:
    """Browse orphans (trashed trees) in a full-screen view, and open, restore, keep or delete them with single keys.

    The list refreshes every few seconds. Press ? for a list of the keys. Each action runs another trashd command:
    restore, keep, reap or du.

    browse needs a terminal that supports cursor positioning, and the Textual library (install trashd[browse], or run
    pipx inject trashd textual). Colours are optional (NO_COLOR is respected).

    \b
    Examples:
      trashd browse
      trashd browse --volume /scratch
    """
    _check_terminal()
    hint = "if you use pipx, run: pipx inject trashd textual; otherwise see docs/howto/install.md"
    try:
        from fusefs.browse.browser import Browser
    except ImportError as error:  # also a name that another version of Textual lacks
        if (error.name or "fusefs").partition(".")[0] == "fusefs":
            raise
        raise Refused(
            f"trashd browse needs Textual {_TEXTUAL} or later, which can't be imported ({error})", hint
        ) from error
    from importlib import metadata  # late: imports many modules

    version = metadata.version("textual")
    if _numbers(version) < _numbers(_TEXTUAL):
        raise Refused(f"trashd browse needs Textual {_TEXTUAL} or later, and this is {version}", hint)
    # Textual writes to sys.__stderr__, whose buffer fusefs.cli.main has detached.
    terminal = open(os.dup(1), "w", encoding=locale.getpreferredencoding(), errors="replace")  # noqa: SIM115
    sys.__stderr__ = terminal  # type: ignore[misc]
    started = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]  # Python, its options, and the script
    return Browser(started, volumes).run(mouse=False) or 0


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def _check_terminal() -> None:
    """Raise Refused unless standard input and output are a terminal that supports cursor positioning."""
    import curses

    if not (os.isatty(0) and os.isatty(1)):
        raise Refused("trashd browse needs a terminal", "in a program, use trashd list --json and trashd ls --json")
    if os.environ.get("TERM", "dumb") in ("", "dumb", "unknown"):
        can_place, n_colours = False, 0
    else:
        try:
            curses.setupterm()
        except curses.error:  # a terminal without a terminfo entry is a new one, which supports cursor positioning
            return
        can_place, n_colours = curses.tigetstr("cup") is not None, curses.tigetnum("colors")
    if not can_place:
        raise Refused(
            "the terminal type in TERM does not support cursor positioning",
            "trashd list prints the same list as plain text",
        )
    if n_colours <= 0:
        os.environ["NO_COLOR"] = "1"
