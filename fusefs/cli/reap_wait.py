"""`trashd reap --wait`: each volume's space before and after, and what keeps the rest."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple, Self

from fusefs.cli import output
from fusefs.cli.json_objects import ReapedVolume
from fusefs.cli.stop_signals import StopSignals
from fusefs.core.errors import Incomplete
from fusefs.core.freed_space import Survey, Waited, tolerance_bytes, total
from fusefs.core.names import ContainerId
from fusefs.core.printable_names import printable
from fusefs.core.report import Reaped
from fusefs.core.sizes import format_size
from fusefs.core.space_goal import ALL
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.store.backing_and_mount import DIRECTORY
from fusefs.store.list_orphans import ListedContainer
from fusefs.store.mounted_paths import open_shown


class _WaitedVolume(NamedTuple):
    """The directory that holds a store, its free space before, and what was reaped there."""

    fd: Fd
    before_bytes: int
    containers: list[ContainerId]
    surveys: list[Survey]
    left_bytes: list[int]


class SpaceWait:
    """The volumes whose space is waited for; none without a wish to wait."""

    def __init__(self, kernel: Kernel, due: Sequence[ListedContainer]) -> None:
        self._kernel = kernel
        self._due = due
        self._volumes: dict[bytes, _WaitedVolume] = {}
        self._owned = ExitStack()

    def __enter__(self) -> Self:
        """Note the free space of each volume."""
        for base in dict.fromkeys(entry.base_path() for entry in self._due):
            # Of a mount of ours it is the backing volume that has the space, and its daemon has files open there.
            with open_shown(self._kernel, base) as shown:
                fd = self._owned.enter_context(self._kernel.open_beneath(shown.fd, b".", DIRECTORY))
            self._volumes[base] = _WaitedVolume(fd, self._kernel.free_bytes(fd), [], [], [])
        return self

    def __exit__(self, *_error: object) -> None:
        """Let go of them."""
        self._owned.close()

    def reaped(self, entry: ListedContainer, reaped: Reaped) -> None:
        """One of them is reaped: its space is expected."""
        volume = self._volumes.get(entry.base_path())
        if volume is not None and reaped.survey is not None and not reaped.report.stopped:
            volume.containers.append(entry.id)
            volume.surveys.append(reaped.survey)
            volume.left_bytes.append(reaped.left_bytes)

    def wait(self, stop: StopSignals, *, as_json: bool) -> list[int]:
        """Wait for all of it; exit codes."""
        if not self._volumes:
            return []
        from fusefs.waiting.wait_for_space import FreeSpaceGauge, wait_for_goal

        codes = []
        for base, volume in self._volumes.items():
            if volume.surveys and not stop():
                met = wait_for_goal(
                    self._kernel,
                    volume.fd,
                    FreeSpaceGauge(self._kernel, volume.fd, before_bytes=volume.before_bytes),
                    ALL,
                    total(volume.surveys),
                    left_bytes=sum(volume.left_bytes),
                    containers=volume.containers,
                    tell=_draw,
                    stops=stop,
                )
                codes.append(_tell(base, met.waited, as_json=as_json))
        return codes


def tell_came(came_bytes: int, expected_bytes: int, what: str) -> str:
    """What came back, for people: of the filesystem's space that came what was expected is these trees', no more."""
    own_bytes = min(came_bytes, expected_bytes)
    others_bytes = came_bytes - own_bytes
    told = f"{format_size(own_bytes)} came back of the {format_size(expected_bytes)} that were {what}"
    if others_bytes > tolerance_bytes(expected_bytes):
        told += f" (others gave back {format_size(others_bytes)} meanwhile)"
    return told


def _draw(came_bytes: int, expected_bytes: int) -> None:
    if sys.stderr.isatty():
        own = format_size(min(max(came_bytes, 0), expected_bytes))
        text = f"\rwaiting: {own} of {format_size(expected_bytes)} came back \x1b[K"
        os.write(2, text.encode())


def _tell(base: bytes, waited: Waited, *, as_json: bool) -> int:
    if as_json:
        output.as_json(ReapedVolume(base), waited)
    else:
        if sys.stderr.isatty():
            os.write(2, b"\r\x1b[K")
        print(f"{printable(base)}: {tell_came(waited.came_bytes, waited.expected_bytes, 'reaped')}")
        for reason in waited.reasons:
            print(f"  {format_size(reason.n_bytes)}: {reason.detail}")
    return 0 if waited.is_well() else Incomplete.exit_code
