"""What every command that looks at a whole folder does first: recover, take in what was dropped, fill the reserve."""

from __future__ import annotations

from fusefs.store.adopt import Problem, adopt_dropped
from fusefs.store.layout import FOLDER_MODE, UserFolder
from fusefs.store.recover import recover
from fusefs.store.stage import restock


def tend(folder: UserFolder) -> list[str]:
    """Tend one user's folder, as that user; what could not be settled, in words."""
    kernel = folder.store.kernel
    if kernel.fstat(folder.fd).st_mode & 0o7777 != FOLDER_MODE:
        kernel.chmod(folder.fd, FOLDER_MODE)
    settled = recover(folder)
    _adopted, problems = adopt_dropped(folder)
    restock(folder)
    return [_told(problem) for problem in (*settled.problems, *problems)]


def _told(problem: Problem) -> str:
    return f"{problem.where}: {problem.what} ({problem.hint})"
