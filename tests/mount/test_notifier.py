"""What the kernel is told to forget, and what it is not bothered with; the test stands in for the kernel."""

from __future__ import annotations

import errno
import os
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import trio

from fusefs.linux.fanotify import watch_filesystem
from fusefs.linux.fd import Fd
from fusefs.linux.fuse_device import INVAL_INODE, NOTIFY_INVAL_INODE
from fusefs.mount.notices.forget_stored import StoredNotices
from fusefs.mount.notices.invalidation import ChangeNotices, ChangeSource
from fusefs.mount.notices.invalidation_process import ANSWER, MESSAGE_MAX
from fusefs.mount.tree.attribute_operations import Changes
from fusefs.mount.tree.vfs import Vfs
from tests.support.real_filesystems import tmpfs_volume
from tests.support.vfs_without_mount import Somebody, vfs_on

pytestmark = pytest.mark.needs("root")

ROOT, ME, LIMIT_S = 1, Somebody(0, 0, os.getpid(), 0o022), 60.0
HEAD = struct.Struct("=IiQ")
INODE, ENTRY = struct.Struct("=Qqq"), struct.Struct("=QII")
Notice = tuple[int, bytes] | tuple[int, str]
END: Notice = (ROOT, b"the end")


class Known(NamedTuple):
    """A tree that the kernel knows: nodeids of a directory with a file, beside one that it does not know."""

    top: Path
    vfs: Vfs
    directory: int
    file: int


@pytest.fixture
def known() -> Iterator[Known]:
    with tmpfs_volume() as top, Fd(os.open(top, os.O_PATH | os.O_DIRECTORY)) as root:
        (top / "directory").mkdir()
        (top / "directory" / "file").write_bytes(b"content")
        (top / "unknown").mkdir()
        vfs = vfs_on(root, max_fds=100, is_shared=True)
        directory = vfs.lookups.lookup(ROOT, b"directory", ME).nodeid
        yield Known(top, vfs, directory, vfs.lookups.lookup(directory, b"file", ME).nodeid)
        vfs.close()


def notices_of(message: bytes) -> list[Notice]:
    """Names that are to be forgotten, and inodes: all of one, or its attributes."""
    found: list[Notice] = []
    at = 0
    while at < len(message):
        length, code, unique = HEAD.unpack_from(message, at)
        assert unique == 0
        body = message[at + HEAD.size : at + length]
        if code == 2:
            nodeid, offset, size = INODE.unpack(body)
            assert size == 0
            found.append((nodeid, "all" if offset == 0 else "attributes"))
        else:
            assert code == 3
            nodeid, size, _flags = ENTRY.unpack_from(body)
            assert body[ENTRY.size + size :] == b"\0"
            found.append((nodeid, body[ENTRY.size : -1]))
        at += length
    return found


