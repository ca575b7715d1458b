"""What a filesystem refuses: it goes to quarantine with the kernel's reason, and everything else goes."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import pytest

from fusefs.linux.kernel import Kernel
from fusefs.store.layout import RECORD
from tests.support.foreground_mount import until
from tests.support.fuse_eio import N_LISTED, broken_volume
from tests.support.fuse_watchdog import FuseVolume
from tests.support.make_trees import APPEND_ONLY, IMMUTABLE, Entry, Spec, deep_chain, make_tree, set_flags
from tests.support.many_files import fill
from tests.support.real_filesystems import full, loop_volume, tmpfs_volume
from tests.support.reap_process import assert_quarantined, left_in, reasons, state_of
from tests.support.sshfs_volumes import sshfs_volume
from tests.support.store_verbs import assert_silent, init, place, reap_now, recover_all, swap

pytestmark = pytest.mark.needs("root")

FULL = [
    pytest.param(("tmpfs", {}), id="tmpfs"),
    pytest.param(("ext4", {}), id="ext4", marks=pytest.mark.needs("loop")),
    pytest.param(("ext4", {"spare_kernel": False}), id="ext4-to-the-last", marks=pytest.mark.needs("loop")),
    pytest.param(("xfs", {}), id="xfs", marks=pytest.mark.needs("loop", "xfs")),
    pytest.param(("btrfs", {"inodes": False}), id="btrfs-data", marks=pytest.mark.needs("loop", "btrfs")),
]


class Small(NamedTuple):
    """A small volume with a store, and how it can be filled."""

    path: Path
    fullness: dict[str, bool]

    def filled(self) -> AbstractContextManager[object]:
        return full(self.path, **self.fullness)


@pytest.fixture(params=FULL)
def small(request: pytest.FixtureRequest) -> Iterator[Small]:
    fs_type, fullness = request.param
    with tmpfs_volume("4m", ["nr_inodes=2000"]) if fs_type == "tmpfs" else loop_volume(fs_type, 16) as path:
        init(path)
        yield Small(path, fullness)
        recover_all(path)
        assert_silent(path)


# Full volumes


def shapes() -> Spec:
    """Wide, with modes that have to be changed, and names that take room."""
    return {
        "wide": {f"{'n' * 200}{i}": "" for i in range(100)},
        "dirs": {f"{i}": {"a": "x", "b": {}} for i in range(50)},
        "blocks": b"b" * 100_000,
    }


@pytest.mark.parametrize("make", [lambda path: make_tree(path, shapes()), lambda path: deep_chain(path, 400)])
def test_tree_on_a_full_volume_is_reaped_although_no_directory_can_be_made_there(
    small: Small, make: Callable[[Path], Path]
) -> None:
    identifier = swap(make(small.path / "job")).id
    with small.filled():
        assert reap_now(small.path, identifier).report.failures == ()
        assert state_of(small.path, identifier) is None


def test_what_can_not_be_removed_on_a_full_volume_goes_to_quarantine(small: Small) -> None:
    job = make_tree(small.path / "job", {"sub": {"frozen": "x"}, **shapes()})
    set_flags(job / "sub/frozen", IMMUTABLE)
    identifier = swap(job).id
    with small.filled():
        assert reasons(reap_now(small.path, identifier)) == {b"tree/sub/frozen": errno.EPERM}
        assert left_in(small.path, identifier) == {"sub", "sub/frozen"}
    set_flags(place(small.path, identifier) / "tree/sub/frozen", IMMUTABLE, on=False)
    assert reap_now(small.path, identifier).report.failures == ()


# Flags


@pytest.mark.parametrize("flag", [IMMUTABLE, APPEND_ONLY])
def test_directory_that_may_not_change_keeps_its_entries_and_no_others(volume: Path, flag: int) -> None:
    job = make_tree(volume / "job", {"held": {"a": "1", "sub": {"b": "2"}, "empty": {}}, "free": {"c": "3"}, "d": "4"})
    set_flags(job / "held", flag)
    identifier = swap(job).id
    reaped = reap_now(volume, identifier)
    assert reasons(reaped) == dict.fromkeys([b"tree/held/a", b"tree/held/sub", b"tree/held/empty"], errno.EPERM)
    assert_quarantined(volume, reaped)
    assert left_in(volume, identifier) == {"held", "held/a", "held/sub", "held/empty"}
    set_flags(place(volume, identifier) / "tree/held", flag, on=False)
    assert reap_now(volume, identifier).report.failures == ()


def test_more_refusals_than_anybody_reads_are_counted_and_stop_nothing(volume: Path) -> None:
    job = make_tree(volume / "job", {})
    fill(job / "held", 12_000)
    fill(job / "free", 3000)
    set_flags(job / "held", IMMUTABLE)
    identifier = swap(job).id
    reaped = reap_now(volume, identifier)
    assert reaped.report.n_failed >= 12_000
    assert_quarantined(volume, reaped)
    left = place(volume, identifier) / "tree"
    assert os.listdir(left) == ["held"]
    assert len(os.listdir(left / "held")) == 12_000
    set_flags(left / "held", IMMUTABLE, on=False)
    assert reap_now(volume, identifier).report.failures == ()


# I/O errors


@pytest.fixture
def broken() -> Iterator[FuseVolume]:
    with broken_volume() as served:
        init(served.path)
        yield served
        assert_silent(served.path)


@pytest.mark.needs("fuse")
@pytest.mark.parametrize(
    ("name", "content", "stays"),
    [
        ("unlink-me", "x", {"unlink-me"}),
        ("rmdir-me", {"a": "x"}, {"rmdir-me"}),
        ("opendir-me", {"a": "x"}, {"opendir-me", "opendir-me/a"}),
        ("readdir-me", {f"{i:03}": "x" for i in range(3 * N_LISTED)}, {"readdir-me"}),
    ],
)
def test_input_output_error_in_the_middle_is_told_and_the_rest_goes(
    broken: FuseVolume, name: str, content: Spec | str, stays: set[str]
) -> None:
    middle: dict[str, Entry | Spec | str] = {"before": "1", "good": content, "zz": {"after": "2"}}
    job = make_tree(broken.path / "job", {"a": {"b": "1"}, "middle": middle, "z": "3"})
    (job / "middle/good").rename(job / "middle" / name)
    identifier = swap(job).id
    reaped = reap_now(broken.path, identifier)
    assert set(reasons(reaped).values()) == {errno.EIO}
    assert {one.split(b"/")[2] for one in reasons(reaped)} == {os.fsencode(name)}
    assert_quarantined(broken.path, reaped)
    backing = broken.backing / place(broken.path, identifier).relative_to(broken.path) / "tree"
    left = {str(path.relative_to(backing / "middle")) for path in backing.rglob("*")} - {".", "../middle"}
    assert (os.listdir(backing), left & stays) == (["middle"], stays)
    # The disk was exchanged for a good one.
    (backing / "middle" / name).rename(backing / "middle/good")
    assert reap_now(broken.path, identifier).report.failures == ()
    assert state_of(broken.path, identifier) is None


# Open files that only get a hidden name


@pytest.mark.needs("fuse")
@pytest.mark.parametrize("serve", [broken_volume, pytest.param(sshfs_volume, marks=pytest.mark.needs("sshfs"))])
def test_open_file_that_is_hidden_instead_of_unlinked_makes_no_reap_endless(
    serve: Callable[[], AbstractContextManager[FuseVolume]],
) -> None:
    with serve() as served:
        volume = served.path
        init(volume)
        job = make_tree(volume / "job", {"sub": {"open": "content", "a": "1"}, "other": {"b": "2"}})
        with (job / "sub/open").open() as held:
            identifier = swap(job).id
            reaped = reap_now(volume, identifier)
            assert held.read() == "content"
            if state_of(volume, identifier) is not None:
                assert_quarantined(volume, reaped)
                assert set(reasons(reaped).values()) <= {errno.ENOTEMPTY, errno.EBUSY}
                tree = place(volume, identifier) / "tree"
                assert {path.name[:12] for path in tree.rglob("*") if path.is_file()} <= {".fuse_hidden"}
        # The kernel tells the daemon of the close, and does not wait for it.
        assert until(lambda: not list(served.backing.rglob(".fuse_hidden*")))
        if state_of(volume, identifier) is not None:
            assert reap_now(volume, identifier).report.failures == ()
        assert state_of(volume, identifier) is None
        assert_silent(volume)


# What is refused once only


class KeepsRecords(Kernel):
    """Unlinks no record: a reap that is killed after that leaves an orphan whose origin nobody knows."""

    def unlink(self, dir_fd: int, name: bytes) -> None:
        assert name != RECORD
        super().unlink(dir_fd, name)


def test_what_somebody_put_beside_the_tree_stays_with_the_record(volume: Path) -> None:
    identifier = swap(make_tree(volume / "job", {"a": "1"})).id
    (place(volume, identifier) / "note").write_text("theirs")
    reaped = reap_now(volume, identifier, kernel=KeepsRecords())
    assert reasons(reaped) == {b"": errno.ENOTEMPTY}
    assert_quarantined(volume, reaped)
    (note := place(volume, identifier) / "note").rename(volume / note.name)
    assert reap_now(volume, identifier).report.failures == ()
