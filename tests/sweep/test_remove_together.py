"""A group of names that one command removes: what others do to them between the looks and the renames."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from fusefs.core.results import RemovalGroup, Swept
from fusefs.linux.kernel import CallHook, Kernel
from fusefs.store.stage import SwapOptions
from fusefs.sweep.remove_together import group_paths, remove_group
from fusefs.sweep.request import SweepOptions
from tests.support.make_trees import make_tree
from tests.support.real_filesystems import bind_mount
from tests.support.store_verbs import ActingBefore, assert_silent, init

pytestmark = pytest.mark.needs("root")

NAMES = [f"f{number}" for number in range(300)]


@pytest.fixture
def top(top: Path, volume: Path) -> Iterator[Path]:
    init(volume)
    for name in NAMES:
        (top / name).touch()
    yield top
    assert_silent(volume)


def given(top: Path, names: Iterable[str]) -> list[bytes]:
    return [os.fsencode(top / name) for name in names]


def grouped(top: Path, *names: str) -> RemovalGroup:
    (group,), alone = group_paths(Kernel(), given(top, names or NAMES))
    assert not alone
    return group


def removed(group: RemovalGroup, hook: CallHook = lambda _call: None) -> tuple[Swept, list[bytes]]:
    return remove_group(Kernel(hook), group, SwapOptions(), SweepOptions())


def test_what_all_came_is_not_looked_for(top: Path) -> None:
    group, looks = grouped(top), list[str]()
    swept, left = removed(group, looks.append)
    assert (swept.sums.n_done, left, os.listdir(top)) == (len(NAMES), [], [])
    assert looks.count("stat") < len(NAMES) + 100, "each name was looked at once"


def test_a_name_that_went_before_its_turn_is_left(top: Path) -> None:
    group = grouped(top)
    (top / "f7").unlink()
    swept, left = removed(group)
    assert (swept.sums.n_done, left, os.listdir(top)) == (len(NAMES) - 1, given(top, ["f7"]), [])


def test_a_name_that_went_between_its_look_and_its_rename_is_left(top: Path) -> None:
    swept, left = removed(grouped(top, *NAMES), ActingBefore("renameat2", lambda: os.unlink(top / NAMES[0])))
    assert (swept.sums.n_done, left, os.listdir(top)) == (len(NAMES) - 1, given(top, NAMES[:1]), [])


def test_what_took_a_name_that_came_stays(top: Path) -> None:
    """The list names it twice, so that it is there again when the second one has its turn."""
    group = grouped(top, "f1", "f2", "f1")
    swept, left = removed(group)
    (top / "f1").write_text("new")
    assert (swept.sums.n_done, left) == (2, [])
    assert (top / "f1").read_text() == "new"


def test_what_is_mounted_on_a_name_after_the_looks_stays_with_its_name(top: Path) -> None:
    group = grouped(top)
    with bind_mount(top / "f1", top / "f9"):
        _swept, left = removed(group)
        assert os.listdir(top) == ["f9"]
        assert left == given(top, ["f9"])


def test_a_directory_that_something_is_mounted_in_after_the_looks_stays(top: Path) -> None:
    make_tree(top / "d", {"below": {"deep": ""}})
    group = grouped(top, "f1", "d", "f2")
    with bind_mount(top / "d/below", top / "d/below"):
        _swept, left = removed(group)
        assert (top / "d/below/deep").exists()
        assert left == given(top, ["d"])


def test_a_link_that_takes_the_place_of_the_directory_is_not_followed(top: Path, volume: Path) -> None:
    other = make_tree(volume / "other", {"a": "", "b": ""})
    make_tree(top / "d", {"a": "", "b": ""})
    group = grouped(top, "f1", "d/a", "d/b")
    (top / "d").rename(volume / "moved")
    (top / "d").symlink_to(other)
    swept, left = removed(group)
    assert (swept.sums.n_done, left) == (1, given(top, ["d/a", "d/b"]))
    assert sorted(os.listdir(other)) == sorted(os.listdir(volume / "moved")) == ["a", "b"]


def test_a_directory_that_takes_the_place_of_a_file_is_looked_at_as_one(top: Path) -> None:
    group = grouped(top)
    (top / "f3").unlink()
    (top / "f3").mkdir()
    init(top / "f3")
    _swept, left = removed(group)
    assert os.listdir(top / "f3") == [".trashd"]
    assert left == given(top, ["f3"]), "it holds a store"


def test_less_than_two_that_are_there_make_no_group(top: Path) -> None:
    groups, alone = group_paths(Kernel(), given(top, ["no", "f1", "nor/f2"]))
    assert (groups, sorted(alone)) == ([], given(top, ["f1", "no", "nor/f2"]))


def test_a_directory_of_which_nothing_is_there_does_not_widen_the_group(top: Path) -> None:
    make_tree(top / "d", {"a": "", "b": ""})
    (group,), alone = group_paths(Kernel(), given(top, ["d/a", "f-none", "d/b"]))
    assert (group.directory, alone) == (bytes(top / "d"), given(top, ["f-none"]))
