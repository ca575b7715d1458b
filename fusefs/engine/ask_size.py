"""What a container's tree takes: by its filesystem's word, else counted."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from fusefs.core.freed_space import AskedSize, Survey
from fusefs.core.record import TreeSize
from fusefs.core.report import Stops
from fusefs.engine.count_tree import survey
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.known_sizes import known_size
from fusefs.linux.shared_extents import never_shares, tells_sharing
from fusefs.store.layout import HOISTED, TREE

_READABLE = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK


def ask_size(
    kernel: Kernel,
    container: Fd,
    *,
    walks: bool,
    pauses: Callable[[], None] = lambda: None,
    stops: Stops = lambda: False,
) -> AskedSize:
    """Ask for it; to be run as the container's owner.

    container  open for reading
    walks   whether it is counted where the filesystem doesn't know it
    pauses, stops  of that, as for `survey`
    Raises  OSError of the container itself
    """
    with suppress(OSError), kernel.open_beneath(container, TREE, _READABLE) as tree:
        known = None if HOISTED in kernel.list(container) else known_size(kernel, tree)
        if known is not None:
            return AskedSize(known)
    if not walks:
        return AskedSize(None)
    seen = survey(kernel, container, with_shared=True, stops=stops, pauses=pauses)
    is_stopped = stops()
    return AskedSize(size_of(kernel, container, seen, is_stopped=is_stopped), seen.n_failed, is_stopped)


def size_of(
    kernel: Kernel, container: Fd, seen: Survey, *, with_shared: bool = True, is_stopped: bool = False
) -> TreeSize:
    """What was counted, as a record has it. with_shared: as `survey` was asked"""
    magic = kernel.filesystem(container)
    knows = tells_sharing(magic) if with_shared else never_shares(magic)
    shared = seen.shared_bytes if knows else None
    is_at_least = seen.is_at_least or seen.n_failed > 0 or is_stopped
    return TreeSize(
        seen.n_entries, seen.n_bytes, seen.linked_bytes, shared, is_at_least, "count", kernel.now_ns()
    )  # fmt: skip
