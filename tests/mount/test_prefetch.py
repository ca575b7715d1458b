"""Nodes without clients: many names found by threads of C, names without file handles, and what is forgotten soon."""

import logging
import os
import re
import shutil
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import trio
import trio.testing

from fusefs.core.metadata_cache import ACCESS_ACL, CACHED_XATTRS, NAMES, ROOT
from fusefs.linux.fd import Fd
from fusefs.linux.statx import OPEN_FLAGS, identify_fd
from fusefs.linux.syscalls import RENAME_EXCHANGE
from fusefs.linux.xattrs import read_xattr
from fusefs.mount.native._core import Prefetcher
from fusefs.mount.tables.daemon_cache import LookupResult
from fusefs.mount.tree.vfs import Vfs
from tests.support.acls import ACCESS, GROUP_OBJ, MASK, NOBODY, OTHER, USER, USER_OBJ, acl
from tests.support.fake_dev_fuse import Files, Names, Somebody, vfs_at
from tests.support.foreground_mount import Mounted, trashd_mount, until
from tests.support.mount_and_backing import opened
from tests.support.real_filesystems import overlay_volume, tmpfs_volume
from tests.support.store_verbs import init, recover_all

pytestmark = pytest.mark.needs("root")


N = 1000
ACL = acl((USER_OBJ, 6, NOBODY), (USER, 6, 1000), (GROUP_OBJ, 4, NOBODY), (MASK, 6, NOBODY), (OTHER, 4, NOBODY))
ALL = (1 << len(CACHED_XATTRS)) - 1
BATCH: Any = "batch"


@pytest.fixture
def top() -> Iterator[Path]:
    with tmpfs_volume() as volume:
        yield volume


@pytest.fixture
def prefetcher() -> Iterator[Prefetcher]:
    made = Prefetcher(8)
    yield made
    made.end()


def found(
    prefetcher: Prefetcher, top: Path, names: list[bytes], xattrs: tuple[int, int] = (0, 0), *, has_handles: bool = True
) -> dict[bytes, LookupResult | None]:
    assert prefetcher.add(BATCH, os.open(top, os.O_PATH), names, xattrs, has_handles, 1, 8)
    results: dict[bytes, LookupResult | None] = {}
    while len(results) < len(names):
        for batch, name, one in prefetcher.results():
            assert cast(str, batch) == BATCH
            assert name not in results
            results[name] = one
    return results


@pytest.mark.parametrize("has_handles", [True, False])
def test_many_names_are_found_as_they_are(prefetcher: Prefetcher, top: Path, *, has_handles: bool) -> None:
    names = [b"%d" % number for number in range(N)]
    for name in names:
        (top / os.fsdecode(name)).touch()
    with Fd(os.open(top, os.O_PATH)) as fd:
        for _ in range(2):
            for name, one in found(prefetcher, top, [*names, b"none"], has_handles=has_handles).items():
                if name == b"none":
                    assert one is None
                else:
                    with Fd(os.open(name, OPEN_FLAGS, dir_fd=fd)) as inode:
                        seen, handle = identify_fd(inode)
                    assert one == (seen, handle if has_handles else b"", {})


@pytest.mark.parametrize("is_directory", [False, True])
def test_extended_attributes_of_its_kind_are_found(prefetcher: Prefetcher, top: Path, *, is_directory: bool) -> None:
    (top / "it").mkdir() if is_directory else (top / "it").touch()
    os.setxattr(top / "it", ACCESS, ACL)
    (top / "link").symlink_to("it")
    xattrs = (0, ALL) if is_directory else (ALL, 0)
    results = found(prefetcher, top, [b"it", b"link"], xattrs)
    one, link = results[b"it"], results[b"link"]
    assert one is not None
    assert link is not None
    assert not link[2]
    with Fd(os.open(top / "it", os.O_PATH)) as fd:
        assert one[2] == {name: read_xattr(fd, name) for name in CACHED_XATTRS}
    assert one[2][ACCESS_ACL] == ACL
    other = found(prefetcher, top, [b"it"], xattrs[::-1])[b"it"]
    assert other is not None
    assert not other[2]


