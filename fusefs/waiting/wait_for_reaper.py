"""Orphans whose space a command waits for: left to the reaper, and followed until that is done and the space free."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import NamedTuple, Self, assert_never

from fusefs.core.durations import format_duration
from fusefs.core.errors import NotFound, TrashdError
from fusefs.core.freed_space import SpaceKeeper, SpaceKept, Survey, Waited, total
from fusefs.core.lifecycle import State
from fusefs.core.names import ContainerId, join
from fusefs.core.printable_names import printable, show
from fusefs.core.report import Progress, Stops
from fusefs.core.service_status import VolumePhase, VolumeStatus
from fusefs.core.space_goal import GoalReached, SpaceGoal, explain_impossible, is_reached
from fusefs.engine.count_tree import survey
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.lock_holders import command_of, flock_holders
from fusefs.linux.mountinfo import find_place, is_inside, read_mounts
from fusefs.linux.runtime_directories import SYSTEM_RUNTIME, runtime_dir
from fusefs.service.status_file import served_volumes
from fusefs.store.as_owner import as_owner
from fusefs.store.claim import ClaimLost, hold, look_at_record
from fusefs.store.container import move
from fusefs.store.discover import discover, folders
from fusefs.store.layout import RECORD, TREE, Store, UserFolder
from fusefs.store.list_orphans import explain_first
from fusefs.store.reserve import FOR_REAPER, with_room
from fusefs.store.swap import Swapped
from fusefs.waiting.wait_for_space import FreeSpaceGauge, wait_for_goal

_PAUSE_S = 0.2
_ASK_S = 1.0
"""As often as a service at work says something new."""
_LATE_S = 10.0
"""So long an orphan that is due may lie untouched before it is looked into why."""
_RESTART_S = 5.0
"""So long a service may be away before it counts as gone."""
_UNKNOWN = Survey(0, 0, 0, 0, 1, False)
_MARKED_MAX = 200
"""So many trees are remembered by an fd each, to tell a restore from a reap."""


class LeftToReaper(NamedTuple):
    """How an orphan was left to the reaper.

    survey     of what was in it; None if another process had it
    is_handed  the next reaper takes it; False if it was to be kept, or we were stopped
    """

    survey: Survey | None
    is_handed: bool


def hand_over(
    folder: UserFolder, container: ContainerId, progress: Progress, stops: Stops, *, keeps: bool
) -> LeftToReaper:
    """Count what is in an orphan, and let the reaper have it; to be run as the folder's owner.

    It is counted while we have its lock, so that nothing of it goes meanwhile, and then claimed: what lies in
    reaping/ and no process holds is past its retention, and the next reaper goes on with it. If we are stopped or
    killed before that, it is an orphan like any other.
    keeps   it stays an orphan for its retention
    Raises  BadRecord, OSError
    """
    held = hold(folder, State.ORPHANS, container)
    if isinstance(held, ClaimLost):
        return LeftToReaper(None, False)
    with held:
        seen = survey(folder.store.kernel, held.fd, progress, with_shared=True, stops=stops)
        is_handed = not keeps and not stops()
        if is_handed:
            with_room(folder, FOR_REAPER, lambda: move(held, State.REAPING))
    return LeftToReaper(seen, is_handed)


def _explain_left(folder: UserFolder, container: ContainerId) -> SpaceKept:
    """What of a quarantined orphan is left, and why; to be run as the folder's owner.

    Raises  BadRecord, OSError; FileNotFoundError if it is not in quarantine any more
    """
    kernel = folder.store.kernel
    with folder.open(State.QUARANTINE) as state_fd, kernel.open_dir(state_fd, container.encode()) as fd:
        n_bytes = survey(kernel, fd).n_bytes
    failures = look_at_record(folder, State.QUARANTINE, container).failures
    why = explain_first(failures[0] if failures else None, len(failures))
    return SpaceKept(SpaceKeeper.LEFT, n_bytes, f"could not be removed, in quarantine{f': {why}' if why else ''}")


def _expires_ns(folder: UserFolder, container: ContainerId) -> int | None:
    """When the retention of an orphan ends by what its record says now; None for never. To be run as its owner.

    Raises  BadRecord, OSError; FileNotFoundError if it is no orphan any more
    """
    return look_at_record(folder, State.ORPHANS, container).expires_ns()


class FollowedOrphan:
    """One that is followed: where it is, and when it is nowhere, whether it was put back.

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

    def ended(self) -> SpaceKept | None:
        """Of one that is nowhere: why its space does not come, if it was put back."""
        is_somewhere = self._tree is not None and self.folder.store.kernel.fstat(self._tree).st_nlink > 0
        self.close()
        return SpaceKept(SpaceKeeper.RESTORED, self.survey.n_bytes, f"{self.id} was restored") if is_somewhere else None

    def left(self) -> SpaceKept:
        """Of one in quarantine: what is left, and why."""
        return as_owner(self.folder, lambda _visible: _explain_left(self.folder, self.id), SpaceKept)

    def why_untouched(self) -> SpaceKept | None:
        """Of one that is due and still an orphan: what keeps it, if that can be seen."""
        with suppress(FileNotFoundError):
            if as_owner(self.folder, lambda _visible: _expires_ns(self.folder, self.id), int | None) is None:
                return SpaceKept(SpaceKeeper.PINNED, self.survey.n_bytes, f"{self.id} is to be kept (trashd keep)")
            record = self.folder.store.kernel.stat(self.folder.fd, self._way(State.ORPHANS, RECORD))
            for pid in flock_holders(record.st_ino):
                holder = f"{printable(os.fsencode(command_of(pid)))} (pid {pid})"
                return SpaceKept(SpaceKeeper.PINNED, self.survey.n_bytes, f"{holder} holds the lock of {self.id}")
        return None

    def _way(self, state: State, *names: bytes) -> bytes:
        return join(state.value.encode(), self.id.encode(), *names)


