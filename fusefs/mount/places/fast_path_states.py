"""Which fast paths a mount has: decided while it starts, shown by `trashd mount --explain` and `trashd status`."""

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
        """Turn all fast paths on, except some.

        target  the mount point; `counters.open_counters` makes its runtime directory, and must outlive this object
        device  st_dev of the mount
        off     fast paths that the options turn off, and the reasons
        """
        self._target, self._device = target, device
        self._path = runtime_dir.path_of(target, runtime_dir.FAST_PATHS)
        self._has_begun = False
        self._states = {path: FastPathState(path.value, is_on=True, why=why) for path, why in FAST_PATH_EFFECTS.items()}
        for path, why in off.items():
            self.turn_off(path, why)

    def close(self) -> None:
        """Remove the file, unless the mount still exists."""
        if self._path is not None and not runtime_dir.is_mounted(self._target):
            for name in (self._path, self._path + NEW):
                with suppress(OSError):
                    os.unlink(name)

    def is_on(self, path: FastPath) -> bool:
        """Return whether the mount has a fast path."""
        return self._states[path].is_on

    def why(self, path: FastPath) -> str:
        """Return what a fast path does, what limits it, or why it is off."""
        return self._states[path].why

    def turn_off(self, path: FastPath, why: str | None) -> None:
        """Turn a fast path off if there is a reason; the first reason counts. Without the engine, all of them are
        off."""
        if why is None or not self.is_on(path):
            return
        for one in FastPath if path is FastPath.ENGINE else (path,):
            self._states[one] = FastPathState(one.value, is_on=False, why=why)
        if self._has_begun:
            _log.warning("without %s from now on: %s", path.value, why)
            self._publish()

    def limit(self, path: FastPath, how: str) -> None:
        """Set the reason why a fast path that is on is limited."""
        self._states[path] = FastPathState(path.value, is_on=True, why=how)

    def begin(self) -> None:
        """Log and publish the states; called when the mount is about to answer."""
        self._has_begun = True
        off = [f"{one.name} ({one.why})" for one in self._states.values() if not one.is_on]
        if off:
            _log.info("without %s", ", ".join(off))
        self._publish()

    def _publish(self) -> None:
        if self._path is not None:
            report = FastPathReport(self._device, os.getpid(), tuple(self._states.values()))
            try:
                replace_file(self._path, encode_report(report), 0o644, ignores_umask=True)
            except OSError as error:
                _log.warning("`trashd mount --explain` does not work: %s: %s", printable(self._path), error.strerror)
