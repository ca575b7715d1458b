"""What a sweep trashes keeps its tree in one orphan, wherever its store has to be; a store made for nothing goes."""

import errno
import os
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from fusefs.core.container_states import State
from fusefs.core.errors import TrashdError
from fusefs.core.record import Method
from fusefs.core.record_decoding import decode_record
from fusefs.core.selection import Selection
from fusefs.linux.kernel import Kernel
from fusefs.store.stage import SwapOptions
from fusefs.sweep.request import Request, ToTrash
from fusefs.sweep.run_sweep import run_request
from tests.support.make_trees import Dir, make_tree, snapshot, weird_names
from tests.support.other_users import as_user
from tests.support.real_filesystems import (
    btrfs_subvolume,
    full,
    loop_volume,
    project_quota_volume,
    set_project,
    tmpfs_volume,
)
from tests.support.run_sweep import ALL, give, names, sweep
from tests.support.store_verbs import (
    ActingBefore,
    assert_silent,
    entries,
    forked,
    init,
    place,
    raw,
    reap_now,
    recover_all,
    restore,
)
from tests.support.trash_without_walk import gather, take, trashing

pytestmark = pytest.mark.needs("root")


ALICE = 12001
SPEC = Dir(
    {"a.log": b"1", "keep": b"k", "sub": Dir({"b.log": b"2", "deep": Dir({"c.log": b"3"}, mode=0o2710)}, 0o1777)}
)
LOGS = ["a.log", "sub/b.log", "sub/deep/c.log"]


@pytest.fixture
def stored_volume() -> Iterator[Path]:
    with tmpfs_volume() as path:
        init(path)
        yield path
        assert_silent(path)


@pytest.fixture
def job(stored_volume: Path) -> Path:
    return make_tree(stored_volume / "job", SPEC)


def tree_of(stored_volume: Path, orphan: str | None) -> Path:
    assert orphan is not None
    return place(stored_volume, orphan) / "tree"


def files_in(tree: Path) -> list[str]:
    return sorted(str(path.relative_to(tree)) for path in tree.rglob("*") if not path.is_dir())


@pytest.mark.quick("sweep")
def test_matches_become_one_orphan_with_their_tree(stored_volume: Path, job: Path) -> None:
    swept = run_request(Kernel(), Request(raw(job), Selection(names=("*.log",)), ToTrash(SwapOptions(60, "tidy"))))
    assert (swept.sums.n_done, swept.sums.n_failed, swept.volume) == (3, 0, None)
    assert files_in(tree_of(stored_volume, swept.orphan)) == LOGS
    assert files_in(job) == ["keep"]
    (entry,) = entries(stored_volume)
    assert (entry.id, entry.state, entry.method, entry.note) == (swept.orphan, State.ORPHANS, Method.SWEEP, "tidy")
    assert (entry.origin, entry.expires_ns) == (raw(job), entry.created_ns + 60 * 10**9)


def test_record_says_where_it_was_and_which_tree_is_its_own(stored_volume: Path, job: Path) -> None:
    orphan = gather(job, LOGS).orphan
    tree = tree_of(stored_volume, orphan)
    record = decode_record((tree.parent / "record.json").read_bytes())
    assert (record.origin, record.fresh, record.lent_mode) == (b"job", None, None)
    assert record.victim is not None
    assert record.victim.ino == tree.stat().st_ino
    assert record.parent is not None
    assert record.parent.ino == job.stat().st_ino


def test_directories_are_made_like_those_that_something_came_from(stored_volume: Path, job: Path) -> None:
    os.setxattr(job / "sub", "trusted.mark", b"x")
    os.chown(job / "sub/deep", ALICE, ALICE)
    orphan = gather(job, LOGS).orphan
    tree = tree_of(stored_volume, orphan)
    for path in (".", "sub", "sub/deep"):
        like, made = (job / path).stat(), (tree / path).stat()
        assert (made.st_mode, made.st_uid, made.st_gid) == (like.st_mode, like.st_uid, like.st_gid), path
    assert os.getxattr(tree / "sub", "trusted.mark") == b"x"


def test_directory_after_what_was_in_it_joins_that(stored_volume: Path, job: Path) -> None:
    gathered = gather(job, ["sub/deep/c.log", "sub/deep", "sub"])
    assert gathered.refused == ()
    assert files_in(tree_of(stored_volume, gathered.orphan)) == ["sub/b.log", "sub/deep/c.log"]
    assert not (job / "sub").exists()


def test_empty_directory_that_came_with_a_part_is_kept(stored_volume: Path, job: Path) -> None:
    (job / "sub/deep/c.log").unlink()
    kernel = Kernel(ActingBefore("rmdir", partial((job / "sub/late").write_bytes, b"x")))
    gathered = gather(job, ["sub/gone", "sub"], kernel)
    assert gathered.refused == (("sub/gone", errno.ENOENT), ("sub", errno.ENOTEMPTY))
    assert (tree_of(stored_volume, gathered.orphan) / "sub/deep").is_dir()


