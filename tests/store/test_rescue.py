"""A way out of the store for all that can't be understood: taken out whole, or given up; and nothing else is."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from fusefs.core.errors import (
    WAY_OUT,
    Busy,
    IsStore,
    NotFound,
    NotPermitted,
    Occupied,
    OtherFilesystem,
    Refused,
    UsageError,
)
from fusefs.core.lifecycle import State
from fusefs.linux.kernel import Kernel
from fusefs.store.rescue import Forgotten, Rescued, find_thing, forget, rescue
from tests.support.crash_scenarios import DyingAfter
from tests.support.make_trees import Dir, make_tree, snapshot
from tests.support.other_users import as_user
from tests.support.real_filesystems import bind_mount, loop_volume, tmpfs_volume
from tests.support.small_orphans import EXPIRED, command, orphan_in
from tests.support.store_calls import (
    Before,
    assert_silent,
    die,
    entries,
    folder_of,
    forge,
    in_child,
    init,
    place,
    problems,
    raw,
    reap_now,
    recover_all,
    restore,
    swap,
    tmpfs_store,
)

pytestmark = pytest.mark.needs("root")

ALICE, BOB = 1001, 1002


def taken(volume: Path, name: str, to: Path | None = None, kernel: Kernel | None = None) -> Rescued:
    """`trashd doctor --rescue NAME --to PATH`."""
    kernel = kernel or Kernel()
    entry = find_thing(kernel, [raw(volume)], name.encode())
    return rescue(kernel, [raw(volume)], entry, raw(to or volume / "rescued"))


def given_up(volume: Path, name: str) -> Forgotten:
    """`trashd doctor --forget --yes NAME`."""
    return forget(Kernel(), [raw(volume)], find_thing(Kernel(), [raw(volume)], name.encode()))


# What can't be understood: each makes one, and says where it is


def with_cut_record(volume: Path) -> Path:
    container = place(volume, orphan_in(volume).id)
    os.truncate(container / "record.json", 40)
    return container


def with_no_record(volume: Path) -> Path:
    container = place(volume, orphan_in(volume).id)
    (container / "record.json").unlink()
    return container


def with_another_volumes_record(volume: Path) -> Path:
    container = place(volume, orphan_in(volume).id)
    forge(container / "record.json", volume="0" * 32)
    return container


def with_a_fifo_for_a_record(volume: Path) -> Path:
    container = with_no_record(volume)
    os.mkfifo(container / "record.json")
    return container


def in_quarantine(volume: Path) -> Path:
    container = with_cut_record(volume)
    return container.rename(container.parents[1] / "quarantine" / container.name)


def in_reaping(volume: Path) -> Path:
    container = with_cut_record(volume)
    make_tree(container / "hoisted", {"0123": {"deep": "down"}})
    return container.rename(container.parents[1] / "reaping" / container.name)


def kept_in_stage(volume: Path) -> Path:
    """A swap was killed, and what it had in its container is another directory by now."""
    victim = make_tree(volume / "job", {"a": "1"})
    in_child(partial(swap, victim, Kernel(Before("exchange", die))))
    (container,) = (volume / ".trashd/u/0/stage").iterdir()
    (container / "tree").rmdir()
    make_tree(container / "tree", {"whose": "?"})
    return container


def kept_in_restoring(volume: Path) -> Path:
    """A store was copied during a restore."""
    container = place(volume, orphan_in(volume).id)
    make_tree(volume / "copy", {"of": "it"})
    (container / "tree").rename(volume / "job-old")
    (volume / "copy").rename(container / "tree")
    return container.rename(container.parents[1] / "restoring" / container.name)


def with_a_read_only_tree(volume: Path) -> Path:
    container = with_cut_record(volume)
    (container / "tree").chmod(0o555)
    return container


def a_stray_directory(volume: Path) -> Path:
    return make_tree(volume / ".trashd/u/0/orphans/whose directory", {"a": "1"})


def a_stray_file(volume: Path) -> Path:
    path = volume / ".trashd/u/0/quarantine/whose\nfile"
    path.write_text("whose")
    return path


def a_file_with_the_name_of_a_container(volume: Path) -> Path:
    path = volume / ".trashd/u/0/orphans/20260101T000000.000Z-job-0123456789ab"
    path.write_text("whose")
    return path


STUCK: list[Callable[[Path], Path]] = [
    with_cut_record, with_no_record, with_another_volumes_record, with_a_fifo_for_a_record, in_quarantine, in_reaping,
    kept_in_stage, kept_in_restoring, with_a_read_only_tree, a_stray_directory, a_stray_file,
    a_file_with_the_name_of_a_container,
]  # fmt: skip
stuck = pytest.mark.parametrize("make", STUCK, ids=lambda make: make.__name__)


@stuck
def test_what_is_not_understood_is_taken_out_whole(volume: Path, make: Callable[[Path], Path]) -> None:
    where = make(volume)
    before = snapshot(where, with_times=True)
    rescued = taken(volume, where.name)
    assert snapshot(volume / "rescued", with_times=True) == before
    assert rescued.path == raw(volume / "rescued")
    assert_silent(volume)


@stuck
def test_what_is_given_up_goes_with_the_next_reap(volume: Path, make: Callable[[Path], Path]) -> None:
    given = given_up(volume, make(volume).name)
    assert_silent(volume)
    (entry,) = [entry for entry in entries(volume) if entry.id == given.orphan]
    assert entry.expires_ns == entry.created_ns
    assert reap_now(volume, given.orphan).report.n_failed == 0
    assert list((volume / ".trashd/u/0").glob("*/2*")) == []


@stuck
def test_what_is_given_up_can_be_had_until_it_is_reaped(volume: Path, make: Callable[[Path], Path]) -> None:
    where = make(volume)
    before = snapshot(where)
    given = given_up(volume, where.name)
    restore(volume, given.orphan, to=volume / "back")
    assert snapshot(volume / "back") == before


@stuck
def test_its_hint_names_the_command_that_takes_it_out(volume: Path, make: Callable[[Path], Path]) -> None:
    where = make(volume)
    recover_all(volume)
    hints = [problem.hint for problem in problems(volume) if os.path.basename(problem.where) != "reserve"]
    assert hints
    assert all(WAY_OUT in hint for hint in hints)
    taken(volume, where.name)


@pytest.mark.parametrize(
    "words", [("restore",), ("keep",), ("reap", "--now"), ("reap", "--force", "--yes")], ids=" ".join
)
@pytest.mark.parametrize("make", [with_cut_record, kept_in_stage, kept_in_restoring], ids=lambda make: make.__name__)
def test_each_command_that_refuses_it_says_how_to_get_it_out(
    volume: Path, make: Callable[[Path], Path], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    name = make(volume).name
    capsys.readouterr()
    assert command(volume, *words, name) != 0
    *_, hint = capsys.readouterr().err.splitlines()
    assert WAY_OUT in hint or "trashd list" in hint
    taken(volume, name)


def test_a_list_of_what_is_unreadable_says_how_to_get_it_out(volume: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = with_cut_record(volume).name
    assert command(volume, "list") == 0
    assert WAY_OUT in capsys.readouterr().err
    taken(volume, name)


def test_what_a_copy_of_a_volume_has_that_nobody_can_settle_is_taken_out(volume: Path) -> None:
    """A swap was killed, then everything copied: identities prove nothing there."""
    make_tree(volume / "vol", {"job": {"a": "1"}})
    init(volume / "vol")
    (volume / ".trashd").rename(volume / "upper")
    in_child(partial(swap, volume / "vol/job", Kernel(DyingAfter("exchange"))))
    shutil.copytree(volume / "vol", volume / "copy", symlinks=True)
    copied = volume / "copy"
    (container,) = copied.glob(".trashd/u/0/stage/*")
    assert recover_all(copied)
    taken(copied, container.name, volume / "rescued")
    assert (volume / "rescued/tree/a").read_text() == "1"
    init(copied)
    assert_silent(copied)
    (volume / "upper").rename(volume / ".trashd")


# What is in order stays


def test_an_orphan_in_order_is_neither_rescued_nor_given_up(volume: Path) -> None:
    orphan = orphan_in(volume)
    with pytest.raises(Refused, match="nothing is wrong"):
        taken(volume, orphan.id)
    with pytest.raises(Refused, match="nothing is wrong"):
        given_up(volume, orphan.id)
    assert not (volume / "rescued").exists()


def test_what_recovery_can_complete_is_completed_and_not_taken(volume: Path) -> None:
    victim = make_tree(volume / "job", {"a": "1"})
    in_child(partial(swap, victim, Kernel(Before("exchange", die))))
    (container,) = (volume / ".trashd/u/0/stage").iterdir()
    with pytest.raises(NotFound):
        taken(volume, container.name)
    assert_silent(volume)


def test_what_somebody_works_on_is_not_taken(volume: Path) -> None:
    container = with_cut_record(volume)
    with (container / "record.json").open() as record:
        fcntl.flock(record, fcntl.LOCK_EX)
        with pytest.raises(Busy):
            taken(volume, container.name)
        with pytest.raises(Busy):
            given_up(volume, container.name)
    taken(volume, container.name)


def test_a_container_that_is_just_being_made_is_not_taken(volume: Path) -> None:
    container = volume / ".trashd/u/0/stage/20260101T000000.000Z-job-0123456789ab"
    make_tree(container, {"tree": {}})
    with (container / "record.json.new").open("w") as record:
        fcntl.flock(record, fcntl.LOCK_EX)
        with pytest.raises(Refused, match="holds nothing"):
            taken(volume, container.name)
    recover_all(volume)


# Where to


def test_nothing_is_overwritten(volume: Path) -> None:
    container = with_cut_record(volume)
    make_tree(volume / "rescued", {})
    with pytest.raises(Occupied):
        taken(volume, container.name)
    assert os.listdir(volume / "rescued") == []
    taken(volume, container.name, volume / "other")


def test_it_goes_to_no_store(volume: Path) -> None:
    container = with_cut_record(volume)
    for to in (volume / ".trashd/u/0/orphans/x", volume / ".trashd/x", volume / ".trashd.new-x"):
        with pytest.raises(IsStore):
            taken(volume, container.name, to)
    taken(volume, container.name)


def test_another_filesystem_is_refused_with_the_one_to_name(volume: Path) -> None:
    container = with_cut_record(volume)
    with tmpfs_volume() as other, pytest.raises(OtherFilesystem) as refused:
        taken(volume, container.name, other / "rescued")
    assert str(volume) in refused.value.hint
    taken(volume, container.name)


def test_another_mount_of_a_store_is_no_way_into_it(volume: Path) -> None:
    container = with_cut_record(volume)
    (volume / "view").mkdir()
    with bind_mount(volume / ".trashd", volume / "view"), pytest.raises(OtherFilesystem):
        taken(volume, container.name, volume / "view/rescued")
    taken(volume, container.name)


# Which


def test_a_cut_id_is_enough_if_it_is_the_only_one(volume: Path) -> None:
    container = with_cut_record(volume)
    taken(volume, container.name[-12:])


def test_one_of_two_states_is_named_with_its_state(volume: Path) -> None:
    container = with_cut_record(volume)
    twin = container.parents[1] / "quarantine" / container.name
    make_tree(twin, {"tree": {"b": "2"}})
    with pytest.raises(UsageError, match=f"could be orphans/{container.name} or quarantine/{container.name}"):
        taken(volume, container.name)
    taken(volume, f"quarantine/{container.name}")
    assert (volume / "rescued/tree/b").read_text() == "2"
    taken(volume, container.name, volume / "other")


def test_a_stray_is_not_meant_by_a_part_of_its_name(volume: Path) -> None:
    stray = a_stray_directory(volume)
    with pytest.raises(NotFound):
        taken(volume, stray.name[:5])
    taken(volume, stray.name)


# Whose


@pytest.fixture
def shared() -> Iterator[Path]:
    """A store of root's with a container of Alice's, whose record is cut short; and a directory of hers."""
    with tmpfs_store() as path:
        make_tree(path / "alice", Dir({"job": Dir({"results": "hers"})}, owner=(ALICE, ALICE)))
        for one in (path / "alice").rglob("*"):
            os.chown(one, ALICE, ALICE)
        orphan = as_user(ALICE, lambda: str(swap(path / "alice/job", options=EXPIRED).id))
        recover_all(path)
        os.truncate(place(path, orphan) / "record.json", 40)
        yield path


def hers(shared: Path) -> str:
    (container,) = orphans_of_alice(shared).iterdir()
    return container.name


def orphans_of_alice(shared: Path) -> Path:
    """Where root's first look moves her folder to, or where it is before that."""
    return folder_of(shared, ALICE) / "orphans"


