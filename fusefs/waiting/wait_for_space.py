"""`--wait`: follow the orphans of a volume until they are gone, or until a goal of free space is reached.

Whether space came back is read from statvfs(2), whoever freed it. At the end the processes that have deleted files
of these orphans open are looked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Self

from fusefs.core.errors import NotFound, TrashdError
from fusefs.core.lifecycle import State
from fusefs.core.names import ContainerId, join
from fusefs.core.printable_names import printable, show
from fusefs.core.report import Reaped, Stops
from fusefs.core.service_status import VolumePhase, VolumeStatus
from fusefs.core.sizes import format_size
from fusefs.core.space_goal import DONE, TOLERANCE_BYTES, SpaceGoal, Waited, WaitReason, WaitReasonKind
from fusefs.engine.count_tree import survey
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import find_place, is_inside, read_mounts
from fusefs.linux.runtime_directories import SYSTEM_RUNTIME, runtime_dir
from fusefs.linux.tree_users import DeletedFile, device_of, find_deleted, serves_fuse
from fusefs.service.status_file import served_volumes
from fusefs.store.as_owner import as_owner
from fusefs.store.backing_and_mount import DIRECTORY
from fusefs.store.claim import ClaimLost, hold, look_at_record
from fusefs.store.container import move
from fusefs.store.discover import discover, folders
from fusefs.store.layout import TREE, Store, UserFolder
from fusefs.store.list_orphans import ListedContainer, explain_first
from fusefs.store.mounted_paths import open_shown
from fusefs.store.reserve import FOR_REAPER, with_room
from fusefs.store.swap import Swapped

_PAUSE_S = 0.2
_RESTART_S = 5.0
"""How long a service may be away, as in a restart, before the waiting ends."""
_PATIENCE_S = 10.0
"""How long free space may stay as it is, after the trees are gone, before a goal is given up."""
_MARKED_MAX = 200
"""How many trees are kept open, to distinguish a restore from a reap."""


class FreeSpaceGauge:
    """The free space of a volume since this object was made."""

    def __init__(self, kernel: Kernel, base: bytes, fd: int) -> None:
        """base: the directory that holds the store; fd: any directory of the volume, behind a mount of trashd."""
        self._kernel = kernel
        self._base = base
        self._fd = fd
        self._before = self._highest = self._read()

    def _read(self) -> tuple[int, int]:
        return self._kernel.free_bytes(self._fd), self._kernel.free_inodes(self._fd) or 0

    def came(self) -> tuple[int, int]:
        """The most bytes and inodes that were free, above those before: others may have used them since."""
        (n_bytes, n_inodes), (most_bytes, most_inodes) = self._read(), self._highest
        self._highest = max(n_bytes, most_bytes), max(n_inodes, most_inodes)
        return self._highest[0] - self._before[0], self._highest[1] - self._before[1]

    def is_reached(self, goal: SpaceGoal) -> bool:
        """Whether so much is free; never for a goal that is the end of the trees."""
        n_bytes, n_inodes = self.came()
        if goal.n_inodes is not None:
            return n_inodes >= goal.n_inodes
        return goal.n_bytes is not None and n_bytes >= goal.n_bytes

    def conclude(
        self,
        goal: SpaceGoal,
        ids: Collection[ContainerId],
        reasons: Sequence[WaitReason],
        *,
        are_gone: bool,
        stops: Stops,
    ) -> Waited:
        """Report how the waiting ended, and what keeps the rest.

        ids       of the containers whose deleted files are looked for in processes
        are_gone  they have ended: what the filesystem frees later is waited for
        """
        held = self._settle(goal, ids, stops) if are_gone else []
        is_reached = self.is_reached(goal)
        if goal.is_done():
            is_reached = are_gone and not reasons and sum(one.n_bytes for one in held) <= TOLERANCE_BYTES
        reasons = () if is_reached else (*reasons, *held)
        if are_gone and not is_reached and not reasons:
            reasons = (WaitReason(WaitReasonKind.LESS, 0, "the trees are gone, and no more space comes from them"),)
        return Waited(self._base, goal.text, is_reached, *self.came(), tuple(reasons))

    def _settle(self, goal: SpaceGoal, ids: Collection[ContainerId], stops: Stops) -> list[WaitReason]:
        """Wait for what is freed after the removal: by a commit (btrfs), a worker (xfs), a server, a mount's daemon.

        Returns  the processes that still have deleted files open
        """
        if self._kernel.is_local(self._fd):
            with suppress(OSError), self._kernel.open_dir(self._fd) as directory:
                self._kernel.syncfs(directory)
        counted, since_s = -1, time.monotonic()
        while True:
            came = self.came()[goal.n_inodes is not None]
            has_grown = came > counted + counted // 50  # in steps, so that this ends whatever others free
            if has_grown:
                counted, since_s = came, time.monotonic()
            if self.is_reached(goal):
                return []
            deleted = [] if has_grown else self._find_deleted(ids)
            is_patient = not goal.is_done() or has_grown or _are_daemons(deleted)
            if not is_patient or stops() or time.monotonic() - since_s >= _PATIENCE_S:
                return describe_holders(deleted)
            time.sleep(_PAUSE_S)

    def _find_deleted(self, ids: Collection[ContainerId]) -> list[DeletedFile]:
        device = device_of(self._fd)
        parts = [b"/%s/" % one.encode() for one in ids]
        return [] if device is None else list(find_deleted(device, lambda path: any(part in path for part in parts)))


def _are_daemons(deleted: Sequence[DeletedFile]) -> bool:
    """Whether only daemons of mounts have more than a little open: they close it when the kernel has forgotten it."""
    is_much = sum(one.n_bytes for one in deleted) > TOLERANCE_BYTES
    return is_much and all(serves_fuse(pid) for pid in {one.pid for one in deleted})


def describe_holders(deleted: Iterable[DeletedFile]) -> list[WaitReason]:
    """A reason for each process. The bytes of a file that several have open count for the first of them."""
    by_process: dict[int, list[DeletedFile]] = {}
    for one in deleted:
        by_process.setdefault(one.pid, []).append(one)
    counted: set[tuple[int, int]] = set()
    reasons = []
    for pid, files in sorted(by_process.items()):
        n_bytes = sum(file.n_bytes for file in files if file.inode not in counted)
        counted.update(file.inode for file in files)
        largest = max(files, key=lambda file: file.n_bytes)
        what = "a deleted file" if len(files) == 1 else f"{len(files)} deleted files"
        where = f": {printable(largest.path)}" if largest.path else ""
        detail = f"{printable(largest.command.encode())} (pid {pid}) has {what} open{where}"
        reasons.append(WaitReason(WaitReasonKind.OPEN, n_bytes, detail))
    return reasons


class ReapWait:
    """The volumes of a reap in the foreground, and what was reaped on each."""

    def __init__(self, kernel: Kernel, due: Iterable[ListedContainer]) -> None:
        """Note the free space of each volume. Raises  OSError; NoBacking"""
        self._reaped: dict[bytes, list[Reaped]] = {}
        self._gauges: dict[bytes, FreeSpaceGauge] = {}
        with ExitStack() as owned:
            for base in dict.fromkeys(entry.base_path() for entry in due):
                # Of a mount of ours the backing volume has the space, and its daemon has files open there.
                with open_shown(kernel, base) as shown:
                    fd = owned.enter_context(kernel.open_beneath(shown.fd, b".", DIRECTORY))
                self._gauges[base] = FreeSpaceGauge(kernel, base, fd)
            self._owned = owned.pop_all()

    def __enter__(self) -> Self:
        """Own the volumes."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Close them."""
        self._owned.close()

    def add(self, entry: ListedContainer, reaped: Reaped) -> None:
        """Note what became of an orphan."""
        if reaped.lost is None and not reaped.report.stopped:
            self._reaped.setdefault(entry.base_path(), []).append(reaped)

    def conclude(self, stops: Stops) -> Iterator[Waited]:
        """The volumes on which something was reaped, each when its space is free."""
        for base, reaped in self._reaped.items():
            if stops():
                return
            quarantined = [one.id for one in reaped if one.report.n_failed]
            left = [
                WaitReason(WaitReasonKind.LEFT, 0, f"{one} could not be removed, in quarantine") for one in quarantined
            ]
            yield self._gauges[base].conclude(DONE, [one.id for one in reaped], left, are_gone=True, stops=stops)


