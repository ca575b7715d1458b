"""Matches moved by rename: each is at its old place or at its new one, whatever is in the way."""

import errno
import os
import stat
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest

from fusefs.core.errors import NotADirectory, NotFound, OtherFilesystem, Refused, TrashdError, UsageError
from fusefs.linux.kernel import Kernel
from fusefs.sweep.request import IfExists
from tests.support.crash_invariants import spread
from tests.support.crash_scenarios import changing
from tests.support.fuse_bad_rename import Mode, lying_volume
from tests.support.make_trees import (
    Dir,
    HardLink,
    Spec,
    SpecialFile,
    Symlink,
    make_tree,
    remove_tree_hard,
    snapshot,
    weird_names,
)
from tests.support.move_entries import move, pass_a_tick
from tests.support.other_users import as_user
from tests.support.real_filesystems import btrfs_subvolume, loop_volume, project_quota_volume, set_project, tmpfs_volume
from tests.support.store_verbs import ActingBefore, Counting, DyingAt, FailingAt, in_child, numbered_calls

pytestmark = pytest.mark.needs("root")

ALICE, MALLORY = 12001, 12666


@pytest.fixture
def volume() -> Iterator[Path]:
    with tmpfs_volume() as path:
        (path / "archive").mkdir()
        yield path


@pytest.fixture
def archive(volume: Path) -> Path:
    return volume / "archive"


def contents(path: Path) -> Counter[str]:
    return Counter(seen.content for seen in snapshot(path) if seen.content is not None)


TREE: Spec = {
    "a": Dir({"b": Dir({"file": b"deep"}, 0o2750, (ALICE, MALLORY), {"user.colour": b"blue"})}, 0o555),
    "file": b"top",
    "link": Symlink("nowhere"),
    "fifo": SpecialFile(stat.S_IFIFO | 0o600),
    "socket": SpecialFile(stat.S_IFSOCK | 0o600),
    "second": HardLink("a/b/file"),
}


def test_the_tree_is_kept_with_what_its_directories_are(volume: Path, archive: Path) -> None:
    job = make_tree(volume / "job", TREE)
    wanted = snapshot(job)
    assert move(job, archive) == {}
    assert snapshot(archive)[1:] == wanted[1:]
    assert sum(len(files) for _path, _dirs, files in os.walk(job)) == 0


def test_a_directory_without_a_match_is_not_made(volume: Path, archive: Path) -> None:
    move(make_tree(volume / "job", {"empty": {}, "file": b""}), archive)
    assert os.listdir(archive) == ["file"]


def test_names_are_moved_byte_by_byte(volume: Path, archive: Path) -> None:
    job = make_tree(volume / "job", {name: name for name in weird_names()})
    assert move(job, archive) == {}
    assert sorted(os.listdir(os.fsencode(archive))) == sorted(weird_names())


def test_moving_takes_one_call_a_name(volume: Path, archive: Path) -> None:
    job = make_tree(volume / "job", {str(number): b"" for number in range(100)})
    hook = Counting()
    move(job, archive, Kernel(hook))
    same_filesystem, first, *rest = (number for number, call in enumerate(hook.calls) if call == "renameat2")
    assert len(rest) == 99
    assert same_filesystem < first
    assert not {"stat", "unlink", "rename"} & set(hook.calls[first:])


def test_directories_are_moved_whole(volume: Path, archive: Path) -> None:
    job = make_tree(volume / "job", {"a": {"x": b"1", "link": Symlink("x")}, "b": {"c": {}}})
    wanted = snapshot(job)
    assert move(job, archive, whole=True) == {}
    assert snapshot(archive)[1:] == wanted[1:]


def test_a_directory_is_merged_into_none(volume: Path, archive: Path) -> None:
    job = make_tree(volume / "job", {"a": {"x": b"1"}, "b": {"x": b"1"}})
    make_tree(archive / "a", {"y": b"2"})
    (archive / "b").mkdir()
    pass_a_tick()
    assert move(job, archive, whole=True) == {"a": errno.EEXIST, "b": errno.EEXIST}
    assert move(job, archive, whole=True, if_exists=IfExists.REPLACE) == {"a": errno.ENOTEMPTY}
    assert move(job, archive, whole=True, if_exists=IfExists.NUMBER) == {}
    assert sorted(os.listdir(archive)) == ["a", "a.1", "b"]


# A name that is taken.


