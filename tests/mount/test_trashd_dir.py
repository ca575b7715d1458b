"""What `.trashd` shows inside the mount, asked of the decisions themselves, on a real directory."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fusefs.core.fuse_protocol import CallerIds
from fusefs.core.metadata_cache import Attributes
from fusefs.core.names import STORE
from fusefs.linux.kernel import Kernel
from fusefs.mount.native._core import Node, Tables
from fusefs.mount.tree.trashd_dir import (
    DropLinks,
    drop_link_nodeid,
    drop_link_user,
    hides_stores,
    is_drop_link,
    is_in_store,
    prepare_store,
)
from fusefs.store.layout import is_store_name
from tests.support.make_trees import Dir, make_tree, remove_tree_hard
from tests.support.real_filesystems import tmpfs_volume
from tests.support.store_verbs import assert_silent, init, raw, recover_all

ALICE, BOB = 4711, 4712
_DIRECTORY = Attributes(1, 1, stat.S_IFDIR | 0o755, 2, 0, 0, 0, 0, 0, 4096, 0, 0, 0, 0)


def caller(uid: int) -> CallerIds:
    return CallerIds(uid, uid, 1)


def table(*names: bytes) -> tuple[Tables, list[Node]]:
    """A table of nodes: the root and, one in the other, directories of those names."""
    nodes = Tables((1, 1, 0), _DIRECTORY)
    found = [nodes.root]
    for number, name in enumerate(names, 2):
        found.append(nodes.learn((1, number, 0), _DIRECTORY._replace(ino=number), found[-1], name))
    return nodes, found


# Pure


def test_the_store_and_all_in_it_is_below() -> None:
    nodes, [root, *inside] = table(STORE, b"u", b"0", b"drop")
    assert not is_in_store(nodes, root)
    assert all(is_in_store(nodes, node) for node in inside)


@pytest.mark.parametrize("name", [STORE, b".trashd-1000", b".trashd.new-1"], ids=["made", "a user's", "being made"])
def test_a_store_further_down_is_below_too(name: bytes) -> None:
    nodes, [_root, home, *inside] = table(b"home", name, b"u")
    assert not is_in_store(nodes, home)
    assert all(is_in_store(nodes, node) for node in inside)


@pytest.mark.parametrize("name", [b".trashd2", b"trashd", b".trash", b".trashd-new", b".trashd-1000.0123"])
def test_what_is_only_called_like_it_is_not(name: bytes) -> None:
    nodes, [_root, *inside] = table(name, b"u")
    assert not any(is_in_store(nodes, node) for node in inside)
    assert not is_store_name(name)


def test_a_tree_that_moves_out_of_the_store_is_below_no_more() -> None:
    nodes, [root, store, tree, deep] = table(STORE, b"tree", b"deep")
    assert is_in_store(nodes, deep)
    nodes.move(tree, (store, b"tree"), (root, b"job"))
    assert not is_in_store(nodes, deep)


def test_only_the_root_hides_it_and_only_unless_it_shall_be_shown() -> None:
    _nodes, [root, home] = table(b"home")
    assert hides_stores(root, shows_trash=False)
    assert not hides_stores(root, shows_trash=True)
    assert not hides_stores(home, shows_trash=False)


def test_the_link_is_at_the_root_s_store_alone() -> None:
    _nodes, [root, store, users] = table(STORE, b"u")
    assert is_drop_link(store, b"drop")
    assert not is_drop_link(store, b"u")
    assert not is_drop_link(root, b"drop")
    assert not is_drop_link(users, b"drop")
    _nodes, [_root, _home, lower] = table(b"home", STORE)
    assert not is_drop_link(lower, b"drop")


@pytest.mark.parametrize("uid", [0, ALICE, (1 << 32) - 1])
def test_each_user_s_link_has_a_nodeid_of_its_own(uid: int) -> None:
    nodeid = drop_link_nodeid(uid, b"u/%d/drop" % uid)
    assert drop_link_user(nodeid) == uid
    assert 1 << 62 < nodeid < 1 << 63


@pytest.mark.parametrize("nodeid", [1, 2, (1 << 62) + 1, 0x6000_0000_0000_0000 - 1, 1 << 63])
def test_another_nodeid_is_nobody_s_link(nodeid: int) -> None:
    assert drop_link_user(nodeid) is None


# On a volume


@pytest.fixture
def volume() -> Iterator[Path]:
    """A store of root's, in which no user has a folder yet."""
    with tmpfs_volume() as path:
        with Kernel().open_path(raw(path)) as root:
            assert prepare_store(Kernel(), root, raw(path)) is None
        yield path
        recover_all(path)
        assert_silent(path)


