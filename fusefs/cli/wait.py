"""Implements `--wait` of swap and reap: follows orphans until they are deleted or enough space is free.

statvfs(2) shows how much space became free, whichever process freed it. At the end, each process that still has deleted
files of these orphans open is named once.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from shutil import get_terminal_size

from fusefs.cli import output
from fusefs.cli.stop_signals import StopSignals
from fusefs.cli.swap_paths import SwapBatch, swap_all
from fusefs.core.container_states import State
from fusefs.core.errors import Incomplete, NotFound, TrashdError, from_os
from fusefs.core.human_units import format_duration, format_size
from fusefs.core.names import ContainerId, join_path
from fusefs.core.printable_names import printable, printable_text, shell_word
from fusefs.core.results import Reaped, ShouldStop, Waited, WaitReason, WaitReasonKind
from fusefs.core.service_status import VolumePhase, VolumeStatus
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import find_place, is_inside, read_mounts
from fusefs.linux.runtime_directories import SYSTEM_RUNTIME, runtime_dir
from fusefs.linux.tree_users import DeletedFile, find_deleted, find_device, serves_fuse
from fusefs.store.as_owner import call_as_owner
from fusefs.store.backing_and_mount import DIRECTORY
from fusefs.store.container import ClaimLost, hold, move_to_state
from fusefs.store.find_stores import discover_stores, folders_for_caller
from fusefs.store.layout import TREE, Store, UserFolder
from fusefs.store.mounted_paths import open_both_sides
from fusefs.store.reserve import SPARE_FOR_REAPER, call_with_room
from fusefs.store.swap import Swapped

_PAUSE_S = 0.2
_RESTART_S = 5.0
"""How long the service may be gone, for example during a restart, before the wait ends."""
_PATIENCE_S = 10.0
"""How long the free space may stay the same after the trees are deleted, before the wait ends."""
_MARKED_MAX = 200
"""How many trees are kept open, to distinguish a restore from a reap."""
_NAMED_MAX = 3
TOLERANCE_BYTES = 256 << 10
"""How much space deleted files that are still open may take without being reported."""
_HINTS = {
    WaitReasonKind.NOBODY: "trashd reap --now --wait --volume {volume} {ids}",
    WaitReasonKind.PAUSED: "trashd resume {volume}",
    WaitReasonKind.BROKEN: "trashd status shows the errors",
    WaitReasonKind.LEFT: "trashd list --state quarantine",
}


class FollowedOrphan:
    """An orphan that is followed until it is deleted, restored or in quarantine."""

    def __init__(self, folder: UserFolder, container: ContainerId) -> None:
        self.folder = folder
        self.id = container
        self._tree: Fd | None = None

    def mark(self) -> None:
        """Open the tree and keep it open, to distinguish a restore from a reap, after which the tree has no link."""
        with suppress(OSError):
            self._tree = self.folder.store.kernel.open_beneath(self.folder.fd, self._path(State.ORPHANS, TREE))

    def close(self) -> None:
        if self._tree is not None:
            self._tree.close()
            self._tree = None

    def give_up(self, _visible: object = None) -> None:
        """Move the orphan to reaping/, where the next reaper deletes it; must run as the folder's owner.

        If another process has locked the orphan, it stays where it is.
        Raises  BadRecord, OSError
        """
        held = hold(self.folder, State.ORPHANS, self.id)
        if not isinstance(held, ClaimLost):
            with held:
                call_with_room(self.folder, SPARE_FOR_REAPER, lambda: move_to_state(held, State.REAPING))

    def state(self) -> State | None:
        """Return the orphan's state; None if it is gone. Check all states twice, since it may move meanwhile."""
        for _ in range(2):
            for state in (State.ORPHANS, State.REAPING, State.QUARANTINE, State.RESTORING, State.STAGE):
                with suppress(FileNotFoundError):
                    self.folder.store.kernel.stat(self.folder.fd, self._path(state))
                    return state
        return None

    def find_end(self) -> list[WaitReason] | None:
        """Return the reasons why the space does not become free, if any; None while that is undecided."""
        state = self.state()
        if state is State.QUARANTINE:
            return [_explain_quarantine(self.id)]
        if state is not None:
            return None
        is_restored = self._tree is not None and self.folder.store.kernel.fstat(self._tree).st_nlink > 0
        self.close()
        return [WaitReason(WaitReasonKind.RESTORED, f"{self.id} was restored")] if is_restored else []

    def _path(self, state: State, *names: bytes) -> bytes:
        return join_path(state.value.encode(), self.id.encode(), *names)


