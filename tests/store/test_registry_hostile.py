"""What a user may put into a registry, or in its place: it costs others nothing, and leads root nowhere."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import select
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import read_mounts
from fusefs.linux.untrusted_path import open_way
from fusefs.store.registry_lines import MAX_LINES, RegistryLine, decode, encode
from fusefs.store.registry_targets import LineOf, open_registered, stores_of_users
from tests.support.fuse_silent import silent_fuse
from tests.support.make_trees import make_tree
from tests.support.real_filesystems import bind_mount, unmount
from tests.support.store_verbs import init, raw
from tests.support.user_homes import ALICE, BOB, homes, registry_of, trashd_as

_PROTOCOL = 5
_CATATONIC = 0x9362
"""AUTOFS_IOC_CATATONIC: processes that wait are let go."""


@contextmanager
def resting(point: Path, kind: str = "direct") -> Iterator[Callable[[], bool]]:
    """An automount point that rests; tells whether it was woken. kind: direct, or indirect: each name in it is one

    Who wakes it waits to the end of the block. Source  the kernel's Documentation/filesystems/autofs.rst
    """
    libc = ctypes.CDLL(None, use_errno=True)
    wanted, theirs = os.pipe()
    ready, end = os.pipe(), os.pipe()
    daemon = os.fork()  # what its process group asks is never asked of it
    if daemon == 0:
        _end_it(point, ready, end)
    os.close(end[0])
    os.read(ready[0], 1)
    options = f"fd={theirs},pgrp={daemon},minproto={_PROTOCOL},maxproto={_PROTOCOL},{kind}".encode()
    try:
        if libc.mount(b"tests", os.fsencode(point), b"autofs", ctypes.c_ulong(0), options):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        yield lambda: bool(select.select([wanted], [], [], 0)[0])
    finally:
        os.write(end[1], b".")
        os.close(end[1])
        os.waitpid(daemon, 0)
        unmount(point)
        for fd in (wanted, theirs, *ready):
            os.close(fd)


def _end_it(point: Path, ready: tuple[int, int], end: tuple[int, int]) -> None:
    """The daemon's life: when it is not needed any more, nothing waits for it."""
    try:
        os.setpgid(0, 0)
        os.close(end[1])
        os.write(ready[1], b".")
        os.read(end[0], 1)
        fcntl.ioctl(os.open(point, os.O_RDONLY | os.O_DIRECTORY), _CATATONIC)
    finally:
        os._exit(0)


pytestmark = pytest.mark.needs("root")

LIMIT_S = 30.0
"""For what takes a fraction of a second on a machine that is not busy, and for ever where it waits."""


@pytest.fixture
def users() -> Iterator[tuple[Path, Path]]:
    """The homes of Alice and of Bob, each with an own store and an orphan in it."""
    with homes(ALICE, BOB) as made:
        for uid, home in made.items():
            job = make_tree(home / "job", {})
            os.chown(job, uid, uid)
            assert trashd_as(uid, home, "swap", job).code == 0
        yield made[ALICE], made[BOB]


def heard() -> list[tuple[int, Path]]:
    """The stores of users that root opens, and for which user."""
    kernel, mounts = Kernel(), read_mounts()
    found = []
    for word in stores_of_users(kernel, mounts):
        store = open_registered(kernel, word, mounts)
        if store is not None:
            with store:
                assert store.owner == word.uid
                found.append((word.uid, Path(os.fsdecode(word.line.path))))
    return sorted(found)


def line_of(home: Path) -> RegistryLine:
    (line,) = decode(registry_of(home).read_bytes())
    return line


def says(home: Path, uid: int, *lines: RegistryLine) -> None:
    registry_of(home).write_bytes(b"".join(map(encode, lines)))
    os.chown(registry_of(home), uid, uid)


def test_root_hears_of_both(users: tuple[Path, Path]) -> None:
    alice, bob = users
    assert heard() == [(ALICE, alice), (BOB, bob)]


def _link(registry: Path) -> None:
    registry.rename(registry.with_name("aside"))
    registry.symlink_to("aside")


def _hers(make: Callable[[Path], None], registry: Path) -> None:
    registry.unlink()
    make(registry)
    os.chown(registry, ALICE, ALICE)


def _directory_is_a_link(registry: Path) -> None:
    _link(registry.parent)
    os.lchown(registry.parent, ALICE, ALICE)


SPOIL: dict[str, Callable[[Path], object]] = {
    "link": _link,
    "second_name": lambda registry: os.link(registry, registry.with_name("aside")),
    "fifo": partial(_hers, os.mkfifo),
    "directory": partial(_hers, os.mkdir),
    "ten_megabytes": lambda registry: registry.write_bytes(registry.read_bytes() + b"\n" * (10 << 20)),
    "hole": lambda registry: os.truncate(registry, 1 << 40),
    "anothers": lambda registry: os.chown(registry, BOB, BOB),
    "writable": lambda registry: registry.chmod(0o620),
    "directory_writable": lambda registry: registry.parent.chmod(0o777),
    "directory_is_a_link": _directory_is_a_link,
}


@pytest.mark.parametrize("how", SPOIL)
def test_what_is_no_registry_of_his_alone_is_not_read(users: tuple[Path, Path], how: str) -> None:
    alice, bob = users
    SPOIL[how](registry_of(alice))
    began_s = time.monotonic()
    assert heard() == [(BOB, bob)]
    assert time.monotonic() - began_s < LIMIT_S


