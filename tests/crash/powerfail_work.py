"""Verbs whose power is cut: rounds of each in its variants, which tell by marks where their tree goes."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from fusefs.core.errors import TrashdError
from fusefs.linux.kernel import Kernel
from fusefs.linux.runtime_directories import replace_file
from fusefs.store.as_owner import swap_for_owner
from fusefs.store.backing_and_mount import BackingAndMount
from fusefs.store.init_store import initialise
from fusefs.store.stage import SwapOptions
from fusefs.store.swap import open_own_folder
from fusefs.store.user_folders import inspect_folders
from tests.crash.powerfail_invariants import MODE, STORE_DURABLE, Shape, check_state, shapes_at_once, text_of
from tests.support.crash_states import Check
from tests.support.fake_dev_fuse import move_into_drop
from tests.support.make_trees import Dir, make_tree
from tests.support.other_users import as_user, query_without_fork
from tests.support.real_filesystems import btrfs_subvolume, sync
from tests.support.store_verbs import init, init_as_of_old, opened, recover_all, remove, restore, swap
from tests.support.trash_without_walk import gather
from tests.support.write_log_disk import MOUNTED, LoggedVolume

T = TypeVar("T")
USER = 4711
LOOKS = frozenset(("open", "openat2", "stat", "fstat", "statx", "statfs", "identify", "getdents", "read", "flock"))
"""Calls that change nothing on a disk: between two of them a background flush makes no difference."""


class Meddler:
    """A hook: before the n-th call (from 0) that changes anything another process flushes something; a full volume."""

    def __init__(self) -> None:
        self.flush: Callable[[], None] = lambda: None
        self.n_left = -1
        self.n_calls = 0
        self.n_in_a_round = 0
        self.is_full = False
        self.is_boundary = False

    def __call__(self, call: str) -> None:
        if call == "mkdir" and self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if call in ("exchange", "rename") and self.is_boundary:
            self.is_boundary = False
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        if call not in LOOKS:
            self.n_calls += 1
            self.n_left -= 1
            if self.n_left == -1:
                self.flush()


class Cut:
    """A logged volume, what happens on it, and a kernel of the verb alone, with its hook."""

    def __init__(self, volume: LoggedVolume, scenario: Scenario, kind: type[Kernel] = Kernel) -> None:
        self.volume = volume
        self.uid = scenario.uid
        self.base = prepare(volume, scenario)
        self.meddler = Meddler()
        self.kernel = kind(self.meddler)

    def name(self, k: int) -> Path:
        return self.base / f"v{k}"

    def elsewhere(self, k: int) -> Path:
        return self.base / f"to{k}"

    def begin(self, k: int) -> None:
        """Make round k's tree; it is on the disk. It is there, named, or not at all, whatever syncs meanwhile."""
        path = self.base / f"made{k}"
        (path / "part").mkdir(parents=True)
        for name in ("f0", "f1", "part"):
            (path / name / "p" if name == "part" else path / name).write_text(text_of(k, name))
        for directory in (path / "part", path):
            os.chown(directory, self.uid, self.uid)
        path.chmod(MODE)
        path.rename(self.name(k))
        self.stands(k, Shape.HOME, sync=True)

    def begin_file(self, k: int) -> None:
        """Make round k's file, which `rm` takes too; it is on the disk."""
        self.name(k).write_text(text_of(k, "file"))
        self.stands(k, Shape.HOME, sync=True)

    def flush_tree(self) -> None:
        """What a holder of any tree may do: fsync its directory, wherever that is now."""
        for pattern in ("v*", ".trashd/*/*/*/*/tree"):
            for path in self.base.glob(pattern):
                fd = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)

    def as_its_user(self, function: Callable[[], T]) -> T:
        """What a function returns that the trees' user runs; calls are counted as if they were ours."""
        result, self.meddler.n_calls, self.meddler.n_left = as_user(
            self.uid, lambda: (function(), self.meddler.n_calls, self.meddler.n_left)
        )
        return result

    def may(self, k: int, *shapes: Shape) -> None:
        for shape in shapes:
            self.volume.mark(f"start {k} {shape.name}")

    def stands(self, k: int, shape: Shape, *, sync: bool = False) -> None:
        """Say that a shape is there for good; sync makes it so, where no verb has promised it."""
        if sync:
            self.sync()
        self.volume.mark(f"durable {k} {shape.name}")

    def sync(self) -> None:
        """What any process may do at any time: syncfs."""
        kernel = Kernel()
        with kernel.open_path(os.fsencode(self.base), os.O_RDONLY) as fd:
            kernel.syncfs(fd)

    def flush_unrelated(self) -> None:
        """What any process may do too: write a new file beside the victim and fsync it."""
        fd = os.open(self.base / f"other{self.meddler.n_calls}", os.O_CREAT | os.O_WRONLY, 0o600)
        try:
            os.write(fd, b"something")
            os.fsync(fd)
        finally:
            os.close(fd)

    def swapped(self, k: int, options: SwapOptions = SwapOptions()) -> str:  # noqa: B008  a value
        """Swap by the watched kernel; the id."""
        self.may(k, Shape.SWAPPED)
        done = swap(self.name(k), self.kernel, options)
        assert not done.warnings, done.warnings
        self.stands(k, Shape.SWAPPED)
        return done.id


