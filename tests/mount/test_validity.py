"""Attributes of directories: believed for long while nothing changes in there, and never after a change."""

import os
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from fusefs.core.metadata_cache import NodeId
from fusefs.linux import syscalls
from fusefs.linux.fd import Fd
from fusefs.linux.statx import stat_at
from fusefs.mount.native._core import Tables
from fusefs.mount.tree.kernel_timeouts import AttrTimeouts, EntryParam
from fusefs.mount.tree.vfs import Vfs
from tests.support.background_processes import workers
from tests.support.fake_dev_fuse import Files, Names, Somebody, vfs_at
from tests.support.foreground_mount import fresh_mount
from tests.support.transports import by_ring

HOUR_S, SECOND_S = 3600.0, 1.0
ROOT = 1
ME = Somebody(0, 0, 1, 0)
N_CHANGES = 400


class Device:
    """A socket for /dev/fuse, and what the kernel is told by it."""

    def __init__(self, nodes: Tables) -> None:
        self._end, self._session = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._end.setblocking(False)
        nodes.device = self._session.fileno()

    def close(self) -> None:
        self._end.close()
        self._session.close()

    def voided(self) -> list[int]:
        """The nodes whose attributes are to be asked for again, since the last time."""
        found = []
        with suppress(BlockingIOError):
            while True:
                size, code, _unique, nodeid, first, _length = struct.unpack("=IiQQqq", self._end.recv(1 << 12))
                assert (size, code, first) == (40, 2, -1)
                found.append(nodeid)
        return found


class Tree:
    """A tree without a mount: `top/sub`, which the kernel was told of."""

    def __init__(self, vfs: Vfs, path: Path) -> None:
        self.vfs = vfs
        self.path = path
        self.device = Device(vfs.nodes)
        self.top = Names(vfs).lookup(ROOT, b"top", ME).nodeid
        self.sub = Names(vfs).lookup(self.top, b"sub", ME).nodeid

    def tell(self, *nodeids: int) -> list[float]:
        """For how long the kernel believes what these are."""
        return [Files(self.vfs).getattr(nodeid, ME).attr_s for nodeid in nodeids]

    def asks_again(self, *nodeids: int) -> bool:
        """Whether these, which lasted, do so no more."""
        told = self.device.voided()
        return sorted(told) == sorted(nodeids) and all(left_s <= SECOND_S for left_s in self.tell(*nodeids))


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tree]:
    """Time stands still."""
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    (tmp_path / "top/sub").mkdir(parents=True)
    (tmp_path / "top/file").touch()
    (tmp_path / "top/link").symlink_to("file")
    with vfs_at(tmp_path, max_fds=1000, timeout_s=HOUR_S) as vfs:
        tree = Tree(vfs, tmp_path)
        assert tree.tell(ROOT, tree.top, tree.sub) == [HOUR_S] * 3
        yield tree
        tree.device.close()


CHANGES_IN_TOP: dict[str, Callable[[Vfs, int], object]] = {
    "create": lambda vfs, top: Names(vfs).create(top, b"new", 0o644, os.O_WRONLY, ME),
    "mknod": lambda vfs, top: Names(vfs).mknod(top, b"new", 0o100644, 0, ME),
    "mkdir": lambda vfs, top: Names(vfs).mkdir(top, b"new", 0o755, ME),
    "symlink": lambda vfs, top: Names(vfs).symlink(top, b"new", b"target", ME),
    "link": lambda vfs, top: Names(vfs).link(Names(vfs).lookup(top, b"file", ME).nodeid, top, b"new", ME),
    "unlink": lambda vfs, top: Names(vfs).unlink(top, b"file", ME),
    "rmdir": lambda vfs, top: Names(vfs).rmdir(top, b"sub", ME),
    "rename": lambda vfs, top: Names(vfs).rename(top, b"file", top, b"new", 0, ME),
}


@pytest.mark.parametrize("change", CHANGES_IN_TOP.values(), ids=CHANGES_IN_TOP)
def test_the_kernel_hears_of_a_change_before_its_answer(tree: Tree, change: Callable[[Vfs, int], object]) -> None:
    change(tree.vfs, tree.top)
    assert tree.asks_again(tree.top)
    assert tree.tell(ROOT) == [HOUR_S]


def test_what_is_moved_and_where_from_and_where_to_are_new(tree: Tree) -> None:
    Names(tree.vfs).rename(tree.top, b"sub", ROOT, b"sub", 0, ME)
    assert tree.asks_again(ROOT, tree.top, tree.sub)


