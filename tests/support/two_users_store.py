"""Stores of root's that Alice and Bob share: what they swap, her folder, root's canary, which is not to be touched."""

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fusefs.core.container_states import State
from fusefs.core.errors import TrashdError
from fusefs.linux.kernel import CallHook, Kernel
from fusefs.store.layout import FOLDERS
from fusefs.store.make_folder import make_user_folder
from fusefs.store.orphans import ListedContainer
from fusefs.store.user_folders import open_user_folder
from tests.support.acls import GROUP_OBJ, MASK, NOBODY, OTHER, USER, USER_OBJ
from tests.support.make_trees import Dir, EntrySnapshot, Spec, make_tree, snapshot
from tests.support.other_users import as_user
from tests.support.real_filesystems import tmpfs_volume
from tests.support.store_verbs import entries, init, opened, place, reap_now, recover_all, swap

ALICE, BOB, NOGROUP = 1001, 1002, 65534
CANARY: Spec = {"job": {"results": "root's"}, "tree": {"results": "root's"}, "orphans": {}, "secret": "s"}
"""As much like an orphan as it can be."""
OPEN_TO_BOB = [(USER_OBJ, 7, NOBODY), (USER, 7, BOB), (GROUP_OBJ, 0, NOBODY), (MASK, 7, NOBODY), (OTHER, 0, NOBODY)]
PARTS = [os.fsdecode(part) for part in FOLDERS]


@contextmanager
def shared_store(canary: Spec | None = None, **owners: int) -> Iterator[Path]:
    """A store of root's, a directory of each of these users, by its name, and the canary, if there is to be one."""
    with tmpfs_volume() as path:
        init(path)
        if canary is not None:
            make_tree(path / "canary", canary)
        for name, uid in owners.items():
            make_tree(path / name, Dir(owner=(uid, uid)))
        yield path


@contextmanager
def alices_volume() -> Iterator[Path]:
    with shared_store(alice=ALICE) as path:
        yield path


def canary_of(volume: Path) -> tuple[EntrySnapshot, ...]:
    return snapshot(volume / "canary", with_times=True)


def job_of(volume: Path, uid: int) -> Path:
    """The directory that Alice or Bob swaps."""
    return volume / {ALICE: "alice", BOB: "bob"}[uid] / "job"


def orphan_of(volume: Path, uid: int, mode: int = 0o755) -> str:
    """The id of an orphan that Alice or Bob made of it."""

    def act() -> str:
        make_tree(job_of(volume, uid), Dir({"results": "his own", "sub": {"more": "too"}}, mode=mode))
        return str(swap(job_of(volume, uid)).id)

    return as_user(uid, act)


def stuck(volume: Path) -> ListedContainer:
    """What is in quarantine of Alice's directory, in which root had made one of root's."""
    identifier = orphan_of(volume, ALICE)
    recover_all(volume)
    make_tree(place(volume, identifier) / "tree/roots", {"file": "root's"})
    reap_now(volume, identifier)
    (entry,) = [entry for entry in entries(volume) if entry.id == identifier]
    assert entry.state is State.QUARANTINE
    return entry


def dooms(number: int, *calls: str) -> CallHook:
    """A hook that sends a signal to its own process if that acts for Alice, at any call or at the first of these."""

    def hook(call: str) -> None:
        if os.geteuid() == ALICE and (not calls or call in calls):
            os.kill(os.getpid(), number)

    return hook


def throw(volume: Path, kernel: Kernel | None = None) -> Path:
    """The folder that gets what Alice, who this process is, swaps."""
    path = make_tree(volume / "alice" / os.urandom(4).hex(), {"results": "her own"})
    return Path(os.fsdecode(swap(path, kernel).store))


def folders(volume: Path) -> list[str]:
    """All names in u/ and new/ that have to do with Alice."""
    areas = (volume / ".trashd/u", volume / ".trashd/new")
    return sorted(path.name for area in areas for path in area.iterdir() if str(ALICE) in path.name)


def modes(folder: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in (folder, *(folder / part for part in PARTS))}


def make(volume: Path, kernel: Kernel | None = None) -> Path:
    """The caller's folder, made if there is none."""
    with opened(volume) as store:
        store = store._replace(kernel=kernel or store.kernel)
        with open_user_folder(store, os.geteuid()) or make_user_folder(store) as folder:
            return Path(os.fsdecode(folder.path()))


def attempt(act: Callable[[], object]) -> None:
    """Do it; whether it works is another test's law."""
    try:
        act()
    except (TrashdError, OSError):
        return