# ---- the rounds: each verb in its variants


def swap_round(cut: Cut, k: int) -> None:
    cut.begin(k)
    cut.swapped(k)


def lower_store_round(cut: Cut, k: int) -> None:
    """A swap that the volume's store can't take: btrfs refuses by itself, for the others the hook does."""
    cut.begin(k)
    cut.meddler.is_boundary = cut.volume.fstype != "btrfs"
    cut.swapped(k)
    assert (cut.base / ".trashd").exists()


def two_rename_round(cut: Cut, k: int) -> None:
    cut.begin(k)
    cut.may(k, Shape.GAP)
    identifier = cut.swapped(k)
    cut.may(k, Shape.GAP, Shape.HOME)
    restore(cut.volume.mountpoint, identifier, cut.kernel)
    cut.stands(k, Shape.HOME)


def rm_round(cut: Cut, k: int) -> None:
    cut.begin(k)
    cut.may(k, Shape.REMOVED)
    remove(cut.name(k), cut.kernel)
    cut.stands(k, Shape.REMOVED)


def rm_file_round(cut: Cut, k: int) -> None:
    cut.begin_file(k)
    cut.may(k, Shape.REMOVED)
    identifier = remove(cut.name(k), cut.kernel).id
    cut.stands(k, Shape.REMOVED)
    cut.may(k, Shape.HOME)
    restore(cut.base, identifier, cut.kernel)
    cut.stands(k, Shape.HOME)


def restore_removed_round(cut: Cut, k: int) -> None:
    cut.begin(k)
    cut.may(k, Shape.REMOVED)
    identifier = remove(cut.name(k), cut.kernel).id
    cut.stands(k, Shape.REMOVED, sync=True)
    cut.may(k, Shape.HOME)
    restore(cut.volume.mountpoint, identifier, cut.kernel)
    cut.stands(k, Shape.HOME)


def drop_round(cut: Cut, k: int) -> None:
    cut.begin(k)
    cut.may(k, Shape.REMOVED)
    cut.name(k).rename(cut.base / f".trashd/u/0/drop/v{k}")
    assert recover_all(cut.base, cut.kernel) == []
    cut.flush_unrelated()
    cut.stands(k, Shape.REMOVED, sync=True)


def drop_through_mount_round(cut: Cut, k: int) -> None:
    cut.begin(k)
    cut.may(k, Shape.REMOVED)
    move_into_drop(cut.base, cut.name(k), cut.kernel)
    cut.flush_unrelated()
    cut.stands(k, Shape.REMOVED, sync=True)


def restore_round(cut: Cut, k: int) -> None:
    cut.begin(k)
    identifier = cut.swapped(k)
    cut.may(k, Shape.HOME)
    restore(cut.volume.mountpoint, identifier, cut.kernel)
    cut.stands(k, Shape.HOME)


def restore_elsewhere_round(cut: Cut, k: int) -> None:
    cut.begin(k)
    identifier = cut.swapped(k)
    cut.may(k, Shape.AWAY)
    restore(cut.base, identifier, cut.kernel, to=cut.elsewhere(k))
    cut.stands(k, Shape.AWAY)