def test_its_owner_takes_it_out_himself(shared: Path) -> None:
    as_user(ALICE, partial(taken, shared, hers(shared), shared / "alice/rescued"))
    assert (shared / "alice/rescued/tree/results").read_text() == "hers"


def test_root_takes_it_out_where_he_likes(shared: Path) -> None:
    make_tree(shared / "roots", Dir(mode=0o700))
    taken(shared, hers(shared), shared / "roots/rescued")
    st = (shared / "roots/rescued").lstat()
    assert (stat.S_IMODE(st.st_mode), st.st_uid) == (0o700, ALICE)


def test_root_takes_it_out_of_a_users_own_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """One in her home, where root made none."""
    with tmpfs_volume() as path:
        make_tree(path / "alice", Dir({"state": Dir(owner=(ALICE, ALICE))}, owner=(ALICE, ALICE)))
        monkeypatch.setenv("XDG_STATE_HOME", str(path / "alice/state"))

        def act() -> str:
            init(path / "alice")
            return with_no_record(path / "alice").name

        name = as_user(ALICE, act)
        taken(path / "alice", name, path / "rescued")
        assert (path / "rescued/tree/a").read_text() == "1"


def test_nobody_else_finds_it(shared: Path) -> None:
    (shared / "bob").mkdir()
    os.chown(shared / "bob", BOB, BOB)
    name = hers(shared)
    with pytest.raises(NotFound):
        as_user(BOB, partial(taken, shared, name, shared / "bob/rescued"))
    taken(shared, name)


