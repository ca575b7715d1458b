"""What an orphan takes, counted by its owner."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from fusefs.core.errors import TrashdError, from_os
from fusefs.core.freed_space import Survey
from fusefs.core.report import Stops
from fusefs.core.sizes import format_size
from fusefs.linux.kernel import Kernel
from fusefs.store.find_orphans import act_on
from fusefs.store.layout import UserFolder
from fusefs.store.list_orphans import ListedContainer
from fusefs.store.victim_rename import VisibleRename


class CountedOrphan(NamedTuple):
    """An orphan, and what it holds; is_stopped: as far as it was counted."""

    entry: ListedContainer
    seen: Survey
    is_stopped: bool

    def is_bound(self) -> bool:
        """Whether it may be more than was counted."""
        return self.is_stopped or self.seen.is_at_least or self.seen.n_failed > 0


def count_orphan(kernel: Kernel, volumes: Sequence[bytes], entry: ListedContainer, stops: Stops) -> CountedOrphan:
    """Walk its tree. stops: asked now and then. Raises  TrashdError"""

    def act(folder: UserFolder, _visible: VisibleRename | None) -> Survey:
        from fusefs.engine.count_tree import survey

        with folder.open(entry.state) as state, kernel.open_beneath(state, entry.id.encode()) as container:
            return survey(kernel, container, stops=stops)

    try:
        seen = act_on(kernel, volumes, entry, act, Survey)
    except OSError as error:
        raise from_os(error, entry.id) from error
    return CountedOrphan(entry, seen, stops())


def size_by(kernel: Kernel, volumes: Sequence[bytes], entry: ListedContainer, end_s: float) -> str:
    """What it takes, in words, as far as it can be counted by then (time.monotonic)."""
    try:
        counted = count_orphan(kernel, volumes, entry, lambda: time.monotonic() > end_s)
    except TrashdError:
        return "size unknown"
    return ("at least " if counted.is_bound() else "") + format_size(counted.seen.n_bytes)
