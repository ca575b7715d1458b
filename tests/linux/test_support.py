"""Support of the tests, itself tested: users of .ci/init, oracles, snapshots, volumes full or slow, children."""

import errno
import os
import shutil
import stat
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

from fusefs.linux.kernel import Kernel
from tests.support.crash_scenarios import DyingAfter
from tests.support.fuse_slow import slow_volume
from tests.support.hostile_steps import ALICE, BOB, CAROL, LIVE, TEAM, team
from tests.support.make_trees import (
    IMMUTABLE,
    Dir,
    File,
    HardLink,
    Spec,
    SpecialFile,
    Symlink,
    make_tree,
    remove_tree_hard,
    set_flags,
    snapshot,
)
from tests.support.mount_namespaces import ROOTS, see_own_mounts_only
from tests.support.other_users import as_user
from tests.support.plain_twin import Exchange, Twins, contents, could_delete
from tests.support.real_filesystems import ON_DISK, full, loop_volume, mount_of, tmpfs_volume
from tests.support.shared_memory_children import call_in_child, code_of_child
from tests.support.store_verbs import DyingAt

REPO = Path(__file__).parents[2]
INSIDE = (
    "unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private",
    REPO / ".ci/init",
)  # fmt: skip
AS_OTHER = "setpriv --reuid={0} --regid={0} --clear-groups "


def inside(cwd: Path, script: str) -> str:
    return subprocess.run([*INSIDE, "sh", "-euc", script], cwd=cwd, capture_output=True, text=True, check=True).stdout


@pytest.mark.needs("root")
@pytest.mark.parametrize("above", ["shut", "shut/and/more", "a,colon:and\\more"])
@pytest.mark.parametrize("uid", [1000, 4711])
def test_others_pass_to_a_clone_below_a_private_directory(tmp_path: Path, above: str, uid: int) -> None:
    clone = tmp_path / above / "clone"
    clone.mkdir(parents=True)
    (clone / "file").write_text("content")
    for directory in (clone.parent, tmp_path / above.partition("/")[0]):
        directory.chmod(0o700)
    assert inside(clone, AS_OTHER.format(uid) + 'cat "$PWD/file" file') == 2 * "content"
    inside(clone, "echo made > made")
    assert (clone / "made").read_text() == "made\n", "the clone is the clone itself"
    assert stat.S_IMODE(clone.parent.stat().st_mode) == 0o700, "of the machine nothing changes"


@pytest.mark.needs("root")
def test_the_machines_list_of_stores_is_not_theirs(tmp_path: Path) -> None:
    mark = f"{tmp_path.name}-{os.getpid()}"
    assert inside(tmp_path, f"ls /var/lib/trashd; echo > /var/lib/trashd/{mark}") == ""
    pid = os.fork()
    if pid == 0:
        see_own_mounts_only()  # as the benchmarks and each of the tests' workers do
        (ROOTS / mark).touch()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert not (ROOTS / mark).exists()


HER_OWN = "content of live/results/thesis"
ANY_MATES = "content of live/draft"


@pytest.fixture
def twins() -> Iterator[Twins]:
    with tmpfs_volume() as first, tmpfs_volume() as plain, team(first, plain, BOB) as both:
        yield both


@pytest.mark.needs("root")
def test_nothing_is_a_fault_where_nothing_happened(twins: Twins) -> None:
    assert twins.faults(contents(twins.first)) == []


@pytest.mark.needs("root")
def test_what_is_gone_is_a_fault_unless_who_is_up_to_something_could_delete_it(twins: Twins) -> None:
    before = contents(twins.first)
    shutil.rmtree(twins.first.at(LIVE))
    assert f"gone: {HER_OWN}" in twins.faults(before)
    assert f"gone: {ANY_MATES}" not in twins.faults(before)


@pytest.mark.needs("root")
def test_what_its_owner_gave_away_may_go_until_it_is_back(twins: Twins) -> None:
    before = contents(twins.first)
    twins.give(ALICE, LIVE, 1, is_swap=False)
    shutil.copytree(twins.first.at(LIVE), twins.first.at("srv/back"))
    shutil.rmtree(twins.first.at(LIVE))
    assert not [fault for fault in twins.faults(before) if fault.startswith("gone")]
    twins.keep_from_now("srv/back")
    shutil.rmtree(twins.first.at("srv/back"))
    assert f"gone: {HER_OWN}" in twins.faults(before)


@pytest.mark.needs("root")
def test_what_somebody_reads_who_never_could_is_a_fault(twins: Twins) -> None:
    twins.first.at("team").chmod(0o2770)
    twins.first.at("srv/secret").chmod(0o604)
    assert twins.faults(contents(twins.first)) == [
        f"{name} reads: content of srv/secret" for name in ("alice", "bob", "carol")
    ]


