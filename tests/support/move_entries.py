"""A move as a sweep's action, without the engine: every entry that is no directory is handed to it."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from fusefs.core.results import SweepSums, Swept
from fusefs.linux.kernel import Kernel
from fusefs.store.backing_and_mount import BackingAndMount, open_in_mount
from fusefs.store.victim import find_scope
from fusefs.store.walk import DeepOpeners
from fusefs.sweep.actions import open_move
from fusefs.sweep.request import Action, ActionPlace, IfExists, SweepRoot, ToMove

_CLOCK_REALTIME_COARSE = 5
Refusals = dict[str, int]
"""Errno by path, relative to the swept directory."""


def move(
    source: Path,
    target: Path,
    kernel: Kernel | None = None,
    *,
    if_exists: IfExists = IfExists.SKIP,
    whole: bool = False,
) -> Refusals:
    """Move all that is below a directory; what was refused, what had vanished too.

    whole  move its own directories, and nothing else
    """
    kernel = kernel or Kernel()
    to = ToMove(os.fsencode(target), if_exists)
    found: Refusals = {}
    with ExitStack() as owned:
        scope = owned.enter_context(find_scope(kernel, os.fsencode(source)))
        top = SweepRoot(scope.path(), scope.sides)
        ways = owned.enter_context(DeepOpeners(kernel))
        action = owned.enter_context(open_move(kernel, top, to))
        for upper, names in [("", _dirs(source))] if whole else _walk(source, action):
            with _opened(top.sides, os.fsencode(upper)) as sides:
                here = ActionPlace(kernel, sides, os.fsencode(upper), whole, ways)
                found |= {os.path.join(upper, name): number for name, number in _take(action, here, names)}
        action.end(Swept(top.path, SweepSums()))
    return found


def _opened(top: BackingAndMount, upper: bytes) -> BackingAndMount:
    kernel = Kernel()
    fd = kernel.open_dir(top.fd, upper or b".")
    return BackingAndMount(fd, open_in_mount(kernel, top.mounted, upper, fd))


def _take(action: Action, here: ActionPlace, names: list[str]) -> Iterator[tuple[str, int]]:
    for at in range(0, len(names), 128):
        some = names[at : at + 128]
        try:
            yield from action.take(here, some).refused
        except OSError as error:
            yield from [(name, error.errno or 0) for name in some]


def _walk(source: Path, action: Action) -> list[tuple[str, list[str]]]:
    """The directories, relative, and what is in each but directories; links to those are none."""
    found = []
    for path, dirs, _files in os.walk(source):
        dirs[:] = [name for name in dirs if _identity(Path(path, name)) not in action.avoided]
        names = [entry.name for entry in os.scandir(path) if not entry.is_dir(follow_symlinks=False)]
        found.append((os.path.relpath(path, source).removeprefix("."), sorted(names)))
    return found


def _dirs(source: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(source) if entry.is_dir(follow_symlinks=False))


def _identity(path: Path) -> tuple[int, int]:
    st = path.stat()
    return st.st_dev, st.st_ino


def pass_a_tick() -> None:
    """From now on the filesystem gives later times than it did until now: its clock is a little behind."""
    now = time.time_ns()
    while time.clock_gettime_ns(_CLOCK_REALTIME_COARSE) <= now:
        pass


class AfterThe:
    """A hook that does something once, before whatever follows the n-th call (from 1) of a name."""

    def __init__(self, call: str, action: Callable[[], object], n: int = 1) -> None:
        self.call = call
        self.left = n
        self.action: Callable[[], object] | None = action

    def __call__(self, call: str) -> None:
        if self.left == 0 and self.action is not None:
            action, self.action = self.action, None
            action()
        self.left -= call == self.call
