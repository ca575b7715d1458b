"""Finds an orphan's size: in its record, from the filesystem, or by counting in a process of its owner."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

from fusefs.cli import output
from fusefs.core.container_states import State
from fusefs.core.errors import TrashdError, from_os
from fusefs.core.human_units import format_size
from fusefs.core.orphan_sums import MeasuredSize
from fusefs.core.pacing import Speed
from fusefs.core.record import TreeSize
from fusefs.core.results import ShouldStop
from fusefs.linux.kernel import Kernel
from fusefs.store.container import record_size
from fusefs.store.layout import UserFolder
from fusefs.store.orphans import ListedContainer, call_in_folder
from fusefs.store.victim_rename import VisibleRename


class CountedOrphan(NamedTuple):
    """An orphan and its size. n_failed: the number of entries that could not be counted"""

    entry: ListedContainer
    size: TreeSize | None
    n_failed: int = 0
    is_stopped: bool = False


class CountOptions(NamedTuple):
    """Options for counting an orphan.

    anew    ignore the size in the record
    far     count on network filesystems, too
    paced   yield to other users of the disk, and report this on stderr
    noted   store the size in the record
    """

    anew: bool = False
    far: bool = False
    paced: bool = False
    noted: bool = True


def count_orphan(
    kernel: Kernel, volumes: Sequence[bytes], entry: ListedContainer, stops: ShouldStop, how: CountOptions
) -> CountedOrphan:
    """Find the size of an orphan. stops: called repeatedly; returns whether to stop counting. Raises  TrashdError"""
    kept = entry.size if entry.state is State.ORPHANS else None
    if kept is not None and not (kept.is_at_least or how.anew):
        return CountedOrphan(entry, kept)

    def ask(folder: UserFolder, _visible: VisibleRename | None) -> MeasuredSize:
        from fusefs.engine.count_tree import measure_tree

        with (
            folder.open(entry.state) as state,
            kernel.open_dir(state, entry.id.encode()) as container,
            _pace(kernel, folder, stops) if how.paced else nullcontext(lambda: None) as pauses,
        ):
            walks = how.far or kernel.is_local(container)
            asked = measure_tree(kernel, container, walks=walks, stops=stops, pauses=pauses)
            if how.noted and asked.size is not None and not asked.is_stopped and entry.state is State.ORPHANS:
                pauses()
                record_size(folder, entry.id, asked.size)
                pauses()  # the flush disturbs others more than stat calls do, and counts towards the same share of time
        return asked

    try:
        asked = call_in_folder(kernel, volumes, entry, ask, MeasuredSize)
    except OSError as error:
        raise from_os(error, entry.id) from error
    known_sizes = [size for size in (asked.size, kept) if size is not None]
    size = (
        max(known_sizes, key=lambda one: one.n_bytes, default=None)
        if asked.is_stopped
        else next(iter(known_sizes), None)
    )
    return CountedOrphan(entry, size, asked.n_failed, asked.is_stopped or stops())


@contextmanager
def _pace(kernel: Kernel, folder: UserFolder, stops: ShouldStop) -> Iterator[Callable[[], None]]:
    from fusefs.engine.pace import WalkPacer, open_pacer  # imported late: a restore counts at full speed

    with open_pacer(kernel, folder.fd, Speed(), output.print_pace, may_write=False) as pacer:
        yield WalkPacer(pacer, stops)


def size_by(kernel: Kernel, volumes: Sequence[bytes], entry: ListedContainer, end_s: float) -> str:
    """Format the size of an orphan. end_s: when to stop counting (time.monotonic)"""
    try:
        counted = count_orphan(kernel, volumes, entry, lambda: time.monotonic() > end_s, CountOptions(noted=False))
    except TrashdError:
        return "size unknown"
    size = counted.size
    if size is None or (size.is_at_least and not size.n_bytes):
        return "size unknown"
    return ("at least " if size.is_at_least else "") + format_size(size.n_bytes)


def in_column(size: TreeSize | None) -> str:
    return "unknown" if size is None else (">=" if size.is_at_least else "") + format_size(size.n_bytes)
