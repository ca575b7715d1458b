"""What a service knows of volumes by their ids: on which disk each was served last, and under which rules.

A volume is known again by its id wherever it is mounted, and so is a block copy of it: an LVM snapshot, a dd, a disk of
a cloned machine. Nothing on a copy tells that it is one. So a disk that comes to be served has a while of grace, two
disks with one id stay untouched, and a volume that had rules is not served without them.
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
from fusefs.core.record import quote, unquote
from fusefs.linux.mountinfo import Disk
from fusefs.linux.runtime_directories import make_dir, read_file, replace_file
from fusefs.service.open_volume import Unproven
from fusefs.store.init_store import read_chosen

_LOG = logging.getLogger(__name__)
_FILE = b"volumes.json"
_MOST, _MOST_BYTES = 1000, 1 << 20
_OF_USER = " "
"""Between the id and the owner of a user's own store."""
_MOST_WINDOWS = 4
_EVER_S = -1e18
"""So long before the boot that nothing has expired before."""


class CopyMounted(Unproven):
    """Two mounted disks have the ID of one volume, so the service reaps neither"""

    problem = "two mounted disks have the same volume ID, so nothing on this one is reaped"


class RulesMissing(Unproven):
    """The configuration has rules for the volume at another path only, so the service reaps nothing on it"""

    problem = "this volume had its own rules at another path and has none here, so nothing on it is reaped"


class GraceWindow(NamedTuple):
    """A time in which a volume was not served, and until when that keeps what expired then; by CLOCK_BOOTTIME."""

    after_s: float
    until_s: float
    ends_s: float


class Grace:
    """A while in which nothing goes that expired while a volume was not served; in seconds of the service's time."""

    def __init__(self, where: bytes = b"", windows: Sequence[GraceWindow] = ()) -> None:
        """where: the volume, for the log; empty: nothing is logged, as a user can bring it about at will."""
        self._where = where
        self._windows = windows
        self._ends_s = 0.0

    def at_s(self, due_s: float, expired_s: float) -> float:
        """When something may go that is due at one time, and expired at another."""
        ends_s = max((one.ends_s for one in self._windows if one.after_s < expired_s <= one.until_s), default=due_s)
        if ends_s <= due_s:
            return due_s
        if ends_s > self._ends_s:
            self._ends_s = ends_s
            if self._where:
                hint = f"trashd reap --all --volume {shell_word(self._where)} deletes them now"
                _LOG.warning("%s: %s; %s", printable(self._where), self.why(due_s), hint)
        return ends_s

    def why(self, now_s: float) -> str:
        """A sentence for the status; empty if nothing is kept by it, or no longer."""
        if now_s >= self._ends_s:
            return ""
        ends = time.strftime("%H:%M", time.localtime(time.time() + self._ends_s - _boot_s()))
        return f"orphans that expired while the service was not running are kept until {ends}"


NO_GRACE = Grace()


