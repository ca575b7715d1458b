"""What every command that looks at a whole folder does first: recover, take in what was dropped, fill the reserve.

Names that are refused as users' folders are reported: trashd never touches nor mends them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from itertools import groupby

from fusefs.core.errors import NotProven, TrashdError, from_os
from fusefs.core.printable_names import printable, shell_word
from fusefs.core.results import Finding
from fusefs.store.layout import UNMOUNT, Store, UserFolder
from fusefs.store.make_folder import look_first
from fusefs.store.old_stores import WAITS, discard_emptied, take_own, waiting
from fusefs.store.pointers import lower_stores
from fusefs.store.recover import adopt_dropped, recover
from fusefs.store.reserve import is_used
from fusefs.store.stage import restock
from fusefs.store.standing import MOUNTED, NOT_MADE, NOT_REGISTERED, Standing, take_census
from fusefs.store.store_maker import way_out
from fusefs.store.take_over import Waits

_MOST_NAMED = 3
"""Of one owner; any user can make thousands of names."""
_OWNER_DOES = "its owner takes it out by his next command here: trashd list"
_HINT = "look into it; what is yours in there take out with mv; trashd touches nothing of it"


def passed_over(store: Store, uid: int | None = None) -> list[Finding]:
    """The names that are refused, of all users or of one, a few of each owner. Raises  OSError"""
    census = take_census(store, uid)
    return tell(store.path(), [*census.refused, *census.unread, *waiting(store, uid)])


def passed_over_below(folder: UserFolder) -> list[Finding]:
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


def tell(store: bytes, refused: Iterable[Standing]) -> list[Finding]:
    """What is refused in a store, by its path, for people."""
    by_owner = groupby(sorted(refused, key=_by_owner), key=_by_owner)
    return [problem for _owner, ones in by_owner for problem in _of_owner(store, list(ones))]


def _by_owner(refusal: Standing) -> int:
    return -1 if refusal.owner is None else refusal.owner


def _of_owner(store: bytes, refused: list[Standing]) -> Iterable[Finding]:
    base_path = os.path.dirname(store)
    refused.sort(key=lambda one: not one.is_used)
    hints = {
        NOT_REGISTERED: f"trashd init {shell_word(base_path)} registers it; look into it first",
        NOT_MADE: way_out(base_path),
        WAITS: _OWNER_DOES,
        MOUNTED: UNMOUNT,
    }
    for one in refused[:_MOST_NAMED]:
        hint = hints.get(MOUNTED if one.why.endswith(MOUNTED) else one.why, _HINT)
        yield Finding(printable(os.path.join(store, one.area, one.name)), one.what(), hint)
    n_more = len(refused) - _MOST_NAMED
    if n_more > 0:
        owner = "nobody can see whom" if refused[0].owner is None else f"uid {refused[0].owner}"
        yield Finding(
            printable(os.path.join(store, refused[0].area)),
            f"{n_more:,} more names of {owner} are not used as anybody's folder",
            _HINT,
        )


def tend(folder: UserFolder, ended: Collection[str] = (), waits: Waits | None = None) -> list[str]:
    """Tend one user's folder, as that user; what could not be settled, in words. ended, waits: as for `recover`"""
    kept = recover(folder, ended, waits)
    _adopted, problems = adopt_dropped(folder)
    if is_used(folder):
        restock(folder)
    return [told(problem) for problem in (*kept, *problems, *passed_over_below(folder))]


def look_over(store: Store) -> None:
    """See to what users made in a store of root's since the last look, and to what they emptied; needs root.

    On a full volume that is done later, on one that is read-only not at all.
    Raises  OSError
    """
    if store.is_roots_to_keep():
        look_first(store)
        discard_emptied(store)


def prepare(store: Store, lost: list[TrashdError]) -> None:
    """Look over a store of the caller's; take the caller's part of what was set aside out of another one.

    lost  gets the error if that did not come to its end
    """
    try:
        look_over(store)
        if store.is_common() and os.geteuid() != 0 and not store.kernel.is_read_only(store.fd):
            take_own(store)
    except (OSError, TrashdError) as error:
        lost.append(from_os(error, store.base_path))


def told(problem: Finding) -> str:
    """A problem in one line."""
    return f"{problem.where}: {problem.what} ({problem.hint})"
