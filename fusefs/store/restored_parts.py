"""Parts of a swapped tree that were restored before the whole: the record names them, and the whole takes them back.

A part lies in the fresh directory under the path that it has in the tree, where its place is free. When the whole is
restored, whatever has that path in the fresh directory moves into the tree: it is the newer copy. Nothing is replaced.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from functools import partial

from fusefs.core.names import RelPath, join, split
from fusefs.core.printable_names import printable
from fusefs.core.record import Record, encode
from fusefs.store.backing_and_mount import ABSENT, BackingAndMount, between, wholly_beneath
from fusefs.store.container import HeldContainer, flush_directory, rewrite
from fusefs.store.reserve import FOR_USER, with_room

_RECORD_MAX_BYTES = 24 * 1024
"""How long a record may get by parts: recovery and a reap must have room for what they note in it later."""


def note_part(held: HeldContainer, inside: RelPath, *, is_home: bool) -> tuple[HeldContainer, list[str]]:
    """The container before a part is moved out of its tree: its size is not known any more, and the part is noted.

    is_home  it goes to its place in the fresh directory, if the swap made one
    Returns  and a warning if that can't be noted: the part is restored all the same
    """
    record = held.record._replace(size=None)
    why = ""
    if is_home and record.fresh is not None and inside not in record.parts:
        noted = record._replace(parts=(*record.parts, inside))
        if _has_room(noted):
            record = noted
        else:
            why = "its record has no room for more"
    if record != held.record:
        try:
            held = with_room(held.folder, FOR_USER, partial(rewrite, held, record))
        except OSError as error:
            why = os.strerror(error.errno or errno.EIO)
    if not why:
        return held, []
    what = f"a later restore of the whole will keep {printable(inside)} in an orphan of its own"
    return held, [f"{what}: that it was restored could not be noted ({why})"]


def _has_room(record: Record) -> bool:
    try:
        return len(encode(record)) <= _RECORD_MAX_BYTES
    except ValueError:
        return False


def merge_parts(held: HeldContainer, fresh: BackingAndMount, tree: BackingAndMount) -> list[str]:
    """Move the noted parts that a fresh directory has, out of view, into the tree; which stay there and why, in words.

    Killed in between it is done once more: what moved already is in the fresh directory no more.
    """
    left = []
    for part in held.record.parts:
        try:
            _merge(held, fresh, tree, part)
        except OSError as error:
            if error.errno not in ABSENT or _has(held, fresh, part):
                left.append(f"{printable(part)} ({error.strerror})")
    return left


def _merge(held: HeldContainer, fresh: BackingAndMount, tree: BackingAndMount, part: RelPath) -> None:
    kernel = held.folder.store.kernel
    *parents, name = split(part)
    above = join(*parents)
    with wholly_beneath(kernel, fresh, above) as source:
        kernel.stat(source.fd, name)
        with wholly_beneath(kernel, tree, above) as target:
            here, there = between(source, target)
            kernel.rename_free(here, name, there, name)
        flush_directory(held, source.fd)  # as in `restore_inside`
    with suppress(OSError):
        while above:  # directories that were made on the way to it, and have nothing else in them
            upper, _, last = above.rpartition(b"/")
            with wholly_beneath(kernel, fresh, upper) as directory:
                kernel.rmdir(directory.names(), last)
            above = RelPath(upper)


def _has(held: HeldContainer, fresh: BackingAndMount, part: RelPath) -> bool:
    """Whether a fresh directory has a part, so that it was the tree that lacks the directory to take it."""
    kernel = held.folder.store.kernel
    with suppress(OSError), wholly_beneath(kernel, fresh, RelPath(os.path.dirname(part))) as source:
        kernel.stat(source.fd, os.path.basename(part))
        return True
    return False