class Followed(NamedTuple):
    """How it ended.

    hindrance  why nothing more will come by itself; None if all have ended, or enough came
    kept       why some of the space will not come
    """

    hindrance: SpaceKept | None
    kept: tuple[SpaceKept, ...]


def follow(
    orphans: Sequence[FollowedOrphan],
    gauge: FreeSpaceGauge,
    goal: SpaceGoal,
    *,
    tell: Callable[[str], None] = lambda _what: None,
    stops: Stops = lambda: False,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> Followed:
    """Wait until the orphans of one store have ended, or until enough has come, or until it is known why it can't.

    tell   gets what goes on, in words, before each pause
    stops  asked after each pause: after a yes it returns what is known by then
    """
    expected = total(orphan.survey for orphan in orphans)
    left, kept = list(orphans), list[SpaceKept]()
    asked_s = late_s = served_s = clock()
    reaper = _find_reaper(orphans[0].folder.store)
    while True:
        gauge.look(expected.n_bytes)
        while left and (end := _end_of(left[0])) is not None:
            kept += end
            del left[0]
            late_s = clock()
        if not left or is_reached(goal, expected, gauge.courses) or stops():
            return Followed(None, tuple(kept))
        now = clock()
        if not isinstance(reaper, SpaceKept):
            served_s = now
        elif reaper.kind is not SpaceKeeper.NOBODY or now - served_s > _RESTART_S:
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
            asked_s, reaper = now, _find_reaper(left[0].folder.store)


def _end_of(orphan: FollowedOrphan) -> list[SpaceKept] | None:
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
        return None  # it was taken out again
    orphan.close()
    return [reason]


def _waits_s(orphan: FollowedOrphan) -> float:
    return (orphan.due_ns - time.time_ns()) / 1e9


def _describe(reaper: VolumeStatus | SpaceKept, waits_s: float) -> str:
    if isinstance(reaper, SpaceKept):
        return reaper.detail
    if waits_s > 0:
        return f"may be reaped in {format_duration(round(waits_s))}"
    rate = f", {reaper.entries_per_s:,.0f} entries/s" if reaper.entries_per_s else ""
    why = f": {show(reaper.why)}" if reaper.why else ""
    return f"{reaper.phase.value}{rate}{why}"


class WaitCallbacks(NamedTuple):
    """How whoever waits is told, and may end it.

    counting  gets the entries and bytes that are counted, about every thousand
    tell      gets what came, what is expected, and what goes on, in words
    stops     whether to end now, and leave everything as it is
    """

    counting: Progress
    tell: Callable[[int, int, str], None]
    stops: Stops


class WaitResult(NamedTuple):
    """How the waiting for one volume ended.

    base    the directory that holds the store
    ids     of the orphans that were waited for
    spared  those of them that were not left to the reaper: they have the retention that a swap gives
    """

    base: bytes
    met: GoalReached
    ids: tuple[ContainerId, ...]
    spared: tuple[ContainerId, ...]


class _AwaitedVolume:
    """The directory that holds a store, what was free when its first victim was gone, and what is waited for."""

    def __init__(self, kernel: Kernel, folder: UserFolder) -> None:
        self.store = folder.store
        self.gauge = FreeSpaceGauge(kernel, folder.store.base.fd)
        self.orphans: list[FollowedOrphan] = []
        self.handed: set[ContainerId] = set()

    def expected(self) -> Survey:
        """What was in all of them, as far as it was counted."""
        return total(orphan.survey for orphan in self.orphans)

    def came_bytes(self) -> int:
        """What came of their space until the last look."""
        return max(self.gauge.courses.space.came(), 0)

    def unmet(self, goal: SpaceGoal, *reasons: SpaceKept) -> GoalReached:
        """What to tell where the goal is not reached, for these reasons."""
        waited = Waited(self.came_bytes(), self.expected().n_bytes, reasons, False)
        return GoalReached(goal, False, waited, self.gauge.courses.came_inodes())


class SwapWait:
    """The volumes of one command."""

    def __init__(self, goal: SpaceGoal, keep_for: int) -> None:
        """keep_for: the retention in seconds that the user asked for; 0 if it is given up."""
        self._goal = goal
        self._keep_for = keep_for
        self._kernel = Kernel()
        self._volumes: dict[bytes, _AwaitedVolume] = {}
        self._folders: dict[bytes, UserFolder] = {}
        self._n_marked = 0
        self._owned = ExitStack()

    def __enter__(self) -> Self:
        """Own what is opened for it."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Let go of the volumes."""
        self._owned.close()

    def add(self, swapped: Swapped) -> None:
        """One more. Raises  TrashdError, OSError if it can't be waited for"""
        folder = self._folders.get(swapped.store)
        if folder is None:
            folder = self._folders[swapped.store] = self._open(swapped)
        base = folder.store.base_path
        volume = self._volumes.get(base)
        if volume is None:
            volume = self._volumes[base] = _AwaitedVolume(self._kernel, folder)
        orphan = FollowedOrphan(folder, swapped.id, time.time_ns() + self._keep_for * 1_000_000_000)
        self._owned.callback(orphan.close)
        if self._n_marked < _MARKED_MAX:
            self._n_marked += 1
            orphan.mark()
        volume.orphans.append(orphan)

    def _open(self, swapped: Swapped) -> UserFolder:
        """The folder that has it; ours until the end."""
        for store in discover(self._kernel, (swapped.base(),)):
            with ExitStack() as mine:
                mine.enter_context(store)
                for folder in folders(store):
                    if folder.path() == swapped.store:
                        mine.enter_context(folder)
                        self._owned.push(mine.pop_all())
                        return folder
                    folder.fd.close()
        raise NotFound(swapped.store)

    def bases(self) -> Iterable[bytes]:
        """The volumes, each by the directory that holds its store."""
        return self._volumes.keys()

    def wait_for(self, base: bytes, ways: WaitCallbacks) -> WaitResult:
        """Wait for one of them.

        Raises  TrashdError, OSError of what can't be counted or followed
        """
        volume = self._volumes[base]
        ids = tuple(orphan.id for orphan in volume.orphans)
        met = self._wait_for(volume, ways)
        return WaitResult(base, met, ids, tuple(one for one in ids if one not in volume.handed))

    def _wait_for(self, volume: _AwaitedVolume, ways: WaitCallbacks) -> GoalReached:
        reaper = _find_reaper(volume.store)
        if isinstance(reaper, SpaceKept) and reaper.kind is SpaceKeeper.NOBODY:
            return volume.unmet(self._goal, reaper)  # nobody would take them, so that nothing is given up
        kept = self._hand_over(volume, ways)
        expected = volume.expected()
        impossible = explain_impossible(self._goal, expected)
        if ways.stops() or impossible is not None or not volume.orphans:
            return volume.unmet(self._goal, *filter(None, [impossible]), *kept)

        def tell(what: str) -> None:
            ways.tell(volume.came_bytes(), expected.n_bytes, what)

        followed = follow(volume.orphans, volume.gauge, self._goal, tell=tell, stops=ways.stops)
        kept += followed.kept
        if ways.stops() or followed.hindrance is not None:
            return volume.unmet(self._goal, *filter(None, [followed.hindrance]), *kept)
        return wait_for_goal(
            self._kernel,
            volume.store.base.fd,
            volume.gauge,
            self._goal,
            expected,
            known=kept,
            containers=[orphan.id for orphan in volume.orphans],
            tell=lambda _came, _expected: tell("reaped"),
            stops=ways.stops,
        )

    def _hand_over(self, volume: _AwaitedVolume, ways: WaitCallbacks) -> list[SpaceKept]:
        """Let the reaper have all of a volume; why some of their space will not come."""
        kept = []
        for orphan in list(volume.orphans):
            if ways.stops():
                break
            handed = self._hand_over_one(orphan, ways)
            if handed.is_handed:
                volume.handed.add(orphan.id)
            if handed.survey is not None:
                orphan.survey = handed.survey
            elif orphan.state() is not State.REAPING:
                volume.orphans.remove(orphan)
                unexplained = SpaceKept(SpaceKeeper.PINNED, 0, f"somebody else has {orphan.id}")
                kept.append(orphan.why_untouched() or unexplained)
        return kept

    def _hand_over_one(self, orphan: FollowedOrphan, ways: WaitCallbacks) -> LeftToReaper:
        keeps = self._keep_for > 0
        act = partial(hand_over, orphan.folder, orphan.id, ways.counting, ways.stops, keeps=keeps)
        return as_owner(orphan.folder, lambda _visible: act(), LeftToReaper)


def _find_reaper(store: Store) -> VolumeStatus | SpaceKept:
    """What the reaper of a store's volume says, root's or else the caller's own; or why nothing is reaped there."""
    reason = SpaceKept(SpaceKeeper.NOBODY, 0, f"no reaper serves {printable(store.base_path)}")
    for directory in dict.fromkeys((SYSTEM_RUNTIME, runtime_dir())):
        with suppress(TrashdError, OSError):  # of another version, or not ours to read
            volume = _find(store, served_volumes(directory))
            if volume is None:
                continue
            hindrance = _explain_hindrance(volume)
            if hindrance is None:
                return volume
            reason = hindrance
    return reason


def _find(store: Store, volumes: tuple[VolumeStatus, ...]) -> VolumeStatus | None:
    """A lower store is served with the upper one of its filesystem, which its user's pointers lead from."""
    # An id is no secret: another user's own store may have the same.
    ours = [volume for volume in volumes if volume.owner in (None, store.owner)]
    for volume in ours:
        if volume.id == store.volume.id:
            return volume
    mounts = read_mounts()
    place = find_place(store.base_path, mounts)
    for volume in sorted(ours, key=lambda volume: -len(volume.root())):
        upper = find_place(volume.root(), mounts)
        if place and upper and place.device == upper.device and is_inside(store.base_path, volume.root()):
            return volume
    return None


def _explain_hindrance(volume: VolumeStatus) -> SpaceKept | None:
    """Why a reaper that serves a volume does not reap there; None if it does, or will without anybody's doing."""
    match volume.phase:
        case (
            VolumePhase.IDLE
            | VolumePhase.LOOKING
            | VolumePhase.REAPING
            | VolumePhase.YIELDING
            | VolumePhase.HURRYING
            | VolumePhase.WINDOW
        ):
            return None
        case VolumePhase.PAUSED:
            return SpaceKept(SpaceKeeper.PAUSED, 0, _told("the reaper is paused", volume))
        case VolumePhase.BROKEN:
            return SpaceKept(SpaceKeeper.BROKEN, 0, _told("the reaper rests after too many errors", volume))
        case VolumePhase.ELSEWHERE | VolumePhase.GONE | VolumePhase.UNPROVEN:
            return SpaceKept(SpaceKeeper.NOBODY, 0, _told("the reaper has let go of the volume", volume))
    assert_never(volume.phase)


def _told(what: str, volume: VolumeStatus) -> str:
    return f"{what}: {show(volume.why)}" if volume.why else what