def restore_over_written_round(cut: Cut, k: int) -> None:
    cut.begin(k)
    identifier = cut.swapped(k)
    late = cut.base / f"late{k}"
    late.write_text(text_of(k, "late"))
    cut.sync()
    cut.may(k, Shape.WRITTEN)
    late.rename(cut.name(k) / "late")
    cut.stands(k, Shape.WRITTEN, sync=True)
    cut.may(k, Shape.RESCUED)
    assert restore(cut.base, identifier, cut.kernel).rescued
    cut.flush_unrelated()
    cut.stands(k, Shape.RESCUED)


def restore_inside_round(cut: Cut, k: int) -> None:
    _restore_inside(cut, k, b"part", Shape.PARTED)


def restore_file_inside_round(cut: Cut, k: int) -> None:
    _restore_inside(cut, k, b"f0", Shape.FILE_PARTED)


def _restore_inside(cut: Cut, k: int, inside: bytes, shape: Shape) -> None:
    cut.begin(k)
    identifier = cut.swapped(k)
    cut.may(k, shape)
    restore(cut.base, identifier, cut.kernel, inside=inside)
    cut.stands(k, shape)


def reserve_round(cut: Cut, k: int) -> None:
    """A swap on a full volume, which makes no directory of its own; then the reserve is stocked again."""
    cut.begin(k)
    cut.meddler.is_full = True
    cut.swapped(k)
    cut.meddler.is_full = False
    assert not (cut.base / ".trashd/u/0/reserve/ready").exists()
    assert recover_all(cut.base, cut.kernel) == []


def user_round(cut: Cut, k: int) -> None:
    """A user's first swap makes the folder; each lends its owner write permission for the exchange."""
    cut.begin(k)
    cut.may(k, Shape.SWAPPED)
    identifier = cut.as_its_user(lambda: str(swap(cut.name(k), cut.kernel).id))
    cut.stands(k, Shape.SWAPPED)
    cut.may(k, Shape.HOME)
    cut.as_its_user(lambda: restore(cut.volume.mountpoint, identifier, cut.kernel).partial)
    cut.stands(k, Shape.HOME)


def for_owner_round(cut: Cut, k: int) -> None:
    """Root swaps, and gives the old tree to its owner."""
    cut.begin(k)
    cut.may(k, Shape.SWAPPED)
    done = swap_for_owner(cut.kernel, os.fsencode(cut.name(k)), SwapOptions())
    assert not done.warnings, done.warnings
    cut.stands(k, Shape.SWAPPED)
    cut.may(k, Shape.HOME)
    restore(cut.volume.mountpoint, done.id, cut.kernel)
    cut.stands(k, Shape.HOME)


def lower_store_rm_round(cut: Cut, k: int) -> None:
    """A removal by a plain rename, which no filesystem hurries to the disk as it does an exchange."""
    cut.begin(k)
    cut.may(k, Shape.REMOVED)
    cut.meddler.is_boundary = cut.volume.fstype != "btrfs"
    remove(cut.name(k), cut.kernel)
    assert (cut.base / ".trashd").exists()
    cut.stands(k, Shape.REMOVED)


def sweep_round(cut: Cut, k: int) -> None:
    _sweep(cut, k)


def restore_swept_round(cut: Cut, k: int) -> None:
    """They are put back, either of them first."""
    orphan = _sweep(cut, k)
    cut.stands(k, Shape.SWEPT, sync=True)
    cut.may(k, Shape.SWEEPING, Shape.MERGING, Shape.HOME)
    assert restore(cut.base, orphan, cut.kernel).n_left == 0
    cut.stands(k, Shape.HOME)


def _sweep(cut: Cut, k: int) -> str:
    cut.begin(k)
    cut.may(k, Shape.SWEEPING, Shape.SWEPT)
    orphan = gather(cut.name(k), ["f0", "part"], cut.kernel).orphan
    assert orphan is not None
    cut.stands(k, Shape.SWEPT)
    return orphan


def init_round(cut: Cut, _k: int) -> None:
    """The store is durable before the caller's folder is made: registering that flushes a file, on ext4 and xfs all."""
    base = os.fsencode(cut.base)
    store, _done = initialise(cut.kernel, BackingAndMount(cut.kernel.open_path(base)), base)
    cut.volume.mark(STORE_DURABLE)
    with store:
        open_own_folder(store).fd.close()


