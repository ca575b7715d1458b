"""What is wrong with the caller's registry of stores, as far as it concerns a directory. It only looks."""

from __future__ import annotations

import os
from collections.abc import Iterator

from fusefs.core.names import STORE, printable, shell_word
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import is_inside, read_mounts
from fusefs.store.adopt import Problem
from fusefs.store.layout import UserFolder
from fusefs.store.leads import Lead, Word, follow
from fusefs.store.lines import registered, why_unread
from fusefs.store.registry import is_vouched

_UNREAD = "nothing that it names is found; make it a file of your own that nobody else can write, or remove it"
_GONE = "nothing: the line goes with the next store that is used"


def check_registry(kernel: Kernel, directory: bytes) -> Iterator[Problem]:
    """Why the registry counts for nothing; which of its lines lead to no store any more, in a directory or below it."""
    unread = why_unread()
    if unread is not None:
        where, why = unread
        yield Problem(printable(where), f"the registry of stores is not used: {why}", _UNREAD)
    words = [Word(os.geteuid(), line) for line in registered() if is_inside(line.path, directory)]
    for word, lead in follow(kernel, words, read_mounts()):
        if lead is Lead.GONE:
            where = os.path.join(word.line.path, STORE)
            yield Problem(printable(where), "the registry of stores names it, and it is gone", _GONE)


def check_vouched(folder: UserFolder) -> list[Problem]:
    """Whether a reap without ID, or a service, leaves what is in a folder; to be run as its user."""
    store = folder.store
    if is_vouched(store):
        return []
    where, owner_does = os.path.join(store.base_path, STORE), f"trashd init {shell_word(store.base_path)}"
    what = "its owner's registry does not name it, as if it were a copy: nothing in it is reaped but by its ID"
    return [Problem(printable(where), what, f"its owner vouches for it by: {owner_does}")]
