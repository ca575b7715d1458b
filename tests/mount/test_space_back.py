"""After a swap and a reap through a mount: the daemon's fds, its nodes and the free space are where they were."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from fusefs.cli import wait
from fusefs.core.errors import Incomplete
from fusefs.linux.fd import Fd
from tests.support.foreground_mount import SHARED_LIMIT_S, Mounted, trashd_mount, until
from tests.support.real_filesystems import loop_volume, sync
from tests.support.trashd_command import done_well, swapped, trashd

pytestmark = pytest.mark.needs("root", "fuse", "loop", "prune")

N_DIRECTORIES, N_FILES = 40, 8
LARGE_BYTES = 4 << 20
N_LARGE, NAME_BYTES = 2000, 200
"""So many names, so long, make a directory that `--wait` misses."""
LIMIT_S = 60.0
_SLACK = 8
"""Fds and nodes of what was looked at to find out: the store's own directories."""
_SLACK_BYTES = 64 << 10
_NUMBERS = itertools.count()


class Seen(NamedTuple):
    """What a mount and its volume hold."""

    n_nodes: int
    n_deleted: int
    free_bytes: int
    free_inodes: int


@pytest.fixture(scope="module", params=["over itself", "elsewhere", "shared"])
def mount_for_all(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    with loop_volume("ext4") as volume:
        done_well("init", volume)
        coherence = "shared" if request.param == "shared" else "exclusive"
        with trashd_mount(
            volume,
            volume if request.param == "over itself" else None,
            options=[f"coherence={coherence}", "timeout=3600"],
            limit_s=SHARED_LIMIT_S,
        ) as mounted:
            yield mounted


@pytest.fixture
def mount(mount_for_all: Mounted) -> Mounted:
    """Of which the kernel knows nothing of an earlier test's any more."""
    mount_for_all.forget_all()
    return mount_for_all


def n_deleted(mount: Mounted) -> int:
    """Directories and files that the daemon has open though a reaper has deleted them."""
    n = 0
    for fd in Path(f"/proc/{mount.pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            link = os.readlink(fd)
            n += "/.trashd/" in link and link.endswith(" (deleted)")
    return n


def seen(mount: Mounted) -> Seen:
    sync(mount.backing)
    volume = os.statvfs(mount.path)
    return Seen(mount.stats().gauges["n_nodes"], n_deleted(mount), volume.f_bfree * volume.f_frsize, volume.f_ffree)


def fill(mount: Mounted) -> Path:
    top = mount.path / f"job-{next(_NUMBERS)}"
    top.mkdir()
    for number in range(N_DIRECTORIES):
        (directory := top / f"d{number}").mkdir()
        for file in range(N_FILES):
            (directory / f"f{file}").write_bytes(b"content")
    return top


def is_back(mount: Mounted, before: Seen) -> bool:
    now = seen(mount)
    return (
        now.n_nodes <= before.n_nodes + _SLACK
        and now.n_deleted <= before.n_deleted
        and now.free_bytes >= before.free_bytes - _SLACK_BYTES
        and now.free_inodes >= before.free_inodes - _SLACK
    )


def begin(mount: Mounted) -> Seen:
    """What there is when a swap has been once, and no process holds its directory: the store has what it needs."""
    (mount.path / "first").mkdir()
    done_well("reap", "--now", swapped(mount.path / "first")["id"])
    (mount.path / "first").rmdir()
    assert until(lambda: not n_deleted(mount), LIMIT_S)
    return seen(mount)


def swap_and_reap(top: Path) -> None:
    done_well("reap", "--now", swapped(top)["id"])
    top.rmdir()


def test_after_swap_and_reap_all_is_where_it_was(mount: Mounted) -> None:
    before = begin(mount)
    swap_and_reap(fill(mount))
    assert until(lambda: is_back(mount, before), LIMIT_S), (before, seen(mount))


def test_what_somebody_looked_at_in_the_store_is_let_go_of_as_well(mount: Mounted) -> None:
    before = begin(mount)
    identifier = swapped(top := fill(mount))["id"]
    tree = mount.path / ".trashd/u/0/orphans" / str(identifier) / "tree"
    assert sum(len(files) for _, _, files in os.walk(tree)) == N_DIRECTORIES * N_FILES
    assert (tree / "d1/f1").read_bytes() == b"content"
    done_well("reap", "--now", identifier)
    top.rmdir()
    assert until(lambda: is_back(mount, before), LIMIT_S), (before, seen(mount))


def test_who_works_in_the_old_tree_goes_on_and_all_comes_back_when_he_has_let_go(mount: Mounted) -> None:
    before = begin(mount)
    top = fill(mount)
    with Fd(os.open(top / "d1", os.O_RDONLY | os.O_DIRECTORY)) as where, (top / "d2/f2").open("r+b") as file:
        identifier = swapped(top)["id"]
        assert until(lambda: mount.stats().gauges["n_nodes"] < N_DIRECTORIES, LIMIT_S)
        assert len(os.listdir(where)) == N_FILES
        os.close(os.open("late", os.O_CREAT | os.O_WRONLY, dir_fd=where))
        done_well("reap", "--now", identifier)
        assert os.fstat(where).st_nlink == 0
        assert file.read() == b"content"
        file.write(b"more")
        file.flush()
        top.rmdir()
        assert not is_back(mount, before)
    assert until(lambda: is_back(mount, before), LIMIT_S), (before, seen(mount))


def test_a_wait_for_the_space_names_the_daemon_that_has_files_open_for_others(
    mount: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait, "_PATIENCE_S", 1.0)
    top = fill(mount)
    (top / "d2/large").write_bytes(os.urandom(LARGE_BYTES))
    with (top / "d2/large").open("rb"):
        identifier = swapped(top)["id"]
        done = trashd("reap", "--now", "--wait", "--json", identifier)
        assert done.code == Incomplete.exit_code
        *_, told = done.objects()
    (reason,) = [one for one in told["reasons"] if one["kind"] == "open"]
    assert reason["n_bytes"] >= LARGE_BYTES
    assert f"(pid {mount.pid}) has " in reason["detail"]


def test_a_wait_for_the_space_waits_until_the_daemon_has_let_go(mount: Mounted) -> None:
    top = fill(mount)
    for number in range(N_LARGE):
        (top / "d1" / f"{number}".rjust(NAME_BYTES, "x")).touch()
    done = done_well("reap", "--now", "--wait", "--json", swapped(top)["id"])
    assert done.objects()[-1]["is_reached"]


def test_a_restored_tree_is_whole_and_known_anew(mount: Mounted) -> None:
    top = fill(mount)
    identifier = swapped(top)["id"]
    assert until(lambda: mount.stats().gauges["n_nodes"] < N_DIRECTORIES, LIMIT_S)
    done_well("restore", identifier, "--volume", mount.path)
    assert sum(len(files) for _, _, files in os.walk(top)) == N_DIRECTORIES * N_FILES
    with ExitStack() as held:  # the kernel may forget what nobody holds at any time
        for path, _, _ in os.walk(top):
            held.enter_context(Fd(os.open(path, os.O_PATH)))
        assert until(lambda: mount.stats().gauges["n_nodes"] >= N_DIRECTORIES, LIMIT_S)


def test_who_stays_in_a_tree_sees_what_a_reaper_did_there_when_it_is_back(mount: Mounted) -> None:
    """What was told before it was dropped would last for an hour."""
    top = fill(mount)
    with Fd(os.open(top / "d1", os.O_RDONLY)) as held:
        assert until(lambda: _lasts(mount, held))
        drop = (mount.path / ".trashd/drop").resolve()
        top.rename(drop / top.name)
        assert until(lambda: mount.stats().gauges["n_nodes"] < N_DIRECTORIES, LIMIT_S)
        [behind] = mount.backing.glob(".trashd/u/0/orphans/*/tree")
        for file in (behind / "d1").iterdir():
            file.unlink()
        back = mount.path / behind.relative_to(mount.backing)
        back.stat()  # or the kernel, which knows it elsewhere, says ESTALE
        back.rename(top)
        assert os.fstat(held).st_mtime_ns == (mount.backing / top.name / "d1").stat().st_mtime_ns


def _lasts(mount: Mounted, fd: Fd) -> bool:
    """Whether the kernel believes what a directory is for longer than the second for which it believes anything."""
    os.fstat(fd)
    before = mount.stats().operations["getattr"].n()
    time.sleep(1.2)
    os.fstat(fd)
    return mount.stats().operations["getattr"].n() == before