def test_a_file_that_is_moved_is_new_to_whom_it_was_told(tree: Tree) -> None:
    """Its time of change is. What was made a moment ago, and not looked at, costs nothing."""
    file = Names(tree.vfs).lookup(tree.top, b"file", ME).nodeid
    for old, new in ((b"file", b"new"), (b"new", b"file")):
        Names(tree.vfs).rename(tree.top, old, tree.top, new, 0, ME)
        assert file in tree.device.voided()
        Names(tree.vfs).rename(tree.top, new, tree.top, old, 0, ME)
        assert not tree.device.voided()
        Names(tree.vfs).rename(tree.top, old, tree.top, new, 0, ME)
        Files(tree.vfs).getattr(file, ME)
    Names(tree.vfs).rename(tree.top, b"file", tree.top, b"link", syscalls.RENAME_EXCHANGE, ME)
    assert tree.device.voided() == [file]
    Names(tree.vfs).create(tree.top, b"made", 0o644, os.O_WRONLY, ME)
    Names(tree.vfs).rename(tree.top, b"made", tree.top, b"done", 0, ME)
    assert not tree.device.voided()


def container(tree: Tree) -> int:
    """With a directory in it, `tree`."""
    (tree.path / ".trashd/u/0/orphans/id/tree").mkdir(parents=True)
    at: int = ROOT
    for name in (b".trashd", b"u", b"0", b"orphans", b"id"):
        at = Names(tree.vfs).lookup(at, name, ME).nodeid
    return at


@pytest.mark.parametrize("is_exchanged_back", [False, True], ids=["renamed", "exchanged"])
def test_what_comes_back_from_a_store_is_looked_at_anew(tree: Tree, *, is_exchanged_back: bool) -> None:
    """A reaper may have worked on it behind the mount, on any directory in it."""
    orphan = container(tree)
    Names(tree.vfs).rename(orphan, b"tree", ROOT, b"top", syscalls.RENAME_EXCHANGE, ME)
    tree.device.voided()
    if is_exchanged_back:
        Names(tree.vfs).rename(ROOT, b"top", orphan, b"tree", syscalls.RENAME_EXCHANGE, ME)
    else:
        Names(tree.vfs).rename(orphan, b"tree", ROOT, b"elsewhere", 0, ME)
    assert tree.sub in tree.device.voided()
    assert tree.tell(tree.sub) == [HOUR_S]


def test_a_swap_and_its_restore_make_nothing_of_others_void(tree: Tree) -> None:
    """However many directories are known: untouched ones are not asked for again."""
    others = [Names(tree.vfs).mkdir(ROOT, b"%d" % number, 0o755, ME).nodeid for number in range(100)]
    assert tree.tell(*others) == [HOUR_S] * len(others)
    orphan = container(tree)
    for _ in range(2):
        Names(tree.vfs).rename(orphan, b"tree", ROOT, b"top", syscalls.RENAME_EXCHANGE, ME)
        assert not set(tree.device.voided()) & set(others)


def test_many_changes_in_a_row_cost_one_notice(tree: Tree) -> None:
    for number in range(10):
        Names(tree.vfs).mknod(tree.top, b"new%d" % number, 0o100644, 0, ME)
        tree.tell(tree.top)
    assert tree.device.voided() == [tree.top]


def test_a_change_after_a_look_at_its_name_is_heard_of_too(tree: Tree) -> None:
    """However soon after another one: the reply to the look may come after that to the change."""
    Names(tree.vfs).mknod(tree.top, b"new", 0o100644, 0, ME)
    tree.device.voided()
    Names(tree.vfs).lookup(ROOT, b"top", ME)
    Names(tree.vfs).unlink(tree.top, b"new", ME)
    assert tree.device.voided() == [tree.top]


def test_it_lasts_again_when_nothing_has_changed_for_a_second(tree: Tree) -> None:
    Names(tree.vfs).unlink(tree.top, b"file", ME)
    top = tree.vfs.nodes.get(tree.top)
    assert top is not None
    top.changed_s -= 1
    assert tree.tell(tree.top) == [HOUR_S]
    assert tree.device.voided() == [tree.top]
    Names(tree.vfs).unlink(tree.top, b"link", ME)
    assert tree.asks_again(tree.top)


