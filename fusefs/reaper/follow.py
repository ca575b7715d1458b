"""Following orphans until their reaper is done with them, or until it is known why it will not be."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import NamedTuple

from fusefs.core.durations import format_duration
from fusefs.core.events import show
from fusefs.core.goal import Goal, is_reached
from fusefs.core.lifecycle import State
from fusefs.core.names import ContainerId, join, printable
from fusefs.core.space import Kind, Reason, Survey, total
from fusefs.core.status import VolumeStatus
from fusefs.linux.fd import Fd
from fusefs.linux.locks import command_of, flock_holders
from fusefs.reaper.handing import expires_ns, explain_left
from fusefs.reaper.serving import find_reaper
from fusefs.reaper.wait import Gauge
from fusefs.store.authority import as_owner
from fusefs.store.layout import RECORD, TREE, UserFolder

_PAUSE_S = 0.2
_ASK_S = 1.0
"""As often as a service at work says something new."""
_LATE_S = 10.0
"""So long an orphan that is due may lie untouched before somebody asks why."""
_RESTART_S = 5.0
"""So long a service may be away before it counts as gone."""
_UNKNOWN = Survey(0, 0, 0, 0, 1, False)


class Orphan:
    """One that is followed: where it is, and when it is nowhere, whether somebody put it back.

    survey  of what was in it, as far as it was counted
    """

    def __init__(self, folder: UserFolder, container: ContainerId, due_ns: int = 0) -> None:
        """due_ns: wall time from which it may be reaped."""
        self.id = container
        self.folder = folder
        self.due_ns = due_ns
        self.survey = _UNKNOWN
        self._owned = ExitStack()
        self._tree: Fd | None = None

    def mark(self) -> None:
        """Remember its tree: by an fd, which ends with `ended` or `close`."""
        kernel = self.folder.store.kernel
        with suppress(OSError):
            self._tree = self._owned.enter_context(kernel.open_beneath(self.folder.fd, self._way(State.ORPHANS, TREE)))

    def close(self) -> None:
        """Forget its tree."""
        self._tree = None
        self._owned.close()

    def state(self) -> State | None:
        """Where it is; None for nowhere. It may move while we look: into a state where we have looked already."""
        for _ in range(2):
            for state in (State.ORPHANS, State.REAPING, State.QUARANTINE, State.RESTORING, State.STAGE):
                with suppress(FileNotFoundError):
                    self.folder.store.kernel.stat(self.folder.fd, self._way(state))
                    return state
        return None

    def ended(self) -> Reason | None:
        """Of one that is nowhere: why its space does not come, if somebody put it back."""
        is_somewhere = self._tree is not None and self.folder.store.kernel.fstat(self._tree).st_nlink > 0
        self.close()
        return Reason(Kind.RESTORED, self.survey.n_bytes, f"{self.id} was restored") if is_somewhere else None

    def left(self) -> Reason:
        """Of one in quarantine: what is left, and why."""
        explain = partial(explain_left, self.folder, self.id)
        return as_owner(self.folder, lambda _visible: explain(), Reason)

    def why_untouched(self) -> Reason | None:
        """Of one that is due and still an orphan: what keeps it, if that can be seen."""
        read = partial(expires_ns, self.folder, self.id)
        with suppress(FileNotFoundError):
            if as_owner(self.folder, lambda _visible: read(), int | None) is None:
                return Reason(Kind.PINNED, self.survey.n_bytes, f"{self.id} is to be kept (trashd keep)")
            record = self.folder.store.kernel.stat(self.folder.fd, self._way(State.ORPHANS, RECORD))
            for pid in flock_holders(record.st_ino):
                holder = f"{printable(os.fsencode(command_of(pid)))} (pid {pid})"
                return Reason(Kind.PINNED, self.survey.n_bytes, f"{holder} holds the lock of {self.id}")
        return None

    def _way(self, state: State, *names: bytes) -> bytes:
        return join(state.value.encode(), self.id.encode(), *names)


class Followed(NamedTuple):
    """How it ended.

    hindrance  why nothing more will come before somebody does something; None if all have ended, or enough came
    kept       why some of the space will not come
    """

    hindrance: Reason | None
    kept: tuple[Reason, ...]


def follow(
    orphans: Sequence[Orphan],
    gauge: Gauge,
    goal: Goal,
    *,
    tell: Callable[[str], None] = lambda _what: None,
    stops: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> Followed:
    """Wait until the orphans of one store have ended, or until enough has come, or until it is known why it can't.

    tell   gets what goes on, in words, before each pause
    stops  asked after each pause: whoever says yes gets what is known by then
    """
    expected = total(orphan.survey for orphan in orphans)
    left, kept = list(orphans), list[Reason]()
    asked_s = late_s = served_s = clock()
    reaper = find_reaper(orphans[0].folder.store)
    while True:
        gauge.look(expected.n_bytes)
        while left and (end := _end_of(left[0])) is not None:
            kept += end
            del left[0]
            late_s = clock()
        if not left or is_reached(goal, expected, gauge.courses) or stops():
            return Followed(None, tuple(kept))
        now = clock()
        if not isinstance(reaper, Reason):
            served_s = now
        elif reaper.kind is not Kind.NOBODY or now - served_s > _RESTART_S:
            return Followed(reaper, tuple(kept))
        waits_s = _waits_s(left[0])
        if waits_s > 0 or left[0].state() is not State.ORPHANS:
            late_s = now
        elif now - late_s > _LATE_S:
            late_s = now
            pinned = left[0].why_untouched()
            if pinned is not None:
                return Followed(pinned, tuple(kept))
        tell(_describe(reaper, waits_s))
        pause(_PAUSE_S)
        if now - asked_s > _ASK_S:
            asked_s, reaper = now, find_reaper(left[0].folder.store)


def _end_of(orphan: Orphan) -> list[Reason] | None:
    """None of one that has not ended; of one that has, why its space does not come, if it does not."""
    state = orphan.state()
    if state is None:
        end = orphan.ended()
        return [] if end is None else [end]
    if state is not State.QUARANTINE:
        return None
    try:
        reason = orphan.left()
    except FileNotFoundError:
        return None  # somebody took it out again
    orphan.close()
    return [reason]


def _waits_s(orphan: Orphan) -> float:
    return (orphan.due_ns - time.time_ns()) / 1e9


def _describe(reaper: VolumeStatus | Reason, waits_s: float) -> str:
    if isinstance(reaper, Reason):
        return reaper.detail
    if waits_s > 0:
        return f"may be reaped in {format_duration(round(waits_s))}"
    rate = f", {reaper.entries_per_s:,.0f} entries/s" if reaper.entries_per_s else ""
    why = f": {show(reaper.why)}" if reaper.why else ""
    return f"{reaper.phase.value}{rate}{why}"
