"""Copies and snapshots of a volume: what they hold is listed, kept and restored, and nothing taken from others."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from fusefs.core.container_states import State
from fusefs.core.errors import WAY_OUT, Occupied, Refused, TrashdError, UsageError
from fusefs.linux.kernel import Kernel
from fusefs.store.orphans import RetentionFromNow, change_retention, find_container
from tests.support.crash_scenarios import DyingAfter
from tests.support.make_trees import Dir, make_tree, snapshot
from tests.support.other_users import as_user
from tests.support.real_filesystems import bind_mount, btrfs_subvolume, full, loop_volume, mount_of, unmount
from tests.support.shared_memory_children import code_of_child
from tests.support.small_orphans import command
from tests.support.store_verbs import (
    assert_silent,
    entries,
    folder_of,
    init,
    place,
    problems,
    raw,
    reap_now,
    recover_all,
    restore,
    swap,
)
from tests.support.trash_without_walk import gather
from tests.support.two_users_store import ALICE, alices_volume, orphan_of

pytestmark = pytest.mark.needs("root")


def _by_cp(source: Path, to: Path) -> None:
    subprocess.run(["cp", "-a", f"{source}/.", to], check=True)


def _by_rsync(source: Path, to: Path) -> None:
    subprocess.run(["rsync", "-aHAX", f"{source}/", to], check=True)


def _by_tar(source: Path, to: Path) -> None:
    with subprocess.Popen(["tar", "-C", source, "-c", "."], stdout=subprocess.PIPE) as packing:
        subprocess.run(["tar", "-C", to, "-xp"], stdin=packing.stdout, check=True)


COPIES = {"cp -a": _by_cp, "rsync -aHAX": _by_rsync, "tar": _by_tar}


class Volumes(NamedTuple):
    """One with a store, and an empty one for its copy."""

    source: Path
    copy: Path


@pytest.fixture
def volumes() -> Iterator[Volumes]:
    """A store of root's and a directory of Alice's; the other filesystem gives other inode numbers."""
    with alices_volume() as source, loop_volume("ext4", 32) as copy:
        yield Volumes(source, copy)


def copied_orphan(volumes: Volumes, how: str = "cp -a") -> str:
    """The id of an orphan of Alice's, with which the volume was copied."""
    identifier = orphan_of(volumes.source, ALICE)
    COPIES[how](volumes.source, volumes.copy)
    return identifier


@pytest.mark.parametrize("how", COPIES)
def test_what_a_copied_store_holds_is_listed_and_restored_to_its_free_name(volumes: Volumes, how: str) -> None:
    identifier = copied_orphan(volumes, how)
    assert [entry.id for entry in entries(volumes.copy)] == [identifier]
    (volumes.copy / "alice/job").rmdir()
    as_user(ALICE, lambda: restore(volumes.copy, identifier))
    assert (volumes.copy / "alice/job/results").read_text() == "his own"
    assert entries(volumes.copy) == []


@pytest.mark.parametrize("how", COPIES)
def test_a_refused_restore_of_a_copy_leaves_the_orphan_for_another_try(volumes: Volumes, how: str) -> None:
    identifier = copied_orphan(volumes, how)
    for _ in range(2):
        with pytest.raises(Occupied) as caught:
            as_user(ALICE, lambda: restore(volumes.copy, identifier))
        assert "--to" in caught.value.hint
        assert [entry.state for entry in entries(volumes.copy)] == [State.ORPHANS]
    as_user(ALICE, partial(restore, volumes.copy, identifier, to=volumes.copy / "alice/again"))
    assert (volumes.copy / "alice/again/results").read_text() == "his own"


def test_a_refused_restore_of_a_read_only_copy_takes_its_loan_back(volumes: Volumes) -> None:
    identifier = copied_orphan(volumes)
    tree = place(volumes.copy, identifier) / "tree"
    tree.chmod(0o555)
    with pytest.raises(Occupied):
        as_user(ALICE, lambda: restore(volumes.copy, identifier))
    assert tree.stat().st_mode & 0o7777 == 0o555


def test_a_refused_restore_of_a_part_leaves_the_copys_orphan_for_another_try(volumes: Volumes) -> None:
    identifier = copied_orphan(volumes)
    (volumes.copy / "alice/job/results").write_text("another's")
    with pytest.raises(Occupied):
        as_user(ALICE, lambda: restore(volumes.copy, identifier, inside=b"results"))
    assert [entry.state for entry in entries(volumes.copy)] == [State.ORPHANS]
    (volumes.copy / "alice/job/results").unlink()
    as_user(ALICE, lambda: restore(volumes.copy, identifier, inside=b"results"))
    assert (volumes.copy / "alice/job/results").read_text() == "his own"
    assert [entry.state for entry in entries(volumes.copy)] == [State.ORPHANS]