@contextmanager
def drops(volume: Path) -> Iterator[DropLinks]:
    with Kernel().open_path(raw(volume)) as root:
        yield DropLinks(Kernel(), root)


needs_root = pytest.mark.needs("root")


@needs_root
@pytest.mark.parametrize("uid", [0, ALICE])
def test_a_user_s_folder_is_made_when_he_asks(volume: Path, uid: int) -> None:
    with drops(volume) as links:
        attributes = links.stat_link(uid, caller(uid))
        target = links.readlink(uid, caller(uid))
    assert target == b"u/%d/drop" % uid
    assert (attributes.ino, attributes.uid, attributes.size) == (drop_link_nodeid(uid, target), uid, len(target))
    assert stat.S_ISLNK(attributes.mode)
    folder = volume / ".trashd" / "u" / str(uid)
    for path in (folder, folder / "drop", folder / "orphans"):
        assert (path.stat().st_uid, path.stat().st_mode & 0o7777) == (uid, 0o700)


@needs_root
def test_nobody_makes_another_one_s_folder(volume: Path) -> None:
    with drops(volume) as links:
        for uid in (BOB, 0):
            with pytest.raises(FileNotFoundError):
                links.stat_link(ALICE, caller(uid))
        assert os.listdir(volume / ".trashd" / "u") == []
        links.stat_link(ALICE, caller(ALICE))
        assert links.readlink(ALICE, caller(0)) == b"u/4711/drop"


@needs_root
def test_a_planted_folder_is_gone_round(volume: Path) -> None:
    (volume / ".trashd" / "u" / str(ALICE)).mkdir()  # root's, but the name is Alice's
    with drops(volume) as links:
        target = links.readlink(ALICE, caller(ALICE))
        assert links.readlink(ALICE, caller(ALICE)) == target
    assert target.startswith(b"u/4711.")
    assert (volume / ".trashd" / os.fsdecode(target)).stat().st_uid == ALICE
    (volume / ".trashd" / "u" / str(ALICE)).rmdir()


@needs_root
def test_a_directory_of_his_that_others_could_move_there_is_gone_round(volume: Path) -> None:
    planted = volume / ".trashd" / "u" / str(ALICE)
    make_tree(planted, Dir({"drop": Dir(mode=0o777, owner=(ALICE, ALICE))}, mode=0o2775, owner=(ALICE, ALICE)))
    with drops(volume) as links:
        target = links.readlink(ALICE, caller(ALICE))
        assert links.readlink(ALICE, caller(ALICE)) == target
    assert target.startswith(b"u/4711.")
    assert planted.stat().st_mode & 0o7777 == 0o2775
    remove_tree_hard(planted)


@needs_root
def test_without_a_store_there_is_no_link() -> None:
    with tmpfs_volume() as bare, drops(bare) as links:
        with pytest.raises(FileNotFoundError):
            links.stat_link(0, caller(0))
        assert os.listdir(bare) == []


@needs_root
def test_a_store_that_root_does_not_trust_leads_nobody(volume: Path) -> None:
    os.chown(volume / ".trashd", ALICE, ALICE)
    with drops(volume) as links, pytest.raises(PermissionError):
        links.stat_link(ALICE, caller(ALICE))
    os.chown(volume / ".trashd", 0, 0)


@needs_root
def test_all_that_the_links_open_is_closed(volume: Path) -> None:
    with drops(volume) as links:
        links.stat_link(ALICE, caller(ALICE))
        n_fds = len(os.listdir("/proc/self/fd"))
        for uid in (ALICE, BOB):
            links.stat_link(uid, caller(uid))
            links.readlink(uid, caller(uid))
        assert len(os.listdir("/proc/self/fd")) == n_fds


# The store at mount time


@needs_root
def test_a_store_is_prepared_once(volume: Path) -> None:
    before = (volume / ".trashd" / "volume.json").read_bytes()
    with Kernel().open_path(raw(volume)) as root:
        assert prepare_store(Kernel(), root, raw(volume)) is None
    assert (volume / ".trashd" / "volume.json").read_bytes() == before


@needs_root
def test_what_keeps_a_store_from_being_made_is_told() -> None:
    with tmpfs_volume() as path:
        init(path)
        os.chown(path / ".trashd", ALICE, ALICE)
        n_fds = len(os.listdir("/proc/self/fd"))
        with Kernel().open_path(raw(path)) as root:
            told = prepare_store(Kernel(), root, raw(path))
        assert told is not None
        assert told.errno == errno.EPERM
        assert len(os.listdir("/proc/self/fd")) == n_fds
