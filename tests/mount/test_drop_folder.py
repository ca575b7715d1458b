"""What is moved into a drop folder through the mount is an orphan at once; what can't be is never replaced there."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fusefs.core.container_states import DEFAULT_RETENTION_S
from fusefs.linux import kernel as kernel_module
from fusefs.linux import syscalls
from tests.support.foreground_mount import Mounted, trashd_mount, until
from tests.support.make_trees import Spec, make_tree, snapshot
from tests.support.mount_and_backing import opened
from tests.support.other_users import as_user
from tests.support.real_filesystems import tmpfs_volume
from tests.support.store_verbs import assert_silent, entries, init, recover_all
from tests.support.transports import cases
from tests.support.trashd_command import TRASHD, environment

pytestmark = pytest.mark.needs("root", "fuse")

ALICE, BOB = 4711, 4712
HOW = {
    "device": ["uring=off"],
    "ring": ["uring=on"],
    "slow": ["uring=off", "backing=slow"],
    "plain": ["engine=plain"],
}
NAMES = "abc"
LIMIT_S = 30.0


@contextmanager
def mounted_volume(*options: str) -> Iterator[Mounted]:
    with tmpfs_volume() as volume:
        source = volume / "source"
        source.mkdir()
        init(source)
        coherence = [] if any("coherence" in word for word in options) else ["coherence=exclusive"]
        with trashd_mount(source, options=[*coherence, *options]) as mounted:
            yield mounted
        for uid in [int(path.name) for path in source.glob(".trashd/[un]*/*") if path.name != "0"]:
            as_user(uid, lambda: recover_all(source))  # makes the reserve
        assert_silent(source)


@pytest.fixture(params=cases(HOW))
def mount(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    with mounted_volume(*HOW[request.param]) as mounted:
        yield mounted


@pytest.fixture
def one_mount() -> Iterator[Mounted]:
    with mounted_volume("uring=off") as mounted:
        yield mounted


def make(mount: Mounted, things: dict[str, Spec]) -> None:
    for name, thing in things.items():
        make_tree(mount.path / name, thing)


def move(*words: str | Path) -> int:
    """Run mv, and never wait for an answer."""
    return subprocess.run(["mv", *words], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode


def origins(mount: Mounted) -> list[bytes | None]:
    """Where the orphans came from, the oldest first; all there is in the store are orphans."""
    found = sorted(entries(mount.backing), key=lambda one: one.id)
    assert {one.state.value for one in found} <= {"orphans"}
    return [one.origin and os.path.relpath(one.origin, os.fsencode(mount.backing)) for one in found]


def trees(mount: Mounted) -> list[Path]:
    return sorted(mount.backing.glob(".trashd/[un]*/*/orphans/*/tree"))


def fill(fd: int) -> None:
    while True:
        os.write(fd, bytes(4096))


def fill_drop(mount: Mounted, *names: str) -> Path:
    """Files in root's drop folder that were copied there."""
    drop = mount.path / ".trashd/drop"
    for name in names:
        (drop / name).write_text(name)
    return drop


@pytest.mark.parametrize("thing", ["content", {"file": "content"}, {}])
def test_all_things_of_one_name_are_orphans_at_once(mount: Mounted, thing: str | dict[str, str]) -> None:
    drop = mount.path / ".trashd/drop"
    for name in NAMES:
        make_tree(mount.path / name, {"report": thing})
    before = snapshot(mount.path / "a" / "report")
    assert [move(mount.path / name / "report", drop) for name in NAMES] == [0, 0, 0]
    assert origins(mount) == [b"%c/report" % name for name in NAMES.encode()]
    assert [snapshot(tree) for tree in trees(mount)] == [before] * 3
    assert [os.listdir(mount.path / name) for name in NAMES] == [[], [], []]
    assert os.listdir(drop) == []
    recover_all(mount.backing)