@contextmanager
def watched(top: Path) -> Iterator[tuple[ChangeSource, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, Fd(os.open(top, os.O_PATH)) as fd, watch_filesystem(fd) as changes:
        ours.setblocking(False)
        yield ChangeSource(changes, ours), theirs


def told(
    known: Known,
    act: Callable[[], object],
    *,
    up_to: Notice = END,
    unknown: Callable[[bytes], bytes] = lambda _message: b"",
) -> list[Notice]:
    """What the kernel is told when something is done, and then a last thing, up to a notice.

    unknown  the notices of a message whose inodes it does not know
    """
    found: list[Notice] = []

    async def listen(theirs: socket.socket, scope: trio.CancelScope) -> None:
        while up_to not in found:
            await trio.lowlevel.wait_readable(theirs)
            message = theirs.recv(MESSAGE_MAX)
            found.extend(notices_of(message))
            theirs.send(ANSWER.pack(0) + unknown(message))
        scope.cancel()

    async def main() -> None:
        with watched(known.top) as (its, theirs), trio.fail_after(LIMIT_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ChangeNotices(known.vfs, StoredNotices(known.vfs)).run, its)
                act()
                behind("mkdir", known.top / os.fsdecode(END[1]))
                nursery.start_soon(listen, theirs, nursery.cancel_scope)

    trio.run(main)
    return found[: found.index(up_to)]


def behind(*argv: str | Path) -> None:
    """Another process does something."""
    subprocess.run(argv, check=True)


def test_what_came_through_the_mount_is_not_told(known: Known) -> None:
    def act() -> None:
        known.vfs.names.mkdir(known.directory, b"new", 0o755, ME)
        known.vfs.names.rename(known.directory, b"file", ROOT, b"moved", 0, ME)
        known.vfs.attributes.setattr(known.file, Changes(mode=0o600, size=1), None, ME)
        known.vfs.names.unlink(ROOT, b"moved", ME)

    assert told(known, act) == []


def test_what_the_kernel_does_not_know_is_not_told(known: Known) -> None:
    assert told(known, lambda: behind("touch", known.top / "unknown" / "new")) == []


def test_a_new_name_is_told_with_its_directory(known: Known) -> None:
    found = told(known, lambda: behind("mkdir", known.top / "directory" / "new"))
    assert found == [(known.directory, b"new"), (known.directory, "all")]


def test_a_name_that_goes_is_told_with_what_had_it(known: Known) -> None:
    found = told(known, lambda: behind("unlink", known.top / "directory" / "file"))
    assert set(found) == {(known.directory, b"file"), (known.directory, "all"), (known.file, "attributes")}


def test_of_written_content_the_name_is_kept(known: Known) -> None:
    assert told(known, lambda: behind("truncate", "-s", "1", known.top / "directory" / "file")) == [(known.file, "all")]


def test_of_a_mode_the_content_is_kept(known: Known) -> None:
    found = told(known, lambda: behind("chmod", "0600", known.top / "directory" / "file"))
    assert found == [(known.file, "attributes")]


def test_what_happens_often_is_told_once(known: Known) -> None:
    act = 'for i in {1..100}; do chmod 06$((i % 8))0 "$0"; done'
    found = told(known, lambda: behind("bash", "-c", act, known.top / "directory" / "file"))
    assert found == [(known.file, "attributes")]


def test_a_directory_that_goes_is_not_held_open(known: Known) -> None:
    def held() -> int:
        with os.scandir("/proc/self/fd") as fds:
            return sum(os.readlink(fd.path).startswith(str(known.top / "empty")) for fd in fds)

    (known.top / "empty").mkdir()
    known.vfs.lookups.getattr(known.vfs.lookups.lookup(ROOT, b"empty", ME).nodeid, ME)
    assert held() == 1
    told(known, lambda: behind("rmdir", known.top / "empty"))
    assert held() == 0


@pytest.mark.parametrize("how_it_ends", ["taken in", "forgotten"])
def test_what_is_on_its_way_to_the_kernel_is_told_until_it_has_it_or_has_forgotten_it(
    known: Known, how_it_ends: str
) -> None:
    """The answer may be older than the change, and would be believed for as long as it says."""
    n_times = 0

    def unknown(message: bytes) -> bytes:
        nonlocal n_times
        if (known.file, "attributes") not in notices_of(message):
            return b""
        n_times += 1
        if n_times == 3:
            behind("rmdir", known.top / "unknown")
            if how_it_ends == "taken in":
                return b""
            known.vfs.references.forget(known.file, 1)
        return INVAL_INODE.pack(INVAL_INODE.size, NOTIFY_INVAL_INODE, 0, known.file, -1, 0)

    act = partial(behind, "chmod", "0600", known.top / "directory" / "file")
    found = told(known, act, up_to=(ROOT, b"unknown"), unknown=unknown)
    assert found.count((known.file, "attributes")) == 3


def make_too_many(top: Path) -> None:
    n = int(Path("/proc/sys/fs/fanotify/max_queued_events").read_text()) + 1
    for i in range(n):
        os.mkdir(top / f"unknown/{i}")


def test_after_too_many_changes_everything_known_is_told(known: Known) -> None:
    """In several messages, as none is longer than what the other side takes."""
    names = [f"{i:0200}".encode() for i in range(1000)]
    for name in names:
        (known.top / "directory" / os.fsdecode(name)).touch()
    nodeids = [known.vfs.lookups.lookup(known.directory, name, ME).nodeid for name in names]
    last = (nodeids[-1], "all")
    found = set(told(known, lambda: make_too_many(known.top), up_to=last))
    assert {(known.directory, name) for name in [b"file", *names]} <= found
    assert {(nodeid, "all") for nodeid in [ROOT, known.directory, known.file, *nodeids[:-1]]} <= found
    assert (ROOT, b"directory") in found


def test_it_ends_at_once_though_the_kernel_takes_its_time(known: Known) -> None:
    async def main() -> None:
        with watched(known.top) as (its, theirs), trio.fail_after(LIMIT_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ChangeNotices(known.vfs, StoredNotices(known.vfs)).run, its)
                behind("mkdir", known.top / "directory" / "new")
                await trio.lowlevel.wait_readable(theirs)  # which gets no answer
                nursery.cancel_scope.cancel()

    trio.run(main)


@pytest.mark.allows_warnings
@pytest.mark.parametrize("answer", [ANSWER.pack(errno.EINVAL), None])
def test_if_the_kernel_does_not_listen_the_log_says_so_and_the_mount_goes_on(
    known: Known, answer: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        with watched(known.top) as (its, theirs), trio.fail_after(LIMIT_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ChangeNotices(known.vfs, StoredNotices(known.vfs)).run, its)
                behind("mkdir", known.top / "directory" / "new")
                await trio.lowlevel.wait_readable(theirs)
                if answer is None:
                    theirs.close()
                else:
                    theirs.send(answer)

    trio.run(main)
    assert "when the timeout is over from now on" in caplog.text
