"""Alice's folder in a store of root's: made, looked at."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fusefs.linux.kernel import Kernel
from fusefs.store.folders import open_user
from fusefs.store.layout import FOLDERS
from fusefs.store.new_folder import make_user
from tests.support.acls import GROUP_OBJ, MASK, NOBODY, OTHER, USER, USER_OBJ
from tests.support.store import init, opened, swap
from tests.support.tree import Dir, make_tree
from tests.support.volumes import tmpfs_volume

ALICE, BOB = 1001, 1002
OPEN_TO_BOB = [(USER_OBJ, 7, NOBODY), (USER, 7, BOB), (GROUP_OBJ, 0, NOBODY), (MASK, 7, NOBODY), (OTHER, 0, NOBODY)]
PARTS = [os.fsdecode(part) for part in FOLDERS]


@contextmanager
def shared_store(**owners: int) -> Iterator[Path]:
    """A store of root's, and a directory of each of these users, by its name."""
    with tmpfs_volume() as path:
        init(path)
        for name, uid in owners.items():
            make_tree(path / name, Dir(owner=(uid, uid)))
        yield path


@contextmanager
def alices_volume() -> Iterator[Path]:
    """A store of root's and Alice's home."""
    with shared_store(alice=ALICE) as path:
        yield path


def throw(volume: Path, kernel: Kernel | None = None) -> Path:
    """The folder that gets what Alice, who this process is, swaps."""
    path = make_tree(volume / "alice" / os.urandom(4).hex(), {"results": "her own"})
    return Path(os.fsdecode(swap(path, kernel).store))


def folders(volume: Path) -> list[str]:
    """All names in u/ and new/ that have to do with Alice."""
    areas = (volume / ".trashd/u", volume / ".trashd/new")
    return sorted(path.name for area in areas for path in area.iterdir() if str(ALICE) in path.name)


def modes(folder: Path) -> set[int]:
    """The modes of a folder and its parts, all their bits."""
    return {stat.S_IMODE(path.stat().st_mode) for path in (folder, *(folder / part for part in PARTS))}


def make(volume: Path, kernel: Kernel | None = None) -> Path:
    """The caller's folder, made if he has none."""
    with opened(volume) as store:
        store = store._replace(kernel=kernel or store.kernel)
        with open_user(store, os.geteuid()) or make_user(store) as folder:
            return Path(os.fsdecode(folder.path()))
