"""Nothing in a drop folder is replaced through the mount: a name that is there is EEXIST, over each transport."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.foreground_mount import Mounted, trashd_mount
from tests.support.make_trees import make_tree
from tests.support.other_users import as_user
from tests.support.real_filesystems import tmpfs_volume
from tests.support.store_verbs import assert_silent, entries, init, recover_all
from tests.support.transports import cases

pytestmark = pytest.mark.needs("root", "fuse")

ALICE = 4711
HOW = {"python": ["uring=off"], "native": ["uring=on"]}
NAMES = "abc"


@pytest.fixture(params=cases(HOW))
def mount(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    with tmpfs_volume() as volume:
        source = volume / "source"
        source.mkdir()
        init(source)
        with trashd_mount(source, options=["coherence=exclusive", *HOW[request.param]]) as mounted:
            yield mounted
        assert_silent(source)


def move(*words: str | Path) -> int:
    """Run mv, and never wait for an answer."""
    return subprocess.run(["mv", *words], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode


@pytest.mark.parametrize("thing", ["content", {"file": "content"}, {}])
def test_a_second_thing_of_a_name_stays_where_it_is(mount: Mounted, thing: str | dict[str, str]) -> None:
    drop = mount.path / ".trashd/drop"
    for name in NAMES:
        make_tree(mount.path / name, {"report": thing})
    assert [move(mount.path / name / "report", drop) for name in NAMES] == [0, 1, 1]
    assert [os.listdir(mount.path / name) for name in NAMES] == [[], ["report"], ["report"]]
    with pytest.raises(OSError, match="report") as caught:
        (mount.path / "b" / "report").rename(drop / "report")
    assert caught.value.errno == errno.EEXIST
    recover_all(mount.backing)
    assert move(mount.path / "b" / "report", drop) == 0
    recover_all(mount.backing)
    assert len(entries(mount.backing)) == 2


def test_numbered_backups_keep_all(mount: Mounted) -> None:
    for name in NAMES:
        make_tree(mount.path / name, {"report": name})
        assert move("--backup=numbered", mount.path / name / "report", mount.path / ".trashd/drop/") == 0
    recover_all(mount.backing)
    assert len(entries(mount.backing)) == len(NAMES)


def test_within_a_drop_folder_nothing_is_replaced_and_elsewhere_all_is_as_ever(mount: Mounted) -> None:
    drop = mount.path / ".trashd/drop"
    make_tree(mount.path / "drop", {"a": "1", "b": "2"})
    for name in "ab":
        (mount.path / "drop" / name).rename(drop / name)
    (mount.path / "drop" / "a").touch()
    with pytest.raises(FileExistsError):
        (drop / "a").rename(drop / "b")
    (drop / "a").rename(mount.path / "drop" / "a")
    assert (mount.path / "drop" / "a").read_text() == "1"
    recover_all(mount.backing)


def test_a_users_own_drop_folder_replaces_nothing_either(mount: Mounted) -> None:
    home = make_tree(mount.path / "home", {"a": {"report": "1"}, "b": {"report": "2"}})
    for path in (home, *home.rglob("*")):
        os.chown(path, ALICE, ALICE)

    def drop() -> None:
        for name in "ab":
            (home / name / "report").rename(mount.path / ".trashd/drop/report")

    with pytest.raises(FileExistsError):
        as_user(ALICE, drop)
    assert (home / "b" / "report").read_text() == "2"
    as_user(ALICE, lambda: recover_all(mount.backing))
