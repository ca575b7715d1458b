"""The remover: every shape of tree is gone after one reap, by few fds; what is refused, or beyond its border, stays."""

import errno
import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from fusefs.linux.kernel import Kernel
from fusefs.store.layout import RECORD
from tests.support.foreground_mount import until
from tests.support.fuse_eio import N_LISTED, broken_volume
from tests.support.fuse_watchdog import FuseVolume
from tests.support.make_trees import (
    APPEND_ONLY,
    IMMUTABLE,
    Dir,
    Entry,
    File,
    HardLink,
    Spec,
    SpecialFile,
    Symlink,
    bulky_tree,
    deep_chain,
    fill,
    make_tree,
    roomy_volume,
    set_flags,
    snapshot,
    weird_names,
)
from tests.support.mount_namespaces import bind_elsewhere
from tests.support.other_users import as_user
from tests.support.outside_tree import Canary, unmount_below
from tests.support.peak_usage import bare_interpreter_kib, watch
from tests.support.real_filesystems import ALL_FILESYSTEMS, bind_mount, full, loop_volume, tmpfs_volume
from tests.support.reap_process import assert_quarantined, left_in, reasons, state_of
from tests.support.sshfs_volumes import sshfs_volume
from tests.support.store_verbs import assert_silent, init, place, reap_now, recover_all, swap
from tests.support.trashd_command import TRASHD

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


@contextmanager
def canary_in(volume: Path) -> Iterator[Canary]:
    """A canary; in the end it is untouched, and there is no other name for its files."""
    canary = Canary(volume)
    yield canary
    canary.assert_alone()


def test_hard_links_across_the_border_keep_their_content(volume: Path) -> None:
    with canary_in(volume) as canary:
        job = bulky_tree(volume / "job", 5, 100, 1000)
        canary.link_into(job)
        identifier = swap(job).id
        assert reap_now(volume, identifier).report.failures == ()


@pytest.mark.parametrize("where", ["d0", "chain/" + "d/" * 100])
def test_mounts_made_in_an_orphan_keep_what_is_mounted_and_all_else_goes(volume: Path, where: str) -> None:
    with canary_in(volume) as canary:
        job = bulky_tree(volume / "job", 5, 100, 1000)
        (job / where / "mount").mkdir()
        (job / where / "file").touch()
        identifier = swap(job).id
        at = place(volume, identifier) / "tree" / where
        with canary.mounted_in(at / "mount", at / "file"):
            assert reap_now(volume, identifier).report.n_failed > 0
            canary.assert_untouched()
        below = [path for path in place(volume, identifier).rglob("*") if path.name not in ("record.json", "hoisted")]
        assert [path.name for path in below if path.is_file()] == ["file"]
        assert [path.name for path in below if path.is_dir() and not os.listdir(path)] == ["mount"]
        assert reap_now(volume, identifier).report.failures == ()
        assert state_of(volume, identifier) is None


def test_tree_that_is_mounted_on_keeps_what_is_mounted(volume: Path) -> None:
    make_tree(volume / "canary", {"a": "1", "sub": {"b": "2"}})
    before = snapshot(volume / "canary", with_times=True)
    identifier = swap(fill(volume / "job", 100)).id
    with bind_mount(volume / "canary", place(volume, identifier) / "tree"):
        reaped = reap_now(volume, identifier)
        assert reaped.report.n_failed > 0
        assert_quarantined(volume, reaped)
        assert snapshot(volume / "canary", with_times=True) == before
        unmount_below(volume / ".trashd")
    assert reap_now(volume, identifier).report.failures == ()
    assert snapshot(volume / "canary", with_times=True) == before


