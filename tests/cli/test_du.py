"""`trashd du`, and which orphans it and `list` tell of."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from tests.support.make_trees import make_tree
from tests.support.other_users import as_user
from tests.support.store_calls import assert_silent
from tests.support.trashd_command import done_well, swapped, trashd

pytestmark = pytest.mark.needs("root")

USER = 65_534
MIB = 1 << 20


def taken(volume: Path, name: str, n_mib: int) -> str:
    """The id of a directory with a file of that size."""
    directory = volume / name
    directory.mkdir(exist_ok=True)
    (directory / "file").write_bytes(bytes(n_mib * MIB))
    return str(swapped(directory)["id"])


def blocks(identifier: str, volume: Path, uid: int = 0) -> int:
    tree = volume / f".trashd/u/{uid}/orphans/{identifier}/tree"
    return sum(os.lstat(path).st_blocks * 512 for path in (tree, *tree.rglob("*")))


@pytest.mark.quick("du")
def test_what_each_takes_is_counted_and_the_largest_comes_first(volume: Path) -> None:
    ids = {name: taken(volume, name, n) for name, n in (("small", 1), ("large", 3), ("middle", 2))}
    told = done_well("du", "--json", "--volume", volume).objects()
    assert [one["id"] for one in told] == [ids["large"], ids["middle"], ids["small"]]
    for one in told:
        assert one["n_bytes"] == blocks(one["id"], volume)
    assert "root: 6.0" in done_well("du", "--volume", volume).out
    (only,) = done_well("du", "--json", "--larger", "3M", "--volume", volume).objects()
    assert only["id"] == ids["large"]
    (named,) = done_well("du", "--json", ids["small"][-12:], "--volume", volume).objects()
    assert named["id"] == ids["small"]
    assert trashd("du", "0000abcd", "--volume", volume).code == 5
    assert_silent(volume)


def test_what_other_names_keep_is_told(volume: Path) -> None:
    make_tree(volume / "job", {"file": "content"})
    os.link(volume / "job/file", volume / "outside")
    swapped(volume / "job")
    (one,) = done_well("du", "--json", "--volume", volume).objects()
    assert one["linked_bytes"] == os.lstat(volume / "outside").st_blocks * 512 > 0
    assert "stay" in done_well("du", "--volume", volume).out
    assert_silent(volume)


def test_nobody_sees_what_anothers_take_but_root(volume: Path) -> None:
    volume.chmod(0o777)
    mine = taken(volume, "roots", 1)
    his = as_user(USER, partial(taken, volume, "his", 2))
    told = as_user(USER, partial(done_well, "du", "--json", "--volume", volume)).objects()
    assert [one["id"] for one in told] == [his]
    assert [one["id"] for one in done_well("du", "--json", "--volume", volume).objects()] == [his, mine]
    (one,) = done_well("du", "--json", "--user", str(USER), "--volume", volume).objects()
    assert one["id"] == his
    assert_silent(volume)


def test_a_list_is_chosen_and_sorted(volume: Path) -> None:
    first, second = taken(volume, "b", 1), taken(volume, "a", 1)
    done_well("keep", second)

    def ids(*options: str) -> list[str]:
        return [one["id"] for one in done_well("list", "--json", "--volume", volume, *options).objects()]

    assert ids() == [first, second]
    assert ids("--sort", "path") == [second, first]
    assert ids("--sort", "left") == [first, second]
    assert ids("--path", f"{volume}/*") == [first, second]
    assert ids("--path", "*/a") == [second]
    assert ids("--older", "1h") == []
    assert ids("--within", "2d") == [first]
    assert ids("--within", "1h") == []
    assert ids("--state", "restorable") == [first, second]
    assert ids("--state", "quarantine") == []
    assert ids("--user", str(USER)) == []
    assert "no such orphans" in done_well("list", "--older", "1h", "--volume", volume).err
    assert_silent(volume)


def test_what_its_owner_cannot_look_at_is_at_least(volume: Path) -> None:
    home = make_tree(volume / "home", {"job": {"closed": {"file": "x" * 10_000}}})
    for path in (home, *home.rglob("*")):
        os.chown(path, USER, USER)
    told = as_user(USER, partial(swapped, home / "job"))
    closed = Path(told["store"]) / "orphans" / told["id"] / "tree/closed"
    closed.chmod(0)
    done = as_user(USER, partial(trashd, "du", "--volume", volume))
    assert done.code == 13, done
    assert ">=" in done.out
    closed.chmod(0o700)
    assert_silent(volume)
