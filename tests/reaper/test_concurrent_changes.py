"""People who work in a tree while it is reaped: they can make a reap fail, and never make it leave the tree (I6)."""

import errno
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from random import Random

import pytest

from fusefs.core.container_states import State
from fusefs.linux.syscalls import RENAME_EXCHANGE, renameat2
from tests.support.make_trees import bulky_tree, deep_chain, fill, make_tree, snapshot
from tests.support.reap_process import (
    DONE,
    QUARANTINED,
    Reaping,
    beside,
    code_of,
    start_and_stop,
    start_reap,
    state_of,
)
from tests.support.store_verbs import place, reap_now, swap
from tests.support.team_trees import way_into

pytestmark = pytest.mark.needs("root")

ENDED = (DONE, QUARANTINED)
N_FILES = 60


def same_names(path: Path) -> Path:
    """A directory with the names that every directory here has: a reaper that is led astray finds what it looks for."""
    fill(fill(path, N_FILES) / "sub", N_FILES)
    return path


def finish(volume: Path, identifier: str) -> None:
    if state_of(volume, identifier) is not None:
        assert reap_now(volume, identifier).report.failures == ()
    assert state_of(volume, identifier) is None


# Links


def pair(depth: str, i: int) -> tuple[bytes, bytes]:
    """A directory with what is in it, or the one above it, and the link that it is exchanged with."""
    return (b"%d" % i, b"link-%d" % i) if depth == "parent" else (b"%d/q" % i, b"%d/link" % i)


def to_canary(volume: Path, depth: int, n: int) -> Path:
    """Where a link in a container leads to the canary: by the root, or up and without a mount on the way."""
    # Up from a directory of the container: <id>, reaping, <uid>, u, .trashd
    return volume / "canary" if n % 2 else Path("../" * (5 + depth)) / "canary"


@pytest.mark.parametrize("depth", ["directory", "parent"])
def test_link_exchanged_for_a_directory_all_the_time_leads_nowhere(volume: Path, depth: str) -> None:
    make_tree(volume / "canary", {})
    for name in ("p", "q"):
        same_names(volume / "canary" / name / "sub")
        fill(volume / "canary" / name, N_FILES)
    before = snapshot(volume / "canary", with_times=True)
    n_exchanges = 0
    for n in range(30):
        job = make_tree(volume / f"job-{n}", {})
        for i in range(6):
            for name in ("p", "q"):
                (job / f"{i}" / name).mkdir(parents=True)
                same_names(job / f"{i}" / name / "sub")
            link = os.fsdecode(pair(depth, i)[1])
            (job / link).symlink_to(to_canary(volume, 1 + link.count("/"), i) / ("" if depth == "parent" else "p"))
        with way_into(job) as job_fd:
            identifier = swap(job).id

            def exchange(i: int, job_fd: int = job_fd) -> None:
                for k in range(6):
                    one, other = pair(depth, (i + k) % 6)
                    with suppress(FileNotFoundError):
                        renameat2(job_fd, one, job_fd, other, RENAME_EXCHANGE)
                        return
                raise FileNotFoundError(errno.ENOENT, "all of them are gone")

            with beside(exchange) as n_done:
                reaping = start_reap(volume, identifier)
                assert reaping.wait() in ENDED
                n_exchanges += n_done()
        assert snapshot(volume / "canary", with_times=True) == before, f"round {n}"
        finish(volume, identifier)
    assert n_exchanges > 30


def test_link_exchanged_for_the_whole_tree_all_the_time_leads_nowhere(volume: Path) -> None:
    same_names(volume / "canary")
    before = snapshot(volume / "canary", with_times=True)
    for n in range(30):
        identifier = swap(same_names(volume / f"job-{n}")).id
        with way_into(place(volume, identifier)) as container:
            os.symlink(to_canary(volume, 0, n), "aside", dir_fd=container)

            def exchange(_i: int, container: int = container) -> None:
                renameat2(container, b"tree", container, b"aside", RENAME_EXCHANGE)

            with beside(exchange):
                assert start_reap(volume, identifier).wait() in ENDED
            assert snapshot(volume / "canary", with_times=True) == before, f"round {n}"
            # Put back what a reap can be expected to find.
            left = os.listdir(container)
            if "aside" in left:
                if "tree" in left and os.path.islink(f"/proc/self/fd/{container}/tree"):
                    exchange(0)
                if os.path.islink(f"/proc/self/fd/{container}/aside"):
                    os.unlink("aside", dir_fd=container)
                else:
                    os.rename("aside", "tree", src_dir_fd=container, dst_dir_fd=container)
        finish(volume, identifier)


@pytest.mark.parametrize("plant", [lambda planted: planted.symlink_to("../" * 5 + "canary"), Path.touch, os.mkfifo])
def test_what_somebody_planted_where_deep_directories_go_leads_nowhere(
    volume: Path, plant: Callable[[Path], object]
) -> None:
    same_names(volume / "canary")
    before = snapshot(volume / "canary", with_times=True)
    job = deep_chain(volume / "job", 500)
    identifier = swap(job).id
    plant(place(volume, identifier) / "hoisted")
    assert code_of(lambda: reap_now(volume, identifier)) in ENDED
    assert snapshot(volume / "canary", with_times=True) == before
    if state_of(volume, identifier) is not None:
        (place(volume, identifier) / "hoisted").unlink(missing_ok=True)
    finish(volume, identifier)


# Entries made meanwhile


def test_files_that_are_made_while_it_is_reaped_are_removed_too(volume: Path) -> None:
    n_made = 0
    for n in range(20):
        job = make_tree(volume / f"job-{n}", {})
        fill(job / "sub", 2000)
        with way_into(job / "sub") as sub:
            identifier = swap(job).id

            def make(i: int, sub: int = sub) -> None:
                if i >= 5000:
                    raise OSError(errno.ENOSPC, "enough")
                os.mknod(b"late-%d" % i, dir_fd=sub)

            with beside(make) as n_done:
                assert start_reap(volume, identifier).wait() in ENDED
                n_made += n_done()
        finish(volume, identifier)
    assert n_made > 100


