"""What a request is answered that fails: from any exception to an errno."""

from __future__ import annotations

from collections.abc import Callable, Generator
from enum import Enum
from typing import ParamSpec, TypeVar

from fusefs.mount.tables.tables_lock import WouldWait
from fusefs.mount.tree.mount_state import errno_of

P = ParamSpec("P")
R = TypeVar("R")
D = TypeVar("D")


class NotCached(Exception):
    """A request can't be answered from memory."""


class NotYet(Enum):
    """Says that there is no answer yet."""

    NOT_YET = 0


def attempt(act: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | int:
    """What a request is answered, or the errno that it has failed with. Raises  NotCached, WouldWait"""
    try:
        return act(*args, **kwargs)
    except (NotCached, WouldWait):
        raise
    except Exception as error:
        return errno_of(error, act)


def attempt_step(steps: Generator[None, D, R], word: D) -> R | int | NotYet:
    """What one step of a request is answered, or the errno that it failed with; NotYet: it was not the last."""
    try:
        steps.send(word)
    except StopIteration as end:
        answer: R = end.value
        return answer
    except Exception as error:
        return errno_of(error, steps)
    return NotYet.NOT_YET
