"""Users' folders when power is cut: a folder is registered, or a store taken over.

Beside the trees of the rounds there is what a mate planted. What root has once refused stays refused, though it gets
the right modes afterwards; what root has not looked at is not proven.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from fusefs.core.errors import TrashdError
from fusefs.linux.kernel import Kernel
from fusefs.store.standing import take_census
from tests.crash.powerfail_invariants import STORE_DURABLE, Shape, check_state, shapes_at_once
from tests.crash.powerfail_work import USER, Cut, Scenario
from tests.support.asked_directly import asked_directly
from tests.support.make_trees import Dir, make_tree
from tests.support.other_users import as_user
from tests.support.store_verbs import init, init_as_of_old, opened, recover_all, swap

MATE = USER + 1000
"""Whose a planted directory is."""
PREPARED = "what there was is on the disk"
LOOKED = "root has looked"
_THESIS = f"{MATE}/orphans/20200101T000000.000Z-data-000000000000/tree/thesis"


def plant(store: Path, area: str) -> None:
    """A directory of a user's that was open to others when it got that user's name."""
    container = Dir({"tree": Dir({"thesis": "years of work"})}, mode=0o700)
    orphans = Dir({Path(_THESIS).parts[2]: container}, mode=0o700)
    planted = make_tree(store / area / str(MATE), Dir({"orphans": orphans}, mode=0o770))
    for path in (planted, *planted.rglob("*")):
        os.chown(path, MATE, MATE)


def closed(planted: Path) -> None:
    """What a backup, or `chmod -R go=`, makes of it."""
    for path in (planted, *(path for path in planted.rglob("*") if path.is_dir())):
        path.chmod(0o700)


# ---- the rounds


def registration_round(cut: Cut, k: int) -> None:
    """Two users' first swaps, and root's next command: their folders are registered and moved."""
    for n in (2 * k, 2 * k + 1):
        cut.uid = USER + n
        _throw(cut, n)
        cut.stands(n, Shape.SWAPPED, sync=True)
        cut.volume.mark(f"user {cut.uid}")
    if k == 0:
        plant(cut.base / ".trashd", "new")
    _look(cut)


def _throw(cut: Cut, k: int) -> None:
    cut.begin(k)
    cut.may(k, Shape.SWAPPED)
    as_user(cut.uid, lambda: swap(cut.name(k)).id)


def _look(cut: Cut) -> None:
    cut.sync()
    cut.volume.mark(PREPARED)
    assert _tells_of_planted(recover_all(cut.base, cut.kernel))
    cut.volume.mark(LOOKED)


def taking_over_round(cut: Cut, k: int) -> None:
    """Root takes a user's store over; that user's next command takes the folder out of it, and root's registers it."""
    as_user(cut.uid, lambda: init_as_of_old(cut.base))
    _throw(cut, k)
    cut.stands(k, Shape.SWAPPED, sync=True)
    cut.volume.mark(f"user {cut.uid}")
    cut.volume.mark(PREPARED)
    init(cut.base, cut.kernel)
    cut.volume.mark(STORE_DURABLE)
    assert cut.as_its_user(lambda: recover_all(cut.base, cut.kernel)) == []
    assert recover_all(cut.base, cut.kernel) == []
    assert not list(cut.base.glob(".trashd/old-*"))


# ---- what every state must be


@asked_directly()
def check_folders(root: Path, marks: Sequence[str]) -> str | None:
    """Nothing of the old state is lost, and all is proven that root has looked at, and nothing else."""
    try:
        return shapes_at_once(root, marks) or _repair(root, marks) or check_state(root, marks) or _unproven(root, marks)
    except (OSError, TrashdError) as error:
        return f"recovery raised {error!r}"


def _repair(root: Path, marks: Sequence[str]) -> str | None:
    """Each user's next command; what was planted is refused, and then put away."""
    if STORE_DURABLE not in marks and any(root.glob(".trashd.new-swap-*")):
        init(root)  # what it was exchanged with is still beside it: root, who has heard of no success, tries again
    if (root / ".trashd").exists() and os.stat(root / ".trashd").st_uid == 0:
        places = list(root.glob(f".trashd/[un]*/{MATE}"))
        if LOOKED in marks:
            for planted in places:
                closed(planted)
        told = recover_all(root)
        if places and not _tells_of_planted(told):
            return f"what was planted is not told: {told}"
        if MATE in _served(root):
            return "what was planted is proven"
        kept = list(root.glob(f".trashd/[un]*/{_THESIS}"))
        if len(kept) != len(places):
            return "what was planted is not where its owner finds it"
        for path in root.glob(f".trashd/[un]*/{MATE}"):
            shutil.rmtree(path)
    elif STORE_DURABLE in marks:
        return "root's store is gone"
    else:
        init(root)
    for uid in _users(marks):
        if told := as_user(uid, lambda: recover_all(root)):
            return f"its owner is told: {told}"
    return None


def _unproven(root: Path, marks: Sequence[str]) -> str | None:
    if left := [*root.glob(".trashd/old-*"), *root.glob(".trashd.new-*"), *root.glob(".trashd/new/[0-9]*")]:
        return f"left: {left}"
    if missing := _users(marks) - _served(root):
        return f"not proven: {missing}"
    return None


def _users(marks: Sequence[str]) -> set[int]:
    return {int(mark.split()[1]) for mark in marks if mark.startswith("user ")}


def _served(root: Path) -> set[int]:
    with opened(root) as store:
        return set(take_census(store).inos)


def _tells_of_planted(told: Sequence[str]) -> bool:
    return any(f"/{MATE}" in line for line in told)


class FlushedHere(Kernel):
    """After each rename another process flushes the directory that a name went to, and no other one."""

    is_source = False

    def exchange(self, old_dir: int, old: bytes, new_dir: int, new: bytes) -> None:
        super().exchange(old_dir, old, new_dir, new)
        self._flush(old_dir, new_dir)

    def rename(self, old_dir: int, old: bytes, new_dir: int, new: bytes) -> None:
        super().rename(old_dir, old, new_dir, new)
        self._flush(old_dir, new_dir)

    def rename_free(self, old_dir: int, old: bytes, new_dir: int, new: bytes) -> None:
        super().rename_free(old_dir, old, new_dir, new)
        self._flush(old_dir, new_dir)

    def _flush(self, old_dir: int, new_dir: int) -> None:
        with self.open_dir(old_dir if self.is_source else new_dir) as fd:
            os.fsync(fd)


class FlushedThere(FlushedHere):
    """After each rename another process flushes the directory that a name came from, and no other one."""

    is_source = True


FOLDERS = {
    # What comes before is cut elsewhere.
    "registration": Scenario(registration_round, uid=USER, check=check_folders, since=PREPARED),
    "taking over": Scenario(
        taking_over_round, 1, has_store=False, uid=USER, repeats=False, check=check_folders, since=PREPARED
    ),
}
