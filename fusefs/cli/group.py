"""The commands' list: each is imported when it is called."""

from __future__ import annotations

from importlib import import_module

import click

from fusefs.cli.output import EXIT_PIPE, failed, wants_json
from fusefs.core.errors import UsageError

_COMMANDS = {
    "init": "fusefs.cli.init",
    "swap": "fusefs.cli.swap",
    "rm": "fusefs.cli.rm",
    "sweep": "fusefs.cli.sweep",
    "plan": "fusefs.cli.plan",
    "check": "fusefs.cli.check",
    "holders": "fusefs.cli.holders",
    "list": "fusefs.cli.listing",
    "restore": "fusefs.cli.restore",
    "keep": "fusefs.cli.keep",
    "reap": "fusefs.cli.reap",
    "status": "fusefs.cli.status",
    "pause": "fusefs.cli.pause",
    "resume": "fusefs.cli.resume",
    "quarantine": "fusefs.cli.quarantine",
    "mount": "fusefs.cli.mount",
    "umount": "fusefs.cli.umount",
    "stats": "fusefs.cli.stats",
    "service": "fusefs.cli.service",
    "reaper": "fusefs.cli.reaper",
    "config": "fusefs.cli.config",
    "doctor": "fusefs.cli.doctor",
}


class Lazy(click.Group):
    """A group whose commands are the `command` of their modules."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order in which people meet them."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one."""
        module = _COMMANDS.get(cmd_name)
        if module is None:
            return None
        command: click.Command = import_module(module).command
        return command


EXIT_CODES = """\b
Exit codes:
  0 done                       8 somebody else is working on it
  1 something went wrong       9 something else has the name now
  2 wrong command line        10 not finished; everything was kept
  3 refused                   11 the kernel refused (full, I/O error…)
  4 not permitted             12 the user's process was stopped
  5 not found, not running    13 some of many items failed
  6 no store can be used      14 a volume's reaper needs help
  7 a record can't be understood
"""


@click.command(cls=Lazy, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="trashd", prog_name="trashd")
def trashd() -> None:
    """Empty huge directories at once, and take it back if that was a mistake.

    \b
    Examples:
      trashd swap /scratch/job         an empty /scratch/job now; the old tree is kept for 24 h
      trashd rm old.log builds/        gone, restorable
      trashd list                      what can be restored
      trashd restore ID                take it back
      trashd reap                      let go what has expired
    """


def dispatch(arguments: list[str]) -> int:
    """Run one command; its exit code. Click's own errors come out as click words them, with exit code 2."""
    try:
        code = trashd.main(arguments, prog_name="trashd", standalone_mode=False)
    except click.ClickException as error:
        if wants_json(arguments):
            return failed(UsageError(error.format_message()), as_json=True)
        error.show()
        return error.exit_code
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.Abort:
        return 130
    except SystemExit as end:
        return EXIT_PIPE if end.code else 0  # click's own: nobody reads its output any more; what a shell asked is told
    return code if isinstance(code, int) else 0
