"""Stores within directories that are to go."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fusefs.core.names import RelPath
from fusefs.store.pointers import add_pointer
from fusefs.store.stage import Options
from tests.support.orphans import orphan_in
from tests.support.store import init, own, raw


@contextmanager
def without_upper_store(volume: Path) -> Iterator[None]:
    """A lower store takes something only where no upper one is, or could: what is made in the block, before `init`."""
    (volume / ".trashd").rename(volume / "upper")
    yield
    (volume / "upper").rename(volume / ".trashd")


def store_in(volume: Path, base: Path, options: Options | None = None) -> str:
    """A store in a directory, with an orphan in it, whose id it is."""
    with without_upper_store(volume):
        return own_store(base, options)


def own_store(base: Path, options: Options | None = None) -> str:
    """The same where there is no upper one."""
    init(base)
    return str(orphan_in(base, options=options).id)


def point_to(volume: Path, lower: Path) -> None:
    """The pointer that the caller's command leaves when it has to use a lower store."""
    with own(volume) as folder:
        add_pointer(folder, RelPath(raw(lower.relative_to(volume))))
