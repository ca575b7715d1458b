"""`trashd du`, and which orphans it and `list` tell of."""

import os
import subprocess
from functools import partial
from pathlib import Path

import pytest

from tests.support.fuse_dirstat import knowing_volume
from tests.support.make_trees import make_tree, owned
from tests.support.other_users import as_user
from tests.support.real_filesystems import btrfs_subvolume, loop_volume, sync
from tests.support.store_verbs import assert_silent, init
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
    du_results = done_well("du", "--json", "--volume", volume).objects()
    assert [one["id"] for one in du_results] == [ids["large"], ids["middle"], ids["small"]]
    for one in du_results:
        assert one["n_bytes"] == blocks(one["id"], volume)
    assert "root: 6.0" in done_well("du", "--volume", volume).out
    (only,) = done_well("du", "--json", "--larger", "3M", "--volume", volume).objects()
    assert only["id"] == ids["large"]
    (named,) = done_well("du", "--json", ids["small"][-12:], "--volume", volume).objects()
    assert named["id"] == ids["small"]
    assert trashd("du", "0000abcd", "--volume", volume).code == 5


def test_what_other_names_keep_is_told(volume: Path) -> None:
    make_tree(volume / "job", {"file": "content"})
    os.link(volume / "job/file", volume / "outside")
    swapped(volume / "job")
    (one,) = done_well("du", "--json", "--volume", volume).objects()
    assert one["linked_bytes"] == os.lstat(volume / "outside").st_blocks * 512 > 0
    assert "will not be freed" in done_well("du", "--volume", volume).out


def test_what_was_counted_is_noted_and_not_counted_again(volume: Path) -> None:
    first = taken(volume, "job", 1)
    (listed,) = done_well("list", "--json", "--volume", volume).objects()
    assert listed["size"] is None
    assert "unknown" in done_well("list", "--volume", volume).out
    assert done_well("list", "--json", "--larger", "1", "--volume", volume).out == ""
    (counted,) = done_well("du", "--json", "--volume", volume).objects()
    (listed,) = done_well("list", "--json", "--larger", "1M", "--volume", volume).objects()
    assert listed["size"] == {key: counted[key] for key in listed["size"]}
    assert (listed["size"]["source"], listed["size"]["is_at_least"]) == ("count", False)
    (volume / f".trashd/u/0/orphans/{first}/tree/more").write_bytes(bytes(MIB))
    assert done_well("du", "--json", "--volume", volume).objects() == [counted]
    (anew,) = done_well("du", "--json", "--count", "--volume", volume).objects()
    assert anew["n_bytes"] == counted["n_bytes"] + MIB
    second = taken(volume, "job", 3)
    done_well("du", "--volume", volume)
    ids = [one["id"] for one in done_well("list", "--json", "--sort", "size", "--volume", volume).objects()]
    assert ids == [second, first]


def test_what_something_was_taken_out_of_is_not_known_any_more(volume: Path) -> None:
    make_tree(volume / "job", {"file": "x" * 5000, "other": "x" * 5000})
    identifier = str(swapped(volume / "job")["id"])
    done_well("du", "--volume", volume)
    done_well("restore", identifier, "file", "--to", volume / "back", "--volume", volume)
    (listed,) = done_well("list", "--json", "--volume", volume).objects()
    assert listed["size"] is None
    (counted,) = done_well("du", "--json", "--volume", volume).objects()
    assert counted["n_bytes"] == blocks(identifier, volume)
    done_well("reap", "--now", identifier, "--volume", volume)


def test_a_reap_that_looks_at_no_file_tells_what_was_known(volume: Path) -> None:
    first, second = taken(volume, "a", 1), taken(volume, "b", 2)
    done_well("du", second, "--volume", volume)
    (unknown,) = done_well("reap", "--now", "--json", first, "--volume", volume).objects()
    assert unknown["report"]["n_bytes"] is None
    (known,) = done_well("reap", "--now", "--json", second, "--volume", volume).objects()
    assert known["report"]["n_bytes"] == 2 * MIB


@pytest.mark.needs("loop", "xfs", "btrfs")
@pytest.mark.parametrize(
    ("fs_type", "share", "told"),
    [
        ("xfs", ("cp", "--reflink=always", "job/old", "copy"), " <=2.00 MiB "),
        ("btrfs", ("btrfs", "subvolume", "snapshot", ".", "snap"), "might not be freed: it is shared"),
    ],
)
def test_what_is_shared_bounds_what_comes_back(fs_type: str, share: tuple[str, ...], told: str) -> None:
    with loop_volume(fs_type) as volume:
        init(volume)
        make_tree(volume / "job", {"old": os.urandom(MIB)})
        subprocess.run(share, cwd=volume, check=True, capture_output=True)
        (volume / "job/new").write_bytes(os.urandom(MIB))
        sync(volume)
        swapped(volume / "job")
        (one,) = done_well("du", "--json", "--volume", volume).objects()
        assert one["shared_bytes"] == MIB
        assert one["n_bytes"] >= 2 * MIB
        assert told in done_well("du", "--volume", volume).out
        assert_silent(volume)


