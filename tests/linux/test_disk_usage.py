"""What a filesystem knows of a directory's size: believed where it is that directory's alone, and understood."""

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.core.record import TreeSize
from fusefs.linux.disk_usage import ceph_size, reported_size
from fusefs.linux.kernel import Kernel
from tests.support.fuse_dirstat import knowing_volume, sums_of
from tests.support.make_trees import make_tree
from tests.support.other_users import as_user
from tests.support.real_filesystems import (
    btrfs_subvolume,
    loop_volume,
    project_quota_volume,
    set_project,
    sync,
    tmpfs_volume,
)

MIB = 1 << 20
USER = 12001


def known(directory: Path) -> TreeSize | None:
    kernel = Kernel()
    with kernel.open_path(os.fsencode(directory), os.O_RDONLY | os.O_DIRECTORY) as fd:
        return reported_size(kernel, fd)


def btrfs(*words: str | Path) -> None:
    subprocess.run(["btrfs", *words], check=True, capture_output=True)


def test_two_attributes_are_what_cephfs_tells() -> None:
    told = {"ceph.dir.rbytes": b"4096", "ceph.dir.rentries": b"7"}
    assert ceph_size(told.get, 1) == TreeSize(7, 4096, 0, None, False, "cephfs", 1)
    assert ceph_size({"ceph.dir.rbytes": b"0"}.get, 1) == TreeSize(None, 0, 0, None, False, "cephfs", 1)
    assert ceph_size({"ceph.dir.rentries": b"7"}.get, 1) is None


@given(st.binary(max_size=30).filter(lambda text: not text.isdigit()))
def test_what_is_no_number_is_no_size(text: bytes) -> None:
    assert ceph_size({"ceph.dir.rbytes": text}.get, 1) is None


def test_a_number_that_no_filesystem_could_mean_is_no_size() -> None:
    assert ceph_size({"ceph.dir.rbytes": b"9" * 19}.get, 1) is None


@pytest.mark.needs("root", "fuse")
@pytest.mark.parametrize(("kind", "source"), [("ceph", "cephfs"), ("juicefs", "juicefs")])
def test_a_filesystem_that_keeps_sums_is_asked_for_them(kind: str, source: str) -> None:
    with knowing_volume(kind) as served:
        make_tree(served.backing / "tree", {"a": b"x" * 5000, "sub": {"b": b"y" * 6000, "deeper": {}}})
        size = known(served.path / "tree")
        assert size is not None
        n_bytes, n_entries = sums_of(served.backing / "tree")
        assert (size.n_bytes, size.source) == (n_bytes, source) == (11_000, source)
        assert size.n_entries == (n_entries if kind == "ceph" else None)
        assert size.shared_bytes is None  # its snapshots are the server's secret
        assert not size.is_at_least


@pytest.mark.needs("root", "fuse")
def test_a_juicefs_whose_directories_are_all_alike_tells_nothing() -> None:
    with knowing_volume("juicefs") as served:
        make_tree(served.backing / "tree", {"a": b"x" * 4096})
        assert known(served.path / "tree") is None


def test_a_filesystem_that_keeps_no_sums_tells_nothing() -> None:
    with tmpfs_volume() as volume:
        assert known(make_tree(volume / "tree", {"a": b"x" * 5000})) is None


@pytest.mark.needs("root", "btrfs")
def test_a_subvolume_is_known_by_its_quota_group_to_everybody() -> None:
    with loop_volume("btrfs") as volume:
        subvolume = btrfs_subvolume(volume, "sub", limit_bytes=64 * MIB)
        (subvolume / "file").write_bytes(os.urandom(3 * MIB))
        sync(volume)
        subvolume.chmod(0o755)
        size = as_user(USER, lambda: known(subvolume))
        assert size is not None
        assert 3 * MIB <= size.n_bytes < 4 * MIB
        assert (size.shared_bytes, size.source, size.is_at_least) == (0, "qgroup", False)


@pytest.mark.needs("root", "btrfs")
def test_what_a_snapshot_has_of_a_subvolume_is_shared() -> None:
    with loop_volume("btrfs") as volume:
        subvolume = btrfs_subvolume(volume, "sub", limit_bytes=64 * MIB)
        (subvolume / "file").write_bytes(os.urandom(3 * MIB))
        btrfs("subvolume", "snapshot", subvolume, volume / "snapshot")
        (subvolume / "own").write_bytes(os.urandom(MIB))
        sync(volume)
        size = known(subvolume)
        assert size is not None
        assert size.shared_bytes is not None
        assert 3 * MIB <= size.shared_bytes <= size.n_bytes - MIB
        assert MIB <= size.surely_freed() < 2 * MIB


@pytest.mark.needs("root", "btrfs")
def test_a_subvolume_in_a_subvolume_makes_it_at_least() -> None:
    with loop_volume("btrfs") as volume:
        subvolume = btrfs_subvolume(volume, "sub", limit_bytes=64 * MIB)
        btrfs_subvolume(subvolume, "inner")
        sync(volume)
        size = known(subvolume)
        assert size is not None
        assert size.is_at_least


@pytest.mark.needs("root", "btrfs")
def test_neither_a_directory_of_a_subvolume_nor_one_without_quotas_is_known() -> None:
    with loop_volume("btrfs") as volume:
        subvolume = btrfs_subvolume(volume, "sub")
        assert known(subvolume) is None
        btrfs("quota", "enable", volume)
        assert known(make_tree(subvolume / "directory", {"a": "1"})) is None


@pytest.mark.needs("root", "btrfs")
def test_simple_quotas_are_no_answer() -> None:
    with loop_volume("btrfs") as volume:
        subvolume = btrfs_subvolume(volume, "sub")
        done = subprocess.run(["btrfs", "quota", "enable", "--simple", volume], check=False, capture_output=True)
        if done.returncode == 0:  # btrfs-progs before 6.7 know none
            assert known(subvolume) is None


@pytest.mark.needs("root", "xfs")
def test_a_project_tells_nothing_since_its_usage_is_never_one_trees_alone() -> None:
    with project_quota_volume("xfs") as volume:
        tree = make_tree(volume / "tree", {})
        set_project(tree, 7)
        (tree / "file").write_bytes(bytes(MIB))
        assert known(tree) is None
