"""Reports of names that are refused as users' folders: trashd never touches nor mends them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import groupby

from fusefs.core.errors import NotProven
from fusefs.core.names import STORE
from fusefs.core.printable_names import printable, shell_word
from fusefs.store.adopt import AdoptionProblem
from fusefs.store.layout import UNMOUNT, Store, UserFolder
from fusefs.store.pointers import lower_stores
from fusefs.store.set_aside import WAITS, waiting
from fusefs.store.store_maker import way_out
from fusefs.store.user_folders import MOUNTED, NOT_MADE, NOT_REGISTERED, FolderRefusal, take_census

_MOST_NAMED = 3
"""Of one owner; any user can make thousands of names."""
_OWNER_DOES = "its owner takes it out by his next command here: trashd list"
_HINT = "look into it; what is yours in there take out with mv; trashd touches nothing of it"


def passed_over(store: Store, uid: int | None = None) -> list[AdoptionProblem]:
    """The names that are refused, of all users or of one, a few of each owner. Raises  OSError"""
    return tell(store.base_path, [*take_census(store, uid).refused, *waiting(store, uid)])


def passed_over_below(folder: UserFolder) -> list[AdoptionProblem]:
    """The user's names that are refused in the stores that their pointers lead to; to be run as that user."""
    told = []
    for store in lower_stores(folder):
        with store:
            told += passed_over(store, folder.uid)
    return told


def not_proven(folder: UserFolder) -> NotProven:
    """Why only its user reaps in a folder, with the command that helps, as far as one does."""
    if folder.doubt not in ("", NOT_REGISTERED):
        return NotProven(folder.path())
    proves = f"trashd init {shell_word(folder.store.base_path)}"
    hint = f"its owner can reap it, or restore it; when root has looked into it, he proves it by: {proves}"
    return NotProven(folder.path(), hint)


def tell(base_path: bytes, refused: Iterable[FolderRefusal]) -> list[AdoptionProblem]:
    """What is refused in the store of a directory, for people."""
    by_owner = groupby(sorted(refused, key=_by_owner), key=_by_owner)
    return [problem for _owner, ones in by_owner for problem in _of_owner(base_path, list(ones))]


def _by_owner(refusal: FolderRefusal) -> int:
    return -1 if refusal.owner is None else refusal.owner


def _of_owner(base_path: bytes, refused: list[FolderRefusal]) -> Iterable[AdoptionProblem]:
    store = os.path.join(base_path, STORE)
    refused.sort(key=lambda one: not one.is_used)
    hints = {
        NOT_REGISTERED: f"trashd init {shell_word(base_path)} registers it; look into it first",
        NOT_MADE: way_out(base_path),
        WAITS: _OWNER_DOES,
        MOUNTED: UNMOUNT,
    }
    for one in refused[:_MOST_NAMED]:
        hint = hints.get(MOUNTED if one.why.endswith(MOUNTED) else one.why, _HINT)
        yield AdoptionProblem(printable(os.path.join(store, one.area, one.name)), one.what(), hint)
    n_more = len(refused) - _MOST_NAMED
    if n_more > 0:
        owner = "nobody can see whom" if refused[0].owner is None else f"uid {refused[0].owner}"
        yield AdoptionProblem(
            printable(os.path.join(store, refused[0].area)),
            f"{n_more:,} more names of {owner} are not used as anybody's folder",
            _HINT,
        )
