"""Counting before a reap: each inode once, nothing missed in any shape, and nothing asked that is not the tree's."""

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from fusefs.core.orphan_sums import Survey
from fusefs.core.pacing import HOLD, UNLIMITED, Speed
from fusefs.engine import count_tree as module
from fusefs.engine.count_tree import survey
from fusefs.engine.pace import WalkPacer
from fusefs.linux.kernel import CallHook, Kernel
from fusefs.store import walk
from tests.cli.test_reap import fsyncing
from tests.support.fuse_silent import silent_fuse
from tests.support.make_trees import (
    Dir,
    File,
    HardLink,
    Spec,
    SpecialFile,
    Symlink,
    deep_chain,
    fill,
    make_tree,
    weird_names,
)
from tests.support.other_users import as_user
from tests.support.real_filesystems import bind_mount, loop_volume, sync, tmpfs_volume
from tests.support.small_orphans import OTHER, orphan_in
from tests.support.store_verbs import ActingBefore, assert_silent, raw, reap_now, tree_of
from tests.support.trashd_command import done_well, swapped

pytestmark = pytest.mark.needs("root")

_FICLONE = 0x40049409
KIB = 1024
KINDS: Spec = {
    "file": File(b"x" * 10_000),
    "empty": "",
    "link": Symlink("/etc"),
    "fifo": SpecialFile(stat.S_IFIFO | 0o600),
    "device": SpecialFile(stat.S_IFCHR | 0o600, os.makedev(1, 3)),
    "closed": Dir({"in": "side"}, mode=0o500),
    "sub": {"sub": {"sub": {}, "file": "x"}, "more": {}},
    "names": dict.fromkeys(weird_names(), "n"),
}


def look_at(container: Path, hook: CallHook = lambda _call: None, *, with_shared: bool = False) -> Survey:
    kernel = Kernel(hook)
    with kernel.open_path(raw(container), os.O_RDONLY) as fd:
        return survey(kernel, fd, with_shared=with_shared)


@contextmanager
def steps(monkeypatch: pytest.MonkeyPatch, window: int, n_fds: int = 64) -> Iterator[None]:
    """Limits so low that small trees meet them."""
    with monkeypatch.context() as patch:
        patch.setattr(module, "WINDOW", window)
        patch.setattr(walk, "_FDS_MAX", n_fds)
        yield


def blocks(*paths: Path) -> int:
    return sum(os.lstat(path).st_blocks * 512 for path in paths)


# What is counted


def test_entries_are_those_that_a_reap_removes(volume: Path) -> None:
    swapped = orphan_in(volume, spec=KINDS)
    tree = tree_of(swapped)
    seen = look_at(tree.parent)
    inside = [tree, *tree.rglob("*")]
    assert seen == Survey(len(inside), blocks(*inside), 0, 0, 0, False)
    assert seen.n_entries == reap_now(volume, swapped.id).report.removed


def test_a_file_alone_and_a_link_alone_are_one_entry(volume: Path) -> None:
    (volume / "tree").write_bytes(b"x" * 8192)
    assert look_at(volume) == Survey(1, 8192, 0, 0, 0, False)
    (volume / "tree").unlink()
    (volume / "tree").symlink_to(make_tree(volume / "other", {"a": "1"}))
    assert look_at(volume).n_entries == 1


def test_a_container_without_a_tree_is_empty(volume: Path) -> None:
    assert look_at(volume) == Survey(0, 0, 0, 0, 0, False)


def test_what_an_earlier_reap_moved_up_is_counted_too(volume: Path) -> None:
    make_tree(volume / "tree", {"a": "1"})
    make_tree(volume / "hoisted", {"1": {"b": "2", "c": {}}})
    assert look_at(volume).n_entries == 2 + 3