def test_directory_that_stays_since_somebody_wrote_into_it_is_refused(stored_volume: Path, job: Path) -> None:
    kernel = Kernel(ActingBefore("rmdir", partial((job / "sub/late").write_bytes, b"x")))
    gathered = gather(job, ["sub/b.log", "sub"], kernel)
    assert gathered.refused == (("sub", errno.ENOTEMPTY),)
    assert files_in(job / "sub") == ["late"]
    assert files_in(tree_of(stored_volume, gathered.orphan)) == ["sub/b.log", "sub/deep/c.log"]


def test_every_odd_name_is_taken_and_restored(stored_volume: Path) -> None:
    names = weird_names()
    odd = make_tree(stored_volume / "odd", {b"\xff\n": dict.fromkeys(names, b"x"), **dict.fromkeys(names, b"y")})
    before = snapshot(odd)
    swept = run_request(Kernel(), Request(raw(odd), Selection(), ToTrash()))
    assert swept.sums.n_done == 2 * len(names)
    restore(stored_volume, swept.orphan or "")
    assert snapshot(odd) == before


def test_what_appears_under_a_name_that_was_taken_is_left(stored_volume: Path, job: Path) -> None:
    with trashing(job, Kernel()) as (scope, action):
        assert take(Kernel(), scope, action, b"", ["a.log"]) == []
        (job / "a.log").write_bytes(b"again")
        assert take(Kernel(), scope, action, b"", ["a.log", "keep"]) == [("a.log", errno.EEXIST)]
    recover_all(stored_volume)
    (entry,) = entries(stored_volume)
    assert (tree_of(stored_volume, entry.id) / "a.log").read_bytes() == b"1"
    assert (job / "a.log").read_bytes() == b"again"


def test_two_workers_make_each_directory_once(stored_volume: Path) -> None:
    wide = make_tree(stored_volume / "wide", {f"d{n}": {f"f{m}": b"x" for m in range(4)} for n in range(30)})
    kernel = Kernel()
    with trashing(wide, kernel) as (scope, action):

        def work(half: int) -> None:
            for n in range(30):
                assert take(kernel, scope, action, b"d%d" % n, [f"f{2 * half}", f"f{2 * half + 1}"]) == []

        pids = [forked(partial(work, half)) for half in range(2)]
        assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0, 0]
    assert recover_all(stored_volume) == []
    (entry,) = entries(stored_volume)
    assert len(files_in(tree_of(stored_volume, entry.id))) == 120
    assert sorted(os.listdir(tree_of(stored_volume, entry.id).parent)) == ["record.json", "tree"]
    restore(stored_volume, entry.id)
    assert len(files_in(wide)) == 120


def test_locked_as_long_as_a_worker_lives(stored_volume: Path, job: Path) -> None:
    kernel = Kernel()
    ready, told = os.pipe()
    waits, ends = os.pipe()
    with trashing(job, kernel) as (scope, action):
        take(kernel, scope, action, b"", ["a.log"])
        pid = os.fork()
        if pid == 0:
            os.close(ends)
            os.write(told, b"x")
            os.read(waits, 1)
            os._exit(0)
        os.read(ready, 1)
    assert recover_all(stored_volume) == []
    (entry,) = entries(stored_volume)
    assert entry.state is State.STAGE
    for fd in (ends, waits, ready, told):
        os.close(fd)
    os.waitpid(pid, 0)
    assert recover_all(stored_volume) == []
    (entry,) = entries(stored_volume)
    assert entry.state is State.ORPHANS


def test_link_in_the_parents_is_followed(stored_volume: Path, job: Path) -> None:
    (stored_volume / "way").symlink_to(stored_volume)
    assert gather(stored_volume / "way/job", ["a.log"]).n_done == 1
    (entry,) = entries(stored_volume)
    assert entry.origin == raw(job)


def test_user_who_can_have_no_store_is_told_and_loses_nothing() -> None:
    with tmpfs_volume() as stored_volume:
        shared = make_tree(stored_volume / "shared", {"x": b"1"})
        (shared / "x").chmod(0o666)

        def refused() -> str:
            with pytest.raises(TrashdError) as caught:
                gather(shared, ["x"])
            return type(caught.value).__name__

        assert as_user(ALICE, refused) == "NoStore"
        assert os.listdir(shared) == ["x"]


