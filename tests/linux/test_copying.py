"""A copy is the original in all that a person can see, or there is none."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import socket
import stat
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import cast

import pytest

from fusefs.linux.capabilities import Capability, drop_capabilities
from fusefs.linux.copy_inode import UnnamedCopy
from fusefs.linux.kernel import Kernel
from fusefs.linux.private_directory import PrivateDirectory
from tests.support.acls import (
    ACCESS,
    CAN_BIND,
    CAPABILITY,
    DEFAULT,
    GROUP_OBJ,
    MASK,
    NOBODY,
    OTHER,
    USER,
    USER_OBJ,
    acl,
)
from tests.support.copy_file import After, Without, copy, opened, refused
from tests.support.make_trees import File, Node, Symlink, make_tree, snapshot, weird_names
from tests.support.other_users import as_user
from tests.support.real_filesystems import full, tmpfs_volume
from tests.support.store_calls import Before, DyingAt, FailingAt, in_child, raw

pytestmark = pytest.mark.needs("root", "loop")

ALICE, MALLORY = 12001, 12666
CAP_LEASE = 28
MIB = 1 << 20
READABLE_BY_ALICE = acl(
    (USER_OBJ, 6, NOBODY), (USER, 4, ALICE), (GROUP_OBJ, 0, NOBODY), (MASK, 4, NOBODY), (OTHER, 0, NOBODY)
)


# Attributes.


def test_a_copy_has_owner_mode_times_xattrs_and_acl(source: Path, target: Path) -> None:
    file = source / "file"
    file.write_bytes(os.urandom(300_000))
    os.chown(file, ALICE, MALLORY)
    os.setxattr(file, "user.colour", b"blue")
    os.setxattr(file, "trusted.seal", b"\0\xff")
    os.setxattr(file, ACCESS, READABLE_BY_ALICE)
    os.utime(file, ns=(1_000_000_001, -2_000_000_003))
    st = file.stat()
    copy(file, target)
    got = (target / "file").stat()
    assert (got.st_atime_ns, got.st_mtime_ns) == (st.st_atime_ns, -2_000_000_003)
    assert file.stat() == st
    assert snapshot(target / "file", with_times=True) == snapshot(file, with_times=True)


@pytest.mark.parametrize("mode", [0o4755, 0o2750, 0o0000, 0o1777])
def test_a_copy_has_every_mode_whatever_its_owner(source: Path, target: Path, mode: int) -> None:
    make_tree(source / "in", {"file": File(b"text", mode, (ALICE, ALICE), {CAPABILITY: CAN_BIND})})
    copy(source / "in/file", target)
    assert snapshot(target / "file", with_times=True) == snapshot(source / "in/file", with_times=True)


def test_what_a_directory_gives_its_new_files_is_not_on_a_copy(source: Path, target: Path) -> None:
    everybody = acl((USER_OBJ, 7, NOBODY), (USER, 7, MALLORY), (GROUP_OBJ, 7, NOBODY), (MASK, 7, NOBODY),
                    (OTHER, 7, NOBODY))  # fmt: skip
    os.setxattr(target, DEFAULT, everybody)
    os.chown(target, -1, MALLORY)
    target.chmod(0o2775)
    make_tree(source / "in", {"file": File(b"text", 0o600)})
    copy(source / "in/file", target)
    assert snapshot(target / "file") == snapshot(source / "in/file")


@pytest.mark.parametrize(
    "entry",
    [
        Symlink(b"../\xff/nowhere", (ALICE, MALLORY)),
        Symlink(b"x" * 1000),
        Node(stat.S_IFIFO | 0o642, owner=(ALICE, MALLORY)),
        Node(stat.S_IFCHR | 0o600, os.makedev(1, 3)),
        Node(stat.S_IFBLK | 0o660, os.makedev(259, 77), (0, ALICE)),
    ],
    ids=["link", "long-link", "fifo", "char", "block"],
)
def test_what_is_no_file_is_made_again(source: Path, target: Path, entry: Symlink | Node) -> None:
    make_tree(source / "in", {"it": entry})
    os.setxattr(source / "in/it", "trusted.seal", b"1", follow_symlinks=False)
    os.utime(source / "in/it", ns=(5, 7), follow_symlinks=False)
    copy(source / "in/it", target)
    assert snapshot(target / "it", with_times=True) == snapshot(source / "in/it", with_times=True)
    assert os.listdir(target) == ["it"]


def test_a_socket_and_a_directory_are_refused(source: Path, target: Path) -> None:
    (source / "directory").mkdir()
    with socket.socket(socket.AF_UNIX) as server, opened(source) as fd:
        server.bind(f"/proc/self/fd/{int(fd)}/socket")
    assert refused(source / "socket", target) == errno.EOPNOTSUPP
    assert refused(source / "directory", target) == errno.EISDIR


@pytest.mark.parametrize("name", weird_names(), ids=range(len(weird_names())))
def test_a_name_is_kept_byte_by_byte(source: Path, target: Path, name: bytes) -> None:
    make_tree(source / "in", {name: b"text"})
    copy(source / "in" / os.fsdecode(name), target)
    assert os.listdir(raw(target)) == [name]


def test_an_attribute_that_the_place_can_not_have_refuses_the_copy(source: Path, target: Path) -> None:
    (source / "file").touch()
    os.setxattr(source / "file", "user.colour", b"blue")
    hook = Without("setxattr", lambda _call: None, errno.EOPNOTSUPP)
    assert refused(source / "file", target, Kernel(hook)) == errno.EOPNOTSUPP


def test_somebody_else_s_file_is_refused_to_who_can_not_give_it_away(source: Path, target: Path) -> None:
    file = source / "file"
    file.write_text("text")
    target.chmod(0o777)
    assert as_user(ALICE, partial(refused, file, target)) == errno.EPERM


# Others at work.


def test_a_file_that_somebody_writes_to_is_refused(source: Path, target: Path) -> None:
    with (source / "file").open("wb"):
        assert refused(source / "file", target) == errno.ETXTBSY


def test_a_file_that_somebody_writes_to_is_refused_to_root_without_the_capability_too(
    source: Path, target: Path
) -> None:
    """As in a container, or in trashd-sweep.service."""
    make_tree(source / "in", {"file": File(b"text", owner=(ALICE, ALICE))})

    def look() -> None:
        drop_capabilities(cast(Capability, CAP_LEASE))
        assert refused(source / "in/file", target) == errno.ETXTBSY

    with (source / "in/file").open("ab"):
        assert in_child(look) == 0


def test_a_file_that_is_mapped_for_writing_is_refused(source: Path, target: Path) -> None:
    file = source / "file"
    file.write_bytes(b"x" * 4096)
    with file.open("rb+") as opened_file, mmap.mmap(opened_file.fileno(), 4096):
        opened_file.close()
        assert refused(file, target) == errno.ETXTBSY


def test_a_file_that_somebody_wants_to_write_to_meanwhile_is_refused(source: Path, target: Path) -> None:
    file = source / "file"
    file.write_bytes(b"x" * MIB)

    def want() -> None:
        with pytest.raises(BlockingIOError):
            os.open(file, os.O_WRONLY | os.O_NONBLOCK)

    assert refused(file, target, Kernel(Before("fsync", want))) == errno.ETXTBSY


@pytest.mark.parametrize("change", ["append", "rewrite", "chmod", "cut"])
def test_a_change_during_the_copy_is_seen_where_there_are_no_leases(source: Path, target: Path, change: str) -> None:
    file = source / "file"
    file.write_bytes(b"x" * 100_000)

    def act() -> None:
        match change:
            case "append":
                with file.open("ab") as writing:
                    writing.write(b"y")
            case "rewrite":
                with file.open("rb+") as writing:
                    writing.write(b"y")
            case "chmod":
                file.chmod(0o600)
            case "cut":
                os.truncate(file, 5)

    assert refused(file, target, Kernel(Without("lease", Before("ficlone", act)))) in (errno.EBUSY, errno.EIO)


def test_a_name_that_is_taken_meanwhile_is_not_replaced(source: Path, target: Path) -> None:
    (source / "file").write_bytes(b"ours")
    hook = Before("link", lambda: (target / "file").write_bytes(b"theirs"))
    with pytest.raises(FileExistsError):
        copy(source / "file", target, Kernel(hook))
    assert (target / "file").read_bytes() == b"theirs"


def test_a_copy_that_has_the_name_already_replaces_itself_and_leaves_nothing(target: Path) -> None:
    kernel = Kernel()
    with (
        kernel.open_path(raw(target), os.O_RDONLY | os.O_DIRECTORY) as place,
        PrivateDirectory(kernel, place, b".private-") as private,
        kernel.create_unnamed(place) as fd,
    ):
        UnnamedCopy(fd).put(kernel, place, b"a")
        UnnamedCopy(fd).replace(kernel, private, place, b"a")
    assert os.listdir(target) == ["a"]


def test_nobody_else_can_reach_what_has_not_all_its_attributes(source: Path, target: Path) -> None:
    os.chown(target, MALLORY, MALLORY)
    make_tree(source / "in", {"fifo": Node(stat.S_IFIFO | 0o666, owner=(MALLORY, MALLORY))})
    tried = []

    def reach() -> None:
        (private,) = target.iterdir()
        with pytest.raises(PermissionError):
            os.listdir(private)

    def try_it() -> None:
        as_user(MALLORY, reach)
        tried.append(True)

    copy(source / "in/fifo", target, Kernel(Before("chown", try_it)))
    assert tried
    assert os.listdir(target) == ["fifo"]


def test_a_private_directory_that_mallory_has_exchanged_is_not_used(source: Path, target: Path) -> None:
    os.chown(target, MALLORY, MALLORY)
    make_tree(source / "in", {"fifo": Node(stat.S_IFIFO | 0o666)})

    def exchange() -> None:
        (private,) = target.iterdir()
        private.rename(target / "aside")
        private.mkdir(0o777)

    hook = After("mkdir", "openat2", lambda: as_user(MALLORY, exchange))
    with pytest.raises(PermissionError):
        copy(source / "in/fifo", target, Kernel(hook))
    assert not any(files for _path, _names, files in os.walk(target))


# Full, failing, killed.


def test_a_full_target_leaves_nothing(source: Path) -> None:
    (source / "file").write_bytes(os.urandom(2 * MIB))
    with tmpfs_volume("4m") as small:
        place = make_tree(small / "target", {})
        with full(small, inodes=False):
            assert refused(source / "file", place) == errno.ENOSPC


@pytest.mark.parametrize("kind", ["file", "link"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_any_call_that_fails_leaves_no_part_of_a_copy(source: Path, target: Path, kind: str, number: int) -> None:
    make_tree(source / "in", {"file": File(b"text" * 5000, xattrs={"user.a": b"b"}), "link": Symlink("x")})
    wanted = snapshot(source / "in" / kind, with_times=True)
    before = len(os.listdir("/proc/self/fd"))
    for n in itertools.count():
        hook = FailingAt(n, number)
        with suppress(OSError):
            copy(source / "in" / kind, target, Kernel(hook))
        if (target / kind).is_symlink() or (target / kind).exists():
            assert snapshot(target / kind, with_times=True) == wanted, hook.failed
            (target / kind).unlink()
        for left in target.iterdir():  # the call that failed was the one that would have removed it
            assert left.name.startswith(".private-")
            for one in left.iterdir():
                one.unlink()
            left.rmdir()
        assert len(os.listdir("/proc/self/fd")) == before, hook.failed
        if hook.failed is None:
            return


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_kill_before_any_call_leaves_no_part_of_a_copy_under_the_name(source: Path, target: Path, kind: str) -> None:
    make_tree(source / "in", {"file": File(b"text" * 5000, xattrs={"user.a": b"b"}), "link": Symlink("x")})
    wanted = snapshot(source / "in" / kind, with_times=True)
    for n in itertools.count():
        code = in_child(partial(copy, source / "in" / kind, target, Kernel(DyingAt(n))))
        if os.path.lexists(target / kind):
            assert snapshot(target / kind, with_times=True) == wanted
            (target / kind).unlink()
        if code == 0:
            return


def test_without_unnamed_files_nothing_is_under_the_name_before_it_is_whole(source: Path, target: Path) -> None:
    (source / "file").write_bytes(os.urandom(MIB))
    looked = []

    def hook(call: str) -> None:
        if call == "tmpfile":
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        looked.append((target / "file").exists())

    copy(source / "file", target, Kernel(hook))
    assert snapshot(target / "file", with_times=True) == snapshot(source / "file", with_times=True)
    assert os.listdir(target) == ["file"]
    assert not any(looked[: looked.index(True)] if True in looked else looked)
