"""Whether reads and writes pass the daemon of a mount, and files to see it by."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from fusefs.core.fast_paths import FastPath
from fusefs.mount.find_mounts import mount_at, read_counters
from tests.support.mounted import Mounted, until


def why_off(mounted: Mounted) -> str | None:
    """Why nothing passes the daemon of a mount; None: it does."""
    states = read_counters(mount_at(os.fsencode(mounted.path))).fast_paths
    (state,) = (state for state in states if state.name == FastPath.PASSTHROUGH.value)
    return None if state.is_on else state.why


def n_messages(mounted: Mounted) -> int:
    """Reads and writes that came to the daemon."""
    return sum(mounted.stats().operations[name].n() for name in ("read", "write"))


def all_closed(mounted: Mounted) -> bool:
    """Whether the daemon hears of the close of every file, though late: what was read ahead keeps a file for a moment.

    Until then the next open is of the same mode.
    """

    def is_so() -> bool:
        operations = mounted.stats().operations
        opens = (operations["open"], operations["create"])
        return sum(one.n() - one.n_failed for one in opens) == operations["release"].n()

    return until(is_so)


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """An fd, for the time of the `with`."""
    fd = os.open(path, flags)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def held(*paths: Path) -> Iterator[None]:
    """The kernel forgets none of these meanwhile, though memory is short, or its caches are dropped.

    Each is looked up, and not opened.
    """
    with ExitStack() as stack:
        for path in paths:
            stack.enter_context(opened(path, os.O_PATH | os.O_NOFOLLOW))
        yield


def may_be_written(program: Path) -> bool:
    """Whether it does not run any more: a look at a process that ends, as others do here, keeps it for a moment."""
    return errno_of(lambda: os.close(os.open(program, os.O_WRONLY))) == 0


def waits_in_the_kernel(pid: int) -> bool:
    """Whether a process waits for the answer to a request, or for another that asks the same."""
    found = Path(f"/proc/{pid}/wchan").read_text() + Path(f"/proc/{pid}/stack").read_text()
    return any(word in found for word in ("fuse", "request_wait", "d_alloc_parallel", "d_wait_lookup"))


def errno_of(act: Callable[[], object]) -> int:
    """What something fails with; 0 if it does not."""
    try:
        act()
    except OSError as error:
        return error.errno or -1
    return 0