@pytest.mark.parametrize("where", ["sub", "sub/deeper", "."])
def test_what_is_mounted_in_another_namespace_stays_and_the_orphan_goes(volume: Path, where: str) -> None:
    make_tree(volume / "canary", {"a": "1", "sub": {"b": "2"}})
    before = snapshot(volume / "canary", with_times=True)
    identifier = swap(make_tree(volume / "job", {"f": "1", "sub": {"g": "2", "deeper": {"h": "3"}}})).id
    with bind_elsewhere(volume / "canary", place(volume, identifier) / "tree" / where):
        reaped = reap_now(volume, identifier)
        assert reaped.report.failures == ()
        assert state_of(volume, identifier) is None
        assert snapshot(volume / "canary", with_times=True) == before
    assert snapshot(volume / "canary", with_times=True) == before


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


MAX_FDS = 128
MAX_KIB = 64 << 10


def chain(path: Path) -> None:
    deep_chain(path, 20_000)


def flat(path: Path) -> None:
    fill(path, 200_000)


def long(path: Path) -> None:
    """One directory whose names are as long as they can be, in bytes and in Python's memory."""
    fd = os.open(fill(path, 0), os.O_RDONLY)
    for i in range(70_000):
        # One byte that is no UTF-8 makes each letter of a str two bytes; every further one costs a handler's call.
        os.mknod((b"%d\xff" % i).ljust(255, b"x"), dir_fd=fd)
    os.close(fd)


def wide(path: Path) -> None:
    for i in range(20_000):
        fill(path / f"{i}", 1)


def stairs(path: Path) -> None:
    """A chain on each level of which many directories wait: all of them are open work at once."""
    fd = os.open(fill(path, 1), os.O_RDONLY)
    for _ in range(300):
        for i in range(60):
            os.mkdir(f"side-{i}", dir_fd=fd)
        os.mkdir("down", dir_fd=fd)
        above, fd = fd, os.open("down", os.O_RDONLY, dir_fd=fd)
        os.close(above)
    os.close(fd)


def assert_bounded(fs_type: str, shape: Callable[[Path], None], *options: str) -> None:
    """Reaped by the command, a tree of that shape needs no more than a reap may."""
    with roomy_volume(fs_type, 205_000) as volume:
        shape(volume / "job")
        identifier = swap(volume / "job").id
        code, peak = watch([TRASHD, "reap", "--now", *options, "--volume", str(volume), identifier], MAX_FDS)
        text = f"{shape.__name__} on {fs_type}: {peak}, a bare interpreter {bare_interpreter_kib()} KiB"
        assert code == 0, text
        assert state_of(volume, identifier) is None
        assert_silent(volume)
        assert peak.n_processes > 0, text
        assert peak.n_fds <= MAX_FDS, text
        assert peak.largest_kib - bare_interpreter_kib() <= MAX_KIB, text
        assert peak.memory_kib - bare_interpreter_kib() <= MAX_KIB, text


LOOP, EVERY = pytest.mark.needs("loop"), pytest.mark.every
SHAPES = [
    pytest.param("tmpfs", chain),
    pytest.param("ext4", chain, marks=[LOOP, EVERY]),
    pytest.param("tmpfs", wide, marks=EVERY),
    pytest.param("ext4", wide, marks=LOOP),
    pytest.param("tmpfs", stairs),
    pytest.param("ext4", stairs, marks=[LOOP, EVERY]),
]
"""What a reap has in memory is the same on each filesystem, which may list a directory in another order."""


@pytest.mark.parametrize(("fs_type", "shape"), SHAPES)
def test_memory_and_fds_stay_bounded_whatever_the_shape(fs_type: str, shape: Callable[[Path], None]) -> None:
    assert_bounded(fs_type, shape)


def test_memory_stays_bounded_in_one_directory_of_very_many_files() -> None:
    """On tmpfs; ext4 has one directory of long names."""
    assert_bounded("tmpfs", flat)


@pytest.mark.parametrize("fs_type", [pytest.param("tmpfs", marks=EVERY), pytest.param("ext4", marks=LOOP)])
def test_memory_stays_bounded_with_as_many_workers_as_a_large_machine_has(fs_type: str) -> None:
    """Of long names, of which each worker has its own; fewer workers have fewer."""
    assert_bounded(fs_type, long, "--threads", "8")
