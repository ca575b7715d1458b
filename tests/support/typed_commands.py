"""Check that the commands which a text names, such as a hint, exist and can be typed. No command runs."""

import re
from collections.abc import Iterator

import click

from fusefs.cli.group import trashd

_NAMED = re.compile(r"\btrashd ([a-z]\S*)((?: \S+)*)")
_NOT_COMMANDS = re.compile(
    "also|and|anew|as|at|command|does|for|has|help|in|is|itself|knows|lacks|leave|lists|makes|may|mounted|never|"
    "outside|process|processes|pyfuse3|reaper|serves|still|textual|that|touches|was|what|whose|writes|wrote"
)
"""Words that follow the program's name in sentences about the program."""
FILLED_IN = "…"
"""Where a formatted string has a value, which may be anything or nothing."""
_OPERAND = re.compile(r"""['"$<{~.]|\d|[A-Z/]+(\|[A-Z]+)?$|.*[/*=]""")
"""How operands begin, unlike the other words of a sentence."""


def all_commands(within: click.Group = trashd, name: str = "") -> Iterator[tuple[str, click.Command]]:
    """Each command that is listed, with the words that call it; groups, too."""
    yield name, within
    context = click.Context(within)
    for word in within.list_commands(context):
        command = within.get_command(context, word)
        called = f"{name} {word}".strip()
        if isinstance(command, click.Group):
            yield from all_commands(command, called)
        elif command is not None:
            yield called, command


def mistakes(text: str) -> Iterator[str]:
    """Find mistakes in the commands that a text names: an unknown command or option, too many operands."""
    for first, rest in _NAMED.findall(text):
        name, end = re.match("([a-z0-9-]+)(.?)", first).groups()  # type: ignore[union-attr]
        words = [] if end else rest.split()
        command = trashd.get_command(click.Context(trashd), name)
        if isinstance(command, click.Group) and words and (inner := words.pop(0).strip(f"`;:,.(){FILLED_IN}")):
            name, command = inner, command.get_command(click.Context(command), inner)
        complaints = [f"there is no {name}"] if command is None else _complaints(command, words)
        yield from (f"{complaint}, in {text!r}" for complaint in complaints if not _NOT_COMMANDS.fullmatch(name))


def _complaints(command: click.Command, words: list[str]) -> Iterator[str]:
    """Parse words as click does. Values are not converted: most are placeholders."""
    try:
        _values, extra, _order = command.make_parser(click.Context(command)).parse_args(list(_typed(command, words)))
    except click.NoSuchOption as error:
        yield error.format_message()
    except click.UsageError:
        return  # a sentence may name the command alone, or an option without its value
    else:
        if extra:
            yield f"too many operands: {' '.join(extra)}"


def _typed(command: click.Command, words: list[str]) -> Iterator[str]:
    """The words of a sentence that belong to the command: options, their values, operands."""
    valued = {name for one in command.params if isinstance(one, click.Option) and not one.is_flag for name in one.opts}
    is_value = False
    for word in words:
        bare = word.strip("[]`;:,.()").replace("(s)", "")
        if bare == FILLED_IN:
            continue
        if not (is_value or bare.startswith("-") or _OPERAND.match(bare)):
            return
        if bare not in ("-h", "--help", "--version"):
            yield bare
        is_value = bare in valued
        if word[-1] in "`;:,.)":
            return
