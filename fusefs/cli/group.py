"""The list of commands, each imported when it is called; groups of commands."""

from __future__ import annotations

from importlib import import_module

import click

from fusefs.cli.options import Command, note_usage
from fusefs.cli.output import failed, wants_json
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
"""In the order in which people meet them; each is the `command` of its module, which has its name, or in _BESIDE."""
_BESIDE = {"undo": "restore", "resume": "pause", "umount": "mount", "cat": "ls", "diff": "ls", "check": "swap"}
"""Commands that are in the module of another one, as `<name>_command`."""
_COMMANDS = tuple(name for names in SECTIONS.values() for name in names)
_N_MEANT = 3
_SAID_ELSEWHERE = {
    "empty": "reap", "put": "rm", "stats": "status", "reaper": "service run",
    "quarantine": "list --state quarantine, reap ID, reap --force ID or restore ID",
}  # fmt: skip
"""What other trash cans (trash-empty, trash-put) and earlier releases call it."""
REMOVED: dict[tuple[str, str], str] = {
    ("init", "--beside"): "takeover_s in the configuration states how long nodes are silent before they count as dead",
    ("", "--json-schema"): "the schema is a file: docs/json.schema.json, installed in fusefs/share/docs",
    ("doctor", "--rescue"): "mv CONTAINER PATH, as its owner (man trashd-doctor)",
    ("doctor", "--forget"): "mv CONTAINER VOLUME/.trashd/u/UID/drop/, as its owner (man trashd-doctor)",
    ("sweep", "--flat"): "trashd sweep DIR … --print0 | xargs -0 mv -n -t DEST moves all into one directory",
    ("sweep", "--copy"): "without --copy, a move to another filesystem is refused with the rsync command for it",
    ("plan show", "--run"): "trashd plan apply",
    ("plan show", "--check"): "trashd plan check",
    ("swap", "--holders"): "trashd holders ID, with the id that the swap prints",
    ("swap", "--no-fsync"): "omit it: a swap flushes its container once",
    ("rm", "--no-fsync"): "omit it: rm flushes once for each filesystem",
}
"""Options that 0.3.0 had, by command and option, with the hint for people who still type them."""


class _AskingGroup(click.Group):
    """A group that asks which of its commands was meant."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """What is to be run; of an unknown one those are told that may be meant."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            meant = self.meant(ctx, args[0])
            if not meant:
                raise
            ctx.fail(f"no such command {args[0]!r}; did you mean {meant}?")

    def meant(self, ctx: click.Context, word: str) -> str:
        """The commands that are like a word."""
        from difflib import get_close_matches  # who types well is spared it

        return " or ".join(get_close_matches(word, self.list_commands(ctx), _N_MEANT))


class LazyGroup(_AskingGroup):
    """A group whose commands are the `command` of their modules."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """As they are listed."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one."""
        if cmd_name not in _COMMANDS:
            return None
        module = import_module(f"fusefs.cli.{_BESIDE.get(cmd_name, cmd_name)}")
        command: click.Command = getattr(module, f"{cmd_name}_command" if cmd_name in _BESIDE else "command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """What is to be run. `help` is the help of what follows."""
        if args[0] == "help" and not ctx.resilient_parsing:  # a shell that completes it is offered commands
            args = [*args[1:], "--help"]
            if len(args) == 1:
                click.echo(ctx.get_help())
                ctx.exit()
        return super().resolve_command(ctx, args)

    def meant(self, ctx: click.Context, word: str) -> str:
        """The commands that are like a word, or that it means elsewhere."""
        return _SAID_ELSEWHERE.get(word) or super().meant(ctx, word)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """By what they are for."""
        for section, names in SECTIONS.items():
            commands = [(name, self.get_command(ctx, name)) for name in names]
            with formatter.section(section):
                width = max(map(len, _COMMANDS))
                formatter.write_dl([(f"{name:<{width}}", one.get_short_help_str()) for name, one in commands if one])


class OrderedGroup(_AskingGroup):
    """A group whose commands are listed as they were defined, as people need them: click itself sorts by name."""

    command_class = Command

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In that order."""
        return list(self.commands)


def _tell_exit_codes() -> str:
    """Those that are no signal's, in two columns."""
    told = [(str(code), words) for code, words in EXIT_CODES.items()]
    half = (len(told) + 1) // 2
    rows = [f"{code:>3} {words}" for code, words in told[:half]]
    for index, (code, words) in enumerate(told[half:]):
        rows[index] = f"{rows[index]:<28}{code:>4} {words}"
    return "\n".join(["\b", "Exit codes:", *rows, ""])


@click.command(cls=LazyGroup, epilog=_tell_exit_codes(), context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(None, "-V", "--version", package_name="trashd", prog_name="trashd")
def trashd() -> None:
    """Empty huge directories at once, and take it back if that was a mistake.

    What was taken away is an orphan: it lies in the trash store of its own filesystem and can be restored, for 24 h
    if nothing else was said; then it is deleted.

    \b
    Examples:
      trashd swap /scratch/job         an empty /scratch/job now; the old tree is kept for 24 h
      trashd rm old.log builds/        gone, restorable
      trashd list                      what can be restored
      trashd restore /scratch/job      take it back
      trashd reap                      let go what has expired
    """


def _to_usage_error(error: click.ClickException) -> UsageError:
    """Convert an error of click's parser, in the style of our own messages."""
    ctx = error.ctx if isinstance(error, click.UsageError) else None
    hint = ""
    if isinstance(error, click.NoSuchOption) and ctx is not None:  # an earlier release may have had it
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
        return failed(_to_usage_error(error), as_json=wants_json(arguments))
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.Abort:
        return Exit.INTERRUPTED
    except SystemExit as end:
        # Click raises it itself: after a closed pipe, and after it has answered a shell's completion request.
        return Exit.PIPE if end.code else 0
    return code if isinstance(code, int) else 0