def test_ten_thousand_lines_are_not_read_and_a_thousand_cost_little(users: tuple[Path, Path]) -> None:
    alice, bob = users
    line = line_of(alice)
    registry_of(alice).write_bytes(encode(line) + b"/\n" * 10_000)
    assert heard() == [(ALICE, alice), (BOB, bob)]
    registry_of(alice).write_bytes(b"/\n" * MAX_LINES + encode(line))
    assert heard() == [(BOB, bob)]


def test_a_path_through_a_link_of_his_leads_nowhere(users: tuple[Path, Path]) -> None:
    alice, bob = users
    line = line_of(alice)
    (alice / "link").symlink_to(alice)
    os.lchown(alice / "link", ALICE, ALICE)
    says(alice, ALICE, line._replace(path=raw(alice / "link")))
    assert heard() == [(BOB, bob)]


def test_a_path_through_a_link_of_roots_is_gone(users: tuple[Path, Path]) -> None:
    alice, bob = users
    (alice.parent / "link").symlink_to(alice.name)
    line = line_of(alice)
    says(alice, ALICE, line._replace(path=raw(alice.parent / "link")))
    assert heard() == [(ALICE, alice.parent / "link"), (BOB, bob)]


def test_a_link_of_roots_that_a_user_may_have_moved_is_not_gone(users: tuple[Path, Path]) -> None:
    alice, bob = users
    (alice / "link").symlink_to(alice)  # root's, in a directory of hers
    says(alice, ALICE, line_of(alice)._replace(path=raw(alice / "link")))
    assert heard() == [(BOB, bob)]


def test_anothers_store_is_not_served_by_his_word(users: tuple[Path, Path]) -> None:
    alice, bob = users
    says(alice, ALICE, line_of(bob))
    registry_of(bob).unlink()
    assert heard() == []


def test_a_store_of_roots_is_not_served_by_his_word(users: tuple[Path, Path]) -> None:
    alice, bob = users
    backup = make_tree(alice.parent / "backup", {})
    init(backup)
    (known,) = [line for line in decode(Path("/var/lib/trashd/stores").read_bytes()) if line.path == raw(backup)]
    says(alice, ALICE, known)
    assert heard() == [(BOB, bob)]


@pytest.mark.needs("fuse")
def test_what_he_has_mounted_is_not_asked_for_anything(users: tuple[Path, Path]) -> None:
    alice, bob = users
    (alice / "dead").mkdir()
    with silent_fuse(alice / "dead", ALICE) as fuse:
        says(alice, ALICE, line_of(alice)._replace(path=raw(alice / "dead/deep")), line_of(alice))
        assert heard() == [(ALICE, alice), (BOB, bob)]
        assert select.select([fuse], [], [], 0)[0] == []


@pytest.mark.needs("fuse")
def test_a_dead_mount_of_roots_keeps_nobody_waiting_for_another_store(users: tuple[Path, Path]) -> None:
    alice, bob = users
    (alice.parent / "dead").mkdir()
    line = line_of(alice)
    with silent_fuse(alice.parent / "dead", 0):
        says(alice, ALICE, line._replace(path=raw(alice.parent / "dead/deep")), line)
        assert heard() == [(ALICE, alice), (BOB, bob)]


@pytest.mark.needs("fuse")
def test_a_dead_home_keeps_nobody_waiting_for_another(users: tuple[Path, Path]) -> None:
    alice, bob = users
    with silent_fuse(alice, 0):
        assert heard() == [(BOB, bob)]


@pytest.mark.parametrize("kind", ["direct", "indirect"])
@pytest.mark.parametrize("below", ["", "home", "home/deeper"])
def test_no_automount_is_woken(users: tuple[Path, Path], kind: str, below: str) -> None:
    alice, bob = users
    point = alice.parent / "net"
    point.mkdir()
    with resting(point, kind) as is_woken:
        says(alice, ALICE, line_of(alice)._replace(path=raw(point / below)))
        assert heard() == [(BOB, bob)]
        assert not is_woken()


def test_who_has_no_registry_costs_no_process(users: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    alice, bob = users
    registry_of(alice).unlink()
    forks, fork = [], os.fork

    def counted() -> int:
        pid = fork()
        forks.append(pid)
        return pid

    monkeypatch.setattr(os, "fork", counted)
    kernel, mounts = Kernel(), read_mounts()
    assert [Path(os.fsdecode(word.line.path)) for word in stores_of_users(kernel, mounts)] == [bob]
    assert len(forks) == 4  # the accounts, who has one, Bob's, and where its line leads


def test_the_way_ends_at_what_is_no_directory(users: tuple[Path, Path]) -> None:
    alice, _bob = users
    (alice / "file").touch()
    with pytest.raises(NotADirectoryError):
        open_way(Kernel(), raw(alice / "file"), read_mounts(), (0, ALICE))


def test_the_way_ends_at_what_another_user_has_mounted(users: tuple[Path, Path]) -> None:
    alice, _bob = users
    (point := alice / "mount").mkdir()
    with bind_mount(alice.parent, point):
        mounts = [one._replace(owner=ALICE) if one.point == raw(point) else one for one in read_mounts()]
        open_way(Kernel(), raw(point), mounts, (0, ALICE)).close()
        with pytest.raises(OSError, match=os.strerror(errno.EXDEV)):
            open_way(Kernel(), raw(point), mounts, (0,))


def test_a_line_of_a_user_opens_nothing_for_root_himself(users: tuple[Path, Path]) -> None:
    alice, _bob = users
    assert open_registered(Kernel(), LineOf(0, line_of(alice)), read_mounts()) is None
