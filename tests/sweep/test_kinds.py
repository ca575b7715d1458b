"""What an entry is: where no listing tells it, where something is mounted on a file, and where it became another."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from fusefs.core.record import Failure
from fusefs.core.results import SweepSums
from fusefs.core.selection import Selection, SizeBound
from fusefs.linux.kernel import Kernel
from fusefs.sweep.request import Act, ToCount, ToDelete, ToMove, ToPrint, ToTrash
from tests.support.make_trees import Symlink, make_tree
from tests.support.other_users import as_user
from tests.support.real_filesystems import bind_mount, loop_volume
from tests.support.run_sweep import ALL, give, names, printed, sweep

pytestmark = pytest.mark.needs("root")

MALLORY = 12666
EMPTY_DIRECTORIES = Selection(types=frozenset("d"), empty=True)


@pytest.fixture(scope="module")
def _untold() -> Iterator[Path]:
    with loop_volume("ext4", mkfs_options=["-O", "^filetype"]) as volume:
        yield volume


@pytest.fixture
def untold(_untold: Path, request: pytest.FixtureRequest) -> Path:
    """A directory on a filesystem whose listings tell no types."""
    path: Path = _untold / request.node.name.partition("[")[0]
    path.mkdir()
    return path


# Listings that tell no types


def test_types_that_no_listing_tells_are_found_by_a_look(untold: Path) -> None:
    top = make_tree(untold / "top", {"f": "", "link": Symlink("f"), "d": {"g": "", "other": Symlink("no")}})
    assert sorted(printed(top, Selection(types=frozenset("ld")))) == [b"d", b"d/other", b"link"]
    assert (sweep(top, ALL).sums.n_done, names(top)) == (4, {"d"})


def test_what_may_not_be_looked_at_is_told(untold: Path) -> None:
    top = give(make_tree(untold / "top", {"closed": {"f": "", "g.log": ""}, "a": ""}), MALLORY)
    (top / "closed").chmod(0o400)
    swept = as_user(MALLORY, lambda: sweep(top, Selection(names=("*.log", "*"), max_depth=2)))
    assert swept.failures == (Failure(b"closed/g.log", errno.EACCES, "stat"),)
    swept = as_user(MALLORY, lambda: sweep(top, ALL))
    assert (swept.sums.n_failed, swept.sums.n_done) == (2, 1)


def test_what_is_mounted_is_told_as_skipped(untold: Path) -> None:
    top = make_tree(untold / "top", {"mnt": {}, "on": "", "f": ""})
    with bind_mount(untold, top / "mnt"), bind_mount(top / "f", top / "on"):
        assert sweep(top, ALL).sums == SweepSums(n_seen=3, n_matched=1, n_done=1, n_mounts=2)


# Directories that may not be read


def test_a_directory_that_nobody_can_say_is_empty_is_a_failure_even_where_nobody_enters_it(top: Path) -> None:
    make_tree(top / "at", {"closed": {}, "empty": {}})
    give(top, MALLORY)
    (top / "at/closed").chmod(0)
    for selection in (EMPTY_DIRECTORIES._replace(max_depth=2), EMPTY_DIRECTORIES):
        (top / "at/empty").mkdir(exist_ok=True)
        os.chown(top / "at/empty", MALLORY, MALLORY)
        swept = as_user(MALLORY, partial(sweep, top, selection))
        assert (swept.failures, swept.sums.n_done) == ((Failure(b"at/closed", errno.EACCES, "open"),), 1)


# Files on which something is mounted


@pytest.mark.parametrize(
    "act",
    [ToDelete(), ToTrash(), ToMove(b"target"), ToCount(ToDelete()), ToPrint(lambda _here, _names: [])],
    ids=lambda act: type(act).__name__,
)
@pytest.mark.parametrize("selection", [ALL, Selection(sizes=(SizeBound(1, 1),))])
@pytest.mark.parametrize("is_listed", [False, True])
def test_a_file_on_which_something_is_mounted_is_skipped_by_every_action(
    volume: Path, top: Path, act: Act, selection: Selection, is_listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(volume)
    make_tree(top / "d", {"on": "1", "f": "2"})
    (volume / "target").mkdir()
    with bind_mount(top / "d/f", top / "d/on"):
        swept = sweep(top, selection, act, names=[b"d/on", b"d/f"] if is_listed else None)
        assert (swept.sums.n_done, swept.sums.n_mounts, swept.sums.n_failed) == (1, 1, 0)
    assert (top / "d/on").read_text() == "1"


# Another thing by now


def test_a_link_that_takes_the_place_of_a_file_is_no_file(top: Path) -> None:
    make_tree(top / "d", {"f": "1", "g": "1"})

    def exchange(call: str) -> None:
        if call == "stat" and not (top / "d/f").is_symlink():
            (top / "d/f").unlink()
            (top / "d/f").symlink_to("x")

    files = Selection(types=frozenset("f"), sizes=(SizeBound(1, 1),))
    assert sweep(top, files, kernel=Kernel(exchange)).sums.n_done == 1
    assert names(top) == {"d", "d/f"}


def test_a_file_that_takes_the_place_of_a_directory_is_no_directory(top: Path) -> None:
    (top / "d").mkdir()

    def exchange(call: str) -> None:
        if call == "stat" and (top / "d").is_dir():
            (top / "d").rmdir()
            (top / "d").touch()

    swept = sweep(top, Selection(types=frozenset("d"), uids=(0,)), ToTrash(), kernel=Kernel(exchange))
    assert (swept.sums.n_matched, names(top)) == (0, {"d"})
