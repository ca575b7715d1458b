"""What every command that looks at a whole folder does first: recover, take in what was dropped, fill the reserve."""

from __future__ import annotations

from collections.abc import Collection

from fusefs.store.adopt import Problem, adopt_dropped
from fusefs.store.layout import UserFolder
from fusefs.store.passed_over import passed_over_below
from fusefs.store.recover import recover
from fusefs.store.reserve import is_used
from fusefs.store.stage import restock


def tend(folder: UserFolder, ended: Collection[str] = ()) -> list[str]:
    """Tend one user's folder, as that user; what could not be settled, in words. ended: as for `recover`"""
    settled = recover(folder, ended)
    _adopted, problems = adopt_dropped(folder)
    if is_used(folder):
        restock(folder)
    return [told(problem) for problem in (*settled.problems, *problems, *passed_over_below(folder))]


def told(problem: Problem) -> str:
    """A problem in one line."""
    return f"{problem.where}: {problem.what} ({problem.hint})"