class FollowedOrphan:
    """An orphan that is followed until it is gone, restored or in quarantine.

    is_given_up  it has no retention any more: the next reaper may have it
    """

    def __init__(self, folder: UserFolder, swapped: Swapped) -> None:
        self.folder = folder
        self.swapped = swapped
        self.id = swapped.id
        self.is_given_up = False
        self._tree: Fd | None = None

    def mark(self) -> None:
        """Keep its tree open: it still has a link after a restore, and none after a reap."""
        with suppress(OSError):
            self._tree = self.folder.store.kernel.open_beneath(self.folder.fd, self._path(State.ORPHANS, TREE))

    def close(self) -> None:
        """Close its tree."""
        if self._tree is not None:
            self._tree.close()
            self._tree = None

    def state(self) -> State | None:
        """Find its state; None if it is in none. It may move meanwhile, into a state that was looked at already."""
        for _ in range(2):
            for state in (State.ORPHANS, State.REAPING, State.QUARANTINE, State.RESTORING, State.STAGE):
                with suppress(FileNotFoundError):
                    self.folder.store.kernel.stat(self.folder.fd, self._path(state))
                    return state
        return None

    def find_end(self) -> list[WaitReason] | None:
        """None while it is followed; once it has ended, why its space does not come, if it does not."""
        state = self.state()
        if state is None:
            is_restored = self._tree is not None and self.folder.store.kernel.fstat(self._tree).st_nlink > 0
            self.close()
            return [WaitReason(WaitReasonKind.RESTORED, 0, f"{self.id} was restored")] if is_restored else []
        if state is State.QUARANTINE:
            with suppress(FileNotFoundError):  # it was moved out of quarantine
                why = as_owner(self.folder, lambda _visible: _explain_quarantine(self.folder, self.id), str)
                self.close()
                return [WaitReason(WaitReasonKind.LEFT, 0, f"{self.id} could not be removed, in quarantine{why}")]
        return None

    def _path(self, state: State, *names: bytes) -> bytes:
        return join(state.value.encode(), self.id.encode(), *names)


