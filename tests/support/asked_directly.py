"""Volumes are asked in this process, where a command has a child ask: in a crash test that is a third of all work."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from fusefs.linux import answer_timeout
from fusefs.linux.act_as_user import UserCredentials
from fusefs.store import discover, registry_targets

T = TypeVar("T")
_ASK = "ask_each"


@contextmanager
def asked_directly() -> Iterator[None]:
    """Have volumes asked without a child for the block; none may hang, and no call of an asking kernel fail."""
    for module in (discover, registry_targets):
        setattr(module, _ASK, _ask_each)
    try:
        yield
    finally:
        for module in (discover, registry_targets):
            setattr(module, _ASK, answer_timeout.ask_each)


def _ask_each(
    questions: Sequence[T],
    ask: Callable[[T], bytes],
    silent: set[Hashable],
    where: Callable[[T], Hashable],
    person: UserCredentials | None = None,
    limit_s: float | None = None,
) -> Iterator[tuple[T, bytes | None]]:
    """See answer_timeout.ask_each."""
    if person is not None:
        return answer_timeout.ask_each(questions, ask, silent, where, person, limit_s)
    return ((question, ask(question)) for question in questions)