@pytest.mark.parametrize("is_copy", [False, True])
def test_a_refused_restore_from_quarantine_goes_back_there(volumes: Volumes, is_copy: bool) -> None:
    identifier = orphan_of(volumes.source, ALICE)
    make_tree(place(volumes.source, identifier) / "tree" / "roots", {"file": "root's"})
    reap_now(volumes.source, identifier)
    volume = volumes.source
    if is_copy:
        volume = volumes.copy
        _by_cp(volumes.source, volume)
    (volume / "alice/job").rmdir()
    (volume / "alice/job").write_text("a file")
    before = snapshot(place(volume, identifier) / "tree")
    with pytest.raises(Occupied):
        as_user(ALICE, lambda: restore(volume, identifier))
    [entry] = entries(volume)
    assert (entry.state, entry.n_failed) == (State.QUARANTINE, 1)
    assert snapshot(place(volume, identifier) / "tree") == before


def test_root_gives_a_copy_no_name_that_its_record_does_not_prove(volumes: Volumes) -> None:
    identifier = copied_orphan(volumes)
    make_tree(volumes.copy / "srv", {})
    with pytest.raises(Refused, match="it is inode") as caught:
        restore(volumes.copy, identifier, to=volumes.copy / "srv/data")
    assert "its owner can restore it" in caught.value.hint
    assert [entry.state for entry in entries(volumes.copy)] == [State.ORPHANS]
    as_user(ALICE, partial(restore, volumes.copy, identifier, to=volumes.copy / "alice/again"))
    assert (volumes.copy / "alice/again/results").read_text() == "his own"


def test_what_a_sweep_took_comes_back_in_a_copy_and_what_is_in_the_way_stays(volumes: Volumes) -> None:
    make_tree(volumes.source / "job", {"a": "1", "sub": {"b": "2"}})
    orphan = gather(volumes.source / "job", ["a", "sub"]).orphan
    assert orphan is not None
    _by_cp(volumes.source, volumes.copy)
    (volumes.copy / "job/a").write_text("another's")
    assert restore(volumes.copy, orphan).n_left == 1
    assert (volumes.copy / "job/sub/b").read_text() == "2"
    [entry] = entries(volumes.copy)
    assert entry.state is State.ORPHANS
    (volumes.copy / "job/a").unlink()
    assert restore(volumes.copy, orphan).n_left == 0
    assert (volumes.copy / "job/a").read_text() == "1"


def test_recovery_loses_nothing_of_a_copy_that_was_made_in_the_middle_of_a_restore(volumes: Volumes) -> None:
    identifier = orphan_of(volumes.source, ALICE)
    container = place(volumes.source, identifier)
    container.rename(container.parent.parent / "restoring" / identifier)
    _by_cp(volumes.source, volumes.copy)
    assert recover_all(volumes.copy) != []
    assert (place(volumes.copy, identifier) / "tree/results").read_text() == "his own"
    with pytest.raises(TrashdError):
        as_user(ALICE, lambda: restore(volumes.copy, identifier))
    assert (place(volumes.copy, identifier) / "tree/results").read_text() == "his own"


@pytest.mark.parametrize("call", ["link", "exchange"])
def test_a_swap_that_was_killed_before_the_copy_is_told_with_a_way_out(volumes: Volumes, call: str) -> None:
    make_tree(volumes.source / "job", {"results": "old"})
    code_of_child(lambda: swap(volumes.source / "job", Kernel(DyingAfter(call))))
    _by_cp(volumes.source, volumes.copy)
    recover_all(volumes.copy)
    [container] = (folder_of(volumes.copy, 0) / "stage").iterdir()
    [told] = [problem for problem in problems(volumes.copy) if container.name in problem.where]
    assert WAY_OUT in told.hint
    container.rename(volumes.copy / "out")
    assert [p.read_text() for p in volumes.copy.rglob("results")] == ["old"]
    init(volumes.copy)  # root says that this copy is known
    assert recover_all(volumes.copy) == []
    assert_silent(volumes.copy)


# Second links, as a backup with `cp -al` makes them