@pytest.mark.needs("root")
def test_what_its_owner_gets_no_more_is_a_fault(twins: Twins) -> None:
    twins.first.at(LIVE).rename(twins.first.at("srv/live"))
    twins.first.at("srv").chmod(0o700)
    assert f"out of the reach of alice: {HER_OWN}" in twins.faults(contents(twins.first))


@pytest.mark.needs("root")
def test_the_plain_ones_people_do_only_what_the_kernel_lets_them(twins: Twins) -> None:
    before = contents(twins.plain)
    twins.give(CAROL, LIVE, 1, is_swap=True)
    twins.act(twins.plain, [lambda side: shutil.rmtree(side.at(LIVE), ignore_errors=True)])
    assert before.keys() - contents(twins.plain).keys() <= twins.may_go
    assert HER_OWN in contents(twins.plain)


@pytest.mark.needs("root")
def test_what_is_done_again_undoes_no_exchange_but_does_one_that_failed(twins: Twins) -> None:
    made, failing = Exchange(f"{LIVE}/open", f"{LIVE}/results"), Exchange(f"{LIVE}/open", f"{LIVE}/nothing")
    assert twins.act(twins.plain, [made, failing]) == [failing]
    assert twins.plain.at(f"{LIVE}/open/thesis").exists()


@pytest.mark.needs("root")
def test_who_could_delete_what_is_what_the_kernel_says(tmp_path: Path) -> None:
    for path in (tmp_path, *tmp_path.parents):
        path.chmod(path.stat().st_mode | 0o111)
    for owner, group, mode, may in (
        (ALICE.uid, TEAM, 0o2775, True), (ALICE.uid, TEAM, 0o755, False), (ALICE.uid, TEAM, 0o3775, False),
        (BOB.uid, 0, 0o000, True), (ALICE.uid, 0, 0o777, True), (ALICE.uid, TEAM, 0o707, False),
    ):  # fmt: skip
        directory = tmp_path / f"{owner}-{group}-{mode:o}"
        directory.mkdir()
        (directory / "file").write_text("content of file")
        os.chown(directory, owner, group)
        directory.chmod(mode)
        assert (could_delete(BOB, directory) == {"content of file"}) is may, directory


NO_ID = 2**32 - 1  # in ACLs
SPEC: Spec = {
    "empty": {},
    "file": "text",
    "other": File(b"\0" * 5000, mode=0o4711),
    "again": HardLink("other"),
    "link": Symlink(b"no\nwhere"),
    "fifo": SpecialFile(stat.S_IFIFO | 0o640),
    "dir": Dir({b"\xff": b"deeper"}, mode=0o2750),
}


