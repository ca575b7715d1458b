"""Whether reads and writes pass the daemon of a mount, and files to see it by."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fusefs.core.fastpaths import FastPath
from fusefs.mount.seen import look, mount_at
from tests.support.mounted import Mounted


def why_off(mounted: Mounted) -> str | None:
    """Why nothing passes the daemon of a mount; None: it does."""
    states = look(mount_at(os.fsencode(mounted.path))).fast_paths
    (state,) = (state for state in states if state.name == FastPath.PASSTHROUGH.value)
    return None if state.is_on else state.why


def n_messages(mounted: Mounted) -> int:
    """Reads and writes that came to the daemon."""
    return sum(mounted.stats().operations[name].n() for name in ("read", "write"))


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """An fd, for the time of the `with`."""
    fd = os.open(path, flags)
    try:
        yield fd
    finally:
        os.close(fd)


def errno_of(act: Callable[[], object]) -> int:
    """What something fails with; 0 if it does not."""
    try:
        act()
    except OSError as error:
        return error.errno or -1
    return 0