def link_everything(volume: Path, to: Path) -> None:
    subprocess.run(["cp", "-al", folder_of(volume, ALICE), to], check=True)


def test_records_with_a_second_link_are_listed_kept_and_restored(volumes: Volumes) -> None:
    volume = volumes.source
    identifier = orphan_of(volume, ALICE)
    link_everything(volume, volume / "backup")
    record = place(volume, identifier) / "record.json"
    before = record.read_bytes()
    assert record.stat().st_nlink == 2
    [entry] = as_user(ALICE, lambda: entries(volume))
    assert entry.problem == ""
    as_user(ALICE, lambda: change_retention(Kernel(), [raw(volume)], entry, RetentionFromNow(None)))
    assert record.stat().st_nlink == 1
    assert (volume / "backup/orphans" / identifier / "record.json").read_bytes() == before
    as_user(ALICE, lambda: restore(volume, identifier))
    assert (volume / "alice/job/results").read_text() == "his own"
    recover_all(volume)
    assert_silent(volume)


def test_a_swap_on_a_full_volume_writes_into_no_file_of_a_backup(volumes: Volumes) -> None:
    volume = volumes.copy
    init(volume)
    make_tree(volume / "alice", Dir(owner=(ALICE, ALICE)))
    orphan_of(volume, ALICE)
    link_everything(volume, volume / "backup")
    as_user(ALICE, lambda: make_tree(volume / "alice/second", {"more": "hers"}))
    spare = volume / "backup/reserve/ready/spare"
    with full(volume):
        with suppress(TrashdError):
            as_user(ALICE, lambda: swap(volume / "alice/second"))
        assert spare.stat().st_size == 0
    recover_all(volume)
    assert (folder_of(volume, ALICE) / "reserve/ready/spare").stat().st_nlink == 1
    assert_silent(volume)


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_record_that_others_can_write_to_by_another_name_is_nobodys_word(volumes: Volumes, mode: int) -> None:
    identifier = orphan_of(volumes.source, ALICE)
    record = place(volumes.source, identifier) / "record.json"
    record.chmod(mode)
    (volumes.source / "shared").hardlink_to(record)
    [entry] = as_user(ALICE, lambda: entries(volumes.source))
    assert "not a small regular file" in entry.problem


def test_root_deletes_from_quarantine_what_has_a_record_with_a_second_link(volumes: Volumes) -> None:
    identifier = orphan_of(volumes.source, ALICE)
    make_tree(place(volumes.source, identifier) / "tree" / "roots", {"file": "root's"})
    reap_now(volumes.source, identifier)
    (volumes.source / "second").hardlink_to(place(volumes.source, identifier) / "record.json")
    assert command(volumes.source, "reap", "--force", "--yes", identifier) == 0
    assert entries(volumes.source) == []


# Copies that are mounted at the same time


def test_two_mounted_copies_are_told_apart_by_volume_and_the_message_says_so(volumes: Volumes) -> None:
    identifier = copied_orphan(volumes)
    kernel, both = Kernel(), [raw(volumes.source), raw(volumes.copy)]
    with pytest.raises(UsageError) as caught:
        find_container(kernel, both, identifier[:-2])
    text = f"{caught.value.message()} {caught.value.hint}"
    assert "could be" not in text
    for volume in volumes:
        assert f"--volume {volume}" in text
        assert find_container(kernel, [raw(volume)], identifier).base_path() == raw(volume)


def test_a_copy_mounted_in_its_original_is_the_one_that_is_named(volumes: Volumes) -> None:
    identifier = copied_orphan(volumes)
    inner = volumes.source / "copy"
    inner.mkdir()
    with bind_mount(volumes.copy, inner):
        for volume in (volumes.source, inner):
            assert find_container(Kernel(), [raw(volume)], identifier).base_path() == raw(volume)
        os.chown(inner / "alice/job", ALICE, ALICE)
        (inner / "alice/job").rmdir()
        as_user(ALICE, lambda: restore(inner, identifier))
        assert (inner / "alice/job/results").read_text() == "his own"
        assert [entry.id for entry in entries(volumes.source)] == [identifier]


_UNPROVEN = "it is not the directory that root registered (it is a copy, or it was replaced)"


@pytest.fixture
def top() -> Iterator[Path]:
    """A btrfs with a subvolume `data` that has a store of root's and a directory of Alice's."""
    with loop_volume("btrfs") as path:
        data = btrfs_subvolume(path, "data")
        init(data)
        make_tree(data / "alice", Dir(owner=(ALICE, ALICE)))
        yield path