def test_nobody_waits_between_two_of_one_name(mount: Mounted) -> None:
    drop = mount.path / ".trashd/drop"
    make(mount, {f"{number}": {"report": "a" if number % 2 else {}, "other": "b"} for number in range(10)})
    for number in range(10):
        snapshot(mount.path / f"{number}")  # so that the kernel believes it for an hour
        (mount.path / f"{number}/other").rename(drop / "other")
        assert move("--no-clobber", mount.path / f"{number}/report", drop) == 0
        assert not (mount.path / f"{number}/report").exists()
    assert len(trees(mount)) == 20


@pytest.mark.parametrize("options", [["coherence=exclusive"], ["coherence=shared"], ["timeout=0"]], ids=str)
def test_mv_finds_what_it_has_moved(options: list[str]) -> None:
    """Of several things it looks at each but the last, to refuse a second one of that name."""
    with mounted_volume("uring=off", *options) as mounted:
        make(mounted, {"job": {str(number): "x" if number % 2 else {} for number in range(20)}})
        paths = [mounted.path / "job" / str(number) for number in range(20)]
        assert move(*paths, mounted.path / ".trashd/drop") == 0
        assert len(trees(mounted)) == 20
        drop = mounted.path / ".trashd/drop"
        assert until(lambda: not any((drop / path.name).exists() for path in paths[:-1]), LIMIT_S)


@pytest.mark.parametrize("flags", [0, syscalls.RENAME_NOREPLACE])
def test_the_name_that_the_kernel_gave_it_means_nothing(mount: Mounted, flags: int) -> None:
    drop = mount.path / ".trashd/drop"
    make(mount, {"job": {"sub": {"file": "x"}}})
    snapshot(mount.path / "job")
    syscalls.renameat2(
        syscalls.AT_FDCWD, os.fsencode(mount.path / "job"), syscalls.AT_FDCWD, os.fsencode(drop / "job"), flags
    )
    assert until(lambda: not os.path.lexists(drop / "job"), LIMIT_S)
    assert not (mount.path / "job").exists()


def test_who_is_in_there_goes_on(mount: Mounted) -> None:
    make(mount, {"job": {"sub": {"file": "x"}}})
    with opened(mount.path / "job") as _, (mount.path / "job/sub/file").open("r+") as file:
        fd = os.open(mount.path / "job", os.O_RDONLY)
        (mount.path / "job").rename(mount.path / ".trashd/drop/job")
        assert until(lambda: not os.path.lexists(mount.path / ".trashd/drop/job"), LIMIT_S)
        file.write("y")
        file.flush()
        os.mkdir("made", dir_fd=fd)
        assert sorted(os.listdir(fd)) == ["made", "sub"]
        os.close(fd)
    [tree] = trees(mount)
    assert (tree / "sub/file").read_text() == "y"
    assert sorted(os.listdir(tree)) == ["made", "sub"]


def test_what_a_reaper_takes_from_there_is_not_remembered(mount: Mounted) -> None:
    make(mount, {"job": {"sub": {"file": "x"}}})
    fd = os.open(mount.path / "job", os.O_RDONLY)
    os.stat("sub/file", dir_fd=fd)
    (mount.path / "job").rename(mount.path / ".trashd/drop/job")
    [tree] = trees(mount)
    (tree / "sub/file").unlink()
    with pytest.raises(FileNotFoundError):
        os.open("sub/file", os.O_RDONLY, dir_fd=fd)
    os.close(fd)


def test_other_names_of_a_file_stay(mount: Mounted) -> None:
    make(mount, {"home": {"file": "x"}})
    home = mount.path / "home"
    os.link(home / "file", home / "other")
    os.stat(home / "other")
    os.symlink("other", home / "link")
    os.mkfifo(home / "fifo")
    for name in ("file", "link", "fifo"):
        (home / name).rename(mount.path / ".trashd/drop" / name)
    assert os.listdir(home) == ["other"]
    (home / "other").write_text("y")
    assert ((home / "other").read_text(), (home / "other").stat().st_nlink) == ("y", 2)
    assert sorted(origins(mount), key=str) == [b"home/fifo", b"home/file", b"home/link"]


