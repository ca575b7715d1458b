"""`--wait[=GOAL]`: an option whose value may be left out, and which takes no directory for it."""

from __future__ import annotations

import os
from typing import Any

import click

from fusefs.cli.options import Decorator
from fusefs.core.goal import ALL, Goal, parse_goal

_NAME = "--wait"


class _GoalType(click.ParamType[Goal]):
    """What has to be back."""

    name = "goal"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Goal:
        """Read one."""
        if isinstance(value, Goal):
            return value
        try:
            return parse_goal(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class _Shown(click.Option):
    """The option as it is typed."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Its line in the help, without the space that click puts before a value."""
        record = super().get_help_record(ctx)
        return record and (record[0].replace(" [=", "[="), record[1])


class Waiting(click.Command):
    """A command with that option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Give `--wait` its value where it has none: click would take the next word, a directory, for it."""
        takes_next = {name for one in self.params if _takes_a_word(one) for name in one.opts}
        told, left = [], list(args)
        while left and left[0] != "--":
            word = left.pop(0)
            if word == _NAME:
                word = f"{_NAME}={left.pop(0) if left and _is_goal(left[0]) else ALL.text}"
            told.append(word)
            if word in takes_next:
                told += left[:1]
                del left[:1]
        return super().parse_args(ctx, [*told, *left])


def _is_goal(word: str) -> bool:
    """Whether the word after the option is its value: a goal, and the name of nothing here."""
    try:
        parse_goal(word)
    except ValueError:
        return False
    return not os.path.lexists(word)


def _takes_a_word(param: click.Parameter) -> bool:
    return isinstance(param, click.Option) and not param.is_flag and _NAME not in param.opts


wait_option: Decorator = click.option(
    _NAME,
    "goal",
    cls=_Shown,
    type=_GoalType(),
    metavar="[=GOAL]",
    help="Give up its retention, and wait until so much space is back: 50%, 100G, inodes:1M, or done (all).",
)