def _explain_quarantine(container: ContainerId) -> WaitReason:
    return WaitReason(WaitReasonKind.LEFT, f"{container} could not be deleted completely: the rest is in quarantine")


class VolumeWait:
    """Follows orphans, and measures how much space of their volume becomes free after this object is created.

    base        the directory that holds the store
    owned       the exit stack that closes the opened files
    goal_bytes  as in `Waited`
    """

    def __init__(self, kernel: Kernel, base: bytes, owned: ExitStack, goal_bytes: int = 0) -> None:
        """Raises  OSError; NoBacking"""
        self.ids: list[ContainerId] = []
        self._kernel = kernel
        self._base = base
        self._owned = owned
        self._goal_bytes = goal_bytes
        # The space of a trashd mount is on the backing volume, where its daemon has files open.
        with open_both_sides(kernel, base) as shown:
            self._fd = owned.enter_context(kernel.open_beneath(shown.fd, b".", DIRECTORY))
        self._before = self._highest = kernel.free_bytes(self._fd)
        self._orphans: list[FollowedOrphan] = []
        self._folders: dict[bytes, UserFolder] = {}
        self._reasons: list[WaitReason] = []

    def came_bytes(self) -> int:
        """Return the largest amount of space that has become free so far; others may have used it since."""
        self._highest = max(self._highest, self._kernel.free_bytes(self._fd))
        return self._highest - self._before

    def is_reached(self) -> bool:
        """Return whether the requested amount became free; false if the goal is only that the trees are deleted."""
        return 0 < self._goal_bytes <= self.came_bytes()

    def add_reaped(self, reaped: Reaped) -> None:
        if reaped.lost is None and not reaped.report.stopped:
            self.ids.append(reaped.id)
            if reaped.report.n_failed:
                self._reasons.append(_explain_quarantine(reaped.id))

    def add_swapped(self, swapped: Swapped) -> None:
        """Add an orphan to follow. Raises  TrashdError, OSError if its store can't be opened"""
        if swapped.store not in self._folders:
            self._folders[swapped.store] = self._open(swapped)
        orphan = FollowedOrphan(self._folders[swapped.store], swapped.id)
        if len(self._orphans) < _MARKED_MAX:
            self._owned.callback(orphan.close)
            orphan.mark()
        self._orphans.append(orphan)
        self.ids.append(swapped.id)

    def _open(self, swapped: Swapped) -> UserFolder:
        """Open the user's folder that contains an orphan. Root's service may have moved the folder since the swap."""
        for store in discover_stores(self._kernel, (self._base,)):
            self._owned.enter_context(store)
            for folder in folders_for_caller(store):
                if folder.path() == swapped.store or FollowedOrphan(folder, swapped.id).state() is not None:
                    return self._owned.enter_context(folder)
                folder.fd.close()
        raise NotFound(swapped.store)

    def follow(self, show_progress: Callable[[str], None], stops: ShouldStop, *, keeps: bool) -> Waited:
        """Follow the orphans until all are gone or in quarantine, enough space is free, or no reaper serves them.

        show_progress  called with a text, a few times a second
        stops          returns whether to end the wait now and leave everything as it is
        keeps          the orphans keep their retention; otherwise, if there is a reaper, they are reaped at once
        Raises         TrashdError, OSError if an orphan can't be followed
        """
        store, remaining, served_s = self._orphans[0].folder.store, list(self._orphans), time.monotonic()
        kind, state = find_reaper(store)
        if kind is WaitReasonKind.NOBODY:
            self._reasons.append(WaitReason(kind, state))
            return self.conclude(stops, are_gone=False)
        for orphan in () if keeps else self._orphans:
            if not stops():
                call_as_owner(orphan.folder, orphan.give_up, None)
                if orphan.state() is State.ORPHANS:
                    self._reasons.append(WaitReason(WaitReasonKind.PINNED, f"another process has locked {orphan.id}"))
                    remaining.remove(orphan)
        while True:
            while remaining and (end := remaining[0].find_end()) is not None:
                self._reasons += end
                del remaining[0]
            if not remaining or self.is_reached() or stops():
                return self.conclude(stops, are_gone=not remaining)
            kind, state = find_reaper(store)
            if kind is None:
                served_s = time.monotonic()
            elif kind is not WaitReasonKind.NOBODY or time.monotonic() - served_s > _RESTART_S:
                self._reasons.insert(0, WaitReason(kind, state))
                return self.conclude(stops, are_gone=False)
            show_progress(f"waiting: {format_size(self.came_bytes())} became free; {state}")
            time.sleep(_PAUSE_S)

    def conclude(self, stops: ShouldStop, *, are_gone: bool = True) -> Waited:
        """Return how the wait ended, and what still holds the space that did not become free.

        are_gone  all orphans are gone, so wait only for space that the filesystem frees later
        """
        reasons = (*self._reasons, *(self._settle(stops) if are_gone else ()))
        is_reached = self.is_reached() or (not self._goal_bytes and are_gone and not reasons)
        if is_reached:
            reasons = ()
        elif are_gone and not reasons:
            reasons = (WaitReason(WaitReasonKind.LESS, "the trees are deleted, but no more space becomes free"),)
        ids = " ".join(self.ids[:_NAMED_MAX]) + (" ..." if len(self.ids) > _NAMED_MAX else "")
        hint = next((_HINTS[reason.kind] for reason in reasons if reason.kind in _HINTS), "")
        hint = hint.format(volume=shell_word(self._base), ids=ids)
        return Waited(self._base, self._goal_bytes, is_reached, self.came_bytes(), reasons, hint)

    def _settle(self, stops: ShouldStop) -> list[WaitReason]:
        """Wait for space that is freed after the removal: by a commit (btrfs), a worker (xfs), a server or a daemon.

        Returns  the processes that still have deleted files open
        """
        if self._kernel.is_local(self._fd):
            with suppress(OSError), self._kernel.open_dir(self._fd) as directory:
                self._kernel.syncfs(directory)
        counted, since_s, held = -1, time.monotonic(), list[DeletedFile]()
        while not (self.is_reached() or stops()):
            free_bytes = self.came_bytes()
            if (
                free_bytes > counted + counted // 50
            ):  # in steps of 2 %, so that the wait ends even if other processes continue to free space
                counted, since_s = free_bytes, time.monotonic()
            else:
                held = self._find_held()
                # The daemon of a mount closes a file once the kernel has forgotten it.
                is_patient = self._goal_bytes or (held and all(serves_fuse(pid) for pid in {one.pid for one in held}))
                if not is_patient or time.monotonic() - since_s >= _PATIENCE_S:
                    break
            time.sleep(_PAUSE_S)
        holders = sorted({(one.pid, one.command) for one in held})
        return [_name_holder(*who, [one for one in held if (one.pid, one.command) == who]) for who in holders]

    def _find_held(self) -> list[DeletedFile]:
        """Return the deleted files that processes have open; an empty list if their size is within the tolerance."""
        device = find_device(self._fd)
        parts = [b"/%s/" % one.encode() for one in self.ids]
        held = list(find_deleted(device, lambda path: any(part in path for part in parts))) if device else []
        return held if sum({one.inode or one.path: one.n_bytes for one in held}.values()) > TOLERANCE_BYTES else []