def test_hoisted_that_is_a_link_is_not_followed(volume: Path) -> None:
    make_tree(volume / "other", {"a": "1", "b": {}})
    (volume / "hoisted").symlink_to("other")
    assert look_at(volume) == Survey(0, 0, 0, 0, 1, False)


def test_progress_tells_all_in_the_end(volume: Path) -> None:
    fill(volume / "tree", 2500)
    told: list[tuple[int, int]] = []
    with Kernel().open_path(raw(volume), os.O_RDONLY) as fd:
        seen = survey(Kernel(), fd, lambda entries, size: told.append((entries, size)))
    assert [entries for entries, _ in told] == [1000, 1000, 501]
    assert sum(size for _, size in told) == seen.n_bytes


def test_who_says_stop_gets_what_was_counted_by_then(volume: Path) -> None:
    fill(fill(volume / "tree", 2500) / "sub", 2500)
    with Kernel().open_path(raw(volume), os.O_RDONLY) as fd:
        assert survey(Kernel(), fd, stops=lambda: True).n_entries == 1000


# Hard links


def test_inodes_with_several_names_inside_count_once(volume: Path) -> None:
    make_tree(volume / "tree", {"a": b"x" * 8192, "sub": {"b": HardLink("a"), "c": HardLink("a")}})
    assert look_at(volume) == Survey(5, 8192, 0, 0, 0, False, 2)


def test_a_name_outside_keeps_the_bytes(volume: Path) -> None:
    make_tree(volume / "tree", {"a": b"x" * 8192, "b": HardLink("a"), "c": b"x" * 4096})
    os.link(volume / "tree/a", volume / "outside")
    assert look_at(volume) == Survey(4, 12288, 8192, 0, 0, False, 2)