def test_a_taken_name_is_told_and_stays(volume: Path, archive: Path) -> None:
    job = make_tree(volume / "job", {"file": b"new", "other": b"other"})
    (archive / "file").write_bytes(b"old")
    assert move(job, archive) == {"file": errno.EEXIST}
    assert (job / "file").read_bytes() == b"new"
    assert (archive / "file").read_bytes() == b"old"
    assert (archive / "other").read_bytes() == b"other"


def test_a_taken_name_gets_a_number(volume: Path, archive: Path) -> None:
    job = make_tree(volume / "job", {"file": b"new"})
    (archive / "file").write_bytes(b"old")
    (archive / "file.1").write_bytes(b"older")
    assert move(job, archive, if_exists=IfExists.NUMBER) == {}
    assert (archive / "file.2").read_bytes() == b"new"
    assert (archive / "file.1").read_bytes() == b"older"


def test_a_taken_name_is_replaced(volume: Path, archive: Path) -> None:
    job = make_tree(volume / "job", {"file": b"new", "is-dir": b"x"})
    make_tree(volume / "archive/is-dir", {})
    (archive / "file").write_bytes(b"old")
    pass_a_tick()
    assert move(job, archive, if_exists=IfExists.REPLACE) == {"is-dir": errno.EISDIR}
    assert (archive / "file").read_bytes() == b"new"


def test_two_links_to_one_file_end_as_one_where_names_are_replaced(volume: Path, archive: Path) -> None:
    job = make_tree(volume / "job", {"file": b"text"})
    (archive / "file").hardlink_to(job / "file")
    pass_a_tick()
    assert move(job, archive, if_exists=IfExists.REPLACE) == {}
    assert os.listdir(job) == []
    assert (archive / "file").stat().st_nlink == 1


# Where to.


def test_what_is_no_directory_to_move_to_is_refused(volume: Path, archive: Path) -> None:
    job = make_tree(volume / "job", {"file": b""})
    (volume / "link").symlink_to(archive)
    for target, error in ((volume / "none", NotFound), (job / "file", NotADirectory), (volume / "link", NotADirectory),
                          (job, UsageError)):  # fmt: skip
        with pytest.raises(error):
            move(job, target)
    assert os.listdir(job) == ["file"]


def test_another_filesystem_is_refused_before_anything_is_touched(volume: Path) -> None:
    job = make_tree(volume / "job", {"file": b""})
    with tmpfs_volume() as other:
        before = snapshot(other, with_times=True), snapshot(job, with_times=True)
        with pytest.raises(OtherFilesystem):
            move(job, other)
        assert (snapshot(other, with_times=True), snapshot(job, with_times=True)) == before


@pytest.mark.needs("btrfs")
def test_another_subvolume_is_refused_before_anything_is_touched() -> None:
    with loop_volume("btrfs") as path:
        job = make_tree(path / "job", {"file": b""})
        with pytest.raises(OtherFilesystem):
            move(job, btrfs_subvolume(path, "other"))


@pytest.mark.needs("xfs")
def test_another_project_is_refused_before_anything_is_touched() -> None:
    with project_quota_volume("xfs") as path:
        job = make_tree(path / "job", {"file": b""})
        set_project(make_tree(path / "other", {}), 7)
        with pytest.raises(OtherFilesystem):
            move(job, path / "other")


def test_a_tree_may_be_moved_up(volume: Path) -> None:
    make_tree(volume / "above", {"job": {"a": {"x": b"1"}}})
    assert move(volume / "above/job", volume / "above") == {}
    assert (volume / "above/a/x").read_bytes() == b"1"


def test_a_tree_moved_up_does_not_come_back_into_the_swept_directory(volume: Path) -> None:
    job = make_tree(volume / "above", {"job": {"job": {"x": b"1"}}}) / "job"
    assert move(job, volume / "above") == {"job/x": errno.EINVAL}
    assert (job / "job/x").read_bytes() == b"1"


def test_a_link_that_mallory_has_put_on_the_way_is_not_followed(volume: Path, archive: Path) -> None:
    job = make_tree(volume / "job", {"file": b""})
    home = make_tree(volume / "home", Dir(owner=(MALLORY, MALLORY)))
    as_user(MALLORY, partial(os.symlink, volume, home / "way"))
    with pytest.raises(Refused):
        move(job, home / "way" / "archive")
    assert os.listdir(archive) == []