def _name_holder(pid: int, command: str, files: list[DeletedFile]) -> WaitReason:
    largest = max(files, key=lambda file: file.n_bytes)
    count = "a deleted file" if len(files) == 1 else f"{len(files)} deleted files"
    where = f": {printable(largest.path)}" if largest.path else ""
    holder = f"{printable(command.encode())} (pid {pid})" if pid else f"the kernel, for {command},"
    detail = f"{holder} has {count} open{where}"
    return WaitReason(WaitReasonKind.OPEN, detail, sum(file.n_bytes for file in files))


_IDLE_PHASES = {
    VolumePhase.PAUSED: WaitReasonKind.PAUSED,
    VolumePhase.BROKEN: WaitReasonKind.BROKEN,
    VolumePhase.ELSEWHERE: WaitReasonKind.NOBODY,
    VolumePhase.GONE: WaitReasonKind.NOBODY,
    VolumePhase.UNPROVEN: WaitReasonKind.NOBODY,
}
"""Phases in which a reaper deletes nothing until an administrator acts."""


def find_reaper(store: Store) -> tuple[WaitReasonKind | None, str]:
    """Return the reason why no reaper deletes a store's orphans (None if one does), and a description of the reaper."""
    from fusefs.service.state_files import served_volumes

    volumes, mounts = list[VolumeStatus](), read_mounts()
    for directory in dict.fromkeys((SYSTEM_RUNTIME, runtime_dir())):
        with suppress(TrashdError, OSError):  # the status is from another version, or is not readable
            volumes += served_volumes(directory)
    place = find_place(store.base_path, mounts)

    def serves(volume: VolumeStatus) -> bool:
        """Return whether a served volume includes the store.

        A store below another store on the same filesystem is served with the upper one, whose folders point to it.
        """
        upper, is_below = find_place(volume.root_path(), mounts), is_inside(store.base_path, volume.root_path())
        is_upper = place is not None and upper is not None and place.device == upper.device and is_below
        # An ID is not secret: the private store of another user may have the same one.
        return volume.owner in (None, store.owner) and (volume.id == store.volume.id or is_upper)

    serving = [volume for volume in volumes if serves(volume)]
    if not serving:
        return WaitReasonKind.NOBODY, f"no reaper serves {printable(store.base_path)}"
    serving.sort(key=lambda one: (one.id != store.volume.id, -len(one.root_path()), one.phase in _IDLE_PHASES))
    phase, why = serving[0].phase, serving[0].why
    return _IDLE_PHASES.get(phase), f"reaper: {phase.value}" + (f": {printable_text(why)}" if why else "")


