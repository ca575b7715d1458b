"""The trash action of a sweep without its walk: names are given, and taken directory by directory."""

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from fusefs.core.names import ContainerId
from fusefs.core.results import SweepSums, Swept
from fusefs.linux.kernel import Kernel
from fusefs.store.backing_and_mount import Scope
from fusefs.store.stage import SwapOptions
from fusefs.store.victim import find_scope
from fusefs.store.walk import DeepOpeners
from fusefs.sweep.actions import open_trash
from fusefs.sweep.request import Action, ActionPlace, SweepRoot, ToTrash
from tests.support.store_verbs import raw

_DEFAULT = SwapOptions()


class Gathered(NamedTuple):
    """What came of it; `refused` are names and errnos."""

    orphan: ContainerId | None
    volume: bytes | None
    refused: tuple[tuple[str, int], ...]
    n_done: int


@contextmanager
def trashing(directory: Path, kernel: Kernel, options: SwapOptions = _DEFAULT) -> Iterator[tuple[Scope, Action]]:
    """A directory, and the action that trashes names in it."""
    with find_scope(kernel, raw(directory)) as scope:
        top = SweepRoot(scope.path(), scope.sides)
        with open_trash(kernel, top, ToTrash(options)) as action:
            yield scope, action


def gather(
    directory: Path, names: Iterable[str], kernel: Kernel | None = None, options: SwapOptions = _DEFAULT
) -> Gathered:
    """Trash entries of a directory, told by their paths in it; those of one directory together, in order."""
    kernel = kernel or Kernel()
    refused: list[tuple[str, int]] = []
    n_done = 0
    with trashing(directory, kernel, options) as (scope, action):
        for upper, paths in groupby(names, os.path.dirname):
            wanted = [os.path.basename(path) for path in paths]
            found = take(kernel, scope, action, os.fsencode(upper), wanted)
            refused += [(os.path.join(upper, name), number) for name, number in found]
            n_done += len(wanted) - len(found)
        ended = action.end(Swept(scope.path(), SweepSums(n_done=n_done)))
    return Gathered(ended.orphan, ended.volume, tuple(refused), n_done)


def take(kernel: Kernel, scope: Scope, action: Action, upper: bytes, names: list[str]) -> list[tuple[str, int]]:
    """Let an action take names of one directory; what it refused."""
    refused: list[tuple[str, int]] = []
    try:
        sides = scope.sides.beneath(kernel, upper)
    except FileNotFoundError:
        return [(name, errno.ENOENT) for name in names]
    with sides, kernel.open_dir(sides.fd) as readable, DeepOpeners(kernel) as ways:
        for are_dirs, some in groupby(names, lambda name: _is_dir(readable, name)):
            here = ActionPlace(kernel, sides._replace(fd=readable), upper, are_dirs, ways)
            wanted = list(some)
            try:
                refused += action.take(here, wanted).refused
            except OSError as error:
                refused += [(name, error.errno or errno.EIO) for name in wanted]
    return refused


def _is_dir(fd: int, name: str) -> bool:
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False
