"""The acts of every verb, as scenes: what the crash tests kill, fail, stop and race."""

import os
from functools import partial
from pathlib import Path

from fusefs.cli.count_orphan import CountOptions, count_orphan
from fusefs.linux.kernel import Kernel
from fusefs.store.as_owner import swap_for_owner
from fusefs.store.check_swap import check_swap
from fusefs.store.orphans import RetentionFromNow, change_retention, find_container
from fusefs.store.stage import SwapOptions
from tests.support.crash_scenarios import HOME, USER, Act, CrashScenario, DyingAfter, Prepare, home
from tests.support.fake_dev_fuse import move_into_drop
from tests.support.make_trees import Dir, Spec, make_tree
from tests.support.shared_memory_children import code_of_child
from tests.support.store_verbs import DyingAt, own, reap_now, recover_all, remove, restore, swap

TREE: Spec = {"a": b"first", "empty": {}, "sub": {"leaf": b"second", "b": b"third"}}
READ_ONLY = Dir(TREE, mode=0o555)
LATE = b"written after the swap"


def make_victim(volume: Path) -> None:
    make_tree(home(volume), Dir(TREE, mode=0o750))


def make_users(volume: Path) -> None:
    """The tree at its name, a user's in a directory of root's."""
    make_victim(volume)
    os.chown(home(volume), USER, USER)


def make_with_folder(volume: Path) -> None:
    """The tree at its name, and a folder in the store of the user who makes it."""
    make_victim(volume)
    with own(volume):
        pass


def make_read_only(volume: Path) -> None:
    make_tree(home(volume), READ_ONLY)


def make_read_only_with_folder(volume: Path) -> None:
    make_read_only(volume)
    with own(volume):
        pass


def make_file(volume: Path) -> None:
    home(volume).write_bytes(b"a file")
    home(volume).chmod(0o640)


def make_orphan(volume: Path) -> None:
    """The tree an orphan, its fresh directory untouched."""
    make_victim(volume)
    swap(home(volume))


def make_read_only_orphan(volume: Path) -> None:
    make_read_only(volume)
    swap(home(volume))


def make_counted(volume: Path) -> None:
    make_orphan(volume)
    _count(volume, Kernel())


def write_late(volume: Path) -> None:
    """The tree an orphan, something written into its fresh directory since."""
    make_orphan(volume)
    (home(volume) / "late").write_bytes(LATE)


def write_late_in_read_only(volume: Path) -> None:
    """A read-only tree an orphan, something written into its fresh directory since, which is read-only again."""
    open_up_and_write_late(volume)
    home(volume).chmod(0o555)


def open_up_and_write_late(volume: Path) -> None:
    """A read-only tree an orphan, something written into its fresh directory since, which stays open."""
    make_read_only_orphan(volume)
    home(volume).chmod(0o755)
    (home(volume) / "late").write_bytes(LATE)


def leave_name_free(volume: Path) -> None:
    """The tree an orphan, nothing at its name."""
    make_victim(volume)
    remove(home(volume))


def leave_read_only_name_free(volume: Path) -> None:
    """A read-only tree an orphan, nothing at its name."""
    make_read_only(volume)
    remove(home(volume))


def restore_parts(volume: Path) -> None:
    """The tree an orphan, two parts of it restored, one of them changed since; something else written there, too."""
    make_orphan(volume)
    for part in (b"a", b"sub/leaf"):
        restore_it(volume, Kernel(), part)
    (home(volume) / "sub/leaf").write_bytes(b"changed since")
    (home(volume) / "sub/late").write_bytes(LATE)


def lose_inside(volume: Path) -> None:
    """The tree an orphan, its name and its directories gone."""
    make_orphan(volume)
    home(volume).rmdir()


def drop(volume: Path) -> None:
    """Two things in drop/ that no tool had a hand in."""
    with own(volume) as folder:
        path = Path(os.fsdecode(folder.path())) / "drop"
    make_tree(path / "dropped", TREE)
    (path / "file").write_bytes(b"dropped too")


def drop_read_only(volume: Path) -> None:
    with own(volume) as folder:
        path = Path(os.fsdecode(folder.path())) / "drop"
    make_tree(path / "dropped", READ_ONLY)


def _swap(volume: Path, kernel: Kernel) -> object:
    return swap(home(volume), kernel)


def _swap_for_owner(volume: Path, kernel: Kernel) -> object:
    return swap_for_owner(kernel, os.fsencode(home(volume)), SwapOptions())


def _remove(volume: Path, kernel: Kernel) -> object:
    return remove(home(volume), kernel)


def _drop_through_mount(volume: Path, kernel: Kernel) -> object:
    """What a mount's daemon does for `mv job .trashd/drop/`, if the mover may: the owner."""
    move_into_drop(volume, home(volume), kernel)
    return None


def recover(volume: Path, kernel: Kernel) -> object:
    return recover_all(volume, kernel)


def restore_it(volume: Path, kernel: Kernel, inside: bytes | None = None, to: str | None = None) -> object:
    where = None if to is None else volume / HOME / to
    return restore(volume, only_id(volume), kernel, inside, where)


def _keep(volume: Path, kernel: Kernel) -> object:
    volumes = [os.fsencode(volume)]
    return change_retention(kernel, volumes, find_container(kernel, volumes, only_id(volume)), RetentionFromNow(None))


def _count(volume: Path, kernel: Kernel) -> object:
    volumes = [os.fsencode(volume)]
    return count_orphan(
        kernel, volumes, find_container(kernel, volumes, only_id(volume)), lambda: False, CountOptions()
    )


def _reap(volume: Path, kernel: Kernel) -> object:
    return reap_now(volume, only_id(volume), kernel)


def only_id(volume: Path) -> str:
    """The id of the one container that is there, found without the hook: the path says it."""
    # A user's own folder is in new/ until root has looked.
    names = [path.name for path in (volume / ".trashd").glob("[un]*/*/*/*Z-*")]
    return names[0] if names else "none"


def killed_after(prepare: Prepare, act: Act, call: str, n: int = 1) -> Prepare:
    """What an act leaves that was killed after its n-th call of that name."""

    def leave(volume: Path) -> None:
        prepare(volume)
        assert code_of_child(lambda: act(volume, Kernel(DyingAfter(call, n)))) == DyingAt.EXIT_CODE

    return leave


def _check(volume: Path, kernel: Kernel) -> None:
    check_swap(kernel, bytes(home(volume)))


CHECKS = {
    "check": CrashScenario(make_victim, _check, is_gapless=True),
    "check-two-rename": CrashScenario(make_victim, _check, exchange=False, is_gapless=True),
    "check-first": CrashScenario(make_read_only, _check, uid=USER, is_gapless=True),
    "check-lent": CrashScenario(make_read_only_with_folder, _check, uid=USER, is_gapless=True),
}
"""A check as the first command of its user, who would have to be lent what the victim forbids; and with a folder."""

SWAP = CrashScenario(make_victim, _swap, is_gapless=True)
SWAP_FOR_OWNER = CrashScenario(make_read_only, _swap_for_owner, uid=USER, by=0, is_gapless=True)
SWAP_FOR_OWNER_TWICE = CrashScenario(make_read_only, _swap_for_owner, uid=USER, by=0, exchange=False)
SWAP_LENT = CrashScenario(make_read_only, _swap, uid=USER, is_gapless=True)
SWAP_TWICE = CrashScenario(make_victim, _swap, exchange=False)
SWAP_TWICE_LENT = CrashScenario(make_read_only, _swap, uid=USER, exchange=False)
REMOVE = CrashScenario(make_victim, _remove)
REMOVE_FILE = CrashScenario(make_file, _remove)
REMOVE_LENT = CrashScenario(make_read_only, _remove, uid=USER)
ADOPT = CrashScenario(drop, recover)
ADOPT_LENT = CrashScenario(drop_read_only, recover, uid=USER)
DROP_DIRECTORY = CrashScenario(make_victim, _drop_through_mount)
DROP_FILE = CrashScenario(make_file, _drop_through_mount)
DROP_BY_DAEMON = CrashScenario(make_with_folder, _drop_through_mount, uid=USER, by=0)
RESTORE = CrashScenario(make_orphan, restore_it, is_gapless=True)
RESTORE_LATE = CrashScenario(write_late, restore_it, is_gapless=True)
RESTORE_PARTS = CrashScenario(restore_parts, restore_it, is_gapless=True, is_split=True)
RESTORE_TWICE_PARTS = CrashScenario(restore_parts, restore_it, exchange=False, is_split=True)
RESTORE_PARTS_BY_ROOT = CrashScenario(restore_parts, restore_it, uid=USER, by=0, is_gapless=True, is_split=True)
RESTORE_FREE = CrashScenario(leave_name_free, restore_it)
RESTORE_TO = CrashScenario(make_orphan, partial(restore_it, to="elsewhere"), is_gapless=True)
RESTORE_INSIDE = CrashScenario(make_orphan, partial(restore_it, inside=b"sub/leaf"), is_gapless=True, is_split=True)
RESTORE_INSIDE_FREE = CrashScenario(lose_inside, partial(restore_it, inside=b"sub/leaf"), is_split=True)
RESTORE_LENT = CrashScenario(make_read_only_orphan, restore_it, uid=USER, is_gapless=True)
RESTORE_LATE_LENT = CrashScenario(write_late_in_read_only, restore_it, uid=USER)
RESTORE_LATE_OPENED = CrashScenario(open_up_and_write_late, restore_it, uid=USER)
RESTORE_TWICE_LATE_LENT = CrashScenario(write_late_in_read_only, restore_it, uid=USER, exchange=False)
RESTORE_FREE_LENT = CrashScenario(leave_read_only_name_free, restore_it, uid=USER)
RESTORE_TWICE = CrashScenario(make_orphan, restore_it, exchange=False)
RESTORE_TWICE_LATE = CrashScenario(write_late, restore_it, exchange=False)
RESTORE_BY_ROOT = CrashScenario(make_read_only_orphan, restore_it, uid=USER, by=0, is_gapless=True)
RESTORE_TO_BY_ROOT = CrashScenario(
    make_read_only_orphan, partial(restore_it, to="elsewhere"), uid=USER, by=0, is_gapless=True
)
KEEP = CrashScenario(make_orphan, _keep, is_gapless=True)
KEEP_BY_ROOT = CrashScenario(make_orphan, _keep, uid=USER, by=0, is_gapless=True)
COUNT = CrashScenario(make_orphan, _count, is_gapless=True)
COUNT_BY_ROOT = CrashScenario(make_orphan, _count, uid=USER, by=0, is_gapless=True)
RESTORE_INSIDE_COUNTED = CrashScenario(
    make_counted, partial(restore_it, inside=b"sub/leaf"), is_gapless=True, is_split=True
)
REAP = CrashScenario(make_orphan, _reap, is_gapless=True, is_reap=True)
REAP_BY_ROOT = CrashScenario(make_orphan, _reap, uid=USER, by=0, is_gapless=True, is_reap=True)
RECOVER_SWAP = CrashScenario(killed_after(make_victim, _swap, "exchange"), recover, is_gapless=True)
RECOVER_GIVING = CrashScenario(killed_after(make_users, _swap_for_owner, "exchange"), recover, by=0, is_gapless=True)
RECOVER_GAP = CrashScenario(killed_after(make_victim, _swap, "rename"), recover, exchange=False)
RECOVER_RESTORE = CrashScenario(killed_after(write_late, restore_it, "exchange"), recover, is_gapless=True)
RECOVER_RESTORE_GAP = CrashScenario(killed_after(write_late, restore_it, "rename", 2), recover, exchange=False)
RECOVER_REAP = CrashScenario(killed_after(make_orphan, _reap, "unlink"), recover, is_gapless=True, is_reap=True)

