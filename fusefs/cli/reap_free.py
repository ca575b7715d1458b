"""`reap --free`: which orphans go so that so much space comes back."""

from __future__ import annotations

import os
from collections.abc import Sequence

from fusefs.cli import output
from fusefs.cli.confirm import can_be_asked
from fusefs.cli.count_orphan import CountOptions, count_orphan
from fusefs.cli.reap_choice import ask_about, tell_early
from fusefs.cli.stop_signals import StopSignals
from fusefs.core.errors import Incomplete, Refused, TrashdError
from fusefs.core.sizes import format_size
from fusefs.linux.kernel import Kernel
from fusefs.store.list_orphans import ListedContainer


def enough_to_free(
    kernel: Kernel,
    volumes: Sequence[bytes],
    ended: Sequence[ListedContainer],
    waiting: Sequence[ListedContainer],
    wanted_bytes: int,
    *,
    yes: bool,
) -> tuple[list[ListedContainer], list[ListedContainer]]:
    """As many orphans as take so much: of those that have expired, the oldest first, and then of those that can still
    be restored, those that would go first; the two told apart. What is pinned is left.

    What they take is counted where it isn't known. What other names keep, or may be shared, does not count.
    yes     the answer to the question whether the latter may go
    Raises  Refused: they may not, or nobody can be asked; Incomplete: all together it is not as much
    """
    with StopSignals() as stop:
        chosen, came_bytes = _until(kernel, volumes, ended, wanted_bytes, stop)
        early: list[ListedContainer] = []
        if came_bytes < wanted_bytes:
            soonest = sorted(
                (entry for entry in waiting if entry.expires_ns is not None), key=lambda entry: entry.expires_ns or 0
            )
            early, more_bytes = _until(kernel, volumes, soonest, wanted_bytes - came_bytes, stop)
            came_bytes += more_bytes
        if stop():
            raise Refused("stopped while it was counted: nothing was deleted")
    if came_bytes < wanted_bytes:
        have = f"all that may go takes {format_size(came_bytes)}"
        raise Incomplete(
            f"{have}, not {format_size(wanted_bytes)}: nothing was deleted", "trashd du shows what there is"
        )
    if early and not yes:
        if not can_be_asked():
            tell_early(early)
            count = output.counted(len(early), "orphan")
            told = f"for {format_size(wanted_bytes)} also {count} would go that can still be restored"
            raise Refused(told, "--yes says that they may")
        ask_about(early)
    return chosen, early


def _until(
    kernel: Kernel, volumes: Sequence[bytes], entries: Sequence[ListedContainer], wanted_bytes: int, stop: StopSignals
) -> tuple[list[ListedContainer], int]:
    """The first of some that take so much together, or all of them; what they take."""
    chosen, came_bytes = [], 0
    for entry in entries:
        if came_bytes >= wanted_bytes or stop():
            break
        try:
            # What another user's record says is that user's word.
            how = CountOptions(anew=entry.uid != os.geteuid(), far=True, paced=True)
            size = count_orphan(kernel, volumes, entry, stop, how).size
        except TrashdError as error:
            output.warn(f"{entry.id}: {error.message()}")
            continue
        chosen.append(entry)
        came_bytes += 0 if size is None else size.surely_freed()
    return chosen, came_bytes
