"""Lists the commands, imports each only when it is called, and defines groups of commands."""

from __future__ import annotations

from importlib import import_module

import click

from fusefs.cli.options import Command, note_usage, write_manual_page
from fusefs.cli.output import print_error, wants_json
from fusefs.core.errors import EXIT_CODES, Exit, UsageError

SECTIONS = {
    "Use": (
        "swap", "rm", "undo", "list", "browse", "du", "ls", "cat", "diff", "restore", "keep", "reap", "check",
        "holders",
    ),
    "Select": ("sweep", "plan"),
    "Watch": ("status", "doctor"),
    "Administer": ("init", "mount", "umount", "service", "pause", "resume", "config"),
}  # fmt: skip
"""The commands under each heading, in the order of the help. The module with a command's name defines it as `command`;
_BESIDE lists the exceptions.
"""
_BESIDE = {"undo": "restore", "resume": "pause", "umount": "mount", "cat": "ls", "diff": "ls", "check": "swap"}
"""Commands that are defined in another command's module, as `<name>_command`."""
_COMMANDS = tuple(name for names in SECTIONS.values() for name in names)
_N_MEANT = 3
_SAID_ELSEWHERE = {
    "empty": "reap", "put": "rm", "stats": "status", "reaper": "service run",
    "quarantine": "list --state quarantine, reap ID, reap --force ID or restore ID",
}  # fmt: skip
"""Names in other programs (trash-empty, trash-put) and in earlier releases, each with the command to use instead."""
REMOVED: dict[tuple[str, str], str] = {
    ("init", "--beside"): "set takeover_s in the configuration: man trashd.conf",
    ("", "--json-schema"): "read the file docs/json.schema.json, which is installed in fusefs/share/docs",
    ("doctor", "--rescue"): "as the owner, move the orphan out of the store with mv: man trashd-doctor",
    ("doctor", "--forget"): "as the owner, move the orphan to VOLUME/.trashd/u/UID/drop/ with mv: man trashd-doctor",
    ("sweep", "--flat"): "trashd sweep DIR … --print0 | xargs -0 mv -n -t DEST",
    ("sweep", "--copy"): "omit it: sweep prints the rsync command for a move to another filesystem",
    ("plan show", "--run"): "trashd plan apply",
    ("plan show", "--check"): "trashd plan check",
    ("swap", "--holders"): "trashd holders ID, with the ID that the swap prints",
    ("swap", "--no-fsync"): "omit it: a swap flushes its records to disk once",
    ("rm", "--no-fsync"): "omit it: rm flushes its records to disk once for each filesystem",
}
"""Options of release 0.3.0 that were removed: each command and option, with the hint that the error prints."""


class _AskingGroup(click.Group):
    """A group that suggests similar commands for an unknown name."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            meant = self.suggestions(ctx, args[0])
            if not meant:
                raise
            ctx.fail(f"no such command {args[0]!r}; did you mean {meant}?")

    def suggestions(self, ctx: click.Context, word: str) -> str:
        from difflib import get_close_matches  # imported only for typing errors

        return " or ".join(get_close_matches(word, self.list_commands(ctx), _N_MEANT))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        write_manual_page(ctx, formatter)


class LazyGroup(_AskingGroup):
    """The group of all commands, each of which is imported when it is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = import_module(f"fusefs.cli.{_BESIDE.get(cmd_name, cmd_name)}")
        command: click.Command = getattr(module, f"{cmd_name}_command" if cmd_name in _BESIDE else "command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command to run; treat `help COMMAND` as `COMMAND --help`."""
        if args[0] == "help" and not ctx.resilient_parsing:  # when a shell completes words, commands follow `help`
            args = [*args[1:], "--help"]
            if len(args) == 1:
                click.echo(ctx.get_help())
                ctx.exit()
        return super().resolve_command(ctx, args)

    def suggestions(self, ctx: click.Context, word: str) -> str:
        """Return the commands with similar names, or the equivalent of a command name from another program."""
        return _SAID_ELSEWHERE.get(word) or super().suggestions(ctx, word)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for section, names in SECTIONS.items():
            commands = [(name, self.get_command(ctx, name)) for name in names]
            with formatter.section(section):
                width = max(map(len, _COMMANDS))
                formatter.write_dl([(f"{name:<{width}}", one.get_short_help_str()) for name, one in commands if one])


class OrderedGroup(_AskingGroup):
    """A group that lists its commands in the order in which they are defined; click itself sorts them by name."""

    command_class = Command

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def _format_exit_codes() -> str:
    """Format the exit codes, except those for signals, in two columns."""
    codes = [(str(code), words) for code, words in EXIT_CODES.items()]
    half = (len(codes) + 1) // 2
    rows = [f"{code:>3} {words}" for code, words in codes[:half]]
    for index, (code, words) in enumerate(codes[half:]):
        rows[index] = f"{rows[index]:<28}{code:>4} {words}"
    return "\n".join(["\b", "Exit codes:", *rows, ""])


@click.command(cls=LazyGroup, epilog=_format_exit_codes(), context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(None, "-V", "--version", package_name="trashd", prog_name="trashd")
def trashd() -> None:
    """Empty huge directories instantly, and restore them if that was a mistake.

    The old tree, called an orphan, moves to the trash store of its filesystem. It can be restored until it expires,
    after 24 h by default. Then the reaper service, or trashd reap, deletes it.

    \b
    Examples:
      trashd swap /scratch/job         empty /scratch/job now; keep the old tree for 24 h
      trashd rm old.log builds/        move files or directories to the trash
      trashd list                      list what can be restored
      trashd restore /scratch/job      put the old tree back
      trashd reap                      delete expired orphans
    """


def _to_usage_error(error: click.ClickException) -> UsageError:
    """Convert an error from click's parser to the style of our own messages."""
    ctx = error.ctx if isinstance(error, click.UsageError) else None
    hint = ""
    if isinstance(error, click.NoSuchOption) and ctx is not None:  # an earlier release may have had this option
        hint = REMOVED.get((ctx.command_path.partition(" ")[2], error.option_name), "")
    text = error.format_message()
    wrong = UsageError(text[:1].lower() + text[1:].removesuffix("."), hint)
    if ctx is not None:
        note_usage(wrong, ctx)
    return wrong


def dispatch(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    try:
        code = trashd.main(arguments, prog_name="trashd", standalone_mode=False)
    except click.ClickException as error:
        if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):  # since click 8.2
            error.show()
            return error.exit_code
        return print_error(_to_usage_error(error), as_json=wants_json(arguments))
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.Abort:
        return Exit.INTERRUPTED
    except SystemExit as end:
        # Click raises this after a closed pipe, and after it has answered a completion request from a shell.
        return Exit.PIPE if end.code else 0
    return code if isinstance(code, int) else 0