def snap(top: Path, *options: str) -> Path:
    subprocess.run(["btrfs", "-q", "subvolume", "snapshot", *options, top / "data", top / "snap"], check=True)
    return top / "snap"


def assert_nothing_but_unproven(volume: Path) -> None:
    """The checker says that no folder is the one that root registered, and nothing else: a snapshot is a copy."""
    assert {problem.what.partition(": ")[2] for problem in problems(volume)} <= {_UNPROVEN}


@contextmanager
def rolled_back(top: Path) -> Iterator[Path]:
    """A snapshot of `data` mounted where a machine has that, as after a rollback."""
    snap(top)
    entry = mount_of(top)
    assert entry is not None
    place = top.parent / "rolled-back"
    place.mkdir()
    subprocess.run(["mount", "-o", "subvol=snap", os.fsdecode(entry.source), place], check=True)
    try:
        yield place
    finally:
        unmount(place)
        place.rmdir()


@pytest.mark.needs("loop")
@pytest.mark.parametrize("mode", [0o755, 0o555])
def test_an_orphan_goes_back_in_a_snapshot_as_in_its_source(top: Path, mode: int) -> None:
    identifier = orphan_of(top / "data", ALICE, mode)
    copy = snap(top)
    for volume in (copy, top / "data"):
        as_user(ALICE, partial(restore, volume, identifier))
        assert (volume / "alice/job/results").read_text() == "his own"
        assert (volume / "alice/job").stat().st_mode & 0o7777 == mode
        assert entries(volume) == []
        assert_nothing_but_unproven(volume)


@pytest.mark.needs("loop")
def test_what_was_written_into_the_fresh_directory_is_kept_after_a_rollback(top: Path) -> None:
    identifier = orphan_of(top / "data", ALICE)
    (top / "data/alice/job/late").write_text("later")
    os.chown(top / "data/alice/job/late", ALICE, ALICE)
    with rolled_back(top) as volume:
        done = as_user(ALICE, lambda: restore(volume, identifier))
        assert done.rescued is not None
        assert (place(volume, done.rescued) / "tree/late").read_text() == "later"
        assert_nothing_but_unproven(volume)


@pytest.mark.needs("loop")
def test_root_restores_elsewhere_what_a_snapshot_proves(top: Path) -> None:
    identifier = orphan_of(top / "data", ALICE)
    copy = snap(top)
    make_tree(copy / "srv", {})
    restore(copy, identifier, to=copy / "srv/data")
    assert (copy / "srv/data/results").read_text() == "his own"
    assert_nothing_but_unproven(copy)


@pytest.mark.needs("loop")
@pytest.mark.parametrize("call", ["tmpfile", "exchange", "rename"])
def test_a_swap_that_was_killed_before_the_snapshot_is_completed_or_undone_in_it(top: Path, call: str) -> None:
    job = top / "data/alice/job"

    def act() -> None:
        make_tree(job, {"results": "his own"})
        code_of_child(lambda: swap(job, Kernel(DyingAfter(call))))

    as_user(ALICE, act)
    copy = snap(top)
    for volume in (copy, top / "data"):
        assert as_user(ALICE, partial(recover_all, volume)) == []
        for entry in as_user(ALICE, partial(entries, volume)):
            assert entry.state is State.ORPHANS
            as_user(ALICE, partial(restore, volume, entry.id))
        assert (volume / "alice/job/results").read_text() == "his own"
        assert_nothing_but_unproven(volume)


@pytest.mark.needs("loop")
def test_a_read_only_snapshot_is_listed(top: Path) -> None:
    identifier = orphan_of(top / "data", ALICE)
    copy = snap(top, "-r")
    assert [entry.id for entry in entries(copy)] == [identifier]


@pytest.mark.needs("loop")
def test_a_read_only_snapshot_is_looked_after_as_far_as_that_goes(top: Path) -> None:
    """Root registers nothing in it, and that is no error."""
    orphan_of(top / "data", ALICE)
    assert all(_UNPROVEN in line for line in recover_all(snap(top, "-r")))


@pytest.mark.needs("loop")
def test_after_a_rollback_root_says_that_it_is_his_store_and_the_checker_is_silent(top: Path) -> None:
    orphan_of(top / "data", ALICE)
    with rolled_back(top) as volume:
        assert problems(volume) != []
        init(volume)
        as_user(ALICE, partial(recover_all, volume))
        recover_all(volume)
        assert_silent(volume)
