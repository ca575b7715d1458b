"""Everything that a tree can hold, in every shape, is gone after one reap."""

from __future__ import annotations

import os
import socket
import stat
from functools import partial
from pathlib import Path

import pytest

from tests.support.make_trees import (
    Dir,
    File,
    HardLink,
    Spec,
    SpecialFile,
    Symlink,
    deep_chain,
    make_tree,
    weird_names,
)
from tests.support.many_files import fill, roomy_volume
from tests.support.other_users import as_user
from tests.support.real_filesystems import ALL_FILESYSTEMS
from tests.support.reap_process import state_of
from tests.support.store_verbs import assert_silent, reap_now, swap

pytestmark = pytest.mark.needs("root")

USER = 12001
NAMES = [*weird_names(), b"hoisted", b"record.json.new", b"-1", b".trashd", b".fuse_hidden0001", b".nfs0001"]
MODES = [0o000, 0o111, 0o222, 0o333, 0o444, 0o555, 0o700, 0o2555, 0o1555, 0o4000]


def assert_reaped(volume: Path, victim: Path, n_entries: int) -> None:
    identifier = swap(victim).id
    reaped = reap_now(volume, identifier)
    assert (reaped.report.failures, reaped.report.removed) == ((), n_entries)
    assert state_of(volume, identifier) is None


def test_special_files_are_unlinked_and_never_opened(volume: Path) -> None:
    kinds: Spec = {
        "fifo": SpecialFile(stat.S_IFIFO | 0o600),
        "null": SpecialFile(stat.S_IFCHR | 0o666, os.makedev(1, 3)),
        "tty": SpecialFile(stat.S_IFCHR | 0o666, os.makedev(5, 0)),
        "no such device": SpecialFile(stat.S_IFCHR | 0o600, os.makedev(4000, 70_000)),
        "block": SpecialFile(stat.S_IFBLK | 0o600, os.makedev(7, 255)),
        "socket": SpecialFile(stat.S_IFSOCK | 0o600),
        "link": Symlink("/"),
        "broken": Symlink(b"\xff\n"),
        "loop": Symlink("loop"),
        "parent": Symlink(".."),
        "file": File(b"x", mode=0),
        "again": HardLink("file"),
    }
    job = make_tree(volume / "job", {**kinds, "sub": {**kinds, "again": HardLink("sub/file"), "deeper": kinds}})
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(job / "listening"))
        listener.listen()
        assert_reaped(volume, job, 1 + 12 + 1 + 12 + 1 + 12 + 1)


@pytest.mark.long
@pytest.mark.parametrize("n_levels", [63, 64, 65, 100, 101, 1000, 100_000])
def test_chain_of_any_depth_is_reaped_whole(volume: Path, n_levels: int) -> None:
    assert_reaped(volume, deep_chain(volume / "job", n_levels), n_levels + 2)


def test_deep_chains_with_names_of_any_kind_are_reaped_whole(volume: Path) -> None:
    job = make_tree(volume / "job", {})
    for name in NAMES:
        deep_chain(job / os.fsdecode(name), 150, name)
    assert_reaped(volume, job, 1 + len(NAMES) * 152)


def test_comb_of_deep_chains_is_reaped_whole(volume: Path) -> None:
    """Each level has a side branch that is as deep again: what is moved up brings more to move up."""
    job = volume / "job"
    fd = os.open(make_tree(job, {}), os.O_RDONLY)
    for n in range(200):
        deep_chain(Path(f"/proc/self/fd/{fd}/side"), 80, leaf=None)
        os.mkdir("d", dir_fd=fd)
        above, fd = fd, os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(above)
        assert n < 200
    os.close(fd)
    assert_reaped(volume, job, 1 + 200 * (1 + 81))


def test_names_of_any_kind_are_reaped_as_files_and_as_directories(volume: Path) -> None:
    spec: Spec = dict.fromkeys(NAMES, "file")
    job = make_tree(volume / "job", {**spec, b"below": {name: {name: {name: "file"}} for name in NAMES}})
    assert_reaped(volume, job, 2 + 4 * len(NAMES))


def closed_tree() -> Dir:
    inner = {f"{mode:o}": Dir({"file": File(b"x", mode=0), "empty": Dir({}, mode=0)}, mode=mode) for mode in MODES}
    return Dir({f"{mode:o}": Dir({"file": "x", **inner}, mode=mode) for mode in MODES}, mode=0o555)


@pytest.mark.parametrize("by", ["himself", "root"])
def test_directories_without_permissions_are_no_obstacle_to_their_owner(volume: Path, by: str) -> None:
    home = make_tree(volume / "home", Dir(owner=(USER, USER)))

    def give_away() -> str:
        return str(swap(make_tree(home / "job", closed_tree())).id)

    identifier = as_user(USER, give_away)
    reap = partial(reap_now, volume, identifier)
    reaped = as_user(USER, reap) if by == "himself" else reap()
    assert reaped.report.failures == ()
    assert reaped.report.removed == 1 + len(MODES) * (2 + len(MODES) * 3)
    assert state_of(volume, identifier) is None


@pytest.mark.parametrize("mode", [0o000, 0o555])
def test_deep_chain_of_closed_directories_is_no_obstacle_to_its_owner(volume: Path, mode: int) -> None:
    home = make_tree(volume / "home", Dir(owner=(USER, USER)))

    def give_away() -> str:
        fd = os.open(make_tree(home / "job", {}), os.O_RDONLY)
        for _ in range(300):
            os.mkdir("d", dir_fd=fd)
            above, fd = fd, os.open("d", os.O_RDONLY, dir_fd=fd)
            os.fchmod(above, mode)
            os.close(above)
        os.close(fd)
        return str(swap(home / "job").id)

    identifier = as_user(USER, give_away)
    assert as_user(USER, partial(reap_now, volume, identifier)).report.failures == ()
    assert state_of(volume, identifier) is None


@pytest.mark.parametrize("fs_type", ALL_FILESYSTEMS)
def test_5_000_empty_subdirectories_and_files_between_them_are_reaped_whole(fs_type: str) -> None:
    with roomy_volume(fs_type, 15_000) as volume:
        job = fill(volume / "job", 5000)
        for i in range(5000):
            os.mkdir(job / f"d{i}")
        assert_reaped(volume, job, 10_001)
        assert_silent(volume)


@pytest.mark.parametrize("spec", [{}, {"a": {}}, {"a": "1"}])
def test_smallest_trees_are_reaped_too(volume: Path, spec: Spec) -> None:
    assert_reaped(volume, make_tree(volume / "job", spec), 1 + len(spec))
