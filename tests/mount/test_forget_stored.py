"""What clients move into a drop folder: the kernel forgets it soon, and nothing else."""

from __future__ import annotations

import logging
import os
import re
import shutil
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from fusefs.linux.fd import Fd
from fusefs.mount.tree.vfs import Vfs
from tests.support.foreground_mount import Mounted, trashd_mount, until
from tests.support.mount_and_backing import opened
from tests.support.real_filesystems import tmpfs_volume
from tests.support.store_verbs import init, recover_all
from tests.support.vfs_without_mount import Files, Names, Somebody, vfs_at

pytestmark = pytest.mark.needs("root")

ROOT, ME, LIMIT_S = 1, Somebody(0, 0, os.getpid(), 0o022), 60.0
N, N_NEARLY_NONE, N_AT_A_TIME = 300, 20, 128
HEAD, EXPIRED, PRUNED = struct.Struct("=IiQIIQ"), 3, 9
Known = tuple[Vfs, int, list[int]]


@pytest.fixture
def source() -> Iterator[Path]:
    with tmpfs_volume() as volume:
        path = volume / "source"
        for name in ("victim/sub", "elsewhere"):
            (path / name).mkdir(parents=True)
            for number in range(N):
                (path / name / f"f{number}").touch()
        init(path)
        (path / ".trashd/u/0/drop").mkdir(parents=True, exist_ok=True)
        yield path


@pytest.fixture(params=[("exclusive", "local"), ("exclusive", "slow"), ("shared", "local")], ids=" ".join)
def mount(source: Path, request: pytest.FixtureRequest) -> Iterator[Mounted]:
    coherence, backing = request.param
    options = [f"coherence={coherence}", "timeout=3600", f"backing={backing}"]
    with trashd_mount(source, options=options) as mounted:
        yield mounted


def look_at_all(directory: Path) -> None:
    for number in range(N):
        (directory / f"f{number}").stat()