def test_what_root_gives_up_for_a_user_is_his_to_have_back(shared: Path) -> None:
    given = given_up(shared, hers(shared))
    assert given.orphan in {entry.id for entry in as_user(ALICE, partial(entries, shared))}


def test_a_user_may_not_name_a_place_that_is_not_his(shared: Path) -> None:
    with pytest.raises(NotPermitted):
        as_user(ALICE, partial(taken, shared, hers(shared), shared / "rescued"))
    taken(shared, hers(shared))


@pytest.mark.parametrize("trick", ["link", "directory"])
def test_what_its_owner_puts_in_its_place_at_that_moment_goes_back(shared: Path, trick: str) -> None:
    name = hers(shared)
    recover_all(shared)  # root has her folder where it stays
    container = orphans_of_alice(shared) / name

    def play() -> None:
        container.rename(container.with_name("away"))
        if trick == "link":
            container.symlink_to("/etc")
        else:
            container.mkdir(0o700)

    with pytest.raises(Refused, match="given back"):
        taken(shared, name, kernel=Kernel(Before("renameat2", partial(as_user, ALICE, play))))
    assert not os.path.lexists(shared / "rescued")
    assert (container.with_name("away") / "tree/results").read_text() == "hers"
    container.unlink() if trick == "link" else container.rmdir()
    taken(shared, "away")


def test_root_puts_no_link_of_a_users_to_a_name(shared: Path) -> None:
    recover_all(shared)
    link = orphans_of_alice(shared) / "away"
    as_user(ALICE, partial(link.symlink_to, "/etc"))
    with pytest.raises(Refused, match="neither a directory nor a file"):
        taken(shared, "away")
    assert not os.path.lexists(shared / "rescued")
    link.unlink()
    taken(shared, hers(shared))


# Where


@pytest.mark.needs("loop")
@pytest.mark.parametrize("filesystem", ["ext4", "xfs", "btrfs"])
def test_it_works_on(filesystem: str) -> None:
    with loop_volume(filesystem, 300 if filesystem == "xfs" else 128) as path:
        init(path)
        first, second = with_cut_record(path), a_stray_directory(path)
        taken(path, first.name)
        given = given_up(path, second.name)
        reap_now(path, given.orphan)
        assert_silent(path)


def test_every_state_has_its_way_out(volume: Path) -> None:
    for state in State:
        make_tree(volume / ".trashd/u/0" / state.value / "stray", {"a": state.value})
    for state in State:
        taken(volume, f"{state.value}/stray", volume / state.value)
        assert (volume / state.value / "a").read_text() == state.value
