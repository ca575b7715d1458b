"""Volumes are asked in this process, where a command forks a child that asks: in a crash test most of the work.

For an owner a child asks that has our memory (tests/support/shared_memory_children.py).
"""

import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from fusefs.linux import children
from fusefs.linux.children import UserCredentials, person
from fusefs.store import as_owner, find_stores, orphans, registry_targets
from fusefs.store.layout import UserFolder
from fusefs.store.victim_rename import DirectRename, VisibleRename
from tests.support.other_users import as_user

T = TypeVar("T")
_ASK = "ask_each"
_AS_OWNER = "as_owner"
_blocks: list[None] = []


@contextmanager
def asked_directly() -> Iterator[None]:
    """Have volumes asked without a fork for the block; none may hang, and no call of an asking kernel fail.

    Blocks may be in each other, and in several threads.
    """
    _blocks.append(None)
    for module in (find_stores, registry_targets):
        setattr(module, _ASK, _ask_each)
    setattr(orphans, _AS_OWNER, _as_owner)
    try:
        yield
    finally:
        _blocks.pop()
        if not _blocks:
            for module in (find_stores, registry_targets):
                setattr(module, _ASK, children.ask_each)
            setattr(orphans, _AS_OWNER, as_owner.as_owner)


def _ask_each(
    questions: Sequence[T],
    ask: Callable[[T], bytes],
    silent: set[Hashable],
    where: Callable[[T], Hashable],
    person: UserCredentials | None = None,
    limit_s: float | None = None,
) -> Iterator[tuple[T, bytes | None]]:
    """See children.ask_each."""
    if person is not None:
        return children.ask_each(questions, ask, silent, where, person, limit_s)
    return ((question, ask(question)) for question in questions)


def _as_owner(
    folder: UserFolder, body: Callable[[VisibleRename | None], T], kind: Any, visible: DirectRename | None = None
) -> T:
    """See as_owner.as_owner."""
    if visible is not None or os.geteuid() or not folder.uid:
        return as_owner.as_owner(folder, body, kind, visible)
    user = person(folder.uid)
    return as_user(user.uid, partial(body, None), gid=user.gid, groups=user.groups)