def test_a_list_of_names_that_is_long_is_left_to_a_request(prefetcher: Prefetcher, top: Path) -> None:
    (top / "it").touch()
    for number in range(40):
        os.setxattr(top / "it", f"user.{'x' * 200}{number}", b"")
    one = found(prefetcher, top, [b"it"], (1 << CACHED_XATTRS.index(NAMES), 0))[b"it"]
    assert one is not None
    assert one[2] == {}


def test_a_directory_is_closed_when_all_results_are_taken(prefetcher: Prefetcher, top: Path) -> None:
    before = os.listdir("/proc/self/fd")
    found(prefetcher, top, [b"none"])
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_nothing_is_looked_up_after_the_end(prefetcher: Prefetcher, top: Path) -> None:
    prefetcher.end()
    assert not prefetcher.add(BATCH, os.open(top, os.O_PATH), [b"it"], (0, 0), False, 1, 8)
    assert prefetcher.results() == []


ME = Somebody(0, 0, os.getpid(), 0o022)


@pytest.fixture
def vfs() -> Iterator[Vfs]:
    """On an overlay, with the tree a/x/f and b/y/f."""
    with overlay_volume() as overlay:
        for path in ("a/x", "b/y"):
            (overlay.path / path).mkdir(parents=True)
            (overlay.path / path / "f").write_text(path)
        with vfs_at(overlay.path, max_fds=0) as vfs:
            yield vfs


def look_up(vfs: Vfs, path: bytes) -> int:
    """The nodeid at a path; every node on the way stays known."""
    nodeid: int = ROOT
    for name in path.split(b"/"):
        nodeid = Names(vfs).lookup(nodeid, name, ME).nodeid
    return nodeid


def close_directories(vfs: Vfs) -> None:
    """As if many others had been needed since."""
    for node in vfs.nodes:
        vfs.nodes.drop_directory_fd(node)


def content(vfs: Vfs, nodeid: int) -> bytes:
    """What is in a file, no directory being open before."""
    close_directories(vfs)
    fh = Files(vfs).open(nodeid, os.O_RDONLY, ME).fh
    try:
        return Files(vfs).read(fh, 0, 99)
    finally:
        Files(vfs).release(fh)


def test_both_of_two_exchanged_directories_are_found(vfs: Vfs) -> None:
    a, b = look_up(vfs, b"a/x/f"), look_up(vfs, b"b/y/f")
    Names(vfs).rename(ROOT, b"a", ROOT, b"b", RENAME_EXCHANGE, ME)
    assert (content(vfs, a), content(vfs, b)) == (b"a/x", b"b/y")


def test_directories_exchanged_over_different_parents_are_found(vfs: Vfs) -> None:
    a, b = look_up(vfs, b"a/x/f"), look_up(vfs, b"b/y/f")
    Names(vfs).rename(look_up(vfs, b"a"), b"x", look_up(vfs, b"b"), b"y", RENAME_EXCHANGE, ME)
    assert (content(vfs, a), content(vfs, b)) == (b"a/x", b"b/y")


def test_what_is_below_a_renamed_directory_is_found(vfs: Vfs) -> None:
    file = look_up(vfs, b"a/x/f")
    Names(vfs).rename(ROOT, b"a", look_up(vfs, b"b/y"), b"moved", 0, ME)
    assert content(vfs, file) == b"a/x"


def test_linked_file_is_found_by_the_name_that_is_left(vfs: Vfs) -> None:
    file, elsewhere = look_up(vfs, b"a/x/f"), look_up(vfs, b"b/y")
    Names(vfs).link(file, elsewhere, b"link", ME)
    Names(vfs).unlink(look_up(vfs, b"a/x"), b"f", ME)
    assert content(vfs, file) == b"a/x"