@pytest.mark.needs("loop", "xfs")
def test_of_what_its_owner_may_not_read_all_may_be_shared_and_its_size_is_known() -> None:
    with loop_volume("xfs") as volume:
        init(volume)
        make_tree(volume / "home", {"job": {"closed": os.urandom(MIB)}})
        (volume / "home/job/closed").chmod(0)
        owned(volume / "home", USER)
        sync(volume)
        as_user(USER, partial(swapped, volume / "home/job"))
        (one,) = as_user(USER, partial(done_well, "du", "--json", "--volume", volume)).objects()
        assert one["shared_bytes"] == MIB <= one["n_bytes"]
        assert (one["is_at_least"], one["n_failed"]) == (False, 0)
        assert_silent(volume)


@pytest.mark.needs("loop", "btrfs")
def test_a_subvolume_with_quotas_is_not_walked() -> None:
    with loop_volume("btrfs") as volume:
        init(volume)
        job = btrfs_subvolume(volume, "job", limit_bytes=64 * MIB)
        (job / "file").write_bytes(os.urandom(2 * MIB))
        sync(volume)
        swapped(job, "--unlike")
        (one,) = done_well("du", "--json", "--volume", volume).objects()
        assert (one["source"], one["n_entries"], one["shared_bytes"]) == ("qgroup", None, 0)
        assert 2 * MIB <= one["n_bytes"] < 3 * MIB
        assert_silent(volume)


@pytest.mark.needs("fuse")
def test_a_server_that_knows_is_asked_and_one_that_does_not_is_counted_only_when_told_to() -> None:
    for kind, source in (("ceph", "cephfs"), ("honest", None)):
        with knowing_volume(kind) as served:
            init(served.path)
            make_tree(served.path / "job", {"file": "x" * 5000})
            identifier = str(swapped(served.path / "job")["id"])
            (one,) = done_well("du", "--json", "--volume", served.path).objects()
            assert one["source"] == source
            assert one["n_bytes"] == (5000 if source else None)
            assert ("unknown" in done_well("du", "--volume", served.path).out) is (source is None)
            (named,) = done_well("du", "--json", identifier, "--volume", served.path).objects()
            assert named["source"] == (source or "count")
            assert_silent(served.path)


def test_a_sweep_that_looked_at_files_notes_at_least_what_they_take(volume: Path) -> None:
    make_tree(volume / "job", {"a.log": "x" * 5000, "sub": {"b.log": "x" * 9000, "c": "kept"}, "l.log": "x" * 5000})
    os.link(volume / "job/l.log", volume / "other")
    done_well("sweep", volume / "job", "--name", "*.log", "--size", "+1")
    (listed,) = done_well("list", "--json", "--volume", volume).objects()
    size = listed["size"]
    assert (size["source"], size["is_at_least"], size["n_entries"]) == ("sweep", True, 4)
    assert size["n_bytes"] == sum(
        os.lstat(Path(listed["path"], "tree", name)).st_blocks * 512 for name in ("a.log", "sub/b.log")
    )
    assert f">={size['n_bytes'] // 1024}" in done_well("list", "--volume", volume).out
    (counted,) = done_well("du", "--json", "--volume", volume).objects()
    assert counted["n_bytes"] > size["n_bytes"]
    assert not counted["is_at_least"]


def test_nobody_sees_what_anothers_take_but_root(volume: Path) -> None:
    volume.chmod(0o777)
    mine = taken(volume, "roots", 1)
    his = as_user(USER, partial(taken, volume, "his", 2))
    du_results = as_user(USER, partial(done_well, "du", "--json", "--volume", volume)).objects()
    assert [one["id"] for one in du_results] == [his]
    assert [one["id"] for one in done_well("du", "--json", "--volume", volume).objects()] == [his, mine]
    (one,) = done_well("du", "--json", "--user", str(USER), "--volume", volume).objects()
    assert one["id"] == his


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
    assert "no orphan matches" in done_well("list", "--older", "1h", "--volume", volume).err


def test_what_its_owner_cannot_look_at_is_at_least(volume: Path) -> None:
    home = owned(make_tree(volume / "home", {"job": {"closed": {"file": "x" * 10_000}}}), USER)
    swap_result = as_user(USER, partial(swapped, home / "job"))
    closed = Path(swap_result["store"]) / "orphans" / swap_result["id"] / "tree/closed"
    closed.chmod(0)
    done = as_user(USER, partial(trashd, "du", "--volume", volume))
    assert done.code == 13, done
    assert ">=" in done.out
    closed.chmod(0o700)
