"""What rules did, or would do."""

from __future__ import annotations

from typing import NamedTuple

from fusefs.core.errors import TrashdError
from fusefs.core.plan import Rule
from fusefs.core.swept import Swept


class Done(NamedTuple):
    """What a rule did in one directory."""

    rule: Rule
    swept: Swept


class NotDone(NamedTuple):
    """A directory in which a rule did nothing, and why; with an error, if it should have."""

    rule: Rule
    directory: bytes
    why: str
    error: TrashdError | None = None


class Listed(NamedTuple):
    """The purge lists in one directory, as they are now; with an error as they were.

    is_whole  otherwise they lack what could not be looked at, and say so
    """

    directory: bytes
    n_users: int
    n_entries: int
    error: TrashdError | None = None
    is_whole: bool = True


Told = Done | NotDone | Listed