def n_scanned() -> int:
    """How many names, nodes and the like the kernel has looked at to have memory back, for any process."""
    (n,) = re.findall(r"^slabs_scanned (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    return int(n)


def drop(mount: Mounted) -> Path:
    """Where the victim is, of which everything is known."""

    def is_known() -> bool:
        look_at_all(mount.path / "victim" / "sub")  # again, if the machine has dropped its caches meanwhile
        return mount.n_nodes() > N

    assert until(is_known)
    return (mount.path / "victim").rename(mount.path / ".trashd" / "drop" / "victim")


@pytest.mark.needs("fuse", "prune")
def test_what_is_dropped_is_forgotten_and_is_an_orphan(mount: Mounted) -> None:
    drop(mount)
    assert until(lambda: mount.n_nodes() < N_NEARLY_NONE)
    [tree] = mount.backing.glob(".trashd/u/0/orphans/*/tree")
    assert len(os.listdir(tree / "sub")) == N


@pytest.mark.needs("fuse", "prune")
def test_the_next_one_of_that_name_is_forgotten_as_well(mount: Mounted) -> None:
    drop(mount)
    assert recover_all(mount.backing) == []
    (mount.path / "victim/sub").mkdir(parents=True)
    for number in range(N):
        (mount.path / "victim/sub" / f"f{number}").touch()
    drop(mount)
    assert until(lambda: mount.n_nodes() < N_NEARLY_NONE)


@pytest.mark.needs("fuse", "prune")
def test_who_is_at_work_in_what_is_dropped_stays_where_he_is(mount: Mounted) -> None:
    (mount.backing / "victim/sub/f1").write_bytes(b"content")
    with opened(mount.path / "victim" / "sub") as where, (mount.path / "victim/sub/f1").open("rb") as file:
        drop(mount)
        assert until(lambda: mount.n_nodes() < N_NEARLY_NONE)
        assert where() == str(mount.path / ".trashd/u/0/drop/victim/sub"), "as long as nobody asks for that name"
        assert file.read() == b"content"


@pytest.mark.needs("fuse", "prune")
def test_what_lies_elsewhere_stays_known(mount: Mounted) -> None:
    """Unless memory is short: of that nothing is told, but it is counted."""
    at_first = n_scanned()
    look_at_all(mount.path / "elsewhere")
    drop(mount)
    assert until(lambda: mount.n_nodes() < N + N_NEARLY_NONE)
    before = mount.stats().operations["lookup"].n()
    look_at_all(mount.path / "elsewhere")
    assert mount.stats().operations["lookup"].n() == before or until(lambda: n_scanned() > at_first)


@pytest.fixture
def known(source: Path) -> Iterator[Known]:
    """A vfs, the nodeid of the drop folder, and those of the victim and all that is in it."""
    with vfs_at(source) as vfs:

        def look(*names: str) -> int:
            nodeid = ROOT
            for name in names:
                nodeid = Names(vfs).lookup(nodeid, os.fsencode(name), ME).nodeid
            return nodeid

        look("elsewhere", "f1")
        victim = [look("victim"), look("victim", "sub"), *(look("victim", "sub", f"f{i}") for i in range(N))]
        yield vfs, look(".trashd", "u", "0", "drop"), victim


def run_beside(known: Known, device: int, after: Callable[[], object]) -> None:
    """Move the victim into the drop folder while the kernel is told; until `after` has nothing to wait for."""
    vfs, folder, _ = known

    async def main() -> None:
        with trio.fail_after(LIMIT_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(vfs.stored.run, device)
                await trio.testing.wait_all_tasks_blocked()
                Names(vfs).rename(ROOT, b"victim", folder, b"victim", 0, ME)
                await trio.to_thread.run_sync(after)
                nursery.cancel_scope.cancel()

    trio.run(main)


def test_it_goes_in_small_parts_and_what_is_in_a_directory_goes_first(known: Known) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parts: list[tuple[int, ...]] = []
    expired: list[tuple[int, bytes]] = []

    def listen() -> None:
        while sum(map(len, parts)) < len(known[2]) or not expired:
            message = ours.recv(1 << 16)
            size, code, unique, n, _, _ = HEAD.unpack_from(message)
            assert (size, unique) == (len(message), 0)
            if code == EXPIRED:
                expired.append((n, message[-7:]))
                continue
            assert code == PRUNED
            parts.append(struct.unpack_from(f"={n}Q", message, HEAD.size))

    with ours, theirs:
        ours.settimeout(LIMIT_S)
        run_beside(known, theirs.fileno(), listen)
    assert [nodeid for part in parts for nodeid in part] == known[2][::-1]
    assert max(map(len, parts)) <= N_AT_A_TIME
    assert expired == [(known[1], b"victim\0")]


def test_a_kernel_that_does_not_know_the_message_is_asked_once(known: Known, caplog: pytest.LogCaptureFixture) -> None:
    def wait() -> None:
        assert until(lambda: "when that name is used again" in caplog.text, LIMIT_S)

    with caplog.at_level(logging.INFO), Fd(os.open(os.devnull, os.O_RDONLY)) as refusing:
        run_beside(known, refusing, wait)


def test_a_kernel_that_does_not_know_the_message_costs_no_fd_of_what_was_removed(known: Known, source: Path) -> None:
    vfs, _, victim = known
    sub = vfs.nodes.get(victim[1])
    assert sub is not None

    def wait() -> None:
        assert vfs.nodes.directory_fd(sub) is not None
        [tree] = source.glob(".trashd/u/0/orphans/*/tree")
        shutil.rmtree(tree)
        assert until(lambda: vfs.nodes.directory_fd(sub) is None, LIMIT_S)

    with Fd(os.open(os.devnull, os.O_RDONLY)) as refusing:
        run_beside(known, refusing, wait)
    told = Files(vfs).getattr(victim[1], ME)
    assert (told.attributes.is_directory(), told.attributes.nlink) == (True, 0)
    with pytest.raises(FileNotFoundError):
        Names(vfs).lookup(victim[1], b"f1", ME)
