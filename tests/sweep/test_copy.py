"""Matches moved by a copy: whatever happens, each is whole at one place, or at both."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import subprocess
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest

from fusefs.linux.kernel import Kernel
from fusefs.sweep.request import IfExists
from tests.support.acls import ACCESS, DEFAULT, GROUP_OBJ, MASK, NOBODY, OTHER, USER, USER_OBJ, acl
from tests.support.file_leases import is_broken_into
from tests.support.make_trees import (
    Dir,
    File,
    HardLink,
    Node,
    Spec,
    Symlink,
    make_tree,
    remove_tree_hard,
    snapshot,
    weird_names,
)
from tests.support.move_entries import AfterThe, Volumes, fill, move, pass_a_tick, places
from tests.support.other_users import as_user
from tests.support.real_filesystems import btrfs_subvolume, loop_volume, overlay_volume
from tests.support.store_calls import (
    ActingAt,
    Before,
    Counting,
    in_child,
)

pytestmark = pytest.mark.needs("root", "loop")

ALICE, MALLORY = 12001, 12666
READABLE_BY_ALICE = acl(
    (USER_OBJ, 6, NOBODY), (USER, 4, ALICE), (GROUP_OBJ, 0, NOBODY), (MASK, 4, NOBODY), (OTHER, 0, NOBODY)
)


TREE: Spec = {
    "a": Dir({"file": File(b"text" * 5000, 0o4750, (ALICE, MALLORY), {"user.colour": b"blue"})}, 0o2711),
    "empty": b"",
    "link": Symlink("/nowhere", (ALICE, ALICE)),
    "fifo": Node(stat.S_IFIFO | 0o640, owner=(MALLORY, 0)),
}


def test_everything_arrives_as_it_was(volumes: Volumes) -> None:
    job, archive = volumes
    fill(job, {**TREE, "null": Node(stat.S_IFCHR | 0o666, os.makedev(1, 3))})
    wanted = snapshot(job, with_times=True)
    assert move(job, archive, copy=True) == {}
    kept = [seen._replace(mtime_ns=None) if stat.S_ISDIR(seen.mode) else seen for seen in wanted[1:]]
    got = [
        seen._replace(mtime_ns=None) if stat.S_ISDIR(seen.mode) else seen
        for seen in snapshot(archive, with_times=True)[1:]
    ]
    assert got == kept
    assert places(job) == {}


def test_names_arrive_byte_by_byte(volumes: Volumes) -> None:
    job, archive = volumes
    fill(job, {name: name for name in weird_names()})
    assert move(job, archive, copy=True) == {}
    assert sorted(os.listdir(os.fsencode(archive))) == sorted(weird_names())


def test_within_one_filesystem_nothing_is_copied(volumes: Volumes) -> None:
    job, _ = volumes
    fill(job, {"file": b"text"})
    ino = (job / "file").stat().st_ino
    target = make_tree(job.parent / "near", {})
    assert move(job, target, copy=True) == {}
    assert (target / "file").stat().st_ino == ino
    remove_tree_hard(target)


@pytest.mark.needs("btrfs")
def test_what_lies_in_a_subvolume_is_copied_and_the_rest_renamed() -> None:
    with loop_volume("btrfs") as path:
        job = make_tree(path / "job", {"file": b"near"})
        (btrfs_subvolume(job, "sub") / "file").write_bytes(b"far")
        archive = make_tree(path / "archive", {})
        ino = (job / "file").stat().st_ino
        assert move(job, archive) == {"sub/file": errno.EXDEV}
        (archive / "file").rename(job / "file")
        assert move(job, archive, copy=True) == {}
        assert (archive / "file").stat().st_ino == ino
        assert (archive / "sub/file").read_bytes() == b"far"


def test_sockets_and_directories_are_told_and_stay(volumes: Volumes) -> None:
    job, archive = volumes
    fill(job, {"directory": {"file": b""}})
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(job / "socket"))
    assert move(job, archive, copy=True, whole=True) == {"directory": errno.EISDIR}
    assert move(job, archive, copy=True) == {"socket": errno.EOPNOTSUPP}


def test_the_original_goes_only_after_its_copy_is_durable(volumes: Volumes) -> None:
    job, archive = volumes
    fill(job, {str(n): b"text" for n in range(5)})
    hook = Counting()
    move(job, archive, Kernel(hook), copy=True)
    calls = [call for call in hook.calls if call in ("fsync", "link", "unlink")]
    assert calls == ["fsync", "link"] * 5 + ["fsync"] * 6 + ["unlink"] * 5


@pytest.mark.needs("xfs")
@pytest.mark.parametrize("is_there", [True, False])
def test_acls_arrive_on_xfs_and_come_back(quick: Volumes, is_there: bool) -> None:
    """Of which it tells twice, once in its own words."""
    with loop_volume("xfs", 320) as path:
        job, archive = (path / "job", quick[1]) if is_there else (quick[0], path / "archive")
        (archive if not is_there else job).mkdir()
        (job / "a").mkdir()
        make_tree(job / "a/b", {"file": b"text"})
        for at, name in ((job / "a/b/file", ACCESS), (job / "a", ACCESS), (job / "a", DEFAULT)):
            os.setxattr(at, name, READABLE_BY_ALICE)
        wanted = [os.getxattr(job / at, ACCESS) for at in ("a/b/file", "a")]
        assert move(job, archive, copy=True) == {}
        assert [os.getxattr(archive / at, ACCESS) for at in ("a/b/file", "a")] == wanted
        assert os.getxattr(archive / "a", DEFAULT) == READABLE_BY_ALICE
        assert is_there != any(name.startswith("trusted.") for name in os.listxattr(archive / "a/b/file"))


# Links.


def test_hard_links_stay_links(volumes: Volumes) -> None:
    job, archive = volumes
    many = {f"link-{n}": HardLink("a/file") for n in range(150)}  # of more than one batch
    fill(job, {"a": {"file": b"text", "second": HardLink("a/file")}, "b": many, "other": b"text"})
    assert move(job, archive, copy=True) == {}
    assert (archive / "a/file").stat().st_nlink == 152
    assert (archive / "b/link-7").samefile(archive / "a/second")
    assert (archive / "other").stat().st_nlink == 1


def test_a_link_whose_file_was_changed_after_the_first_copy_is_copied_anew(volumes: Volumes) -> None:
    job, archive = volumes
    fill(job, {"a": {"file": b"old"}, "b": {"link": HardLink("a/file")}})

    def change() -> None:
        (left,) = (path for path in job.rglob("*") if path.is_file())
        subprocess.run(["sh", "-c", 'printf new > "$1"', "sh", left], check=True)

    assert move(job, archive, Kernel(AfterThe("rmdir", change, 2)), copy=True) == {}
    assert sorted(path.read_bytes() for path in archive.rglob("*") if path.is_file()) == [b"new", b"old"]


# A name that is taken.


@pytest.mark.parametrize("if_exists", IfExists)
def test_a_copy_that_a_killed_sweep_has_left_is_not_made_again(volumes: Volumes, if_exists: IfExists) -> None:
    job, archive = volumes
    fill(job, TREE)
    before = places(job)
    code = in_child(partial(move, job, archive, Kernel(Before("unlink", partial(os._exit, 77))), copy=True))
    assert code == 77
    hook = Counting()
    assert move(job, archive, Kernel(hook), copy=True, if_exists=if_exists) == {}
    assert places(archive) == before
    assert places(job) == {}


@pytest.mark.parametrize("if_exists", IfExists)
def test_a_file_is_not_taken_for_a_copy_of_itself_that_another_mount_shows(if_exists: IfExists) -> None:
    def populate(lower: Path) -> None:
        (lower / "job").mkdir()

    with overlay_volume(populate) as overlay:
        job = fill(overlay.path / "job", {"file": b"the only one"})
        move(job, overlay.upper / "job", copy=True, if_exists=if_exists)
        assert b"the only one" in [path.read_bytes() for path in (overlay.upper / "job").glob("file*")]


def test_a_taken_name_is_told_numbered_or_replaced(volumes: Volumes) -> None:
    job, archive = volumes
    for if_exists, refused, names in (
        (IfExists.SKIP, {"file": errno.EEXIST}, {"file": b"old"}),
        (IfExists.NUMBER, {}, {"file": b"old", "file.1": b"new"}),
        (IfExists.REPLACE, {}, {"file": b"new"}),
    ):
        fill(job, {"file": b"new"})
        fill(archive, {"file": b"old"})
        pass_a_tick()
        assert move(job, archive, copy=True, if_exists=if_exists) == refused
        assert {path.name: path.read_bytes() for path in archive.iterdir()} == names
        assert (job / "file").exists() == bool(refused)


@pytest.mark.parametrize("if_exists", IfExists)
def test_flat_loses_none_of_many_equal_names(volumes: Volumes, if_exists: IfExists) -> None:
    job, archive = volumes
    fill(job, {str(n): {"core": str(n)} for n in range(10)})
    refused = move(job, archive, flat=True, if_exists=if_exists, copy=True)
    texts = [path.read_text() for place in (job, archive) for path in place.rglob("core*")]
    assert sorted(texts) == sorted(str(n) for n in range(10))
    assert len(refused) == (0 if if_exists is IfExists.NUMBER else 9)


# Others at work.


def test_what_came_to_a_name_while_it_was_copied_is_not_replaced(volumes: Volumes) -> None:
    job, archive = volumes
    fill(job, {"file": b"new"})
    fill(archive, {"file": b"old"})
    pass_a_tick()

    def come() -> None:
        (archive / "other").write_bytes(b"theirs")
        (archive / "other").rename(archive / "file")

    refused = move(job, archive, Kernel(Before("fsync", come)), copy=True, if_exists=IfExists.REPLACE)
    assert refused == {"file": errno.EEXIST}
    assert ((job / "file").read_bytes(), (archive / "file").read_bytes()) == (b"new", b"theirs")


def test_a_name_that_is_free_by_the_time_it_is_replaced_is_taken(volumes: Volumes) -> None:
    job, archive = volumes
    fill(job, {"file": b"new"})
    fill(archive, {"file": b"old"})
    pass_a_tick()
    kernel = Kernel(Before("fsync", (archive / "file").unlink))
    assert move(job, archive, kernel, copy=True, if_exists=IfExists.REPLACE) == {}
    assert (archive / "file").read_bytes() == b"new"


def test_two_links_to_one_file_are_both_replaced(volumes: Volumes) -> None:
    job, archive = volumes
    fill(job, {"a": b"1", "b": b"2"})
    fill(archive, {"a": b"old"})
    os.link(archive / "a", archive / "b")
    pass_a_tick()
    assert move(job, archive, copy=True, if_exists=IfExists.REPLACE) == {}
    assert {path.name: path.read_bytes() for path in archive.iterdir()} == {"a": b"1", "b": b"2"}


@pytest.mark.parametrize("call", ["ficlone", "copy_file_range", "fsync", "link"])
def test_a_file_that_is_written_to_meanwhile_stays(volumes: Volumes, call: str) -> None:
    job, archive = volumes
    fill(job, {"file": b"text" * 5000})

    writers: list[subprocess.Popen[bytes]] = []

    def hook(name: str) -> None:
        if name == call and not writers:
            # It waits until we let go of the file.
            writers.append(subprocess.Popen(["sh", "-c", 'printf more >> "$1"', "sh", job / "file"]))
            while not is_broken_into((job / "file").stat()):
                pass

    refused = move(job, archive, Kernel(hook), copy=True)
    assert writers[0].wait() == 0
    assert refused == {"file": errno.EBUSY if call == "link" else errno.ETXTBSY}
    assert (job / "file").read_bytes() == b"text" * 5000 + b"more"


def test_a_file_that_another_one_has_replaced_is_not_removed(volumes: Volumes) -> None:
    job, archive = volumes
    fill(job, {"file": b"first"})

    def replace() -> None:
        (job / "new").write_bytes(b"second")
        (job / "new").rename(job / "file")

    move(job, archive, Kernel(Before("fsync", replace)), copy=True)
    assert (job / "file").read_bytes() == b"second"


def test_two_copies_at_once_lose_nothing(volumes: Volumes) -> None:
    job, archive = volumes
    fill(job, {str(n): {f"{n}-{m}": f"{n}-{m}" for m in range(20)} for n in range(10)})
    before = places(job)
    with ProcessPoolExecutor(2, get_context("fork")) as pool:
        for refused in pool.map(partial(move, copy=True), [job] * 2, [archive] * 2):
            assert set(refused.values()) <= {errno.ENOENT, errno.EEXIST, errno.EBUSY}
    assert places(job, archive) == before
    move(job, archive, copy=True)
    assert places(archive) == before
    assert places(job) == {}


@pytest.mark.parametrize("n", range(0, 60, 3))
def test_another_copy_at_any_moment_loses_nothing(quick: Volumes, n: int) -> None:
    job, archive = quick
    fill(job, {"file": b"text", "link": Symlink("x")})
    before = places(job)
    move(job, archive, Kernel(ActingAt(n, partial(in_child, partial(move, job, archive, copy=True)))), copy=True)
    assert places(job, archive) == before


def test_a_copy_in_mallory_s_directory_is_never_his_to_change_before_it_is_complete(quick: Volumes) -> None:
    job, archive = quick
    fill(job, {"file": File(b"text", 0o600, (ALICE, ALICE)), "fifo": Node(stat.S_IFIFO | 0o600, owner=(ALICE, ALICE))})
    before = places(job)
    os.chown(archive, MALLORY, MALLORY)

    def look() -> None:
        for path in archive.iterdir():
            if path.name.startswith(".trashd.new-"):
                with pytest.raises(PermissionError):
                    os.listdir(path)
            else:
                with pytest.raises(PermissionError):
                    path.open("rb")

    def hook(_call: str) -> None:
        as_user(MALLORY, look)

    assert move(job, archive, Kernel(hook), copy=True) == {}
    assert places(archive) == before


def test_what_a_killed_copy_left_deep_below_goes_when_another_comes_there(volumes: Volumes) -> None:
    job, archive = volumes
    fill(job, {"deep": {"er": {"file": b"text"}}})
    left = archive / "deep/er/.trashd.new-copy-0123456789abcdef"
    left.mkdir(0o700, parents=True)
    (left / "0123456789abcdef").touch()
    assert move(job, archive, copy=True) == {}
    assert os.listdir(archive / "deep/er") == ["file"]


@pytest.mark.parametrize("hazard", ["somebody is at work in it", "it is in a directory of others"])
def test_what_may_be_no_killed_copys_stays(volumes: Volumes, hazard: str) -> None:
    job, archive = volumes
    fill(job, {"deep": {"file": b"text"}})
    left = archive / "deep/.trashd.new-copy-0123456789abcdef"
    left.mkdir(0o700, parents=True)
    (left / "0123456789abcdef").touch()
    fd = os.open(left, os.O_RDONLY)
    if "others" in hazard:
        os.chown(archive / "deep", MALLORY, MALLORY)
    else:
        fcntl.flock(fd, fcntl.LOCK_EX)
    assert move(job, archive, copy=True) == {}
    os.close(fd)
    assert os.listdir(left) == ["0123456789abcdef"]