def _replace(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


CHANGES: dict[str, Callable[[Path], object]] = {
    "content": lambda path: (path / "dir" / os.fsdecode(b"\xff")).write_bytes(b"DEEPER"),
    "mode": lambda path: (path / "empty").chmod(0o700),
    "mode of the root": lambda path: path.chmod(0o700),
    "name": lambda path: (path / "file").rename(path / "FILE"),
    "place": lambda path: (path / "file").rename(path / "dir/file"),
    "target": lambda path: _replace(path / "link", lambda link: link.symlink_to("x")),
    "kind": lambda path: _replace(path / "fifo", Path.touch),
    "links": lambda path: _replace(path / "again", lambda again: again.hardlink_to(path / "file")),
    "gone": lambda path: (path / "fifo").unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_snapshot_sees_a_change_of(change: str, tmp_path: Path) -> None:
    path = make_tree(tmp_path / "t", SPEC)
    before = snapshot(path)
    CHANGES[change](path)
    assert snapshot(path) != before


@pytest.mark.needs("root", "loop")
def test_snapshot_sees_owner_xattr_acl_flag_and_device() -> None:
    acl = struct.pack("<I" + 5 * "HHI", 2, 1, 7, NO_ID, 2, 5, 12001, 4, 5, NO_ID, 16, 5, NO_ID, 32, 0, NO_ID)
    with loop_volume("ext4") as volume:
        spec: Spec = {"f": "", "d": {}, "dev": SpecialFile(stat.S_IFCHR | 0o600, os.makedev(1, 3))}
        path = make_tree(volume / "t", spec)
        changes: list[Callable[[], object]] = [
            lambda: os.chown(path / "f", 12001, -1),
            lambda: os.chown(path / "f", -1, 12001),
            lambda: os.setxattr(path / "d", "user.x", b"1"),
            lambda: os.setxattr(path / "d", "trusted.x", b"1"),
            lambda: os.setxattr(path / "f", "system.posix_acl_access", acl),
            lambda: set_flags(path / "f", IMMUTABLE),
            lambda: _replace(path / "dev", lambda dev: os.mknod(dev, stat.S_IFCHR | 0o600, os.makedev(1, 5))),
        ]
        seen = [snapshot(path)]
        for change in changes:
            change()
            seen.append(snapshot(path))
            assert seen[-1] != seen[-2]
        remove_tree_hard(path)


USER = 12001


def _errno_of(function: Callable[[], object]) -> str | None:
    try:
        function()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return None


@pytest.mark.needs("root", "loop")
@pytest.mark.parametrize("fs_type", [*ON_DISK, "tmpfs"])
def test_full_leaves_nobody_a_block_or_an_inode(fs_type: str) -> None:
    volumes: dict[str, Callable[[], AbstractContextManager[Path]]] = {
        "ext4": lambda: loop_volume("ext4", 16, ("-N", "200")),
        "xfs": lambda: loop_volume("xfs"),
        "btrfs": lambda: loop_volume("btrfs", 128, ("--mixed",)),
        "tmpfs": lambda: tmpfs_volume("8m", ("nr_inodes=200",)),
    }
    with volumes[fs_type]() as volume:
        mine = volume / "mine"
        mine.mkdir(mode=0o777)
        mine.chmod(0o777)
        (mine / "file").write_bytes(b"")
        (mine / "file").chmod(0o666)

        def grow() -> None:
            fd = os.open(mine / "file", os.O_WRONLY)
            try:
                os.write(fd, os.urandom(4096))
                os.fsync(fd)
            finally:
                os.close(fd)

        def make() -> None:
            (mine / "new").mkdir()

        with full(volume):
            for attempt in (grow, make):
                assert _errno_of(attempt) == "ENOSPC"
                assert as_user(USER, partial(_errno_of, attempt)) == "ENOSPC"
            if fs_type in ("ext4", "tmpfs"):
                assert os.statvfs(volume).f_bavail == 0
        grow()
        make()


@pytest.mark.parametrize("hook", [DyingAt(1), DyingAfter("mkdir")], ids=["before a call", "after a call"])
def test_a_child_that_ends_makes_no_further_call_whatever_it_would_tidy_up(
    tmp_path: Path, hook: DyingAt | DyingAfter
) -> None:
    kernel = Kernel(hook)

    def act() -> None:
        fd = os.open(tmp_path, os.O_RDONLY)
        try:
            kernel.mkdir(fd, b"first")
            kernel.mkdir(fd, b"second")
        finally:
            try:
                kernel.rmdir(fd, b"first")
            finally:
                kernel.mkdir(fd, b"third")

    assert code_of_child(act) == DyingAt.EXIT_CODE
    assert os.listdir(tmp_path) == ["first"]


def test_a_child_itself_closes_a_generator_that_it_abandons() -> None:
    """Its fds are numbers of other files in the parent, where Python 3.14 closed it."""
    closed_by = []

    def hold() -> Iterator[None]:
        try:
            yield
        finally:
            closed_by.append(os.getpid())

    def abandon() -> int:
        next(hold())
        return os.getpid()

    def act() -> list[int]:
        return [abandon(), call_in_child(abandon, "an inner child"), abandon()]

    assert call_in_child(act, "a child") == closed_by


def test_what_a_child_changes_in_the_environment_is_not_this_process_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRASHD_ONE", "1")

    def act() -> str | None:
        del os.environ["TRASHD_ONE"]
        os.environ["HOME"] = "/nonexistent"
        return os.environ.get("HOME")

    before = dict(os.environ)
    assert as_user(USER, act) == "/nonexistent"
    assert os.environ == before


@pytest.mark.needs("root", "fuse")
def test_lookup_takes_the_delay_which_is_changed_at_run_time() -> None:
    with tmpfs_volume() as source, slow_volume(source, 20_000) as slow:
        (source / "x").touch()
        assert _stat_s(slow.path / "x") >= 0.02
        (source / "y").touch()
        slow.delay(40_000)
        assert _stat_s(slow.path / "y") >= 0.04


def _stat_s(path: Path) -> float:
    began = time.monotonic()
    os.stat(path)
    return time.monotonic() - began


@pytest.mark.needs("root", "fuse")
def test_end_leaves_neither_mount_nor_process_though_somebody_hangs() -> None:
    with tmpfs_volume() as source:
        with slow_volume(source) as slow:
            slow.hang("x")
            client = subprocess.Popen(["stat", slow.path / "x"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            slow.wait_until_hung()
        assert mount_of(slow.path) is None
        assert not slow.path.exists()
        with pytest.raises(ProcessLookupError):
            os.kill(slow.fuse.pid, 0)
        assert client.wait(10) == 1
