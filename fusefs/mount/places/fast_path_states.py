"""Which fast paths a mount has, and why it lacks the others: decided while it starts, shown by `mount --explain`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from fusefs.core.fast_paths import ALWAYS, SAVES, FastPath, FastPathReport, FastPathState, encode
from fusefs.core.printable_names import printable
from fusefs.linux.atomic_files import NEW, replace_file
from fusefs.mount.places import runtime_dir

_WITHOUT_ENGINE = "it takes the engine"

_log = logging.getLogger(__name__)


class FastPathStates:
    """The fast paths of one mount: each is on until it is turned off, and off for good then."""

    def __init__(self, off: Mapping[FastPath, str], publish: Callable[[tuple[FastPathState, ...]], None]) -> None:
        """Begin with all but some.

        off      those that are not wanted, and why
        publish  is told of all of them when the mount is about to answer (`begin`), and at each change from then on
        """
        self._off: dict[FastPath, str] = {}
        self._publish = publish
        self._has_begun = False
        for path, why in off.items():
            self.turn_off(path, why)

    def is_on(self, path: FastPath) -> bool:
        """Whether the mount has it."""
        return path not in self._off

    def on(self) -> frozenset[FastPath]:
        """All that it has."""
        return frozenset(FastPath) - self._off.keys()

    def why_off(self, path: FastPath) -> str:
        """What keeps it off."""
        return self._off[path]

    def turn_off(self, path: FastPath, why: str) -> None:
        """The mount does without it; only the first reason counts."""
        if path in self._off:
            return
        self._off[path] = why
        if path is FastPath.ENGINE:
            self._off = dict.fromkeys(FastPath, _WITHOUT_ENGINE) | self._off
        if self._has_begun:
            _log.warning("without %s from now on: %s", path.value, why)
            self._publish(self.states())

    def decide(self, path: FastPath, why_not: str | None) -> None:
        """The mount has it if nothing is against it."""
        if why_not is not None:
            self.turn_off(path, why_not)

    def states(self) -> tuple[FastPathState, ...]:
        """How it is with each that users read of."""
        return tuple(
            FastPathState(path.value, is_on=path not in self._off, why=self._off.get(path, f"saves {SAVES[path]}"))
            for path in FastPath
            if path in self._off or path not in ALWAYS
        )

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