@pytest.mark.parametrize("kind", ["same names", "new names", "directories"])
def test_writers_who_never_stop_do_not_make_a_reap_endless(volume: Path, kind: str) -> None:
    def make(i: int) -> None:
        # As many at a time as any reaper keeps up with: it is the end that must come, not the empty directory.
        match kind:
            case "same names":
                os.close(os.open(b"%d-%d" % (os.getpid(), i % 8), os.O_WRONLY | os.O_CREAT, dir_fd=sub))
            case "new names":
                os.mknod(b"%d-%d" % (os.getpid(), i), dir_fd=sub)
                with suppress(FileNotFoundError):
                    os.unlink(b"%d-%d" % (os.getpid(), i - 64), dir_fd=sub)
            case _:
                with suppress(FileExistsError):
                    os.mkdir(b"%d-%d" % (os.getpid(), i % 8), dir_fd=sub)

    for n in range(10):
        job = make_tree(volume / f"job-{n}", {"other": {}})
        fill(job / "sub", 2000)
        with way_into(job / "sub") as sub:
            identifier = swap(job).id
            with beside(make), beside(make):
                reaped = reap_now(volume, identifier)
                if reaped.report.n_failed:
                    assert state_of(volume, identifier) is State.QUARANTINE
                    assert errno.ENOTEMPTY in {failure.errno for failure in reaped.report.failures}
                    assert os.listdir(place(volume, identifier) / "tree") == ["sub"]
        finish(volume, identifier)


# Directories moved out and in


def open_directories(reaping: Reaping) -> set[int]:
    inos = set()
    for pid in reaping.processes():
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            if not os.fspath(fd.readlink()).startswith("/"):
                continue
            try:
                inos.add(fd.stat().st_ino)
            except OSError as error:
                # It inherits what pytest has open: a place in another test's mount, which may have ended.
                if error.errno != errno.ENOTCONN:
                    raise
    return inos


def test_directory_moved_out_before_it_was_opened_keeps_its_content(volume: Path) -> None:
    random = Random("moved out")
    n_moved = 0
    for n in count():
        if n >= 8 and n_moved:
            break
        job = bulky_tree(volume / f"job-{n}", 40, 60, 10)
        identifier = swap(job).id
        reaping = start_and_stop(volume, identifier, random.uniform(0, 0.03))
        if reaping is None:
            continue
        is_open = open_directories(reaping)
        outside = make_tree(volume / f"outside-{n}", {})
        for directory in sorted((place(volume, identifier) / "tree").iterdir()):
            inside = [directory, *(path for path in directory.rglob("*") if path.is_dir())]
            if not is_open & {path.stat().st_ino for path in inside}:
                directory.rename(outside / directory.name)
                n_moved += 1
        before = snapshot(outside, with_times=True)
        reaping.signal_all(signal.SIGCONT)
        assert reaping.wait() == DONE
        assert snapshot(outside, with_times=True) == before, f"round {n}"
        finish(volume, identifier)


def test_directories_moved_out_and_in_all_the_time_lead_nowhere_else(volume: Path) -> None:
    n_moves = 0
    for n in range(10):
        job, outside = make_tree(volume / f"job-{n}", {}), make_tree(volume / f"outside-{n}", {})
        for i in range(10):
            same_names(job / f"{i}")
            deep_chain(job / f"{i}/chain", 100)
            # What a `..` from a moved directory would find
            same_names(outside / f"{i}")
        before = snapshot(outside)
        with way_into(job) as job_fd, way_into(outside) as outside_fd:
            identifier = swap(job).id

            def move(i: int, job_fd: int = job_fd, outside_fd: int = outside_fd) -> None:
                inside, away = b"%d" % (i % 10), b"%d/moved" % (i % 10)
                try:
                    os.rename(inside, away, src_dir_fd=job_fd, dst_dir_fd=outside_fd)
                    os.rename(away, inside, src_dir_fd=outside_fd, dst_dir_fd=job_fd)
                except FileNotFoundError:
                    if all(not os.path.lexists(f"/proc/self/fd/{job_fd}/{k}") for k in range(10)):
                        raise

            with beside(move) as n_done:
                assert start_reap(volume, identifier).wait() in ENDED
                n_moves += n_done()
        kept = make_tree(volume / f"kept-{n}", {})
        for moved in outside.glob("*/moved"):
            moved.rename(kept / moved.parent.name)
        assert [one._replace(mtime_ns=None) for one in snapshot(outside)] == list(before), f"round {n}"
        finish(volume, identifier)
    assert n_moves > 20


def test_what_was_moved_out_is_left_alone_once_the_reap_has_ended(volume: Path) -> None:
    for n in range(10):
        job = bulky_tree(volume / f"job-{n}", 10, 100, 10)
        outside = make_tree(volume / f"outside-{n}", {})
        with way_into(job) as job_fd, way_into(outside) as outside_fd:
            identifier = swap(job).id

            def move(i: int, job_fd: int = job_fd, outside_fd: int = outside_fd) -> None:
                if i >= 10:
                    raise OSError(errno.ENOENT, "all are moved")
                os.rename(b"d%d" % i, b"d%d" % i, src_dir_fd=job_fd, dst_dir_fd=outside_fd)

            with beside(move):
                reaping = start_reap(volume, identifier)
                assert reaping.wait() in ENDED
        before = snapshot(outside, with_times=True)
        finish(volume, identifier)
        assert snapshot(outside, with_times=True) == before
