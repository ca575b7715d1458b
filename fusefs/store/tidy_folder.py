"""What every command that looks at a whole folder does first: recover, take in what was dropped, fill the reserve."""

from __future__ import annotations

import os
from collections.abc import Collection

from fusefs.core.errors import TrashdError, from_os
from fusefs.store.adopt import AdoptionProblem, adopt_dropped
from fusefs.store.folder_reports import passed_over_below
from fusefs.store.layout import Store, UserFolder
from fusefs.store.recover import recover
from fusefs.store.reserve import is_used
from fusefs.store.set_aside import discard_emptied, take_own
from fusefs.store.silence import Waits
from fusefs.store.stage import restock
from fusefs.store.verify_folders import look_first


def tend(folder: UserFolder, ended: Collection[str] = (), waits: Waits | None = None) -> list[str]:
    """Tend one user's folder, as that user; what could not be settled, in words. ended, waits: as for `recover`"""
    settled = recover(folder, ended, waits)
    _adopted, problems = adopt_dropped(folder)
    if is_used(folder):
        restock(folder)
    return [told(problem) for problem in (*settled.problems, *problems, *passed_over_below(folder))]


def look_over(store: Store) -> None:
    """See to what users made in a store of root's since the last look, and to what they emptied; needs root.

    On a full volume that is done later, on one that is read-only not at all.
    Raises  OSError
    """
    if store.is_roots_to_keep() and not store.is_unknown() and not store.kernel.is_read_only(store.fd):
        look_first(store)
        discard_emptied(store)


def prepare(store: Store, lost: list[TrashdError]) -> None:
    """Look over a store of the caller's; take the caller's part of what was set aside out of another one.

    lost  gets the error if that did not come to its end
    """
    try:
        look_over(store)
        if store.owner == 0 != os.geteuid() and not store.kernel.is_read_only(store.fd):
            take_own(store)
    except (OSError, TrashdError) as error:
        lost.append(from_os(error, store.base_path))


def told(problem: AdoptionProblem) -> str:
    """A problem in one line."""
    return f"{problem.where}: {problem.what} ({problem.hint})"
