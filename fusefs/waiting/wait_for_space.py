"""Waiting until the space of a reaped tree is free, which is later than unlink returns, or knowing why it is not."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from contextlib import suppress

from fusefs.core.freed_space import (
    SpaceCourse,
    SpaceKeeper,
    SpaceKept,
    Survey,
    Waited,
    WaitStep,
    begin,
    conclude,
    describe_unknown,
    foreseen,
    look,
)
from fusefs.core.names import STORE, ContainerId
from fusefs.core.printable_names import printable
from fusefs.core.report import Stops
from fusefs.core.space_goal import GoalReached, SpaceCourses, SpaceGoal, conclude_goal, decide_goal, is_reached
from fusefs.linux.kernel import Kernel
from fusefs.linux.tree_users import DeletedFile, device_of, find_deleted, find_named, serves_fuse

PATIENCE_S = 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_MOST_TOLD, _MOST_CLIENTS = 20, 5

Tell = Callable[[int, int], None]
"""Called with the bytes that came, and those that are expected."""


class FreeSpaceGauge:
    """How the free space of a volume went since a moment, as far as it was looked at."""

    def __init__(
        self, kernel: Kernel, fd: int, *, before_bytes: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """fd: any directory on the volume; before_bytes: free at that moment, now by default."""
        self._kernel = kernel
        self._fd = fd
        self._clock = clock
        before_inodes, now = kernel.free_inodes(fd), clock()
        self.courses = SpaceCourses(
            begin(kernel.free_bytes(fd) if before_bytes is None else before_bytes, now),
            None if before_inodes is None else begin(before_inodes, now),
        )

    def look(self, expected_bytes: int) -> bool:
        """Look again; whether free bytes have grown: by a step, which goes by what is expected."""
        now, before = self._clock(), self.courses
        space = look(before.space, expected_bytes, self._kernel.free_bytes(self._fd), now)
        free_inodes, inodes = self._kernel.free_inodes(self._fd), before.inodes
        if inodes is not None and free_inodes is not None:
            inodes = look(inodes, expected_bytes, free_inodes, now)
        self.courses = SpaceCourses(space, inodes)
        return space.grown > before.space.grown


def wait_for_goal(
    kernel: Kernel,
    fd: int,
    gauge: FreeSpaceGauge,
    goal: SpaceGoal,
    survey: Survey,
    *,
    left_bytes: int = 0,
    known: Sequence[SpaceKept] = (),
    containers: Collection[ContainerId] = (),
    patience_s: float = PATIENCE_S,
    tell: Tell = lambda _came, _expected: None,
    stops: Stops = lambda: False,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> GoalReached:
    """Wait until so much of the space that reaped trees took is there; or say what keeps the rest.

    Run it as the user who typed the command: processes are seen as far as that user may look.
    fd            any directory on the volume
    gauge         since before the reap
    survey        of the trees before the reap, `core.space.total` of several
    left_bytes    what is left of them in quarantine
    known         what else keeps some of it, beside what the survey tells
    containers    whose files are looked for in processes; any in a store if none is named
    patience_s    how long free space may stay as it is; 0 for one look
    tell          before each pause
    stops         asked after each pause: after a yes it returns what is known by then
    """
    waiting = _SpaceWait(kernel, fd, survey.n_bytes, [*foreseen(survey, left_bytes), *known], containers)
    pause_s = _FIRST_PAUSE_S
    while True:
        has_grown = gauge.look(survey.n_bytes)
        reasons = waiting.known
        is_enough = is_reached(goal, survey, gauge.courses)
        if not is_enough and (not has_grown or patience_s <= 0) and waiting.is_missing_some(gauge.courses.space):
            # Nothing comes by itself: what a commit would free comes now, and what is still missing has a reason.
            waiting.commit()
            gauge.look(survey.n_bytes)
            reasons = waiting.reasons()
        step = decide_goal(goal, survey, gauge.courses, reasons, clock(), patience_s)
        if stops() or step is not WaitStep.KEEP_WAITING:
            waited = waiting.conclude(gauge.courses.space, reasons)
            return conclude_goal(goal, survey, gauge.courses, waited)
        tell(gauge.courses.space.came(), survey.n_bytes)
        pause(pause_s)
        pause_s = _FIRST_PAUSE_S if has_grown else min(2 * pause_s, _LONGEST_PAUSE_S)


class _SpaceWait:
    """What stays the same while we wait."""

    def __init__(
        self, kernel: Kernel, fd: int, expected_bytes: int, known: list[SpaceKept], containers: Collection[ContainerId]
    ) -> None:
        self._kernel = kernel
        self._fd = fd
        self._expected = expected_bytes
        self._is_local = kernel.is_local(fd)
        self._parts = [b"/%s/" % name.encode() for name in containers] or [b"/%s/" % STORE]
        self.known = known

    def is_missing_some(self, course: SpaceCourse) -> bool:
        """Whether not everything came."""
        return not conclude(course, self._expected, (), "").is_complete

    def commit(self) -> None:
        """Hurry up what is freed by a commit (btrfs). On a network it would only be work for the server."""
        if self._is_local:
            with suppress(OSError), self._kernel.open_dir(self._fd) as directory:
                self._kernel.syncfs(directory)

    def reasons(self) -> list[SpaceKept]:
        """All that are known now."""
        device = device_of(self._fd)
        if device is None:
            return self.known
        return [*_held_open(find_deleted(device, self._is_ours), self._is_ours), *self.known]

    def _is_ours(self, path: bytes) -> bool:
        return any(part in path for part in self._parts)

    def conclude(self, course: SpaceCourse, reasons: list[SpaceKept]) -> Waited:
        """What to tell."""
        unknown = describe_unknown(is_local=self._is_local, sees_all=os.geteuid() == 0)
        return conclude(course, self._expected, reasons, unknown)


def _held_open(found: Iterable[DeletedFile], is_ours: Callable[[bytes], bool]) -> list[SpaceKept]:
    """A reason for each process. A file that several have counts for the first one: each of them must let go of it.

    is_ours  whether a path, in whatever mount, leads to what was reaped
    """
    by_process: dict[int, list[DeletedFile]] = {}
    for deleted in found:
        by_process.setdefault(deleted.pid, []).append(deleted)
    counted: set[tuple[int, int]] = set()
    reasons = []
    for pid, files in sorted(by_process.items()):
        n_bytes = sum(file.n_bytes for file in files if file.inode not in counted)
        counted.update(file.inode for file in files)
        what = _describe(pid, files)
        if not serves_fuse(pid):
            reasons.append(SpaceKept(SpaceKeeper.OPEN, n_bytes, what))
        elif clients := _clients(by_process, is_ours):
            reasons.append(SpaceKept(SpaceKeeper.OPEN, n_bytes, f"{what}, for who uses its mount: {clients}"))
        else:
            reasons.append(SpaceKept(SpaceKeeper.SERVED, n_bytes, f"{what}, until the kernel has forgotten that"))
    reasons.sort(key=lambda reason: -reason.n_bytes)
    if len(reasons) > _MOST_TOLD:
        rest = reasons[_MOST_TOLD - 1 :]
        n_bytes = sum(reason.n_bytes for reason in rest)
        reasons[_MOST_TOLD - 1 :] = [
            SpaceKept(SpaceKeeper.OPEN, n_bytes, f"{len(rest)} more processes have deleted files open")
        ]
    return reasons


def _clients(holders: Container[int], is_ours: Callable[[bytes], bool]) -> str:
    """The programs that use what was reaped through a mount, where it is not deleted. holders: those found already"""
    named = (one for one in find_named(is_ours) if one.pid not in holders and not serves_fuse(one.pid))
    told = [f"{printable(one.command.encode())} (pid {one.pid})" for one in named]
    more = len(told) - _MOST_CLIENTS
    return ", ".join(told[:_MOST_CLIENTS]) + (f" and {more} more" if more > 0 else "")


def _describe(pid: int, files: list[DeletedFile]) -> str:
    largest = max(files, key=lambda file: file.n_bytes)
    what = "a deleted file" if len(files) == 1 else f"{len(files)} deleted files"
    where = f": {printable(largest.path)}" if largest.path else ""
    return f"{printable(largest.command.encode())} (pid {pid}) has {what} open{where}"
