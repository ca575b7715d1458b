"""Which fast paths a mount has: decided while it starts, reported by `trashd mount --explain` and `trashd status`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from fusefs.core.fast_paths import ON, FastPath, FastPathReport, FastPathState, encode
from fusefs.core.printable_names import printable
from fusefs.linux.atomic_files import NEW, replace_file
from fusefs.mount.places import runtime_dir

_WITHOUT_ENGINE = "it takes the engine"

_log = logging.getLogger(__name__)


class FastPathStates:
    """The fast paths of one mount: each is on until it is turned off for good."""

    def __init__(self, off: Mapping[FastPath, str], publish: Callable[[tuple[FastPathState, ...]], None]) -> None:
        """Begin with all but some.

        off      those that the options switch off, and how
        publish  called with all of them when the mount is about to answer (`begin`), and at each later change
        """
        self._off: dict[FastPath, str] = {}
        self._on = dict(ON)
        self._publish = publish
        self._has_begun = False
        for path, why in off.items():
            self.turn_off(path, why)

    def is_on(self, path: FastPath) -> bool:
        """Whether the mount has it."""
        return path not in self._off

    def why_off(self, path: FastPath) -> str:
        """What keeps it off."""
        return self._off[path]

    def turn_off(self, path: FastPath, why: str | None) -> None:
        """The mount does without it, if there is a reason; only the first one counts."""
        if why is None or path in self._off:
            return
        self._off[path] = why
        if path is FastPath.ENGINE:
            self._off = dict.fromkeys(FastPath, _WITHOUT_ENGINE) | self._off
        if self._has_begun:
            _log.warning("without %s from now on: %s", path.value, why)
            self._publish(self.states())

    def limit(self, path: FastPath, how: str | None) -> None:
        """The mount has it, but something limits it, if there is a reason."""
        if how is not None:
            self._on[path] = how

    def states(self) -> tuple[FastPathState, ...]:
        """Return the state of each."""
        why = self._on | self._off
        return tuple(FastPathState(path.value, self.is_on(path), why[path]) for path in FastPath)

    def begin(self) -> None:
        """The mount is about to answer."""
        self._has_begun = True
        off = [f"{path.value} ({why})" for path, why in self._off.items() if why != _WITHOUT_ENGINE]
        if off:
            _log.info("without %s", ", ".join(off))
        self._publish(self.states())


@contextmanager
def publishing(target: bytes, device: int) -> Iterator[Callable[[tuple[FastPathState, ...]], None]]:
    """What publishes a mount's states in its runtime directory, if it has one; they go with the mount.

    target  the mount point; its directory is made by stats.kept, which must last longer
    device  st_dev of the mount
    """
    path = runtime_dir.file_of(target, runtime_dir.FAST_PATHS)

    def tell(states: tuple[FastPathState, ...]) -> None:
        if path is not None:
            try:
                text = encode(FastPathReport(device, os.getpid(), states))
                replace_file(path, text, 0o644, whatever_umask=True)
            except OSError as error:
                _log.warning("no `trashd mount --explain`: %s: %s", printable(path), error.strerror)

    try:
        yield tell
    finally:
        if path is not None and not runtime_dir.stands(target):
            for name in (path, path + NEW):
                with suppress(OSError):
                    os.unlink(name)
