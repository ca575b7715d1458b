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
from fusefs.store.set_aside import take_own
from fusefs.store.silence import Waits
from fusefs.store.stage import restock
from fusefs.store.upgrade_format import look_over, renewed


def tend(folder: UserFolder, ended: Collection[str] = (), waits: Waits | None = None) -> list[str]:
    """Tend one user's folder, as that user; what could not be settled, in words. ended, waits: as for `recover`"""
    settled = recover(folder, ended, waits)
    _adopted, problems = adopt_dropped(folder)
    if is_used(folder):
        restock(folder)
    return [told(problem) for problem in (*settled.problems, *problems, *passed_over_below(folder))]


def prepared(store: Store, lost: list[TrashdError]) -> Store:
    """A store as the caller is to use it: tidied if it is the caller's; their part of what was set aside is taken out.

    It takes the place of the one that was given.
    lost  gets the error if that did not come to its end
    """
    try:
        store = renewed(store)
        look_over(store)
        if store.owner == 0 != os.geteuid() and not store.kernel.is_read_only(store.fd):
            take_own(store)
    except (OSError, TrashdError) as error:
        lost.append(from_os(error, store.base_path))
    return store


def told(problem: AdoptionProblem) -> str:
    """A problem in one line."""
    return f"{problem.where}: {problem.what} ({problem.hint})"