def test_an_extended_attribute_makes_answers_void(tree: Tree) -> None:
    files = Files(tree.vfs)
    file = Names(tree.vfs).lookup(tree.top, b"file", ME).nodeid
    files.setxattr(file, b"user.name", b"value", ME)
    files.removexattr(file, b"user.name", ME)
    files.setxattr(tree.top, b"user.name", b"value", ME)
    assert tree.device.voided() == [file, file, tree.top]


def test_reading_a_link_makes_answers_void(tree: Tree) -> None:
    link = Names(tree.vfs).lookup(tree.top, b"link", ME).nodeid
    Names(tree.vfs).readlink(link, ME)
    assert tree.device.voided() == [link]


def test_a_node_that_has_ended_is_nobodys(tree: Tree) -> None:
    sub = tree.vfs.nodes.get(tree.sub)
    assert sub is not None
    Names(tree.vfs).forget(tree.sub, 1)
    tree.vfs.timeouts.note_change(sub)
    assert tree.device.voided() == []


def known_of(path: Path, **changes: object) -> EntryParam:
    with Fd(os.open(path, os.O_PATH)) as fd:
        return EntryParam(NodeId(2), stat_at(fd), HOUR_S)._replace(**changes)  # type: ignore[arg-type]


def test_without_a_session_nothing_of_a_directory_lasts(tmp_path: Path) -> None:
    known = known_of(tmp_path)
    nodes = Tables((1, b"x"), known.attributes)
    timeouts, known = AttrTimeouts(nodes), known._replace(nodeid=nodes.root.nodeid)
    assert timeouts.timeouts_of(known) == (HOUR_S, SECOND_S)
    timeouts.note_change(nodes.root)
    timeouts.invalidate(nodes.root)


def test_what_else_does_not_last(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "twice").touch()
    (tmp_path / "other").hardlink_to(tmp_path / "twice")
    timeouts = AttrTimeouts(Tables((1, b"x"), known_of(tmp_path).attributes))
    assert timeouts.timeouts_of(known_of(tmp_path / "file")) == (HOUR_S, HOUR_S)
    assert timeouts.timeouts_of(known_of(tmp_path / "twice")) == (HOUR_S, SECOND_S)
    assert timeouts.timeouts_of(known_of(tmp_path / "file", is_steady=False)) == (HOUR_S, 0)
    assert timeouts.timeouts_of(known_of(tmp_path, timeout_s=0.5)) == (0.5, 0.5)


@pytest.mark.needs("root", "fuse")
@pytest.mark.parametrize("coherence", ["exclusive", "shared"])
def test_who_looked_during_a_change_does_not_believe_it(coherence: str) -> None:
    """Two look all the time while one changes names: in the end both see what is there."""
    with fresh_mount(f"coherence={coherence}") as mount:
        seen, behind = mount.path / "top", mount.backing / "top"
        (seen / "sub").mkdir(parents=True)

        def looks() -> None:
            while True:
                os.stat(seen)
                with suppress(FileNotFoundError):
                    os.stat(seen / "sub")

        with workers([looks, looks]):
            for number in range(N_CHANGES):
                match number % 4:
                    case 0:
                        (seen / "new").touch()
                    case 1:
                        (seen / "sub").rename(seen / "other")
                    case 2:
                        (seen / "new").unlink()
                    case 3:
                        (seen / "other").rename(seen / "sub")
                if number % 100 == 99:
                    assert told(seen) == told(behind)
                    assert told(seen / "sub") == told(behind / "sub")


@pytest.mark.needs("root", "fuse")
@pytest.mark.parametrize("transport", ["uring=off", by_ring("uring=on")])
def test_who_looked_at_a_file_while_it_was_renamed_does_not_believe_it(transport: str) -> None:
    """The kernel asks again after a rename; the next one may come before that is answered."""
    with fresh_mount(transport) as mount:
        names = [(mount.path / f"{number}", mount.path / f"{number}.new") for number in range(20)]
        for one, _ in names:
            one.touch()

        def looks() -> None:
            while True:
                for path in random.choice(names):
                    with suppress(FileNotFoundError):
                        path.stat()

        for _ in range(20):
            with workers([looks, looks]):
                for one, other in names:
                    one.rename(other)
                    time.sleep(0.0001)  # until it is looked at
                    other.rename(one)
            assert [told(one) for one, _ in names] == [told(mount.backing / one.name) for one, _ in names]


def told(path: Path) -> tuple[int, ...]:
    seen = path.stat()
    return seen.st_mode, seen.st_nlink, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns
