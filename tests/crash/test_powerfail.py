"""Power cut at every moment of every verb: no crash state loses a tree, shows a half, or breaks a promise."""

import os
import re
import stat
from itertools import product
from pathlib import Path

import pytest

from fusefs.linux.kernel import Kernel
from tests.crash.powerfail_reaper import SCENARIOS
from tests.crash.powerfail_replay import BTRFS, EXT4, IS_EVERYWHERE, XFS, NoRecordFsync, replay
from tests.crash.powerfail_work import Cut

on_each_fs = pytest.mark.parametrize("fstype", [EXT4, XFS, BTRFS])
on_xfs_and_btrfs = pytest.mark.parametrize("fstype", [XFS, BTRFS])
MEDDLED_IN = {"swap": EXT4, "swap by a user": XFS, "two renames": BTRFS, "rm": EXT4, "restore inside": XFS}
_FLUSHED_LAST = {
    "swap": EXT4,
    "rm": XFS,
    "restore of removed": BTRFS,
    "restore over written": XFS,
    "restore inside": EXT4,
}
FLUSHED_LAST = list(product(_FLUSHED_LAST, (EXT4, XFS, BTRFS))) if IS_EVERYWHERE else list(_FLUSHED_LAST.items())
pytestmark = pytest.mark.timeout(120)


class NoPointerFsync(NoRecordFsync):
    def fsync(self, fd: int) -> None:
        if b"/pointers/" in os.readlink(b"/proc/self/fd/%d" % fd):
            return
        os.fsync(fd)


class NoDirectoryFsync(Kernel):
    """Does not flush directories: what says at the end that it is durable is not."""

    def fsync(self, fd: int) -> None:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            super().fsync(fd)


class NoContainerFsync(Kernel):
    """Flushes orphans/ instead of the container in it, as trashd did once; restoring/ likewise."""

    def fsync(self, fd: int) -> None:
        here = Path(os.readlink(f"/proc/self/fd/{int(fd)}"))
        if not stat.S_ISDIR(os.fstat(fd).st_mode) or here.parent.name not in ("orphans", "restoring"):
            super().fsync(fd)
        elif here.parent.name == "orphans":
            with self.open_path(os.fsencode(here.parent), os.O_RDONLY) as parent:
                super().fsync(parent)


class ParentFsync(Kernel):
    """After a restore flushes the directory that a tree went to, as trashd did once, not where it came from."""

    def fsync(self, fd: int) -> None:
        here = Path(os.readlink(f"/proc/self/fd/{int(fd)}"))
        if here.parent.name != "restoring":
            super().fsync(fd)
            return
        with self.open_path(os.fsencode(here.parents[4]), os.O_RDONLY) as root:
            super().fsync(root)


class SyncedExchange(Kernel):
    """Exchanges, and another process syncs all right after it."""

    def exchange(self, old_dir: int, old: bytes, new_dir: int, new: bytes) -> None:
        super().exchange(old_dir, old, new_dir, new)
        with self.open_dir(old_dir) as fd:
            self.syncfs(fd)


class NoKeptFsync(SyncedExchange):
    """As SyncedExchange, and a restore does not flush the directory from which it takes back what was kept in view."""

    def fsync(self, fd: int) -> None:
        if b"/restoring/" not in (here := os.readlink(b"/proc/self/fd/%d" % fd)) or not here.endswith(b"/tree"):
            super().fsync(fd)


class ThreeRenames(Kernel):
    """Exchanges by three renames, while others flush."""

    def exchange(self, old_dir: int, old: bytes, new_dir: int, new: bytes) -> None:
        spare = old + b".spare"
        for source in ((old_dir, old, old_dir, spare), (new_dir, new, old_dir, old), (old_dir, spare, new_dir, new)):
            self.rename(*source)
            with self.open_dir(old_dir) as fd:
                self.syncfs(fd)


@pytest.mark.long
@on_each_fs
@pytest.mark.parametrize("verb", SCENARIOS)
def test_power_cut_loses_nothing(verb: str, fstype: str) -> None:
    """Every verb on every filesystem; a second round after the first on ext4 alone.

    The others have theirs in `test_background_flush_between_calls_changes_nothing`: four of each of its verbs.
    """
    scenario = SCENARIOS[verb]
    if fstype != "ext4":
        scenario = scenario._replace(n_rounds=1)
    result = replay(fstype, scenario)
    print(fstype, verb, result)
    assert not result.failures, str(result)
    assert result.n_by_kind["flush"] > 1, str(result)


def flush_in_the_background(cut: Cut, k: int) -> bool:
    """Round 0 counts the calls; each later one has a flush by another process before another one of them."""
    meddler = cut.meddler
    if k == 0:
        meddler.n_left = -1
        return True
    if k == 1:
        meddler.n_in_a_round = meddler.n_calls
    flushes = (cut.sync, cut.flush_unrelated, cut.flush_tree)
    number = (k - 1) * meddler.n_in_a_round // len(flushes) + 3
    meddler.n_left, meddler.flush = number, flushes[(k - 1) % len(flushes)]
    return number < meddler.n_in_a_round


@pytest.mark.long
@pytest.mark.parametrize(
    ("verb", "fstype"), [pytest.param(verb, *fstype.values, marks=fstype.marks) for verb, fstype in MEDDLED_IN.items()]
)
def test_background_flush_between_calls_changes_nothing(verb: str, fstype: str) -> None:
    result = replay(fstype, SCENARIOS[verb], meddle=flush_in_the_background)
    print(fstype, verb, result)
    assert not result.failures, str(result)


def first_failure(fstype: str, verb: str, kind: type[Kernel]) -> str:
    """The first thing that is wrong with wrong code; empty if no crash state shows it."""
    result = replay(fstype, SCENARIOS[verb], kind, stop_after=1)
    return result.failures[0].text if result.failures else ""


@on_each_fs
def test_record_without_fsync_is_short(fstype: str) -> None:
    assert "record" in first_failure(fstype, "swap", NoRecordFsync)


@pytest.mark.parametrize(
    ("verb", "fstype"), [pytest.param(verb, *fstype.values, marks=fstype.marks) for verb, fstype in FLUSHED_LAST]
)
def test_verb_without_its_last_fsync_is_not_durable(verb: str, fstype: str) -> None:
    assert re.match(r"at once: round \d is", first_failure(fstype, verb, NoDirectoryFsync))


@on_each_fs
def test_init_without_fsync_of_its_files_leaves_half_a_store(fstype: str) -> None:
    assert "store" in first_failure(fstype, "init", NoRecordFsync)


@on_each_fs
def test_init_without_its_last_fsync_is_not_durable(fstype: str) -> None:
    assert "store" in first_failure(fstype, "init", NoDirectoryFsync)


@on_each_fs
def test_pointer_without_fsync_leads_nowhere(fstype: str) -> None:
    assert "not a relative path" in first_failure(fstype, "swap in a lower store", NoPointerFsync)


@pytest.mark.needs("root", "loop", "fuse", "btrfs")
def test_removal_on_btrfs_is_not_durable_by_a_flush_of_the_store() -> None:
    assert "is tree at its name" in first_failure("btrfs", "rm", NoContainerFsync)


@pytest.mark.needs("root", "loop", "fuse", "btrfs")
def test_file_restored_on_btrfs_is_in_two_places_by_a_flush_of_where_it_went() -> None:
    told = first_failure("btrfs", "rm of a file", ParentFsync)
    assert "is tree at its name, nothing elsewhere, ('tree',) stored" in told


@pytest.mark.needs("root", "loop", "fuse", "btrfs")
def test_record_rewritten_on_btrfs_before_its_container_is_durable_loses_its_tree() -> None:
    assert "('tree',) stored; not HOME" in first_failure("btrfs", "swap by a user", NoContainerFsync)


@on_xfs_and_btrfs
def test_restore_of_kept_is_durable_whoever_syncs_in_its_middle(fstype: str) -> None:
    result = replay(fstype, SCENARIOS["restore of kept"], SyncedExchange)
    assert not result.failures, str(result)


@on_xfs_and_btrfs
def test_restore_of_kept_without_a_flush_of_its_own_leaves_a_directory_behind(fstype: str) -> None:
    assert "is rest at its name" in first_failure(fstype, "restore of kept", NoKeptFsync)


@on_each_fs
def test_three_renames_leave_the_name_missing(fstype: str) -> None:
    result = replay(fstype, SCENARIOS["swap"]._replace(n_rounds=1), ThreeRenames)
    assert any("is nothing at its name" in failure.text for failure in result.failures), str(result)
