"""Options that several commands have, and how their values are read."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import click

from fusefs.cli.plain_line import read_note
from fusefs.cli.typed_paths import existing
from fusefs.core.durations import parse_duration
from fusefs.core.sizes import parse_rate
from fusefs.linux.user_names import uid_of

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    ParamType = click.ParamType
else:

    class ParamType(click.ParamType):
        """One that can be told of which type its values are, as that of click before 8.4 can't (Debian 13 has 8.2)."""

        def __class_getitem__(cls, _value_type: object) -> type:
            return cls


T = TypeVar("T")


class ParsedValue(ParamType[T], Generic[T]):
    """A value as a function reads it, which says by ValueError what is wrong."""

    def __init__(self, name: str, read: Callable[[str], T]) -> None:
        self.name = name
        self._read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> T:
        """Read one; a default is not read."""
        if not isinstance(value, str):
            default: T = value
            return default
        try:
            return self._read(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


DURATION = ParsedValue("duration", parse_duration)
"""Seconds, typed as 90s, 15m, 24h, 3d, 2w."""
RATE = ParsedValue("rate", parse_rate)
"""An amount a second."""
NOTE = ParsedValue("text", read_note)
"""A sentence that lists show."""
_MOST_WORKERS = 64


class PathBytes(ParamType[bytes]):
    """A path as the kernel has it."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bytes:
        """Bytes of an argument."""
        return value if isinstance(value, bytes) else os.fsencode(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Have the shell look for it."""
        from click.shell_completion import CompletionItem

        return [CompletionItem(incomplete, type="file")]


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

json_option: Decorator = click.option("--json", "as_json", is_flag=True, help="Print JSON, an object a line.")


volume_option: Decorator = click.option(
    "--volume",
    "volumes",
    type=PathBytes(),
    multiple=True,
    metavar="DIR",
    callback=lambda _ctx, _param, volumes: existing(volumes),
    help="Look only in the store in DIR, or else in the nearest above it on the same filesystem (may be repeated); "
    "default: all that are known.",
)
paths_argument: Decorator = click.argument("paths", type=PathBytes(), nargs=-1, metavar="PATH…")
whose_option: Decorator = click.option(
    "--user", "uid", type=ParsedValue("user", uid_of), metavar="USER", help="Whose orphan, for root."
)
null_option: Decorator = click.option(
    "-0", "--null", is_flag=True, help="Read more paths from standard input, separated by NUL (find -print0)."
)


def together(options: Sequence[Decorator]) -> Decorator:
    """Several options as one, listed in their order."""
    return lambda command: reduce(lambda decorated, option: option(decorated), reversed(options), command)


threads_option: Decorator = click.option(
    "--threads",
    "n_workers",
    type=click.IntRange(1, _MOST_WORKERS),
    metavar="N",
    help="Work on so many directories at a time; default: what is fastest on the filesystem.",
)
tempo_options = together(
    (
        click.option("--max-rate", type=RATE, metavar="N/s", help="At most N entries a second."),
        click.option(
            "--max-bytes", type=RATE, metavar="N/s", help="At most N bytes a second (K, M, G: powers of 1024)."
        ),
        click.option(
            "--paced", is_flag=True, help="Make way for whoever else works on the disk; full speed if nobody does."
        ),
    )
)
"""How fast it may go: `max_rate`, `max_bytes` and `paced`."""