def swap_and_wait(batch: SwapBatch, goal_bytes: int, keep_for_s: int) -> int:
    """Swap one path after the other, then wait volume by volume; return the exit code.

    goal_bytes  the space that has to become free on each volume; 0: wait until all trees are deleted
    keep_for_s  the requested retention; 0 if the trees are not retained
    """
    volumes: dict[bytes, VolumeWait] = {}

    def after(swapped: Swapped) -> int:
        base = swapped.base()
        volume = volumes.get(base) or VolumeWait(Kernel(), base, owned, goal_bytes)
        volume.add_swapped(swapped)
        volumes[base] = volume
        return 0

    with ExitStack() as owned:
        code = swap_all(batch._replace(after=after))
        sys.stdout.flush()  # so that a program that reads the output learns that the names are free
        if keep_for_s and not batch.json_lines:
            output.warn(f"nothing is deleted before the retention ends, in {format_duration(keep_for_s)}")
        codes, show_progress = [code] if code else [], partial(_show_progress, batch.json_lines)
        stop = owned.enter_context(StopSignals())
        for base, volume in volumes.items():
            try:
                waited = volume.follow(show_progress, stop, keeps=bool(keep_for_s))
                show_progress("")
                codes.append(print_waited(waited, as_json=batch.json_lines))
            except (TrashdError, OSError) as error:
                show_progress("")
                codes.append(output.print_error(from_os(error, base), as_json=batch.json_lines))
            if stop():
                return stop.exit_code()
    return output.exit_code(codes)


def print_waited(waited: Waited, *, as_json: bool) -> int:
    """Print how much space became free on a volume, and what holds the rest; return the exit code."""
    if as_json:
        output.as_json(waited)
    else:
        print(f"{printable(waited.volume)}: {format_size(waited.came_bytes)} became free")
        for reason in waited.reasons:
            print(f"  {format_size(reason.n_bytes)}: {reason.detail}" if reason.n_bytes else f"  {reason.detail}")
        if waited.hint:
            print(f"  hint: {waited.hint}", file=sys.stderr)
    return 0 if waited.is_reached else Incomplete.exit_code


def _show_progress(as_json: bool, text: str) -> None:
    if not as_json and sys.stderr.isatty():
        os.write(2, b"\r" + text[: get_terminal_size().columns - 1].encode() + b"\x1b[K")
