"""The fast paths of a mount, decided while it starts, and shown by `trashd mount --explain` and `trashd status`."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import suppress

from fusefs.core.printable_names import printable
from fusefs.core.uring_choice import FAST_PATH_EFFECTS, FastPath, FastPathReport, FastPathState, encode_report
from fusefs.linux.runtime_directories import NEW, replace_file
from fusefs.mount.places import runtime_dir

_log = logging.getLogger(__name__)


class FastPathStates:
    """The fast paths of one mount; each is on until it is turned off for good."""

    def __init__(self, target: bytes, device: int, off: Mapping[FastPath, str]) -> None:
        """Turn on all fast paths except those in `off`.

        target  the mount point; `open_counters` creates its runtime directory, and its block must outlast this object
        device  st_dev of the mount
        off     each fast path that the options turn off, with the reason
        """
        self._target, self._device = target, device
        self._path = runtime_dir.path_of(target, runtime_dir.FAST_PATHS)
        self._has_begun = False
        self._states = {path: FastPathState(path.value, is_on=True, why=why) for path, why in FAST_PATH_EFFECTS.items()}
        for path, why in off.items():
            self.turn_off(path, why)

    def close(self) -> None:
        """Remove the published file, unless the mount still exists."""
        if self._path is not None and not runtime_dir.is_mounted(self._target):
            for name in (self._path, self._path + NEW):
                with suppress(OSError):
                    os.unlink(name)

    def is_on(self, path: FastPath) -> bool:
        return self._states[path].is_on

    def why(self, path: FastPath) -> str:
        """Return what a fast path does, what limits it, or why it is off."""
        return self._states[path].why

    def turn_off(self, path: FastPath, why: str | None) -> None:
        """Turn a fast path off, unless `why` is None; keep the first reason. Turning off the engine turns off all."""
        if why is None or not self.is_on(path):
            return
        for one in FastPath if path is FastPath.ENGINE else (path,):
            self._states[one] = FastPathState(one.value, is_on=False, why=why)
        if self._has_begun:
            _log.warning("fast path %s is disabled from now on: %s", path.value, why)
            self._publish()

    def limit(self, path: FastPath, how: str) -> None:
        """Record what limits a fast path that stays on."""
        self._states[path] = FastPathState(path.value, is_on=True, why=how)

    def begin(self) -> None:
        """Log and publish the states. Called just before the mount is ready."""
        self._has_begun = True
        off = [f"{one.name} ({one.why})" for one in self._states.values() if not one.is_on]
        if off:
            _log.info("fast paths that are off: %s", ", ".join(off))
        self._publish()

    def _publish(self) -> None:
        if self._path is not None:
            report = FastPathReport(self._device, os.getpid(), tuple(self._states.values()))
            try:
                replace_file(self._path, encode_report(report), 0o644, ignores_umask=True)
            except OSError as error:
                _log.warning("no data for `trashd mount --explain`: %s: %s", printable(self._path), error.strerror)