def _explain_quarantine(folder: UserFolder, container: ContainerId) -> str:
    failures = look_at_record(folder, State.QUARANTINE, container).failures
    return f": {explain_first(failures[0], len(failures))}" if failures else ""


def follow(
    orphans: Sequence[FollowedOrphan],
    gauge: FreeSpaceGauge,
    goal: SpaceGoal,
    show_progress: Callable[[str], None],
    stops: Stops,
) -> tuple[list[WaitReason], bool]:
    """Follow the orphans of one store until all have ended, the goal is reached, or no reaper reaps them.

    Returns  why space does not come; whether all orphans have ended
    """
    remaining, reasons, served_s = list(orphans), list[WaitReason](), time.monotonic()
    while True:
        while remaining and (end := remaining[0].find_end()) is not None:
            reasons += end
            del remaining[0]
        if not remaining or gauge.is_reached(goal) or stops():
            return reasons, not remaining
        reaper = find_reaper(remaining[0].folder.store)
        if isinstance(reaper, VolumeStatus):
            served_s, what = time.monotonic(), f"{reaper.phase.value}{f': {show(reaper.why)}' if reaper.why else ''}"
        else:
            what = reaper.detail
            if reaper.kind is not WaitReasonKind.NOBODY or time.monotonic() - served_s > _RESTART_S:
                return [reaper, *reasons], False
        show_progress(f"waiting: {format_size(gauge.came()[0])} came back; {what}")
        time.sleep(_PAUSE_S)


def hand_over(orphan: FollowedOrphan, stops: Stops, _visible: object = None, *, keeps: bool, counts: bool) -> int:
    """Move an orphan to reaping/, where the next reaper goes on with it; to be run as the folder's owner.

    It stays where it is if another process has locked it, or after a stop.
    keeps    it stays for its retention
    counts   find out first, under its lock, how many bytes it takes
    Returns  these
    Raises   BadRecord, OSError
    """
    held = hold(orphan.folder, State.ORPHANS, orphan.id)
    if isinstance(held, ClaimLost):
        return 0
    with held:
        n_bytes = survey(orphan.folder.store.kernel, held.fd, stops=stops).n_bytes if counts else 0
        if not (keeps or stops()):
            with_room(orphan.folder, FOR_REAPER, lambda: move(held, State.REAPING))
    return n_bytes


