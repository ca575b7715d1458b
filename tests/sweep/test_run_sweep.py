"""What a walk owes whatever it does: every match once, nothing else, whatever stands in its way or is at work there."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from fusefs.core.errors import IsStore, NotADirectory, NotFound, Refused
from fusefs.core.pacing import Speed
from fusefs.core.record import Failure
from fusefs.core.results import Spared, SweepSums, Swept
from fusefs.core.selection import Selection, SizeBound, TimeBound
from fusefs.engine.pace import ConstantSpeed
from fusefs.linux.kernel import Kernel
from fusefs.store.backing_and_mount import BackingAndMount
from fusefs.store.victim import find_scope
from fusefs.store.walk import DeepOpeners
from fusefs.sweep.actions import open_move
from fusefs.sweep.request import (
    ActionPlace,
    ActionRequest,
    IfExists,
    SweepOptions,
    SweepRoot,
    ToCount,
    ToDelete,
    ToMove,
    ToPrint,
    ToTrash,
)
from tests.support.background_processes import EndsWorkers, workers
from tests.support.foreground_mount import Mounted, trashd_mount
from tests.support.fuse_slow import SlowVolume, slow_volume
from tests.support.make_trees import Spec, Symlink, deep_chain, fill, make_tree, roomy_volume
from tests.support.move_entries import AfterThe
from tests.support.other_users import as_user
from tests.support.real_filesystems import bind_mount, loop_volume, tmpfs_volume
from tests.support.run_sweep import ALL, EVERY_KIND, give, names, printed, sweep
from tests.support.store_verbs import ActingBefore, Counting, init, place, raw, restore
from tests.support.trash_without_walk import trashing

pytestmark = pytest.mark.needs("root")


LOGS = Selection(names=("*.log",))
DIRECTORIES = Selection(types=frozenset("d"))


# What is chosen goes, and nothing else


def test_directories_go_after_what_is_in_them(volume: Path) -> None:
    top = make_tree(volume / "top", {"a": {"b": {"c": {"f": ""}}, "g": ""}, "h": {}})
    assert sweep(top, EVERY_KIND).sums.n_done == 6
    assert names(top) == set()


@pytest.mark.parametrize("n_workers", [1, 2])
def test_recursive_takes_a_directory_with_all_that_it_holds(volume: Path, n_workers: int) -> None:
    top = make_tree(volume / "top", {"x": {"build": {"a": {"f": ""}, "g": ""}}, "build": {}, "keep": {"build.txt": ""}})
    swept = sweep(top, Selection(names=("build",), types=frozenset("d")), ToDelete(True), n_workers=n_workers)
    assert (swept.sums.n_done, swept.sums.n_inside) == (2, 3)
    assert names(top) == {"x", "keep", "keep/build.txt"}


def test_a_store_is_neither_listed_nor_taken(volume: Path) -> None:
    init(volume)
    make_tree(volume / "d", {".trashd": {"f": ""}, ".trashd-1000": {"f": ""}, ".trashd.new-1": "", ".trashdx": ""})
    assert sorted(printed(volume, EVERY_KIND)) == [b"d", b"d/.trashdx"]
    assert sweep(volume, EVERY_KIND).failures == (Failure(b"d", errno.ENOTEMPTY, "rmdir"),)
    assert names(volume / "d") == {".trashd", ".trashd/f", ".trashd-1000", ".trashd-1000/f", ".trashd.new-1"}


def test_what_is_excluded_is_not_even_opened(volume: Path) -> None:
    top = make_tree(volume / "top", {"keep": {"a.log": ""}, "d": {"b.log": ""}})
    (top / "keep").chmod(0)
    counting = Counting()
    selection = Selection(names=("*.log",), excludes=("keep",))
    # Alone: what a forked worker calls, which a busy machine's second slice goes to, is not counted here.
    assert sweep(top, selection, kernel=Kernel(counting), n_workers=1).sums.n_done == 1
    assert counting.calls.count("unlink") == 1


@pytest.mark.parametrize("most", [0, 1, 7, 10, 11])
@pytest.mark.parametrize("selection", [LOGS, Selection(names=("*.log",), sizes=(SizeBound(most=0),))])
def test_no_more_than_the_most_are_taken(volume: Path, most: int, selection: Selection) -> None:
    top = make_tree(volume / "top", {f"d{n}": {f"{m}.log": "" for m in range(5)} for n in range(2)})
    swept = sweep(top, selection, most=most)
    assert (swept.sums.n_done, swept.is_limited) == (min(most, 10), most < 10)
    assert len(list(top.rglob("*.log"))) == max(10 - most, 0)


def test_no_more_directories_than_the_most_lose_what_they_hold(volume: Path) -> None:
    top = make_tree(volume / "top", {f"d{n}": {"sub": {"f": ""}} for n in range(5)})
    swept = sweep(top, Selection(names=("d?",), types=frozenset("d")), ToDelete(True), most=2)
    assert (swept.sums.n_done, swept.is_limited) == (2, True)
    assert len(names(top)) == 3 * 3


@pytest.mark.parametrize("act", [ToDelete(), ToDelete(True)])
@pytest.mark.parametrize("selection", [LOGS, EVERY_KIND, Selection(empty=True), DIRECTORIES])
def test_a_dry_run_counts_what_is_done(volume: Path, act: ToDelete, selection: Selection) -> None:
    top = make_tree(volume / "top", {"a.log": "1", "e": {}, "d": {"b.log": "22", "e": {}, "f": ""}})
    before = names(top)
    counted = sweep(top, selection, ToCount(act))
    assert names(top) == before
    done = sweep(top, selection, act).sums
    assert counted.sums.n_done == done.n_done + (done.n_failed if not act.recursive else 0)


def test_a_dry_run_tells_the_largest_and_the_oldest(volume: Path) -> None:
    top = make_tree(volume / "top", {f"f{n}": "x" * n for n in range(9)})
    for n in range(9):
        os.utime(top / f"f{n}", ns=(n, 100 - n))
    counted = sweep(top, ALL, ToCount(None))
    assert [(one.path, one.n_bytes) for one in counted.largest] == [(b"f%d" % n, n) for n in (8, 7, 6, 5, 4)]
    assert [(one.path, one.time_ns) for one in counted.oldest] == [(b"f%d" % n, 100 - n) for n in (8, 7, 6, 5, 4)]
    assert counted.sums.n_bytes == sum(range(9))


# What it costs


def test_names_and_kinds_cost_no_stat(top: Path) -> None:
    counting = Counting()
    for n in range(3):
        fill(top / str(n), 300)
    fill(top / "big", 3000)
    sweep(top, Selection(names=("f*",), types=frozenset("fl")), kernel=Kernel(counting), n_workers=1)
    assert counting.calls.count("unlink") == 3900
    assert "stat" not in counting.calls
    assert counting.calls.count("fstat") < 3900 // 10  # some a directory and a slice: of these a busy machine has more


def test_all_fds_are_given_back(top: Path) -> None:
    deep_chain(top / "chain", 150)
    fill(top / "wide", 20_000)
    before = len(os.listdir("/proc/self/fd"))
    sweep(top, EVERY_KIND, n_workers=2)
    assert (len(os.listdir("/proc/self/fd")), names(top)) == (before, set())


@pytest.mark.parametrize(("depth", "selection"), [(4_000, Selection(names=("leaf",))), (2_000, EVERY_KIND)])
def test_depth_is_no_limit(top: Path, depth: int, selection: Selection) -> None:
    deep_chain(top / "chain", depth)
    made = len(printed(top, selection))
    assert sweep(top, selection).sums.n_done == made


# What is refused


@pytest.mark.parametrize(
    ("path", "error"),
    [
        *((root, Refused) for root in ("/", "//", "/.")),
        *(("top/link", NotADirectory), ("top/f", NotADirectory), ("top/no", NotFound)),
    ],
)
def test_what_is_no_directory_is_refused(volume: Path, path: str, error: type[Exception]) -> None:
    make_tree(volume / "top", {"d": {"f": ""}, "link": Symlink("d"), "f": ""})
    with pytest.raises(error):
        sweep(volume / path)
    assert len(names(volume)) == 5


def test_nothing_in_a_store_is_swept(volume: Path) -> None:
    init(volume)
    with pytest.raises(IsStore):
        sweep(volume / ".trashd/u")


def test_another_directory_than_was_meant_is_not_swept(top: Path) -> None:
    fill(top, 3)
    st = top.stat()
    with pytest.raises(NotFound):
        sweep(top, ALL, inode=(st.st_dev, st.st_ino + 1))
    assert sweep(top, ALL, inode=(st.st_dev, st.st_ino)).sums.n_done == 3


# Workers, one that is lost, and a stop


@pytest.mark.parametrize("fs_type", ["tmpfs", "ext4"])
def test_workers_share_what_one_would_do(fs_type: str) -> None:
    with roomy_volume(fs_type, 60_000) as path:
        top = path / "top"
        fill(top / "flat", 20_000)
        for n in range(10):
            fill(top / str(n), 1000)
        assert sweep(top, Selection(names=("*[13579]",)), n_workers=2).sums.n_done == 15_000
        assert sweep(top, EVERY_KIND, n_workers=2).sums.n_done == 15_000 + 11
        assert names(top) == set()


def test_workers_that_are_killed_cost_nothing_but_time(top: Path) -> None:
    fill(top / "flat", 20_000)
    for n in range(10):
        fill(top / str(n), 500)
    swept = sweep(top, EVERY_KIND, kernel=Kernel(EndsWorkers(6000)), n_workers=2)
    assert (swept.sums.n_failed, names(top)) == (0, set())


def test_stopped_it_is_finished_by_the_next(top: Path) -> None:
    fill(top, 30_000)
    done: list[SweepSums] = []
    first = sweep(top, ALL, wishes=SweepOptions(progress=done.append, stops=lambda: any(sums.n_done for sums in done)))
    assert first.is_stopped
    assert 0 < first.sums.n_done < 30_000
    second = sweep(top, ALL)
    assert (first.sums.n_done + second.sums.n_done, second.is_stopped) == (30_000, False)


OLD_DIRECTORIES = DIRECTORIES._replace(times=(TimeBound("mtime", before_ns=10**18 + 1),))
MALLORY = 12666


# What is in the way


def test_a_directory_that_may_not_be_read_is_told_and_the_others_are_swept(top: Path) -> None:
    make_tree(top / "open", {"a": {"f": ""}, "closed": {"g": ""}, "z": {"h": ""}})
    (top / "open/closed").chmod(0)
    for path in (top, top / "open", *top.rglob("[az]")):
        os.chown(path, MALLORY, MALLORY)
    swept = as_user(MALLORY, lambda: sweep(top, ALL))
    assert (swept.failures, swept.sums.n_done) == ((Failure(b"open/closed", errno.EACCES, "open"),), 2)


def test_what_is_mounted_inside_is_not_entered(volume: Path, top: Path) -> None:
    make_tree(volume / "other", {"f": ""})
    make_tree(top / "d", {"mnt": {}, "g": ""})
    with bind_mount(volume / "other", top / "d/mnt"):
        swept = sweep(top, EVERY_KIND)
        assert (swept.sums.n_mounts, swept.sums.n_done) == (1, 1)
        assert swept.failures == (Failure(b"d", errno.ENOTEMPTY, "rmdir"),)
        assert names(volume / "other") == {"f"}


def test_a_directory_that_stays_for_a_mount_is_told_where_nobody_enters_it(volume: Path, top: Path) -> None:
    make_tree(volume / "other", {"f": ""})
    for name in ("holds/mnt", "is"):
        (top / name).mkdir(parents=True)
    (volume / "target").mkdir()
    flat = DIRECTORIES._replace(max_depth=1)
    with bind_mount(volume / "other", top / "holds/mnt"), bind_mount(volume / "other", top / "is"):
        for listed in (None, [b"holds", b"is"]):
            swept = sweep(top, flat, ToMove(os.fsencode(volume / "target")), names=listed)
            assert swept.spared == (Spared(b"holds", "it contains a mount point"),)
            assert (swept.sums.n_mounts, swept.sums.n_done) == (1, 0)


@pytest.mark.parametrize("in_the_way", ["", Symlink("nowhere")])
def test_no_place_to_move_to_is_a_failure_and_nothing_vanished(
    volume: Path, top: Path, in_the_way: Spec | str | Symlink
) -> None:
    make_tree(top / "sub", {"f": "", "g": ""})
    target = make_tree(volume / "target", {"sub": in_the_way})
    sums = sweep(top, ALL, ToMove(os.fsencode(target))).sums
    assert (sums.n_done, sums.n_vanished, sums.n_failed) == (0, 0, 2)


def test_a_place_to_move_to_that_was_removed_is_a_failure(volume: Path, top: Path) -> None:
    make_tree(top / "sub", {"f": "", "g": ""})
    target = make_tree(volume / "target", {})
    names_read = iter([b"sub/f", b"sub/g"])

    def listed() -> Iterator[bytes]:
        target.rmdir()
        yield from names_read

    sums = sweep(top, ALL, ToMove(os.fsencode(target)), names=listed()).sums
    assert (sums.n_done, sums.n_vanished, sums.n_failed) == (0, 0, 2)


def test_where_matches_are_moved_to_is_not_swept(volume: Path) -> None:
    top = make_tree(volume / "top", {"a": {"f": ""}, "done": {"g": ""}})
    assert sweep(top, ALL, ToMove(os.fsencode(top / "done"))).sums.n_done == 1
    assert names(top) == {"a", "done", "done/a", "done/a/f", "done/g"}


def test_three_calls_in_vain_end_it(top: Path) -> None:
    def hook(call: str) -> None:
        if call == "unlink":
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    fill(top, 500)
    swept = sweep(top, ALL, kernel=Kernel(hook))
    assert swept.why == os.strerror(errno.EIO)
    assert 3 <= swept.sums.n_failed <= 128
    assert len(swept.failures) == min(swept.sums.n_failed, 50)


def spare_one_name(_kernel: Kernel, sides: BackingAndMount) -> str | None:
    return "for a reason" if os.readlink(sides.fd.path()).endswith(b"/kept") else None


@pytest.mark.parametrize("act", [ToDelete(), ToCount(None), ToMove(b"target")])
def test_what_the_guard_spares_is_left_with_its_name(
    volume: Path, monkeypatch: pytest.MonkeyPatch, act: ToDelete | ToCount | ToMove
) -> None:
    monkeypatch.chdir(volume)
    (volume / "target").mkdir()
    top = make_tree(volume / "top", {"a": {"kept": {"f": ""}}, "b": {"g": ""}})
    selection = Selection(regexes=(".*(kept|f|g)",), types=frozenset("fd"))
    swept = sweep(top, selection, act, spares=spare_one_name)
    assert (swept.sums.n_done, swept.spared) == (1, (Spared(b"a/kept", "for a reason"),))
    assert {"a/kept", "a/kept/f"} <= names(top)


# Others at work


@pytest.mark.parametrize("n", range(12))
def test_a_link_put_in_a_directorys_place_is_not_followed(volume: Path, top: Path, n: int) -> None:
    make_tree(volume / "outside", {"f": "", "sub": {"f": ""}})
    make_tree(top / "d", {"f": "", "sub": {"f": ""}})
    calls: list[str] = []

    def hook(call: str) -> None:
        calls.append(call)
        if len(calls) == 10 + n:
            (top / "d").rename(volume / "moved")
            (top / "d").symlink_to(volume / "outside")

    sweep(top, Selection(types=frozenset("f")), kernel=Kernel(hook))
    assert names(volume / "outside") == {"f", "sub", "sub/f"}
    assert len(calls) > 12


def test_what_is_excluded_stays_where_a_directory_goes_with_all_it_holds(volume: Path) -> None:
    top = make_tree(volume / "t", {"build": {"a": "", "d": {"b.keep": "", "c": ""}}})
    selection = Selection(types=frozenset("d"), names=("build",), excludes=("*.keep",))
    swept = sweep(top, selection, ToDelete(recursive=True))
    assert names(top) == {"build", "build/d", "build/d/b.keep"}
    assert {failure.errno for failure in swept.failures} == {errno.ENOTEMPTY}


def test_root_is_not_led_to_what_he_sweeps_by_a_link_of_others(volume: Path) -> None:
    make_tree(volume / "secret", {"top": {"f": ""}})
    make_tree(volume / "hers", {"way": Symlink(f"{volume}/secret")})
    os.chown(volume / "hers/way", MALLORY, MALLORY, follow_symlinks=False)
    with pytest.raises(Refused, match="way"):
        sweep(volume / "hers/way/top", ALL)
    assert (volume / "secret/top/f").exists()
    os.chown(volume / "hers/way", 0, 0, follow_symlinks=False)
    assert sweep(volume / "hers/way/top", ALL).sums.n_done == 1


def test_whoever_exchanges_directories_and_links_gets_nothing_deleted_outside(volume: Path, top: Path) -> None:
    outside = fill(volume / "outside", 50)
    (volume / "link").symlink_to(outside)
    (top / "d").mkdir()
    kernel = Kernel()

    def exchange() -> None:
        with kernel.open_path(os.fsencode(volume)) as here, kernel.open_path(os.fsencode(top)) as there:
            while True:
                kernel.exchange(here, b"link", there, b"d")

    with workers([exchange]):
        for _ in range(150):
            assert sweep(top, Selection(names=("f*",))).sums.n_failed == 0
    assert len(names(outside)) == 50


def test_a_directory_that_takes_the_place_of_one_that_was_chosen_is_not_stripped(volume: Path, top: Path) -> None:
    for n in range(20):
        os.utime(make_tree(top / f"d{n:02}", {"f": "", "sub": {"g": ""}}), (10**9, 10**9))

    def replace() -> None:
        for path in [path for path in top.iterdir() if (path / "sub").exists()]:
            path.rename(volume / f"moved-{path.name}")
            make_tree(path, {"live": ""})

    kernel = Kernel(ActingBefore("unlink", replace))
    swept = sweep(top, OLD_DIRECTORIES, ToDelete(recursive=True), kernel=kernel, n_workers=1)
    n_live = len(list(top.glob("*/live")))
    assert n_live >= 19
    assert (swept.sums.n_done, {failure.errno for failure in swept.failures}) == (20 - n_live, {errno.ENOTEMPTY})
    assert len([path for path in names(volume) if path.endswith("/g")]) >= 19


@pytest.mark.parametrize("moves", [True, False])
def test_a_directory_that_takes_the_place_of_one_that_was_chosen_stays(volume: Path, top: Path, moves: bool) -> None:
    (volume / "away").mkdir()
    for n in range(300):
        os.utime(make_tree(top / f"d{n}", {"f": ""}), (10**9, 10**9))

    def replace() -> None:
        for path in list(top.iterdir()):
            path.rename(volume / f"moved-{path.name}")
            make_tree(path, {"live": ""})

    act = ToMove(os.fsencode(volume / "away")) if moves else ToTrash()
    slowly = SweepOptions(ConstantSpeed(Speed(entries_per_s=500)))  # 25 in a slice, twice as many after a pause
    sweep(top, OLD_DIRECTORIES, act, kernel=Kernel(AfterThe("renameat2", replace, 100)), wishes=slowly)
    assert len(list(top.glob("*/live"))) >= 150


def test_a_large_directory_that_was_moved_away_is_left_as_soon_as_that_is_seen(volume: Path, top: Path) -> None:
    fill(top / "large", 100_000)

    def save() -> None:
        (top / "large").rename(volume / "saved")

    sweep(top, Selection(names=("f*",)), kernel=Kernel(AfterThe("unlink", save, 10)), n_workers=1)
    assert len(os.listdir(volume / "saved")) >= 100_000 - 2048


def churn(directory: Path) -> Callable[[], None]:
    """What makes, moves and removes files of other names."""

    def work() -> None:
        at = 0
        while True:
            for n in range(50):
                (directory / f"other{at}.{n}").touch()
            for n in range(0, 50, 2):
                with suppress(FileNotFoundError):
                    (directory / f"other{at}.{n}").rename(directory / f"moved{at}.{n}")
            for path in (*directory.glob(f"moved{at}.*"), *directory.glob(f"other{at}.*")):
                path.unlink(missing_ok=True)
            at += 1

    return work


@pytest.mark.parametrize("fs_type", ["tmpfs", "ext4"])
def test_none_is_lost_or_doubled_while_others_come_and_go(fs_type: str) -> None:
    with roomy_volume(fs_type, 60_000) as path:
        flat = fill(path / "flat", 20_000)
        with workers([churn(flat)]):
            told = printed(path, Selection(names=("f[0-9]*",)))
            assert sorted(told) == sorted(b"flat/f%d" % n for n in range(20_000))
            swept = sweep(path, Selection(names=("f[0-9]*",)), n_workers=2)
            assert (swept.sums.n_matched, swept.sums.n_done, swept.failures) == (20_000, 20_000, ())
        assert [one for one in os.listdir(flat) if one.startswith("f")] == []


def test_two_sweeps_at_once_share_the_matches(top: Path) -> None:
    fill(top, 20_000)
    done: list[int] = []

    def other(_sums: SweepSums) -> None:
        if not done:
            done.append(sweep(top, ALL).sums.n_done)

    swept = sweep(top, ALL, wishes=SweepOptions(progress=other))
    assert swept.sums.n_done + done[0] == 20_000
    assert (swept.sums.n_failed, names(top)) == (0, set())


@pytest.fixture
def job(volume: Path) -> Path:
    init(volume)
    (volume / "job/sub/deep").mkdir(parents=True)
    (volume / "job/sub/deep/c.log").touch()
    return volume / "job"


def test_directory_that_has_another_path_by_now_is_left_alone(volume: Path, job: Path) -> None:
    kernel = Kernel()
    with trashing(job, kernel) as (scope, action):
        with scope.sides.beneath(kernel, b"sub/deep") as sides:
            os.rename(job / "sub", volume / "outside")
            taken = action.take(ActionPlace(kernel, sides, b"sub/deep", False, DeepOpeners(kernel)), ["c.log"])
        assert list(taken.refused) == [("c.log", errno.ENOENT)]
        assert action.end(Swept(raw(job), SweepSums())).orphan is None
    assert (volume / "outside/deep/c.log").exists()


def test_directory_that_is_in_the_container_by_now_loses_nothing(volume: Path, job: Path) -> None:
    kernel = Kernel()
    with trashing(job, kernel) as (scope, action):
        with scope.sides.beneath(kernel, b"sub") as sides, DeepOpeners(kernel) as ways:
            (job / "sub/empty").mkdir()
            here = ActionPlace(kernel, scope.sides, b"", True, ways)
            assert action.take(here, ["sub"]).refused == []
            # A process that had it open goes on in there.
            taken = action.take(ActionPlace(kernel, sides, b"sub", True, ways), ["empty"])
        assert list(taken.refused) == [("empty", errno.ENOENT)]
        orphan = action.end(Swept(raw(job), SweepSums(n_done=1))).orphan
    assert orphan is not None
    assert (place(volume, orphan) / "tree/sub/empty").is_dir()


@pytest.mark.parametrize("if_exists", IfExists)
def test_directory_that_its_names_go_to_by_now_loses_nothing(volume: Path, job: Path, if_exists: IfExists) -> None:
    kernel = Kernel()
    (volume / "archive").mkdir()
    to = ToMove(raw(volume / "archive"), if_exists=if_exists)
    with find_scope(kernel, raw(job)) as scope, open_move(kernel, SweepRoot(raw(job), scope.sides), to) as action:
        with scope.sides.beneath(kernel, b"sub/deep") as sides, DeepOpeners(kernel) as ways:
            os.rename(job / "sub", volume / "archive/sub")
            taken = action.take(ActionPlace(kernel, sides, b"sub/deep", False, ways), ["c.log"])
        assert list(taken.refused) == [("c.log", errno.ENOENT)]
    assert os.listdir(volume / "archive/sub/deep") == ["c.log"]


EMPTY_DIRECTORIES = Selection(types=frozenset("d"), empty=True)


@pytest.fixture(scope="module")
def _untold() -> Iterator[Path]:
    with loop_volume("ext4", mkfs_options=["-O", "^filetype"]) as volume:
        yield volume


@pytest.fixture
def untold(_untold: Path, request: pytest.FixtureRequest) -> Path:
    """A directory on a filesystem whose listings tell no types."""
    path: Path = _untold / request.node.name.partition("[")[0]
    path.mkdir()
    return path


# Listings that tell no types


def test_types_that_no_listing_tells_are_found_by_a_look(untold: Path) -> None:
    top = make_tree(untold / "top", {"f": "", "link": Symlink("f"), "d": {"g": "", "other": Symlink("no")}})
    assert sorted(printed(top, Selection(types=frozenset("ld")))) == [b"d", b"d/other", b"link"]
    assert (sweep(top, ALL).sums.n_done, names(top)) == (4, {"d"})


def test_what_may_not_be_looked_at_is_told(untold: Path) -> None:
    top = give(make_tree(untold / "top", {"closed": {"f": "", "g.log": ""}, "a": ""}), MALLORY)
    (top / "closed").chmod(0o400)
    swept = as_user(MALLORY, lambda: sweep(top, Selection(names=("*.log", "*"), max_depth=2)))
    assert swept.failures == (Failure(b"closed/g.log", errno.EACCES, "stat"),)
    swept = as_user(MALLORY, lambda: sweep(top, ALL))
    assert (swept.sums.n_failed, swept.sums.n_done) == (2, 1)


def test_what_is_mounted_is_told_as_skipped(untold: Path) -> None:
    top = make_tree(untold / "top", {"mnt": {}, "on": "", "f": ""})
    with bind_mount(untold, top / "mnt"), bind_mount(top / "f", top / "on"):
        assert sweep(top, ALL).sums == SweepSums(n_seen=3, n_matched=1, n_done=1, n_mounts=2)


# Directories that may not be read


def test_a_directory_that_nobody_can_say_is_empty_is_a_failure_even_where_nobody_enters_it(top: Path) -> None:
    make_tree(top / "at", {"closed": {}, "empty": {}})
    give(top, MALLORY)
    (top / "at/closed").chmod(0)
    for selection in (EMPTY_DIRECTORIES._replace(max_depth=2), EMPTY_DIRECTORIES):
        (top / "at/empty").mkdir(exist_ok=True)
        os.chown(top / "at/empty", MALLORY, MALLORY)
        swept = as_user(MALLORY, partial(sweep, top, selection))
        assert (swept.failures, swept.sums.n_done) == ((Failure(b"at/closed", errno.EACCES, "open"),), 1)


# Files on which something is mounted


@pytest.mark.parametrize(
    "act",
    [ToDelete(), ToTrash(), ToMove(b"target"), ToCount(ToDelete()), ToPrint(lambda _here, _names: [])],
    ids=lambda act: type(act).__name__,
)
@pytest.mark.parametrize("selection", [ALL, Selection(sizes=(SizeBound(1, 1),))])
@pytest.mark.parametrize("is_listed", [False, True])
def test_a_file_on_which_something_is_mounted_is_skipped_by_every_action(
    volume: Path, top: Path, act: ActionRequest, selection: Selection, is_listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(volume)
    make_tree(top / "d", {"on": "1", "f": "2"})
    (volume / "target").mkdir()
    with bind_mount(top / "d/f", top / "d/on"):
        swept = sweep(top, selection, act, names=[b"d/on", b"d/f"] if is_listed else None)
        assert (swept.sums.n_done, swept.sums.n_mounts, swept.sums.n_failed) == (1, 1, 0)
    assert (top / "d/on").read_text() == "1"


# Another thing by now


def test_a_link_that_takes_the_place_of_a_file_is_no_file(top: Path) -> None:
    make_tree(top / "d", {"f": "1", "g": "1"})

    def exchange(call: str) -> None:
        if call == "stat" and not (top / "d/f").is_symlink():
            (top / "d/f").unlink()
            (top / "d/f").symlink_to("x")

    files = Selection(types=frozenset("f"), sizes=(SizeBound(1, 1),))
    assert sweep(top, files, kernel=Kernel(exchange)).sums.n_done == 1
    assert names(top) == {"d", "d/f"}


def test_a_file_that_takes_the_place_of_a_directory_is_no_directory(top: Path) -> None:
    (top / "d").mkdir()

    def exchange(call: str) -> None:
        if call == "stat" and (top / "d").is_dir():
            (top / "d").rmdir()
            (top / "d").touch()

    swept = sweep(top, Selection(types=frozenset("d"), uids=(0,)), ToTrash(), kernel=Kernel(exchange))
    assert (swept.sums.n_matched, names(top)) == (0, {"d"})


EMPTY_FILES = Selection(types=frozenset("f"), sizes=(SizeBound(0, 0),))
FULL_FILES = Selection(types=frozenset("f"), sizes=(SizeBound(1),))


@pytest.fixture
def slow() -> Iterator[SlowVolume]:
    with tmpfs_volume() as source, slow_volume(source, delay_us=300) as volume:
        yield volume


@pytest.fixture
def mount(volume: Path) -> Iterator[Mounted]:
    (volume / "source").mkdir()
    with trashd_mount(volume / "source") as mounted:
        yield mounted


def wide(top: Path) -> Path:
    """Twelve directories with ten empty files and one that is not."""
    return make_tree(top, {f"d{n}": {"full": "1", "sub": {f"f{m}": "" for m in range(10)}} for n in range(12)})


@pytest.mark.needs("fuse")
def test_threads_wait_beside_each_other_and_share_what_one_would_do(slow: SlowVolume) -> None:
    wide(slow.backing / "top")
    slow.forget_max()
    assert sweep(slow.path / "top", EMPTY_FILES).sums.n_done == 120
    assert slow.max_under_way > 2
    assert names(slow.backing / "top") == {f"d{n}{rest}" for n in range(12) for rest in ("", "/full", "/sub")}


@pytest.mark.needs("fuse")
@pytest.mark.parametrize("n_workers", [1, 8])
@pytest.mark.parametrize("lists", [True, False])
def test_threads_choose_what_one_would(slow: SlowVolume, n_workers: int, lists: bool) -> None:
    wide(slow.backing / "top")
    paths = [b"d%d/full" % n for n in range(12)] + [b"d0/no"] if lists else None
    swept = sweep(slow.path / "top", FULL_FILES, n_workers=n_workers, names=paths)
    assert (swept.sums.n_done, swept.sums.n_missing, swept.sums.n_failed) == (12, int(lists), 0)


@pytest.mark.needs("fuse")
def test_threads_trash_and_it_comes_back(slow: SlowVolume) -> None:
    top = wide(slow.backing / "top")
    before = names(top)
    swept = sweep(slow.path / "top", EMPTY_FILES, ToTrash())
    assert (swept.sums.n_done, swept.sums.n_failed) == (120, 0)
    assert swept.orphan is not None
    restore(slow.path, swept.orphan)
    assert names(slow.path / "top") == before


@pytest.mark.needs("fuse")
def test_threads_move_each_once(slow: SlowVolume) -> None:
    make_tree(slow.backing / "top", {f"d{n}": {f"f{n}-{m}": "" for m in range(10)} for n in range(12)})
    (slow.backing / "to").mkdir()
    swept = sweep(slow.path / "top", ALL, ToMove(os.fsencode(slow.path / "to")))
    assert (swept.sums.n_done, swept.sums.n_failed) == (120, 0)
    moved = {name for name in names(slow.backing / "to") if "f" in name}
    assert moved == {f"d{n}/f{n}-{m}" for n in range(12) for m in range(10)}


@pytest.mark.needs("fuse")
def test_stopped_among_threads_it_gives_back_all_fds_and_the_next_does_the_rest(slow: SlowVolume) -> None:
    for n in range(4):
        fill(slow.backing / f"top/{n}", 1000)
    before = len(os.listdir("/proc/self/fd"))
    done: list[SweepSums] = []
    first = sweep(slow.path / "top", ALL, wishes=SweepOptions(progress=done.append, stops=lambda: len(done) > 2))
    assert (first.is_stopped, len(os.listdir("/proc/self/fd"))) == (True, before)
    second = sweep(slow.path / "top", ALL)
    assert first.sums.n_done + second.sums.n_done == 4000


@pytest.mark.needs("fuse")
@pytest.mark.parametrize("n_workers", [1, 2])
def test_what_a_sweep_takes_in_a_mount_is_gone_on_both_sides_at_once(mount: Mounted, n_workers: int) -> None:
    wide(mount.backing / "top")
    assert len(names(mount.path / "top")) == 12 * 13  # which the kernel and the daemon remember
    assert sweep(mount.path / "top", EMPTY_FILES, n_workers=n_workers).sums.n_done == 120
    left = {f"d{n}{rest}" for n in range(12) for rest in ("", "/full", "/sub")}
    assert names(mount.path / "top") == names(mount.backing / "top") == left


@pytest.mark.needs("fuse")
@pytest.mark.parametrize("side", ["mounted", "source"])
def test_what_is_trashed_in_a_mount_comes_back_on_both_sides(mount: Mounted, side: str) -> None:
    wide(mount.backing / "top")
    before = names(mount.path / "top")
    top = (mount.path if side == "mounted" else mount.backing) / "top"
    swept = sweep(top, EVERY_KIND, ToTrash())
    assert (names(mount.path / "top"), names(mount.backing / "top"), swept.sums.n_failed) == (set(), set(), 0)
    assert swept.orphan is not None
    restore(mount.path, swept.orphan)
    assert names(mount.path / "top") == names(mount.backing / "top") == before


@pytest.mark.needs("fuse")
def test_what_is_moved_in_a_mount_is_seen_where_it_is_and_no_more_where_it_was(mount: Mounted) -> None:
    wide(mount.backing / "top")
    (mount.backing / "to").mkdir()
    assert names(mount.path / "to") == set()
    swept = sweep(mount.path / "top", FULL_FILES, ToMove(os.fsencode(mount.path / "to")))
    assert swept.sums.n_done == 12
    assert {name for name in names(mount.path / "to") if "/" in name} == {f"d{n}/full" for n in range(12)}
    assert not [name for name in names(mount.path / "top") if name.endswith("full")]


@pytest.mark.needs("fuse")
def test_what_a_mount_shows_is_chosen_by_what_is_there(mount: Mounted) -> None:
    wide(mount.backing / "top")
    found = sorted(printed(mount.path / "top", FULL_FILES))
    assert found == sorted(printed(mount.backing / "top", FULL_FILES)) == sorted(b"d%d/full" % n for n in range(12))
    listed = sweep(mount.path / "top", FULL_FILES, names=[b"d1/full", bytes(mount.path / "top/d2/full"), b"d1/no"])
    assert (listed.sums.n_done, listed.sums.n_missing) == (2, 1)


@pytest.mark.needs("fuse")
@pytest.mark.parametrize("act", [ToDelete(), ToTrash(), ToCount(ToDelete())])
@pytest.mark.parametrize("where", ["in the mount", "behind it"])
def test_what_is_mounted_in_a_mount_or_behind_it_is_skipped(
    volume: Path, mount: Mounted, act: ActionRequest, where: str
) -> None:
    make_tree(mount.backing / "top", {"d": {"on": "1", "mnt": {}, "f": ""}})
    make_tree(volume / "other", {"f": ""})
    top = (mount.path if where == "in the mount" else mount.backing) / "top"
    with bind_mount(volume / "other", top / "d/mnt"), bind_mount(volume / "other/f", top / "d/on"):
        swept = sweep(mount.path / "top", ALL, act)
        assert (swept.sums.n_done, swept.sums.n_mounts, swept.sums.n_failed) == (1, 2, 0)
    assert names(volume / "other") == {"f"}