def test_a_link_that_mallory_has_put_in_his_directory_is_not_followed(volume: Path) -> None:
    owner = (MALLORY, MALLORY)
    job = make_tree(volume / "job", Dir({"a": Dir({"file": b""}, owner=owner)}, owner=owner))
    home = make_tree(volume / "home", Dir(owner=owner))
    as_user(MALLORY, partial(os.symlink, "/etc", home / "a"))
    assert move(job, home) == {"a/file": errno.ENOTDIR}
    assert (job / "a/file").exists()


def test_mallory_gets_no_directory_by_exchanging_the_one_that_is_made(volume: Path) -> None:
    """A user owns the place, and has a directory of root's in it, which is put where one like the user's is to come."""
    owner = (MALLORY, MALLORY)
    job = make_tree(volume / "job", Dir({"a": Dir({"file": b""}, 0o755, owner)}, owner=owner))
    home = make_tree(volume / "home", Dir({"secret": Dir({"key": b""}, 0o700)}, owner=(MALLORY, MALLORY)))

    def exchange() -> None:
        for name in os.listdir(home):
            if name != "secret":
                os.rename(home / name, home / "aside")
                os.rename(home / "secret", home / name)

    for call in ("openat2", "chown", "chmod", "renameat2"):
        hook = ActingBefore(call, lambda: as_user(MALLORY, exchange))
        move(job, home, Kernel(hook))
        for path in (home / "secret", home / "a"):
            if path.exists() and (path / "key").exists():
                assert (path.stat().st_uid, stat.S_IMODE(path.stat().st_mode)) == (0, 0o700)


# Killed, failing, at once.


def reset(volume: Path) -> tuple[Path, Path]:
    for entry in os.listdir(volume):
        remove_tree_hard(volume / entry)
    job = make_tree(volume / "job", {"a": {"b": {"x": b"1"}, "y": b"2"}, "z": b"3", "taken": b"4"})
    return job, make_tree(volume / "archive", {"taken": b"5"})


def test_nothing_is_lost_or_doubled_by_a_kill_before_any_call(volume: Path) -> None:
    act = partial(move, *reset(volume), if_exists=IfExists.NUMBER)
    for n in changing(numbered_calls(lambda kernel: act(kernel=kernel))):
        job, archive = reset(volume)
        before = contents(volume)
        code = in_child(partial(move, job, archive, Kernel(DyingAt(n)), if_exists=IfExists.NUMBER))
        assert contents(volume) == before
        assert move(job, archive, if_exists=IfExists.NUMBER) == {}
        assert contents(archive) == before
        assert (archive / "a/b/x").read_bytes() == b"1"
    assert code == 0


FAULTS = spread(("move", number) for number in (errno.EIO, errno.ENOSPC, errno.EACCES))


@pytest.mark.parametrize(("act", "number"), FAULTS, ids=lambda value: errno.errorcode.get(value, value))
def test_nothing_is_lost_or_doubled_when_any_call_fails(volume: Path, act: str, number: int) -> None:
    for n in FAULTS[act, number]:
        job, archive = reset(volume)
        before = contents(volume)
        hook = FailingAt(n, number)
        n_fds = len(os.listdir("/proc/self/fd"))
        with suppress(OSError, TrashdError):
            move(job, archive, Kernel(hook), if_exists=IfExists.NUMBER)
        assert len(os.listdir("/proc/self/fd")) == n_fds, hook.failed
        assert contents(volume) == before, hook.failed
        if hook.failed is None:
            return


def test_two_moves_at_once_share_the_work(volume: Path, archive: Path) -> None:
    job = make_tree(volume / "job", {str(n): {f"{n}-{m}": f"{n}-{m}" for m in range(50)} for n in range(20)})
    before = contents(job)

    with ProcessPoolExecutor(2, get_context("fork")) as pool:
        for refused in pool.map(move, [job] * 2, [archive] * 2):
            assert set(refused.values()) <= {errno.ENOENT}
    assert contents(archive) == before


def test_without_rename_flags_a_taken_name_is_not_replaced() -> None:
    with lying_volume(Mode.EINVAL) as served:
        make_tree(served.backing / "job", {"file": b"new", "other": b"other"})
        make_tree(served.backing / "archive", {"file": b"old"})
        assert move(served.path / "job", served.path / "archive") == {"file": errno.EEXIST}
        assert move(served.path / "job", served.path / "archive", if_exists=IfExists.NUMBER) == {}
        assert (served.backing / "archive/file").read_bytes() == b"old"
        assert (served.backing / "archive/file.1").read_bytes() == b"new"