class _Remembered(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is known of one volume.

    disk     the one that it was served on last, as Disk.name has it
    until_s  until when, by CLOCK_BOOTTIME of the boot in that name
    windows  those of its grace, of that boot too
    rules    the path of the [[volume]] that it had, quoted; empty if it had none
    """

    disk: str = ""
    until_s: float = 0.0
    windows: tuple[GraceWindow, ...] = ()
    rules: str = ""


class _MountedVolume(NamedTuple):
    """look_again: has its loop look at it anew; came: because a copy was mounted, otherwise one has gone"""

    disk: Disk
    look_again: Callable[[bool], None]


class KnownVolumes:
    """The memory of a service, in a file that the next one reads, and which volumes are mounted."""

    def __init__(self, state: bytes) -> None:
        """state: the service's state directory."""
        self._path = os.path.join(state, _FILE)
        self._known = self._read()
        self._mounted: dict[str, dict[bytes, _MountedVolume]] = {}

    def _read(self) -> dict[str, _Remembered]:
        try:
            return msgspec.json.decode(read_file(self._path, _MOST_BYTES), type=dict[str, _Remembered])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            _LOG.warning("%s: the saved state of the volumes can't be read: %s", printable(self._path), error)
            return {}

    def _note(self, volume: str, one: _Remembered, *, is_durable: bool = False) -> None:
        if self._known.pop(volume, None) == one:
            self._known[volume] = one
            return
        self._known[volume] = one
        while len(self._known) > _MOST:
            # Users make as many stores as they like: theirs are forgotten before any of root's volumes.
            del self._known[next((one for one in self._known if _OF_USER in one), next(iter(self._known)))]
        try:
            make_dir(os.path.dirname(self._path))
            replace_file(self._path, msgspec.json.encode(self._known), 0o600, is_durable=is_durable)
        except OSError as error:
            _LOG.warning("%s can't be written: %s", printable(self._path), error.strerror)

    def _of(self, volume: str) -> _Remembered:
        return self._known.get(volume, _Remembered())

    def appear(self, volume: str, where: bytes, disk: Disk, now_s: float, grace_s: float) -> Grace:
        """What a volume gets whose disk comes to be served."""
        known = self._of(volume)
        is_same = bool(disk.name) and known.disk == disk.name
        last = GraceWindow(known.until_s if is_same else _EVER_S, now_s, now_s + grace_s)
        windows = tuple(one for one in known.windows if is_same and one.ends_s > now_s)
        if len(windows) == _MOST_WINDOWS:
            windows, last = windows[:-1], last._replace(after_s=windows[-1].after_s)
        windows = (*windows, last)
        self._note(volume, msgspec.structs.replace(known, disk=disk.name, until_s=now_s, windows=windows))
        return Grace(where, windows)

    def disappear(self, volume: str, disk: Disk, served_until_s: float) -> None:
        """Its disk is not served any more, for now or for good."""
        known = self._of(volume)
        if known.disk == disk.name:
            self._note(volume, msgspec.structs.replace(known, until_s=served_until_s))

    def refuse_copy(self, volume: str, path: bytes, disk: Disk, look_again: Callable[[bool], None]) -> None:
        """Of two disks with one volume's id neither is served, unless `trashd init` said which. Raises  CopyMounted"""
        if not disk.is_block:
            return
        mounted = self._mounted.setdefault(volume, {})
        mounted[path] = _MountedVolume(disk, look_again)
        copies = {other: one for other, one in mounted.items() if one.disk.name != disk.name}
        if not disk.is_users:  # a user who has a disk mounted holds up nobody else's volume
            for one in copies.values():
                one.look_again(True)
            copies = {other: one for other, one in copies.items() if not one.disk.is_users}
        if copies and read_chosen().get(volume) != disk.name:
            where = " and ".join(printable(one) for one in (path, *copies))
            raise CopyMounted(where, f"unmount the copy, or select the volume: trashd init {shell_word(path)}")

    def forget_mounted(self, volume: str, path: bytes) -> None:
        """It is not mounted there any more: its copies may be served."""
        mounted = self._mounted.get(volume, {})
        if mounted.pop(path, None) is not None:
            for one in list(mounted.values()):
                one.look_again(False)

    def refuse_without_rules(self, volume: str, path: bytes, config: Config) -> None:
        """A volume that the configuration named at another path is not served by the defaults. Raises  RulesMissing

        Where it was named it may be so no more: then that is what its administrator wants.
        """
        known, rules = self._of(volume), config.rules_of(path, volume)
        had = unquote(known.rules) if known.rules else b""
        if not rules and had not in (b"", path):
            hint = f'mount it there, add id = "{volume}" to its [[volume]], or add a [[volume]] for this path'
            raise RulesMissing(f"{printable(path)} (before: {printable(had)})", hint)
        self._note(volume, msgspec.structs.replace(known, rules=quote(rules) if rules else ""), is_durable=True)


class ServedVolume:
    """What one volume's loop has of that: on which disk it serves the volume, and what grace that has."""

    def __init__(self, known: KnownVolumes, path: bytes, owner: int | None) -> None:
        """owner: of a user's own store that root's service serves; None of any other."""
        self._known = known
        self._path = path
        self._owner = owner
        self._volume = ""
        self._disk: Disk | None = None
        self._until_s = 0.0
        self.grace = NO_GRACE

    def recognise(self, volume: str, disk: Disk, config: Config, look_again: Callable[[bool], None]) -> None:
        """See whether an opened volume is the one, and has the rules, that it had. Raises  Unproven

        look_again  see `refuse_copy`
        """
        if volume != self._volume:
            self.is_gone()
        self._volume = volume
        if self._owner is None:
            self._known.refuse_copy(volume, self._path, disk, look_again)
            self._known.refuse_without_rules(volume, self._path, config)
        if disk != self._disk:
            self.end()
            where = self._path if self._owner is None else b""
            self.grace = self._known.appear(self._key(), where, disk, _boot_s(), config.grace_s)
            self._disk = disk
        self.goes_on()

    def _key(self) -> str:
        """What it is remembered by: a user can give a store of the user's own any id."""
        return self._volume if self._owner is None else f"{self._volume}{_OF_USER}{self._owner}"

    def goes_on(self) -> None:
        """It is served still."""
        self._until_s = _boot_s()

    def end(self) -> None:
        """It is not served any more, since it was seen to be so last."""
        if self._disk is not None:
            self._known.disappear(self._key(), self._disk, self._until_s)
        self._disk = None

    def is_gone(self) -> None:
        """It is not mounted any more."""
        self.end()
        self._known.forget_mounted(self._volume, self._path)


def _boot_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
