"""Recovery: beside a command that works, and of what no command understands, which stays until its owner moves it."""

import itertools
import os
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from fusefs.core.errors import WAY_OUT
from fusefs.linux.kernel import Kernel
from fusefs.store.stage import SwapOptions
from tests.support.make_trees import Dir, make_tree, remove_tree_hard, snapshot
from tests.support.other_users import as_user
from tests.support.small_orphans import EXPIRED, command, orphan_in
from tests.support.store_verbs import (
    ActingAt,
    ActingBefore,
    assert_silent,
    calls_of,
    die,
    entries,
    folder_of,
    forge,
    in_child,
    place,
    problems,
    reap_now,
    recover_all,
    remove,
    restore,
    swap,
    tmpfs_store,
)

pytestmark = pytest.mark.needs("root")


KEPT = SwapOptions(retention_s=None)


def beside(volume: Path, n_calls: int) -> Iterator[Kernel]:
    """A kernel for each call of an act, before which another process recovers the whole store."""
    for n in range(n_calls):
        yield Kernel(ActingAt(n, lambda: recover_all(volume)))


def restore_late(volume: Path, kernel: Kernel) -> None:
    """Restore a directory into whose successor something was written: that is an orphan, and its id is told."""
    job = make_tree(volume / "job", {"a": "1"})
    identifier = swap(job, options=KEPT).id
    (job / "late").write_text("late")
    restored = restore(volume, identifier, kernel)
    assert (restored.warnings, os.listdir(job)) == ((), ["a"])
    assert [one.id for one in entries(volume)] == [restored.rescued]
    remove(job)
    for entry in entries(volume):
        restore(volume, entry.id, to=volume / "out")
        remove_tree_hard(volume / "out")


def test_what_was_written_meanwhile_is_rescued_and_told() -> None:
    with tmpfs_store() as volume:
        n_calls = len(calls_of(lambda kernel: restore_late(volume, kernel)))
        for kernel in beside(volume, n_calls):
            restore_late(volume, kernel)
        assert_silent(volume)


class TakingFreshAt:
    """A hook that removes the staged fresh directory once, as a recovery does that had seen no record yet."""

    def __init__(self, volume: Path) -> None:
        self._volume = volume
        self.n_taken = 0

    def __call__(self, call: str) -> None:
        if call == "exchange" and not self.n_taken:
            for tree in self._volume.glob(".trashd/u/*/stage/*/tree"):
                tree.rmdir()
                self.n_taken += 1


def test_swap_whose_fresh_directory_a_late_recovery_took_starts_again() -> None:
    with tmpfs_store() as volume:
        victim = make_tree(volume / "job", {"a": "1"})
        hook = TakingFreshAt(volume)
        swapped = swap(victim, Kernel(hook), KEPT)
        assert hook.n_taken == 1
        assert not any(victim.iterdir())
        assert [entry.id for entry in entries(volume)] == [swapped.id]
        assert_silent(volume)


ALICE = 1001


def mv(source: Path, target: str | Path) -> None:
    """As people type it."""
    subprocess.run(["mv", "--", source, target], check=True)


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
    in_child(partial(swap, victim, Kernel(ActingBefore("exchange", die))))
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
def test_its_hint_names_mv_which_takes_it_out_whole_and_leaves_a_store_in_order(
    volume: Path, make: Callable[[Path], Path]
) -> None:
    where = make(volume)
    recover_all(volume)
    hints = [problem.hint for problem in problems(volume) if os.path.basename(problem.where) != "reserve"]
    assert hints
    assert all(WAY_OUT in hint for hint in hints)
    before = snapshot(where, with_times=True)
    mv(where, volume / "out")
    assert snapshot(volume / "out", with_times=True) == before
    assert_silent(volume)


@stuck
def test_moved_into_the_drop_directory_it_is_an_orphan_that_can_be_reaped(
    volume: Path, make: Callable[[Path], Path]
) -> None:
    where = make(volume)
    before = snapshot(where)
    mv(where, f"{volume}/.trashd/u/0/drop/")
    assert recover_all(volume) == []
    assert_silent(volume)
    (orphan,) = [entry.id for entry in entries(volume) if snapshot(Path(os.fsdecode(entry.path)) / "tree") == before]
    assert reap_now(volume, orphan).report.n_failed == 0
    assert list((volume / ".trashd/u/0").glob("*/2*")) == []


def test_what_gets_the_name_of_what_is_taken_from_the_drop_directory_is_an_orphan_of_its_own(volume: Path) -> None:
    orphan_in(volume)  # its folder exists from now on
    drop = folder_of(volume, 0) / "drop"

    def put_second() -> None:
        if (drop / "report").exists():  # as `mv --backup=numbered` does
            (drop / "report").rename(drop / "report.~1~")
        make_tree(volume / "report", {"b": "2"}).rename(drop / "report")

    for n in itertools.count():
        for entry in entries(volume):
            reap_now(volume, entry.id)
        make_tree(drop / "report", {"a": "1"})
        hook = ActingAt(n, put_second)
        assert recover_all(volume, Kernel(hook)) == []
        if hook.left >= 0:
            break
        assert recover_all(volume) == []
        assert_silent(volume)
        trees = sorted(os.listdir(Path(os.fsdecode(entry.path)) / "tree") for entry in entries(volume))
        assert trees == [["a"], ["b"]], n
    assert n > 50


@pytest.mark.parametrize(
    "words", [("restore",), ("keep",), ("reap", "--now"), ("reap", "--force", "--yes")], ids=" ".join
)
@pytest.mark.parametrize("make", [with_cut_record, kept_in_stage, kept_in_restoring], ids=lambda make: make.__name__)
def test_each_command_that_refuses_it_names_mv(
    volume: Path, make: Callable[[Path], Path], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    where = make(volume)
    capsys.readouterr()
    assert command(volume, *words, where.name) != 0
    *_, hint = capsys.readouterr().err.splitlines()
    assert WAY_OUT in hint or "trashd list" in hint
    mv(where, volume / "out")


def test_a_list_of_what_is_unreadable_names_mv(volume: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = with_cut_record(volume)
    assert command(volume, "list") == 0
    assert WAY_OUT in capsys.readouterr().err
    mv(where, volume / "out")


def test_its_owner_takes_it_out_of_roots_store() -> None:
    with tmpfs_store() as path:
        make_tree(path / "alice", Dir({"job": Dir({"results": "hers"}, owner=(ALICE, ALICE))}, owner=(ALICE, ALICE)))
        orphan = as_user(ALICE, lambda: str(swap(path / "alice/job", options=EXPIRED).id))
        recover_all(path)  # root's first visit moves her folder
        container = folder_of(path, ALICE) / "orphans" / orphan
        os.truncate(container / "record.json", 40)
        as_user(ALICE, partial(mv, container, path / "alice/out"))
        assert (path / "alice/out/tree/results").read_text() == "hers"
        assert_silent(path)
