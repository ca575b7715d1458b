"""Remember volumes by their ids: the disk on which each was last served, and its rules.

A volume keeps its id wherever it is mounted. A block copy has the same id: an LVM snapshot, a copy made with dd, the
disk of a cloned machine. Nothing on a copy shows that it is a copy. Therefore a newly served disk gets a grace period,
two disks with the same id are left untouched, and a volume that had rules is not served without them.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from fusefs.core.config import Config
from fusefs.core.printable_names import printable, shell_word
from fusefs.core.record import quote_path, unquote_path
from fusefs.linux.mountinfo import Disk
from fusefs.linux.runtime_directories import make_dir, read_file, replace_file
from fusefs.service.open_volume import Unproven
from fusefs.store.init_store import read_chosen

_LOG = logging.getLogger(__name__)
_FILE = b"volumes.json"
_MOST, _MOST_BYTES = 1000, 1 << 20
_OF_USER = " "
"""Separates the id and the owner in the key of a user's own store."""
_MOST_WINDOWS = 4
_BEFORE_BOOT_S = -1e18
"""Earlier than any possible expiry."""


class CopyMounted(Unproven):
    """Two mounted disks have the same volume ID, so the service reaps neither"""

    problem = "two mounted disks have the same volume ID, so nothing on this one is reaped"


class RulesMissing(Unproven):
    """The configuration has rules for the volume only at another path, so the service reaps nothing on it"""

    problem = "this volume had its own rules at another path and has none here, so nothing on it is reaped"


class GraceWindow(NamedTuple):
    """A period in which a volume was not served, and the end of its grace period, in CLOCK_BOOTTIME seconds."""

    after_s: float
    until_s: float
    ends_s: float


class Grace:
    """The grace period for orphans that expired while a volume was not served, in seconds of the service's clock."""

    def __init__(self, where: bytes = b"", windows: Sequence[GraceWindow] = ()) -> None:
        """where: the volume, for the log; empty: log nothing, because a user could cause such messages at will"""
        self._where = where
        self._windows = windows
        self._ends_s = 0.0

    def at_s(self, due_s: float, expired_s: float) -> float:
        """Return when an orphan may be deleted, given when it is due and when it expired."""
        ends_s = max((one.ends_s for one in self._windows if one.after_s < expired_s <= one.until_s), default=due_s)
        if ends_s <= due_s:
            return due_s
        if ends_s > self._ends_s:
            self._ends_s = ends_s
            if self._where:
                hint = f"trashd reap --volume {shell_word(self._where)} deletes them now"
                _LOG.warning("%s: %s; %s", printable(self._where), self.why(due_s), hint)
        return ends_s

    def why(self, now_s: float) -> str:
        """Return a sentence for the status; empty if the grace period keeps no orphans, or is over."""
        if now_s >= self._ends_s:
            return ""
        ends = time.strftime("%H:%M", time.localtime(time.time() + self._ends_s - _boot_s()))
        return f"orphans that expired while the service was not running are kept until {ends}"


NO_GRACE = Grace()