def test_links_beyond_memory_are_told_as_at_least(volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LINKS_MAX", 1)
    make_tree(volume / "tree", {"a": b"x" * 8192, "b": b"x" * 8192, "other": {"b": HardLink("b"), "a": HardLink("a")}})
    assert look_at(volume) == Survey(6, 16384, 0, 0, 0, True, 3)


# Shapes


def test_a_chain_needs_few_fds(volume: Path) -> None:
    deep_chain(volume / "tree", 5000)
    most = 0

    def hook(_call: str) -> None:
        nonlocal most
        most = max(most, len(os.listdir("/proc/self/fd")))

    before = len(os.listdir("/proc/self/fd"))
    assert look_at(volume, hook).n_entries == 5002
    assert most - before <= 72


@pytest.mark.parametrize("n_fds", [2, 5, 64])
def test_a_chain_with_branches_is_gone_back_up(volume: Path, monkeypatch: pytest.MonkeyPatch, n_fds: int) -> None:
    (volume / "tree").mkdir()
    fd = os.open(volume / "tree", os.O_RDONLY)
    for level in range(1500):
        # Which of the two is first depends on their numbers, which go up.
        for name in sorted([b"chain", b"leaf"], reverse=level % 3 == 0):
            os.mkdir(name, dir_fd=fd)
        below = os.open(b"chain", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    with steps(monkeypatch, module.WINDOW, n_fds):
        assert look_at(volume) == Survey(3001, 0, 0, 0, 0, False)


@pytest.mark.parametrize("tells_types", [True, False])
def test_more_directories_than_memory_has_room_for_count_once(
    volume: Path, monkeypatch: pytest.MonkeyPatch, tells_types: bool
) -> None:
    inner: Spec = {f"i{i}": {"file": "", "dir": {}} for i in range(17)}
    make_tree(volume / "tree", {f"o{i}": {**inner, "file": ""} for i in range(23)})
    monkeypatch.setattr(Kernel, "lists_types", lambda _kernel, _fd: tells_types)
    with steps(monkeypatch, 5, 3):
        assert look_at(volume) == Survey(1 + 23 * (2 + 17 * 3), 0, 0, 0, 0, False)


def test_a_tree_deeper_than_memory_is_counted_as_far_as_it_goes(volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATH_MAX_BYTES", 100)
    deep_chain(volume / "tree", 500)
    seen = look_at(volume)
    assert 40 < seen.n_entries < 60
    assert seen.n_failed == 1


# What is not the tree's, or not ours


def test_mounts_inside_are_neither_entered_nor_counted(volume: Path) -> None:
    make_tree(volume / "tree", {"dir": {}, "file": "", "a": ""})
    other = make_tree(volume / "other", {"big": b"x" * 100_000, "sub": {}})
    with bind_mount(other, volume / "tree/dir"), bind_mount(other / "big", volume / "tree/file"):
        assert look_at(volume) == Survey(4, 0, 0, 0, 2, False)


@pytest.mark.needs("fuse")
@pytest.mark.parametrize("kind", [stat.S_IFDIR, stat.S_IFREG])
def test_a_mount_that_never_answers_holds_nobody(volume: Path, kind: int) -> None:
    make_tree(volume / "tree", {"dir": {}, "file": ""})
    target = volume / "tree" / ("dir" if kind == stat.S_IFDIR else "file")
    with silent_fuse(target, OTHER, root_mode=kind):
        seen = as_user(OTHER, partial(look_at, volume))
    assert (seen.n_entries, seen.n_failed) == (3, 1)


def test_what_may_not_be_read_is_counted_as_failed(volume: Path) -> None:
    owner = (OTHER, OTHER)
    closed = {"none": Dir({"a": ""}, mode=0, owner=owner), "list": Dir({"a": "", "b": {}}, mode=0o400, owner=owner)}
    make_tree(volume / "tree", Dir({**closed, "open": Dir({"a": ""}, owner=owner)}, owner=owner))
    seen = as_user(OTHER, partial(look_at, volume))
    assert (seen.n_entries, seen.n_failed) == (7, 3)


def test_errors_of_the_kernel_are_counted_and_the_rest_goes_on(volume: Path) -> None:
    make_tree(volume / "tree", {f"{i}": {"a": "", "b": ""} for i in range(5)})

    def fail() -> None:
        raise OSError(5, "bad sector")

    assert look_at(volume, ActingBefore("getdents", fail, 4)) == Survey(14, 0, 0, 0, 1, False)


def test_a_directory_that_is_another_one_now_is_not_counted(volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep_chain(volume / "tree", 50)
    make_tree(volume / "tree/later", {"a": ""})
    other = make_tree(volume / "other", {"later": {"much": {}, "more": {}}, "d": {}})

    def replace() -> None:
        (volume / "tree").rename(volume / "gone")
        other.rename(volume / "tree")

    with steps(monkeypatch, module.WINDOW, 4):
        seen = look_at(volume, ActingBefore("openat2", replace, 30))
    assert seen.n_failed == 1
    assert 50 <= seen.n_entries <= 53


def test_nothing_is_changed_and_no_entry_is_opened_for_reading_unasked(volume: Path) -> None:
    make_tree(volume / "tree", KINDS)
    before = sorted((path, os.lstat(path).st_ctime_ns) for path in (volume / "tree").rglob("*"))
    calls: set[str] = set()
    look_at(volume, calls.add)
    assert calls <= {"open", "openat2", "getdents", "stat", "fstat", "statfs"}
    assert sorted((path, os.lstat(path).st_ctime_ns) for path in (volume / "tree").rglob("*")) == before


# Shared blocks


def clone(source: Path, target: Path) -> Path:
    with source.open("rb") as old, target.open("wb") as new:
        fcntl.ioctl(new, _FICLONE, old.fileno())
    return target


@pytest.mark.needs("loop", "xfs")
def test_reflinked_blocks_are_told_file_by_file_and_only_when_asked() -> None:
    with loop_volume("xfs") as volume:
        tree = make_tree(
            volume / "tree", {"part": b"p" * (256 * KIB), "own": b"o" * (64 * KIB), "fifo": SpecialFile(0o010600)}
        )
        with (volume / "scattered").open("wb") as file:
            for i in range(600):  # more extents than one answer holds
                os.pwrite(file.fileno(), b"s" * 4096, i * 8192)
        clone(volume / "scattered", tree / "scattered")
        clone(tree / "part", volume / "copy")
        with (tree / "part").open("r+b") as file:
            file.write(b"n" * (128 * KIB))
        sync(volume)
        assert look_at(volume).shared_bytes == 0
        assert look_at(volume, with_shared=True).shared_bytes == 600 * 4096 + 128 * KIB


@pytest.mark.needs("loop")
def test_nobody_asks_where_nothing_can_be_shared() -> None:
    with loop_volume("ext4") as volume:
        make_tree(volume / "tree", {"a": "1"})
        calls: list[str] = []
        assert look_at(volume, calls.append, with_shared=True).shared_bytes == 0
        assert "ioctl" not in calls


@pytest.mark.needs("loop", "btrfs")
def test_small_files_of_btrfs_do_not_count_as_blocks() -> None:
    with loop_volume("btrfs") as volume:
        make_tree(volume / "tree", {f"{i}": b"x" * 700 for i in range(100)})
        sync(volume)
        assert look_at(volume).n_bytes == 70_000


# Beside others: at their pace, never for ever, and nobody is kept waiting who wants it to end


class Waiting:
    """Who sets the speed: so often it has to wait, whenever it asks for a slice (engine.pace.Pacer)."""

    def __init__(self, n_waits: float, speed: Speed = UNLIMITED) -> None:
        self.n_left = n_waits
        self.speed = speed
        self.n_done = 0
        self.n_waited = 0

    def tempo(self) -> Speed:
        return HOLD if self.n_left else self.speed

    def record_work(self, n_entries: int, n_bytes: int, busy_s: float) -> None:
        assert not n_bytes
        assert busy_s >= 0
        self.n_done += n_entries

    def wait(self, _seconds: float) -> None:
        """Not at all: time is no matter here."""
        self.n_left = max(self.n_left - 1, 0)
        self.n_waited += 1


def test_nothing_is_looked_at_before_it_may_be() -> None:
    pacer = Waiting(3)
    looks = WalkPacer(pacer, lambda: False)
    assert pacer.n_waited == 0
    looks()
    assert pacer.n_waited == 3


def test_who_wants_an_end_is_not_kept_waiting_nor_asked_again() -> None:
    pacer = Waiting(float("inf"))
    looks = WalkPacer(pacer, lambda: pacer.n_waited >= 5)
    for _ in range(100):
        looks()
    assert pacer.n_waited == 5


def test_a_walk_at_a_pace_finds_what_one_at_once_finds() -> None:
    with tmpfs_volume() as volume, Kernel().open_path(os.fsencode(volume), os.O_RDONLY) as fd:
        fill(fill(volume / "tree", 2500) / "sub", 500)
        pacer = Waiting(2, Speed(entries_per_s=20_000))  # more than one slice, however fast the machine is
        paced = survey(Kernel(), fd, pauses=WalkPacer(pacer, lambda: False))
        assert paced == survey(Kernel(), fd)
        assert 0 < pacer.n_done <= paced.n_entries


@pytest.mark.needs("loop")
def test_a_count_says_to_whom_it_yields_and_comes_to_its_end() -> None:
    with loop_volume("ext4", 256) as root:
        done_well("init", root)
        fill(root / "victim", 4000)
        identifier = str(swapped(root / "victim")["id"])
        says_so = False
        while not says_so:
            with fsyncing(root):
                done = done_well("du", "--json", "--count", "--volume", root, identifier)
            (one,) = done.objects()
            assert (one["n_entries"], one["is_at_least"]) == (4001, False)
            says_so = "trashd: yielding: " in done.err
        assert_silent(root)