def test_user_is_refused_what_is_not_his_and_the_rest_is_taken(stored_volume: Path) -> None:
    shared = make_tree(stored_volume / "shared", {"mine": b"1", "roots": b"2"})
    shared.chmod(0o1777)
    os.chown(shared / "mine", ALICE, ALICE)
    assert as_user(ALICE, lambda: [number for _, number in gather(shared, ["mine", "roots"]).refused]) == [errno.EPERM]
    assert os.listdir(shared) == ["roots"]
    assert as_user(ALICE, lambda: restore(stored_volume, entries(stored_volume)[0].id).n_left) == 0
    assert sorted(os.listdir(shared)) == ["mine", "roots"]


def test_what_is_taken_from_below_a_read_only_directory_can_be_restored_and_reaped(stored_volume: Path) -> None:
    home = give(make_tree(stored_volume / "home", {"shut": {"open": {"f": b"1", "g": b"2"}}}), ALICE)
    (home / "shut").chmod(0o555)
    as_user(ALICE, lambda: gather(home, ["shut/open/f", "shut/open/g"]).n_done)
    (entry,) = entries(stored_volume)
    made = tree_of(stored_volume, entry.id) / "shut"
    assert stat.S_IMODE(made.stat().st_mode) == 0o755
    as_user(ALICE, lambda: restore(stored_volume, entry.id, inside=b"shut/open/f").n_left)
    assert reap_now(stored_volume, entry.id).report.failures == ()
    assert (home / "shut/open/f").exists()


@pytest.mark.needs("loop")
@pytest.mark.parametrize("fs_type", ["tmpfs", "ext4"])
def test_full_volume_is_no_hindrance(fs_type: str) -> None:
    with tmpfs_volume("8m", ["nr_inodes=300"]) if fs_type == "tmpfs" else loop_volume("ext4", 16) as stored_volume:
        init(stored_volume)
        job = make_tree(stored_volume / "job", SPEC)
        with full(stored_volume):
            gathered = gather(job, ["a.log", "keep", "sub/b.log"])
            assert gathered.n_done >= 2
            assert {name for name, _ in gathered.refused} <= {"sub/b.log"}  # a directory for it needs an inode
        assert recover_all(stored_volume) == []
        assert_silent(stored_volume)


@pytest.mark.needs("loop", "btrfs")
def test_store_is_made_where_renames_lead() -> None:
    with loop_volume("btrfs", 128) as stored_volume:
        init(stored_volume)
        inner = make_tree(btrfs_subvolume(stored_volume, "sub") / "job", SPEC)
        before = snapshot(inner)
        gathered = gather(inner, LOGS)
        assert gathered.volume is None  # the registry names it
        (entry,) = entries(stored_volume)
        assert (entry.id, entry.origin) == (gathered.orphan, raw(inner))
        restore(stored_volume, entry.id)
        assert snapshot(inner) == before
        gathered = gather(stored_volume / "sub", ["job/a.log"])
        assert gathered.volume is None
        restore(stored_volume, gathered.orphan or "")
        assert snapshot(inner) == before
        assert_silent(stored_volume)


@pytest.mark.needs("loop", "xfs")
def test_directory_of_a_project_is_swept_with_its_quota() -> None:
    with project_quota_volume("xfs") as stored_volume:
        init(stored_volume)
        job = stored_volume / "job"
        job.mkdir()
        set_project(job, 7)
        make_tree(job / "sub", {"a": b"1"})
        (job / "b").write_bytes(b"2")
        before = snapshot(job)
        gathered = gather(job, ["b", "sub/a"])
        assert gathered.refused == ()
        restore(stored_volume, gathered.orphan or "")
        assert snapshot(job) == before
        assert_silent(stored_volume)


NOTHING = Selection(names=("nothing",))
OWNER = 12345


def test_a_store_made_for_a_sweep_that_takes_nothing_goes_again(volume: Path, top: Path) -> None:
    make_tree(top / "d", {"f": ""})
    before = names(volume)
    assert sweep(top, NOTHING, ToTrash()).orphan is None
    assert names(volume) == before


def test_a_store_that_was_there_stays_whatever_is_taken(volume: Path, top: Path) -> None:
    init(volume)
    assert sweep(top, NOTHING, ToTrash()).orphan is None
    assert (volume / ".trashd/volume.json").exists()
    assert list(volume.glob(".trashd/u/0/[!r]*/*")) == [], "no container is left"


def test_a_users_own_store_goes_again_too(volume: Path, top: Path) -> None:
    volume.chmod(0o755)
    make_tree(top / "d", {"f": ""})
    give(top, OWNER)
    before = names(volume)
    assert as_user(OWNER, lambda: sweep(top / "d", NOTHING, ToTrash())).orphan is None
    assert names(volume) == before
    orphan = as_user(OWNER, lambda: sweep(top / "d", ALL, ToTrash())).orphan
    assert [path.name for path in top.glob(f".trashd-{OWNER}/u/{OWNER}/orphans/*")] == [orphan]