class SwapWait:
    """The orphans of one command. orphans: by the directory that holds their store"""

    def __init__(self, goal: SpaceGoal, *, keeps: bool) -> None:
        """keeps: the orphans keep the retention that the user asked for; else it is given up."""
        self.orphans: dict[bytes, list[FollowedOrphan]] = {}
        self._goal = goal
        self._keeps = keeps
        self._kernel = Kernel()
        self._folders: dict[bytes, UserFolder] = {}
        self._gauges: dict[bytes, FreeSpaceGauge] = {}
        self._owned = ExitStack()

    def __enter__(self) -> Self:
        """Own what `add` opens."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Close it."""
        self._owned.close()

    def add(self, swapped: Swapped) -> None:
        """Add an orphan. Raises  TrashdError, OSError if its store can't be opened"""
        if swapped.store not in self._folders:
            self._folders[swapped.store] = self._open(swapped)
        folder = self._folders[swapped.store]
        base = folder.store.base_path
        if base not in self._gauges:
            self._gauges[base] = FreeSpaceGauge(self._kernel, base, folder.store.base.fd)
        orphans = self.orphans.setdefault(base, [])
        orphans.append(FollowedOrphan(folder, swapped))
        if len(orphans) <= _MARKED_MAX:
            self._owned.callback(orphans[-1].close)
            orphans[-1].mark()

    def _open(self, swapped: Swapped) -> UserFolder:
        for store in discover(self._kernel, (swapped.base(),)):
            with ExitStack() as ours:
                ours.enter_context(store)
                for folder in folders(store):
                    if folder.path() == swapped.store:
                        ours.enter_context(folder)
                        self._owned.push(ours.pop_all())
                        return folder
                    folder.fd.close()
        raise NotFound(swapped.store)

    def wait_for(self, base: bytes, show_progress: Callable[[str], None], stops: Stops) -> Waited:
        """Wait for one volume.

        show_progress  gets what is done now, a few times a second
        stops          whether to end now and leave everything as it is
        Raises         TrashdError, OSError of what can't be counted or followed
        """
        gauge, orphans, counts = self._gauges[base], self.orphans[base], self._goal.share is not None
        reaper = find_reaper(orphans[0].folder.store)
        if isinstance(reaper, WaitReason) and reaper.kind is WaitReasonKind.NOBODY:  # so nothing is given up
            return gauge.conclude(self._goal, (), [reaper], are_gone=False, stops=stops)
        tree_bytes, locked = 0, list[WaitReason]()
        for orphan in orphans:
            if counts:
                show_progress(f"counting {orphan.id}")
            act = partial(hand_over, orphan, stops, keeps=self._keeps, counts=counts)
            tree_bytes += as_owner(orphan.folder, act, int)
            orphan.is_given_up = orphan.state() is not State.ORPHANS
            if not (orphan.is_given_up or self._keeps or stops()):
                locked.append(WaitReason(WaitReasonKind.PINNED, 0, f"another process has locked {orphan.id}"))
        goal, followed = self._goal.of(tree_bytes), [one for one in orphans if one.is_given_up or self._keeps]
        reasons, are_gone = follow(followed, gauge, goal, show_progress, stops)
        ids, are_gone = [orphan.id for orphan in orphans], are_gone and len(followed) == len(orphans)
        return gauge.conclude(goal, ids, [*locked, *reasons], are_gone=are_gone, stops=stops)


_UNSERVED = WaitReasonKind.NOBODY, "the reaper does not serve the volume any more"
_PHASES = {
    VolumePhase.PAUSED: (WaitReasonKind.PAUSED, "the reaper is paused"),
    VolumePhase.BROKEN: (WaitReasonKind.BROKEN, "the reaper rests after too many errors"),
    VolumePhase.ELSEWHERE: _UNSERVED,
    VolumePhase.GONE: _UNSERVED,
    VolumePhase.UNPROVEN: _UNSERVED,
}
"""The phases in which a reaper reaps nothing until somebody acts."""


def find_reaper(store: Store) -> VolumeStatus | WaitReason:
    """The status of the reaper that serves a store's volume, root's or else the caller's; or why none reaps there."""
    reason = WaitReason(WaitReasonKind.NOBODY, 0, f"no reaper serves {printable(store.base_path)}")
    for directory in dict.fromkeys((SYSTEM_RUNTIME, runtime_dir())):
        with suppress(TrashdError, OSError):  # of another version, or not ours to read
            volume = _find_volume(store, served_volumes(directory))
            if volume is None:
                continue
            if volume.phase not in _PHASES:
                return volume
            kind, what = _PHASES[volume.phase]
            reason = WaitReason(kind, 0, f"{what}: {show(volume.why)}" if volume.why else what)
    return reason


def _find_volume(store: Store, volumes: tuple[VolumeStatus, ...]) -> VolumeStatus | None:
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
