"""`ID[:PATH]`, or the path that something came from: a place in an orphan, as `ls`, `cat` and `diff` are told it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from fusefs.cli.id_completion import OrphanIdOrPath
from fusefs.cli.restore_choice import chosen
from fusefs.cli.settle_first import tended
from fusefs.core.names import RelPath
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.store.layout import UserFolder
from fusefs.store.list_orphans import ListedContainer
from fusefs.store.look_inside import inside

T = TypeVar("T")

inside_argument = click.argument("word", metavar="ID[:PATH]|PATH", type=OrphanIdOrPath())


def look_at_inside(
    volumes: Sequence[bytes],
    word: bytes,
    uid: int | None,
    look: Callable[[Kernel, Fd, UserFolder, ListedContainer, RelPath], T],
    kind: Any,
) -> T:
    """What `look` says of the place that a word means, what killed commands left being settled first.

    look, kind, Raises  as for store.look_inside.inside
    """
    kernel = tended(volumes)
    before, colon, after = word.partition(b":")
    is_id = bool(colon) and b"/" not in before
    part = os.path.normpath(after.strip(b"/")) if is_id and after.strip(b"/") else None
    meant = chosen(kernel, volumes, before if is_id else word, part, uid, as_json=True)
    return inside(
        kernel,
        volumes,
        meant.entry,
        meant.inside,
        lambda fd, folder, within: look(kernel, fd, folder, meant.entry, within),
        kind,
    )