def test_a_path_and_undo_bring_it_back(one_mount: Mounted) -> None:
    make(one_mount, {"job": {"a": "1", "b": {"report": "2"}}})
    before = snapshot(one_mount.path / "job")
    script = 'mv job/a job/b .trashd/drop/ && "$0" undo && mv job .trashd/drop && "$0" restore job'
    done = subprocess.run(
        ["sh", "-c", script, TRASHD], cwd=one_mount.path, env=environment({}), capture_output=True,
        start_new_session=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done
    assert snapshot(one_mount.path / "job") == before
    assert entries(one_mount.backing) == []


def test_the_record_is_that_of_a_removal(one_mount: Mounted) -> None:
    make(one_mount, {"home": {"job": {}}})
    before = (one_mount.path / "home/job").stat().st_mtime_ns
    (one_mount.path / "home/job").rename(one_mount.path / ".trashd/drop/other")
    [entry] = entries(one_mount.backing)
    assert entry.method is not None
    assert entry.expires_ns is not None
    assert (entry.method.value, origins(one_mount), entry.uid) == ("removed", [b"home/job"], 0)
    assert (entry.expires_ns - entry.created_ns) // 10**9 == DEFAULT_RETENTION_S
    assert trees(one_mount)[0].stat().st_mtime_ns == before


def give(path: Path, uid: int) -> None:
    for one in (path, *path.rglob("*")):
        os.chown(one, uid, uid, follow_symlinks=False)


def drops_of(mount: Mounted, *uids: int) -> list[Path]:
    """The drop folders of users."""
    links = [as_user(uid, lambda: os.readlink(mount.path / ".trashd/drop")) for uid in uids]
    return [mount.path / ".trashd" / link for link in links]


def test_a_user_has_an_own_orphan_of_what_root_or_that_user_moves(mount: Mounted) -> None:
    [drop] = drops_of(mount, ALICE)
    make(mount, {"home": {"a": {"report": "1"}, "b": {"report": "2"}}, "roots": {"report": "3"}})
    give(mount.path / "home", ALICE)
    as_user(ALICE, lambda: (mount.path / "home/a/report").rename(mount.path / ".trashd/drop/report") and None)
    (mount.path / "home/b").rename(drop / "b")
    (mount.path / "roots/report").rename(drop / "report")
    assert origins(mount) == [b"home/a/report", b"home/b", b"roots/report"]
    for entry in entries(mount.backing):
        assert entry.uid == ALICE
    owned = [tree.parent.stat().st_uid for tree in trees(mount)] + [
        (tree.parent / "record.json").stat().st_uid for tree in trees(mount)
    ]
    assert owned == [ALICE] * 6
    assert as_user(ALICE, lambda: recover_all(mount.backing)) == []


def test_nobody_else_moves_anything_to_another_users(mount: Mounted) -> None:
    drop, others = drops_of(mount, ALICE, BOB)
    make(mount, {"home": {"job": {"report": "1"}}, "shut": {"job": {}}})
    give(mount.path / "home", ALICE)

    def refused() -> list[int | None]:
        found: list[int | None] = []
        for source, target in (("home/job", others), ("shut/job", drop)):
            with pytest.raises(OSError, match="job") as caught:
                (mount.path / source).rename(target / "job")
            found.append(caught.value.errno)
        return found

    assert as_user(ALICE, refused) == [errno.EACCES, errno.EACCES]
    assert entries(mount.backing) == []
    assert os.listdir(mount.backing / f".trashd/u/{ALICE}/stage") == []


def test_a_right_that_was_lost_behind_the_mount_moves_nothing(one_mount: Mounted) -> None:
    drops_of(one_mount, ALICE)
    make(one_mount, {"home": {"job": "x"}})
    give(one_mount.path / "home", ALICE)

    def move_it() -> None:
        os.stat(one_mount.path / "home")
        (one_mount.path / "home/job").rename(one_mount.path / ".trashd/drop/job")

    as_user(ALICE, lambda: os.listdir(one_mount.path / "home"))
    os.chown(one_mount.backing / "home", BOB, BOB)
    with pytest.raises(PermissionError):
        as_user(ALICE, move_it)
    assert (one_mount.backing / "home/job").read_text() == "x"
    assert entries(one_mount.backing) == []


def test_what_is_copied_there_and_moved_within_is_never_replaced(mount: Mounted) -> None:
    drop = fill_drop(mount, "a", "b")
    with pytest.raises(FileExistsError):
        (drop / "a").rename(drop / "b")
    (drop / "a").rename(mount.path / "a")
    assert (mount.path / "a").read_text() == "a"
    (mount.path / "a").rename(drop / "b")
    assert origins(mount) == [b"a"]
    assert until(lambda: (drop / "b").read_text() == "b", LIMIT_S)
    recover_all(mount.backing)
    assert len(entries(mount.backing)) == 2


def test_without_room_for_a_record_it_waits_in_the_folder(mount: Mounted) -> None:
    make(mount, {name: {"report": name} for name in NAMES})
    drop = mount.path / ".trashd/drop"
    os.listdir(drop)
    filler = mount.backing / "filler"
    with filler.open("wb") as file, pytest.raises(OSError, match="No space"):
        fill(file.fileno())
    (mount.path / "a/report").rename(drop / "report")
    assert entries(mount.backing) == []
    with pytest.raises(FileExistsError):
        (mount.path / "b/report").rename(drop / "report")
    assert [(drop / "report").read_text(), (mount.path / "b/report").read_text()] == ["a", "b"]
    filler.unlink()
    (mount.path / "b/report").rename(drop / "report")
    assert until(lambda: (drop / "report").read_text() == "a", LIMIT_S)
    recover_all(mount.backing)
    assert sorted(map(bool, origins(mount))) == [False, True]


def test_an_exchange_is_none_of_it(one_mount: Mounted) -> None:
    drop = fill_drop(one_mount, "a")
    (one_mount.path / "b").write_text("b")
    paths = os.fsencode(one_mount.path / "b"), os.fsencode(drop / "a")
    syscalls.renameat2(syscalls.AT_FDCWD, paths[0], syscalls.AT_FDCWD, paths[1], syscalls.RENAME_EXCHANGE)
    assert [(one_mount.path / "b").read_text(), (drop / "a").read_text()] == ["a", "b"]
    assert entries(one_mount.backing) == []
    recover_all(one_mount.backing)


def test_a_daemon_that_is_killed_among_moves_frees_their_process() -> None:
    with tmpfs_volume() as volume:
        source = make_tree(volume / "source", {"job": {str(number): "x" for number in range(2000)}})
        init(source)
        with trashd_mount(source, expect_end=True) as mounted:
            paths = [mounted.path / "job" / str(number) for number in range(2000)]
            with subprocess.Popen(["mv", *paths, mounted.path / ".trashd/drop"], stderr=subprocess.DEVNULL) as moving:
                assert until(lambda: len(os.listdir(source / "job")) < 1500, LIMIT_S)
                os.kill(mounted.pid, signal.SIGKILL)
                assert moving.wait(LIMIT_S) == 1
        assert recover_all(source) == []
        n_left = len(os.listdir(source / "job"))
        assert 0 < n_left < 1500
        assert len(entries(source)) == 2000 - n_left
        assert_silent(source)


def test_off_local_filesystems_it_goes_by_a_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_module, "_LOCAL", frozenset())
    with mounted_volume("uring=off") as mounted:
        make(mounted, {name: {"report": {"file": name}} for name in NAMES})
        for name in NAMES:
            (mounted.path / name / "report").rename(mounted.path / ".trashd/drop/report")
        assert origins(mounted) == [b"a/report", b"b/report", b"c/report"]
        assert sorted((tree / "file").read_text() for tree in trees(mounted)) == ["a", "b", "c"]
