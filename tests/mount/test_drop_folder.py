"""`.trashd` and drop folders in a live mount: what is moved there is an orphan at once, and a swap costs nothing."""

import errno
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fusefs.core.container_states import DEFAULT_RETENTION_S
from fusefs.linux import kernel as kernel_module
from fusefs.linux import syscalls
from fusefs.linux.kernel import Kernel
from fusefs.linux.syscalls import RENAME_EXCHANGE, renameat2
from tests.support.foreground_mount import Mounted, trashd_mount, until
from tests.support.make_trees import Dir, Spec, make_tree, snapshot
from tests.support.mount_and_backing import opened
from tests.support.other_users import as_user
from tests.support.real_filesystems import tmpfs_volume
from tests.support.store_verbs import ENTRIES, assert_silent, entries, init, raw, recover_all, swap
from tests.support.transports import by_ring, cases
from tests.support.trashd_command import TRASHD, environment, trashd

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
def with_homes(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    with mounted_volume(*HOW[request.param]) as mounted:
        yield mounted


@pytest.fixture
def one_mount() -> Iterator[Mounted]:
    with mounted_volume("uring=off") as mounted:
        yield mounted


def make(with_homes: Mounted, things: dict[str, Spec]) -> None:
    for name, thing in things.items():
        make_tree(with_homes.path / name, thing)


def move(*words: str | Path) -> int:
    """Run mv, and never wait for an answer."""
    return subprocess.run(["mv", *words], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode


def origins(with_homes: Mounted) -> list[bytes | None]:
    """Where the orphans came from, the oldest first; all there is in the store are orphans."""
    found = sorted(entries(with_homes.backing), key=lambda one: one.id)
    assert {one.state.value for one in found} <= {"orphans"}
    return [one.origin and os.path.relpath(one.origin, os.fsencode(with_homes.backing)) for one in found]


def trees(with_homes: Mounted) -> list[Path]:
    return sorted(with_homes.backing.glob(".trashd/[un]*/*/orphans/*/tree"))


def fill(fd: int) -> None:
    while True:
        os.write(fd, bytes(4096))


def fill_drop(with_homes: Mounted, *names: str) -> Path:
    """Files in root's drop folder that were copied there."""
    drop = with_homes.path / ".trashd/drop"
    for name in names:
        (drop / name).write_text(name)
    return drop


@pytest.mark.parametrize("thing", ["content", {"file": "content"}, {}])
def test_all_things_of_one_name_are_orphans_at_once(with_homes: Mounted, thing: str | dict[str, str]) -> None:
    drop = with_homes.path / ".trashd/drop"
    for name in NAMES:
        make_tree(with_homes.path / name, {"report": thing})
    before = snapshot(with_homes.path / "a" / "report")
    assert [move(with_homes.path / name / "report", drop) for name in NAMES] == [0, 0, 0]
    assert origins(with_homes) == [b"%c/report" % name for name in NAMES.encode()]
    assert [snapshot(tree) for tree in trees(with_homes)] == [before] * 3
    assert [os.listdir(with_homes.path / name) for name in NAMES] == [[], [], []]
    assert os.listdir(drop) == []
    recover_all(with_homes.backing)


def test_nobody_waits_between_two_of_one_name(with_homes: Mounted) -> None:
    drop = with_homes.path / ".trashd/drop"
    make(with_homes, {f"{number}": {"report": "a" if number % 2 else {}, "other": "b"} for number in range(10)})
    for number in range(10):
        snapshot(with_homes.path / f"{number}")  # so that the kernel believes it for an hour
        (with_homes.path / f"{number}/other").rename(drop / "other")
        assert move("--no-clobber", with_homes.path / f"{number}/report", drop) == 0
        assert not (with_homes.path / f"{number}/report").exists()
    assert len(trees(with_homes)) == 20


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
def test_the_name_that_the_kernel_gave_it_means_nothing(with_homes: Mounted, flags: int) -> None:
    drop = with_homes.path / ".trashd/drop"
    make(with_homes, {"job": {"sub": {"file": "x"}}})
    snapshot(with_homes.path / "job")
    syscalls.renameat2(
        syscalls.AT_FDCWD, os.fsencode(with_homes.path / "job"), syscalls.AT_FDCWD, os.fsencode(drop / "job"), flags
    )
    assert until(lambda: not os.path.lexists(drop / "job"), LIMIT_S)
    assert not (with_homes.path / "job").exists()


def test_who_is_in_there_goes_on(with_homes: Mounted) -> None:
    make(with_homes, {"job": {"sub": {"file": "x"}}})
    with opened(with_homes.path / "job") as _, (with_homes.path / "job/sub/file").open("r+") as file:
        fd = os.open(with_homes.path / "job", os.O_RDONLY)
        (with_homes.path / "job").rename(with_homes.path / ".trashd/drop/job")
        assert until(lambda: not os.path.lexists(with_homes.path / ".trashd/drop/job"), LIMIT_S)
        file.write("y")
        file.flush()
        os.mkdir("made", dir_fd=fd)
        assert sorted(os.listdir(fd)) == ["made", "sub"]
        os.close(fd)
    [tree] = trees(with_homes)
    assert (tree / "sub/file").read_text() == "y"
    assert sorted(os.listdir(tree)) == ["made", "sub"]


def test_what_a_reaper_takes_from_there_is_not_remembered(with_homes: Mounted) -> None:
    make(with_homes, {"job": {"sub": {"file": "x"}}})
    fd = os.open(with_homes.path / "job", os.O_RDONLY)
    os.stat("sub/file", dir_fd=fd)
    (with_homes.path / "job").rename(with_homes.path / ".trashd/drop/job")
    [tree] = trees(with_homes)
    (tree / "sub/file").unlink()
    with pytest.raises(FileNotFoundError):
        os.open("sub/file", os.O_RDONLY, dir_fd=fd)
    os.close(fd)


def test_other_names_of_a_file_stay(with_homes: Mounted) -> None:
    make(with_homes, {"home": {"file": "x"}})
    home = with_homes.path / "home"
    os.link(home / "file", home / "other")
    os.stat(home / "other")
    os.symlink("other", home / "link")
    os.mkfifo(home / "fifo")
    for name in ("file", "link", "fifo"):
        (home / name).rename(with_homes.path / ".trashd/drop" / name)
    assert os.listdir(home) == ["other"]
    (home / "other").write_text("y")
    assert ((home / "other").read_text(), (home / "other").stat().st_nlink) == ("y", 2)
    assert sorted(origins(with_homes), key=str) == [b"home/fifo", b"home/file", b"home/link"]


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


def drops_of(with_homes: Mounted, *uids: int) -> list[Path]:
    """The drop folders of users."""
    links = [as_user(uid, lambda: os.readlink(with_homes.path / ".trashd/drop")) for uid in uids]
    return [with_homes.path / ".trashd" / link for link in links]


def test_a_user_has_an_own_orphan_of_what_root_or_that_user_moves(with_homes: Mounted) -> None:
    [drop] = drops_of(with_homes, ALICE)
    make(with_homes, {"home": {"a": {"report": "1"}, "b": {"report": "2"}}, "roots": {"report": "3"}})
    give(with_homes.path / "home", ALICE)
    as_user(ALICE, lambda: (with_homes.path / "home/a/report").rename(with_homes.path / ".trashd/drop/report") and None)
    (with_homes.path / "home/b").rename(drop / "b")
    (with_homes.path / "roots/report").rename(drop / "report")
    assert origins(with_homes) == [b"home/a/report", b"home/b", b"roots/report"]
    for entry in entries(with_homes.backing):
        assert entry.uid == ALICE
    owned = [tree.parent.stat().st_uid for tree in trees(with_homes)] + [
        (tree.parent / "record.json").stat().st_uid for tree in trees(with_homes)
    ]
    assert owned == [ALICE] * 6
    assert as_user(ALICE, lambda: recover_all(with_homes.backing)) == []


def test_nobody_else_moves_anything_to_another_users(with_homes: Mounted) -> None:
    drop, others = drops_of(with_homes, ALICE, BOB)
    make(with_homes, {"home": {"job": {"report": "1"}}, "shut": {"job": {}}})
    give(with_homes.path / "home", ALICE)

    def refused() -> list[int | None]:
        found: list[int | None] = []
        for source, target in (("home/job", others), ("shut/job", drop)):
            with pytest.raises(OSError, match="job") as caught:
                (with_homes.path / source).rename(target / "job")
            found.append(caught.value.errno)
        return found

    assert as_user(ALICE, refused) == [errno.EACCES, errno.EACCES]
    assert entries(with_homes.backing) == []
    assert os.listdir(with_homes.backing / f".trashd/u/{ALICE}/stage") == []


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


def test_what_is_copied_there_and_moved_within_is_never_replaced(with_homes: Mounted) -> None:
    drop = fill_drop(with_homes, "a", "b")
    with pytest.raises(FileExistsError):
        (drop / "a").rename(drop / "b")
    (drop / "a").rename(with_homes.path / "a")
    assert (with_homes.path / "a").read_text() == "a"
    (with_homes.path / "a").rename(drop / "b")
    assert origins(with_homes) == [b"a"]
    assert until(lambda: (drop / "b").read_text() == "b", LIMIT_S)
    recover_all(with_homes.backing)
    assert len(entries(with_homes.backing)) == 2


def test_without_room_for_a_record_it_waits_in_the_folder(with_homes: Mounted) -> None:
    make(with_homes, {name: {"report": name} for name in NAMES})
    drop = with_homes.path / ".trashd/drop"
    os.listdir(drop)
    filler = with_homes.backing / "filler"
    with filler.open("wb") as file, pytest.raises(OSError, match="No space"):
        fill(file.fileno())
    (with_homes.path / "a/report").rename(drop / "report")
    assert entries(with_homes.backing) == []
    with pytest.raises(FileExistsError):
        (with_homes.path / "b/report").rename(drop / "report")
    assert [(drop / "report").read_text(), (with_homes.path / "b/report").read_text()] == ["a", "b"]
    filler.unlink()
    (with_homes.path / "b/report").rename(drop / "report")
    assert until(lambda: (drop / "report").read_text() == "a", LIMIT_S)
    recover_all(with_homes.backing)
    assert sorted(map(bool, origins(with_homes))) == [False, True]


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


def test_off_local_filesystems_it_is_moved_through_a_transfer_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_module, "_LOCAL", frozenset())
    with mounted_volume("uring=off") as mounted:
        make(mounted, {name: {"report": {"file": name}} for name in NAMES})
        for name in NAMES:
            (mounted.path / name / "report").rename(mounted.path / ".trashd/drop/report")
        assert origins(mounted) == [b"a/report", b"b/report", b"c/report"]
        assert sorted((tree / "file").read_text() for tree in trees(mounted)) == ["a", "b", "c"]


@pytest.fixture
def hidden_store() -> Iterator[Mounted]:
    """A mounted volume in which Alice and Bob have homes, and no folder in the store."""
    with tmpfs_volume() as path:
        source = path / "source"
        homes = {name: Dir({"job": Dir({"a": "x"}, owner=(uid, uid))}, owner=(uid, uid)) for name, uid in USERS.items()}
        make_tree(source, homes)
        init(source)
        with trashd_mount(source) as mounted:
            yield mounted
        recover_all(source)
        assert_silent(source)


USERS = {"alice": ALICE, "bob": BOB}


def test_the_root_s_listing_has_it_only_if_it_shall(hidden_store: Mounted) -> None:
    assert sorted(os.listdir(hidden_store.path)) == ["alice", "bob"]
    assert (hidden_store.path / ".trashd" / "volume.json").exists()
    with tmpfs_volume() as path:
        (path / "source").mkdir()
        init(path / "source")
        with trashd_mount(path / "source", options=["show_trash"]) as showing:
            assert os.listdir(showing.path) == [".trashd"]


def test_root_replaces_a_planted_store_through_the_mount() -> None:
    with tmpfs_volume() as path:
        source = path / "source"
        planted = Dir(
            {"u": Dir({str(BOB): Dir({"thesis": "x"}, owner=(BOB, BOB))}, owner=(BOB, BOB))}, owner=(BOB, BOB)
        )
        make_tree(source, {".trashd": planted})
        with trashd_mount(source) as mounted:
            done = trashd("init", "--replace", mounted.path)
        assert done.code == 0, done
        assert os.listdir(source) == [".trashd"]
        assert [one.read_text() for one in source.glob(f".trashd/old-*/u/{BOB}/thesis")] == ["x"]


@pytest.mark.parametrize("words", [(), by_ring(("uring=on",))], ids=["device", "ring"])
def test_users_own_stores_are_left_out_too_and_nothing_else_that_begins_so(words: tuple[str, ...]) -> None:
    stores = (".trashd-0", ".trashd-1000", ".trashd-1000.0123456789ab", ".trashd-4294967294", ".trashd.new-1")
    others = (".trashd-01", ".trashd-1000.0123", ".trashd-4294967295", ".trashd-keep", ".trashd2", "plain")
    with tmpfs_volume() as path:
        for name in (*stores, *others):
            (path / "source" / name).mkdir(parents=True)
        with trashd_mount(path / "source", options=["coherence=exclusive", *words]) as mounted:
            assert sorted(os.listdir(mounted.path)) == sorted(others)
            assert all((mounted.path / name).is_dir() for name in stores)


def test_what_a_store_makes_behind_the_mount_is_seen_at_once(hidden_store: Mounted) -> None:
    listed = hidden_store.path / ".trashd" / "u" / "0" / "orphans"
    assert os.listdir(listed) == []
    for number in range(3):
        behind = hidden_store.backing / ".trashd" / "u" / "0" / "orphans" / str(number)
        assert not (listed / str(number)).exists()
        behind.mkdir()
        assert (listed / str(number)).stat().st_mode & 0o7777 == 0o755
        behind.chmod(0o700)
        assert (listed / str(number)).stat().st_mode & 0o7777 == 0o700
        behind.rmdir()
        assert not (listed / str(number)).exists()


def test_everybody_is_led_to_his_own_at_the_same_time(hidden_store: Mounted) -> None:
    drop = hidden_store.path / ".trashd" / "drop"
    wrong: list[object] = []

    def look(uid: int) -> Callable[[], list[object]]:
        wanted = (f"u/{uid}/drop", uid)

        def asked() -> list[object]:
            found = {(os.readlink(drop), os.stat(drop).st_uid) for _ in range(50)}
            return [one for one in found if one != wanted]

        return asked

    threads = [
        threading.Thread(target=lambda uid=uid: wrong.extend(as_user(uid, look(uid)))) for uid in (ALICE, BOB, 0)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_link_is_a_link_and_nothing_else_can_be_done_with_it(hidden_store: Mounted) -> None:
    store = hidden_store.path / ".trashd"
    drop = store / "drop"
    assert drop.is_symlink()
    assert drop.lstat().st_size == len(os.readlink(drop)) == len("u/0/drop")
    (hidden_store.path / "file").write_text("x")
    refused: list[Callable[[], object]] = [
        drop.unlink,
        drop.mkdir,
        lambda: drop.symlink_to("x"),
        lambda: os.mknod(drop),
        lambda: os.open(drop, os.O_CREAT | os.O_EXCL | os.O_WRONLY),
        lambda: os.rename(drop, store / "other"),
        lambda: os.rename(hidden_store.path / "file", drop),
        lambda: os.link(hidden_store.path / "file", drop),
        lambda: os.link(drop, hidden_store.path / "other", follow_symlinks=False),
        lambda: os.lchown(drop, ALICE, ALICE),
        lambda: os.utime(drop, (0, 0), follow_symlinks=False),
        lambda: os.setxattr(drop, "trusted.a", b"x", follow_symlinks=False),
    ]
    for act in refused:
        with pytest.raises(OSError, match=r"^\[Errno \d+\]"):
            act()
    assert sorted(os.listdir(hidden_store.backing / ".trashd")) == ENTRIES
    assert os.readlink(drop) == "u/0/drop"


def test_an_exchange_with_a_store_asks_for_no_permissions(hidden_store: Mounted) -> None:
    """What its directories allow is believed for as long as one call takes, if the machine is not too busy."""
    stage, home = hidden_store.path / ".trashd" / "u" / "0" / "stage" / "some", hidden_store.path / "alice"
    (stage / "tree").mkdir(parents=True)
    with Kernel().open_path(raw(stage)) as stage_fd, Kernel().open_path(raw(home)) as home_fd:

        def exchange() -> None:
            renameat2(stage_fd, b"tree", home_fd, b"job", RENAME_EXCHANGE)

        def asks_for_none() -> bool:
            for known in (home, home / "job", stage):
                os.stat(known)
            before = hidden_store.stats().operations["getattr"].n()
            exchange()
            n_asked = hidden_store.stats().operations["getattr"].n() - before
            exchange()
            return n_asked == 0

        assert until(asks_for_none)
    (stage / "tree").rmdir()
    stage.rmdir()


N_FEW, N_MANY = 10, 2000


@pytest.fixture(params=["exclusive", "shared"])
def known_tree(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    with tmpfs_volume() as volume:
        source = volume / "source"
        source.mkdir()
        init(source)
        # Attributes and names grow old by time alone: no part of what is counted here.
        with trashd_mount(source, options=[f"coherence={request.param}", "timeout=3600"]) as mounted:
            yield mounted


def make_known(victim: Path, n: int) -> Path:
    victim.mkdir()
    for number in range(n):
        (victim / f"f{number}").touch()
    with os.scandir(victim) as entries:
        assert sum(entry.stat().st_nlink for entry in entries) == n
    return victim


def by_swap(_mount: Mounted, victim: Path) -> None:
    swap(victim)
    assert os.listdir(victim) == []


def by_mv(known_tree: Mounted, victim: Path) -> None:
    victim.rename(known_tree.path / ".trashd" / "drop" / victim.name)
    assert not victim.exists()


@pytest.mark.parametrize("way", [by_swap, by_mv])
def test_the_daemon_is_asked_no_more_for_a_large_tree(
    known_tree: Mounted, way: Callable[[Mounted, Path], None]
) -> None:
    asked = []
    for name, n in (("first", N_FEW), ("few", N_FEW), ("many", N_MANY)):
        victim = make_known(known_tree.path / name, n)
        before = known_tree.n_requests()
        way(known_tree, victim)
        asked.append(known_tree.n_requests() - before)
    _first, few, many = asked
    assert many < few + N_MANY / 20  # attributes of directories grow old: the slower it goes, the more
    assert recover_all(known_tree.backing) == []


def test_the_directory_is_empty_for_clients_when_the_exchange_returns(known_tree: Mounted) -> None:
    victim = make_known(known_tree.path / "victim", N_MANY)
    seen = []

    class Watched(Kernel):
        def exchange(self, old_dir: int, old: bytes, new_dir: int, new: bytes) -> None:
            super().exchange(old_dir, old, new_dir, new)
            seen.append((os.listdir(victim), (victim / "f0").exists()))

    with os.scandir(victim) as entries:
        next(entries)
        swap(victim, Watched())
        assert len(list(entries)) == N_MANY - 1  # who has begun to list goes on in the old tree
    assert seen == [([], False)]
