"""Stores within directories that are to go."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fusefs.core.names import RelPath
from fusefs.core.results import Reaped
from fusefs.linux.kernel import Kernel
from fusefs.reaper.reap import RemovalOptions, reap
from fusefs.store.orphans import call_in_folder, find_container
from fusefs.store.stage import SwapOptions
from fusefs.store.user_folders import add_pointer
from tests.support.make_trees import Spec, make_tree
from tests.support.small_orphans import orphan_in
from tests.support.store_verbs import init, own, raw


@contextmanager
def without_upper_store(volume: Path) -> Iterator[None]:
    """A lower store takes something only where no upper one is, or could: what is made in the block, before `init`."""
    (volume / ".trashd").rename(volume / "upper")
    yield
    (volume / "upper").rename(volume / ".trashd")


def store_in(volume: Path, base: Path, options: SwapOptions | None = None) -> str:
    """A store in a directory, with an orphan in it, whose id it is; no registry knows it there."""
    with without_upper_store(volume), made_elsewhere(volume, base) as made:
        return own_store(made, options)


@contextmanager
def made_elsewhere(volume: Path, base: Path) -> Iterator[Path]:
    """Where to make a store that comes to a directory in the end."""
    made = make_tree(volume / "made", {})
    yield made
    (made / ".trashd").rename(base / ".trashd")
    shutil.rmtree(made)


def own_store(base: Path, options: SwapOptions | None = None) -> str:
    """The id of an orphan in a directory's own store, where there is no upper one."""
    init(base)
    return str(orphan_in(base, options=options).id)


def point_to(volume: Path, lower: Path) -> None:
    """The pointer that the caller's command leaves when it has to use a lower store."""
    with own(volume) as folder:
        add_pointer(folder, RelPath(raw(lower.relative_to(volume))))


def plant_store(path: Path, uid: int) -> None:
    """Make what looks like that user's store, with what one has: one's own files."""
    folder: Spec = {"orphans": {"20260101T000000.000Z-job-0123456789ab": {"tree": {}}}}
    make_tree(path / ".trashd", {"u": {str(uid): folder}})
    (path / ".trashd/volume.json").write_text('{"magic": "trashd", "format": 2}')
    (path / ".trashd/u" / str(uid)).chmod(0o700)


def reap_with_stores(volume: Path, identifier: str, kernel: Kernel | None = None) -> Reaped:
    kernel = kernel or Kernel()
    entry = find_container(kernel, [raw(volume)], identifier)
    wishes = RemovalOptions(with_stores=True)
    return call_in_folder(kernel, [raw(volume)], entry, lambda folder, _visible: reap(folder, entry.id, wishes), Reaped)