SCENES = {
    "swap": SWAP,
    "swap-lent": SWAP_LENT,
    "swap-for-owner": SWAP_FOR_OWNER,
    "swap-for-owner-two-rename": SWAP_FOR_OWNER_TWICE,
    "swap-two-rename": SWAP_TWICE,
    "swap-two-rename-lent": SWAP_TWICE_LENT,
    "rm": REMOVE,
    "rm-file": REMOVE_FILE,
    "rm-lent": REMOVE_LENT,
    "adopt": ADOPT,
    "adopt-lent": ADOPT_LENT,
    "drop": DROP_DIRECTORY,
    "drop-file": DROP_FILE,
    "drop-by-roots-daemon": DROP_BY_DAEMON,
    "restore": RESTORE,
    "restore-late": RESTORE_LATE,
    "restore-parts": RESTORE_PARTS,
    "restore-two-rename-parts": RESTORE_TWICE_PARTS,
    "restore-parts-by-root": RESTORE_PARTS_BY_ROOT,
    "restore-free": RESTORE_FREE,
    "restore-to": RESTORE_TO,
    "restore-inside": RESTORE_INSIDE,
    "restore-inside-free": RESTORE_INSIDE_FREE,
    "restore-lent": RESTORE_LENT,
    "restore-late-lent": RESTORE_LATE_LENT,
    "restore-late-opened": RESTORE_LATE_OPENED,
    "restore-two-rename-late-lent": RESTORE_TWICE_LATE_LENT,
    "restore-free-lent": RESTORE_FREE_LENT,
    "restore-two-rename": RESTORE_TWICE,
    "restore-two-rename-late": RESTORE_TWICE_LATE,
    "restore-by-root": RESTORE_BY_ROOT,
    "restore-to-by-root": RESTORE_TO_BY_ROOT,
    "keep": KEEP,
    "keep-by-root": KEEP_BY_ROOT,
    "count": COUNT,
    "count-by-root": COUNT_BY_ROOT,
    "restore-inside-counted": RESTORE_INSIDE_COUNTED,
    "reap": REAP,
    "reap-by-root": REAP_BY_ROOT,
    "recover-swap": RECOVER_SWAP,
    "recover-giving": RECOVER_GIVING,
    "recover-swap-in-the-gap": RECOVER_GAP,
    "recover-restore": RECOVER_RESTORE,
    "recover-restore-in-the-gap": RECOVER_RESTORE_GAP,
    "recover-reap": RECOVER_REAP,
}