def test_deep_chain_is_opened_with_two_fds(vfs: Vfs) -> None:
    nodeid: int = ROOT
    for _ in range(1500):
        nodeid = Names(vfs).mkdir(nodeid, b"d", 0o755, ME).nodeid
    close_directories(vfs)
    made = Names(vfs).mkdir(nodeid, b"last", 0o755, ME)
    close_directories(vfs)
    assert Files(vfs).getattr(made.nodeid, ME).attributes.is_directory()


ROOT_ID, LIMIT_S = 1, 60.0
N_DROPPED, N_NEARLY_NONE, N_AT_A_TIME = 300, 20, 128
HEAD, EXPIRED, PRUNED = struct.Struct("=IiQIIQ"), 3, 9
Known = tuple[Vfs, int, list[int]]


@pytest.fixture
def source() -> Iterator[Path]:
    with tmpfs_volume() as volume:
        path = volume / "source"
        for name in ("victim/sub", "elsewhere"):
            (path / name).mkdir(parents=True)
            for number in range(N_DROPPED):
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
    for number in range(N_DROPPED):
        (directory / f"f{number}").stat()


def n_scanned() -> int:
    """How many names, nodes and the like the kernel has looked at to have memory back, for any process."""
    (n,) = re.findall(r"^slabs_scanned (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    return int(n)


def drop(mount: Mounted) -> Path:
    """Where the victim is, of which everything is known."""

    def is_known() -> bool:
        look_at_all(mount.path / "victim" / "sub")  # again, if the machine has dropped its caches meanwhile
        return mount.n_nodes() > N_DROPPED

    assert until(is_known)
    return (mount.path / "victim").rename(mount.path / ".trashd" / "drop" / "victim")


@pytest.mark.needs("fuse", "prune")
def test_what_is_dropped_is_forgotten_and_is_an_orphan(mount: Mounted) -> None:
    drop(mount)
    assert until(lambda: mount.n_nodes() < N_NEARLY_NONE)
    [tree] = mount.backing.glob(".trashd/u/0/orphans/*/tree")
    assert len(os.listdir(tree / "sub")) == N_DROPPED


@pytest.mark.needs("fuse", "prune")
def test_the_next_one_of_that_name_is_forgotten_as_well(mount: Mounted) -> None:
    drop(mount)
    assert recover_all(mount.backing) == []
    (mount.path / "victim/sub").mkdir(parents=True)
    for number in range(N_DROPPED):
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
    assert until(lambda: mount.n_nodes() < N_DROPPED + N_NEARLY_NONE)
    before = mount.stats().operations["lookup"].n()
    look_at_all(mount.path / "elsewhere")
    assert mount.stats().operations["lookup"].n() == before or until(lambda: n_scanned() > at_first)


@pytest.fixture
def known(source: Path) -> Iterator[Known]:
    """A vfs, the nodeid of the drop folder, and those of the victim and all that is in it."""
    with vfs_at(source) as vfs:

        def look(*names: str) -> int:
            nodeid = ROOT_ID
            for name in names:
                nodeid = Names(vfs).lookup(nodeid, os.fsencode(name), ME).nodeid
            return nodeid

        look("elsewhere", "f1")
        victim = [look("victim"), look("victim", "sub"), *(look("victim", "sub", f"f{i}") for i in range(N_DROPPED))]
        yield vfs, look(".trashd", "u", "0", "drop"), victim


def run_beside(known: Known, device: int, after: Callable[[], object]) -> None:
    """Move the victim into the drop folder while the kernel is told; until `after` has nothing to wait for."""
    vfs, folder, _ = known

    async def main() -> None:
        with trio.fail_after(LIMIT_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(vfs.stored_notices.forget_until_cancelled, device)
                await trio.testing.wait_all_tasks_blocked()
                Names(vfs).rename(ROOT_ID, b"victim", folder, b"victim", 0, ME)
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
        assert until(lambda: "until their names are used again" in caplog.text, LIMIT_S)

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
