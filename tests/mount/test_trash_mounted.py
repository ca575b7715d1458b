"""`.trashd` in a live mount: hidden, found, never remembered; and `mv DIR .trashd/drop/` for clients with only that."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import pytest

from fusefs.linux.kernel import Kernel
from fusefs.linux.syscalls import RENAME_EXCHANGE, renameat2
from tests.support.foreground_mount import Mounted, trashd_mount, until
from tests.support.make_trees import Dir, make_tree
from tests.support.other_users import as_user
from tests.support.real_filesystems import tmpfs_volume
from tests.support.store_verbs import ENTRIES, assert_silent, init, raw, recover_all
from tests.support.transports import by_ring
from tests.support.trashd_command import trashd

pytestmark = pytest.mark.needs("root", "fuse")

ALICE, BOB = 4711, 4712


@pytest.fixture
def mount() -> Iterator[Mounted]:
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


def test_the_root_s_listing_has_it_only_if_it_shall(mount: Mounted) -> None:
    assert sorted(os.listdir(mount.path)) == ["alice", "bob"]
    assert (mount.path / ".trashd" / "volume.json").exists()
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


def test_what_a_store_makes_behind_the_mount_is_seen_at_once(mount: Mounted) -> None:
    listed = mount.path / ".trashd" / "u" / "0" / "orphans"
    assert os.listdir(listed) == []
    for number in range(3):
        behind = mount.backing / ".trashd" / "u" / "0" / "orphans" / str(number)
        assert not (listed / str(number)).exists()
        behind.mkdir()
        assert (listed / str(number)).stat().st_mode & 0o7777 == 0o755
        behind.chmod(0o700)
        assert (listed / str(number)).stat().st_mode & 0o7777 == 0o700
        behind.rmdir()
        assert not (listed / str(number)).exists()


def test_everybody_is_led_to_his_own_at_the_same_time(mount: Mounted) -> None:
    drop = mount.path / ".trashd" / "drop"
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


def test_the_link_is_a_link_and_nothing_else_can_be_done_with_it(mount: Mounted) -> None:
    store = mount.path / ".trashd"
    drop = store / "drop"
    assert drop.is_symlink()
    assert drop.lstat().st_size == len(os.readlink(drop)) == len("u/0/drop")
    (mount.path / "file").write_text("x")
    refused: list[Callable[[], object]] = [
        drop.unlink,
        drop.mkdir,
        lambda: drop.symlink_to("x"),
        lambda: os.mknod(drop),
        lambda: os.open(drop, os.O_CREAT | os.O_EXCL | os.O_WRONLY),
        lambda: os.rename(drop, store / "other"),
        lambda: os.rename(mount.path / "file", drop),
        lambda: os.link(mount.path / "file", drop),
        lambda: os.link(drop, mount.path / "other", follow_symlinks=False),
        lambda: os.lchown(drop, ALICE, ALICE),
        lambda: os.utime(drop, (0, 0), follow_symlinks=False),
        lambda: os.setxattr(drop, "trusted.a", b"x", follow_symlinks=False),
    ]
    for act in refused:
        with pytest.raises(OSError, match=r"^\[Errno \d+\]"):
            act()
    assert sorted(os.listdir(mount.backing / ".trashd")) == ENTRIES
    assert os.readlink(drop) == "u/0/drop"


def test_an_exchange_with_a_store_asks_for_no_permissions(mount: Mounted) -> None:
    """What its directories allow is believed for as long as one call takes, if the machine is not too busy."""
    stage, home = mount.path / ".trashd" / "u" / "0" / "stage" / "some", mount.path / "alice"
    (stage / "tree").mkdir(parents=True)
    with Kernel().open_path(raw(stage)) as stage_fd, Kernel().open_path(raw(home)) as home_fd:

        def exchange() -> None:
            renameat2(stage_fd, b"tree", home_fd, b"job", RENAME_EXCHANGE)

        def asks_for_none() -> bool:
            for known in (home, home / "job", stage):
                os.stat(known)
            before = mount.stats().operations["getattr"].n()
            exchange()
            n_asked = mount.stats().operations["getattr"].n() - before
            exchange()
            return n_asked == 0

        assert until(asks_for_none)
    (stage / "tree").rmdir()
    stage.rmdir()
