"""What no command understands stays in the store until its owner moves it with mv(1), out of it or into drop/."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from fusefs.core.errors import WAY_OUT
from fusefs.linux.kernel import Kernel
from tests.support.make_trees import Dir, make_tree, snapshot
from tests.support.other_users import as_user
from tests.support.small_orphans import EXPIRED, command, orphan_in
from tests.support.store_verbs import (
    ActingBefore,
    assert_silent,
    die,
    entries,
    folder_of,
    forge,
    in_child,
    place,
    problems,
    reap_now,
    recover_all,
    swap,
    tmpfs_store,
)

pytestmark = pytest.mark.needs("root")

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