class Scenario(NamedTuple):
    """A round, and the volume that it needs.

    has_store  init has made it; False: the round does
    exchange   whether the store believes in RENAME_EXCHANGE
    boundary   the rounds are in a directory that no rename leads into, with a store of its own
    uid        whose trees they are
    check      what every crash state must be
    since      the mark before which nothing is of interest; what it takes to make the store is cut in the first one
    """

    round: Callable[[Cut, int], None]
    n_rounds: int = 2
    has_store: bool = True
    exchange: bool = True
    boundary: bool = False
    uid: int = 0
    check: Check = check_state
    since: str = STORE_DURABLE


VERBS = {
    "swap": Scenario(swap_round, since=MOUNTED),
    "swap in a lower store": Scenario(lower_store_round, boundary=True),
    "first swap": Scenario(swap_round, n_rounds=1, has_store=False, since=MOUNTED),
    "rm in a lower store": Scenario(lower_store_rm_round, boundary=True),
    "swap by the reserve": Scenario(reserve_round),
    "swap by a user": Scenario(user_round, n_rounds=1, uid=USER),
    "swap for the owner": Scenario(for_owner_round, uid=USER),
    "swap for the owner by two renames": Scenario(for_owner_round, exchange=False, uid=USER),
    "two renames": Scenario(two_rename_round, exchange=False),
    "rm": Scenario(rm_round),
    "rm of a file": Scenario(rm_file_round),
    "restore of removed": Scenario(restore_removed_round),
    "drop": Scenario(drop_round),
    "drop through a mount": Scenario(drop_through_mount_round),
    "restore": Scenario(restore_round),
    "restore --to": Scenario(restore_elsewhere_round),
    "restore over written": Scenario(restore_over_written_round),
    "restore inside": Scenario(restore_inside_round),
    "restore of a file inside": Scenario(restore_file_inside_round),
    "sweep": Scenario(sweep_round),
    "restore of a sweep": Scenario(restore_swept_round),
    "init": Scenario(init_round, n_rounds=1, has_store=False, since=MOUNTED),
}


def prepare(volume: LoggedVolume, scenario: Scenario) -> Path:
    """What must be on the volume before the first round; the directory that the rounds are in."""
    root = base = volume.mountpoint
    root.parent.chmod(0o711)  # others pass: some rounds are a user's
    root.chmod(0o1777)
    if scenario.has_store:
        init(root)
        if not scenario.exchange:
            path = root / ".trashd/volume.json"
            replace_file(os.fsencode(path), path.read_bytes().replace(b"true", b"false"), 0o644, is_durable=True)
    if scenario.boundary:
        base = btrfs_subvolume(root, "lower") if volume.fstype == "btrfs" else root / "lower"
        if volume.fstype != "btrfs":
            base.mkdir()
    sync(root)
    if scenario.has_store:
        volume.mark(STORE_DURABLE)
    return base


def keep_round(cut: Cut, k: int) -> None:
    _swap_keeping(cut, k)


def restore_kept_round(cut: Cut, k: int) -> None:
    identifier = _swap_keeping(cut, k)
    cut.stands(k, Shape.KEPT, sync=True)
    cut.may(k, Shape.PARTING, Shape.LINKED, Shape.HOME)
    restore(cut.base, identifier, cut.kernel)
    cut.stands(k, Shape.HOME)
    cut.may(k, Shape.LINKED)  # recovery has nothing to do but to drop the link


def _swap_keeping(cut: Cut, k: int) -> str:
    cut.begin(k)
    cut.may(k, Shape.LINKED, Shape.SHOWN, Shape.KEPT)
    done = swap(cut.name(k), cut.kernel, SwapOptions(keep=("f0", "part")))
    assert not done.warnings, done.warnings
    cut.stands(k, Shape.KEPT)
    return done.id


KEEPING = {"swap --keep": Scenario(keep_round), "restore of kept": Scenario(restore_kept_round)}


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


@query_without_fork()
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
        return set(inspect_folders(store).inos)


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
    "taking over": Scenario(taking_over_round, 1, has_store=False, uid=USER, check=check_folders, since=PREPARED),
}