class _Remembered(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the service remembers about one volume.

    disk     Disk.name of the disk on which it was last served
    until_s  the time until which it was served, in CLOCK_BOOTTIME of the boot that `disk` names
    windows  its grace windows during the same boot
    rules    the quoted path of the [[volume]] that applied to it; empty if there was none
    """

    disk: str = ""
    until_s: float = 0.0
    windows: tuple[GraceWindow, ...] = ()
    rules: str = ""


class _MountedVolume(NamedTuple):
    """A mounted volume. on_change: called with True if a copy of it was mounted, and with False if a copy is gone"""

    disk: Disk
    on_change: Callable[[bool], None]


class RememberedVolumes:
    """What the service remembers about volumes, saved in a file for the next service, and the mounted volumes."""

    def __init__(self, state: bytes) -> None:
        """state: the service's state directory."""
        self._path = os.path.join(state, _FILE)
        self._volumes = self._read()
        self._mounted: dict[str, dict[bytes, _MountedVolume]] = {}

    def _read(self) -> dict[str, _Remembered]:
        try:
            return msgspec.json.decode(read_file(self._path, _MOST_BYTES), type=dict[str, _Remembered])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            _LOG.warning("%s: the saved state of the volumes can't be read: %s", printable(self._path), error)
            return {}

    def _note(self, volume: str, entry: _Remembered, *, is_durable: bool = False) -> None:
        if self._volumes.pop(volume, None) == entry:
            self._volumes[volume] = entry
            return
        self._volumes[volume] = entry
        while len(self._volumes) > _MOST:
            # Users can create any number of stores, so theirs are forgotten before any of root's volumes.
            del self._volumes[next((one for one in self._volumes if _OF_USER in one), next(iter(self._volumes)))]
        try:
            make_dir(os.path.dirname(self._path))
            replace_file(self._path, msgspec.json.encode(self._volumes), 0o600, is_durable=is_durable)
        except OSError as error:
            _LOG.warning("%s can't be written: %s", printable(self._path), error.strerror)

    def _of(self, volume: str) -> _Remembered:
        return self._volumes.get(volume, _Remembered())

    def appear(self, volume: str, where: bytes, disk: Disk, now_s: float, grace_s: float) -> Grace:
        """Note that a volume's disk is newly served, and return the grace period."""
        entry = self._of(volume)
        is_same = bool(disk.name) and entry.disk == disk.name
        last = GraceWindow(entry.until_s if is_same else _BEFORE_BOOT_S, now_s, now_s + grace_s)
        windows = tuple(one for one in entry.windows if is_same and one.ends_s > now_s)
        if len(windows) == _MOST_WINDOWS:
            windows, last = windows[:-1], last._replace(after_s=windows[-1].after_s)
        windows = (*windows, last)
        self._note(volume, msgspec.structs.replace(entry, disk=disk.name, until_s=now_s, windows=windows))
        return Grace(where, windows)

    def disappear(self, volume: str, disk: Disk, served_until_s: float) -> None:
        """Note that a volume's disk is no longer served, for now or for good."""
        entry = self._of(volume)
        if entry.disk == disk.name:
            self._note(volume, msgspec.structs.replace(entry, until_s=served_until_s))

    def refuse_copy(self, volume: str, path: bytes, disk: Disk, on_change: Callable[[bool], None]) -> None:
        """Refuse disks with the same volume id, except the one that `trashd init` selected. Raises  CopyMounted"""
        if not disk.is_block:
            return
        mounted = self._mounted.setdefault(volume, {})
        mounted[path] = _MountedVolume(disk, on_change)
        copies = {other: one for other, one in mounted.items() if one.disk.name != disk.name}
        if not disk.is_users:  # a user who mounts a disk must not block another user's volume
            for one in copies.values():
                one.on_change(True)
            copies = {other: one for other, one in copies.items() if not one.disk.is_users}
        if copies and read_chosen().get(volume) != disk.name:
            where = " and ".join(printable(one) for one in (path, *copies))
            raise CopyMounted(where, f"unmount the copy; or, to select this disk, run trashd init {shell_word(path)}")

    def forget_mounted(self, volume: str, path: bytes) -> None:
        """Forget a mounted volume; its copies may be served from now on."""
        mounted = self._mounted.get(volume, {})
        if mounted.pop(path, None) is not None:
            for one in list(mounted.values()):
                one.on_change(False)

    def refuse_without_rules(self, volume: str, path: bytes, config: Config) -> None:
        """Refuse to apply the defaults to a volume that had its own rules at another path. Raises  RulesMissing

        If a volume at the same path no longer has rules, an administrator removed them on purpose.
        """
        entry, rules = self._of(volume), config.rules_path(path, volume)
        had = unquote_path(entry.rules) if entry.rules else b""
        if not rules and had not in (b"", path):
            hint = f'mount it at the earlier path, add id = "{volume}" to its [[volume]], or add a [[volume]] here'
            raise RulesMissing(f"{printable(path)} (before: {printable(had)})", hint)
        self._note(volume, msgspec.structs.replace(entry, rules=quote_path(rules) if rules else ""), is_durable=True)


class ServedVolume:
    """What a volume's loop knows about its volume: the disk that it serves, and the grace period."""

    def __init__(self, memory: RememberedVolumes, path: bytes, owner: int | None) -> None:
        """owner: the owner of a user's own store, if root's service serves it; None for any other store"""
        self._memory = memory
        self._path = path
        self._owner = owner
        self._volume = ""
        self._disk: Disk | None = None
        self._until_s = 0.0
        self.grace = NO_GRACE

    def recognise(self, volume: str, disk: Disk, config: Config, on_change: Callable[[bool], None]) -> None:
        """Check that an opened volume is the one remembered, and has its rules. Raises  Unproven

        on_change   see `refuse_copy`
        """
        if volume != self._volume:
            self.note_unmounted()
        self._volume = volume
        if self._owner is None:
            self._memory.refuse_copy(volume, self._path, disk, on_change)
            self._memory.refuse_without_rules(volume, self._path, config)
        if disk != self._disk:
            self.note_unserved()
            where = self._path if self._owner is None else b""
            self.grace = self._memory.appear(self._key(), where, disk, _boot_s(), config.grace_s)
            self._disk = disk
        self.note_served()

    def _key(self) -> str:
        """Return the key of the remembered volume; it contains the owner, since users can give their stores any id."""
        return self._volume if self._owner is None else f"{self._volume}{_OF_USER}{self._owner}"

    def note_served(self) -> None:
        """Note that the volume is still served."""
        self._until_s = _boot_s()

    def note_unserved(self) -> None:
        """Note that the volume has not been served since the last `note_served`."""
        if self._disk is not None:
            self._memory.disappear(self._key(), self._disk, self._until_s)
        self._disk = None

    def note_unmounted(self) -> None:
        self.note_unserved()
        self._memory.forget_mounted(self._volume, self._path)


def _boot_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
