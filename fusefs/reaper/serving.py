"""Which running reaper serves a volume, by what it says of itself; or why none does."""

from __future__ import annotations

from contextlib import suppress
from typing import assert_never

from fusefs.core.errors import TrashdError
from fusefs.core.events import show
from fusefs.core.names import printable
from fusefs.core.space import Kind, Reason
from fusefs.core.status import Phase, VolumeStatus
from fusefs.linux.mountinfo import find_place, is_inside, read_mounts
from fusefs.linux.places import SYSTEM_RUNTIME, runtime_dir
from fusefs.reaper.status import read_status
from fusefs.store.layout import Store


def find_reaper(store: Store) -> VolumeStatus | Reason:
    """What the reaper of a store's volume says, root's or else the caller's own; or why nothing is reaped there."""
    reason = Reason(Kind.NOBODY, 0, f"no reaper serves {printable(store.base_path)}")
    for directory in dict.fromkeys((SYSTEM_RUNTIME, runtime_dir())):
        with suppress(TrashdError, OSError):  # of another version, or not ours to read
            seen = read_status(directory)
            if seen is None or not seen.is_running:
                continue
            volume = _find(store, seen.status.volumes)
            if volume is None:
                continue
            hindrance = explain_hindrance(volume)
            if hindrance is None:
                return volume
            reason = hindrance
    return reason


def _find(store: Store, volumes: tuple[VolumeStatus, ...]) -> VolumeStatus | None:
    """A lower store is served with the upper one of its filesystem, which its user's pointers lead from."""
    # An id is no secret: somebody else's own store may have the same.
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


def explain_hindrance(volume: VolumeStatus) -> Reason | None:
    """Why a reaper that serves a volume does not reap there; None if it does, or will without anybody's doing."""
    match volume.phase:
        case Phase.IDLE | Phase.LOOKING | Phase.REAPING | Phase.YIELDING | Phase.HURRYING | Phase.WINDOW:
            return None
        case Phase.PAUSED:
            return Reason(Kind.PAUSED, 0, _told("the reaper is paused", volume))
        case Phase.BROKEN:
            return Reason(Kind.BROKEN, 0, _told("the reaper rests after too many errors", volume))
        case Phase.ELSEWHERE | Phase.GONE | Phase.UNPROVEN:
            return Reason(Kind.NOBODY, 0, _told("the reaper has let go of the volume", volume))
    assert_never(volume.phase)


def _told(what: str, volume: VolumeStatus) -> str:
    return f"{what}: {show(volume.why)}" if volume.why else what
