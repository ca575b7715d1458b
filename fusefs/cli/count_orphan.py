"""What an orphan takes: as its record has it, by its filesystem's word, or counted by its owner."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

from fusefs.cli import output
from fusefs.core.container_states import State
from fusefs.core.errors import TrashdError, from_os
from fusefs.core.human_units import format_size
from fusefs.core.orphan_sums import AskedSize
from fusefs.core.pacing import Speed
from fusefs.core.record import TreeSize
from fusefs.core.results import Stops
from fusefs.linux.kernel import Kernel
from fusefs.store.container import keep_size
from fusefs.store.layout import UserFolder
from fusefs.store.orphans import ListedContainer, act_on
from fusefs.store.victim_rename import VisibleRename


class CountedOrphan(NamedTuple):
    """An orphan, and what it takes.

    size        None: that is not known
    n_failed    what could not be looked at
    is_stopped  it was not counted to the end
    """

    entry: ListedContainer
    size: TreeSize | None
    n_failed: int = 0
    is_stopped: bool = False


class CountOptions(NamedTuple):
    """How it is counted.

    anew    what is noted in its record is asked for once more
    far     on filesystems of a server, too
    paced   others on the disk come first; they are told of on stderr
    noted   for the next time
    """

    anew: bool = False
    far: bool = False
    paced: bool = False
    noted: bool = True


def count_orphan(
    kernel: Kernel, volumes: Sequence[bytes], entry: ListedContainer, stops: Stops, how: CountOptions
) -> CountedOrphan:
    """Find out what it takes. stops: asked now and then. Raises  TrashdError"""
    kept = entry.size if entry.state is State.ORPHANS else None
    if kept is not None and not (kept.is_at_least or how.anew):
        return CountedOrphan(entry, kept)

    def ask(folder: UserFolder, _visible: VisibleRename | None) -> AskedSize:
        from fusefs.engine.count_tree import ask_size

        with (
            folder.open(entry.state) as state,
            kernel.open_dir(state, entry.id.encode()) as container,
            _pace(kernel, folder, stops) if how.paced else nullcontext(lambda: None) as pauses,
        ):
            walks = how.far or kernel.is_local(container)
            asked = ask_size(kernel, container, walks=walks, stops=stops, pauses=pauses)
            if how.noted and asked.size is not None and not asked.is_stopped and entry.state is State.ORPHANS:
                pauses()
                keep_size(folder, entry.id, asked.size)
                pauses()  # its flush is felt more than looks are: it takes from the same share of the time
        return asked

    try:
        asked = act_on(kernel, volumes, entry, ask, AskedSize)
    except OSError as error:
        raise from_os(error, entry.id) from error
    known = [size for size in (asked.size, kept) if size is not None]
    size = max(known, key=lambda one: one.n_bytes, default=None) if asked.is_stopped else next(iter(known), None)
    return CountedOrphan(entry, size, asked.n_failed, asked.is_stopped or stops())


@contextmanager
def _pace(kernel: Kernel, folder: UserFolder, stops: Stops) -> Iterator[Callable[[], None]]:
    from fusefs.engine.pace import (
        PacedLooks,
        pacer_in,  # a restore counts for a moment, at full speed
    )

    with pacer_in(kernel, folder.fd, Speed(), output.tell_why, may_write=False) as pacer:
        yield PacedLooks(pacer, stops)


def size_by(kernel: Kernel, volumes: Sequence[bytes], entry: ListedContainer, end_s: float) -> str:
    """What it takes, in words, as far as that is found out by then (time.monotonic)."""
    try:
        counted = count_orphan(kernel, volumes, entry, lambda: time.monotonic() > end_s, CountOptions(noted=False))
    except TrashdError:
        return "size unknown"
    size = counted.size
    if size is None or (size.is_at_least and not size.n_bytes):
        return "size unknown"
    return ("at least " if size.is_at_least else "") + format_size(size.n_bytes)


def in_column(size: TreeSize | None) -> str:
    """What something takes, as a table has it."""
    return "unknown" if size is None else (">=" if size.is_at_least else "") + format_size(size.n_bytes)
