"""What a walk owes whatever it does: every match once, nothing else, and only below the directory."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from fusefs.core.errors import IsStore, NotADirectory, NotFound, Refused
from fusefs.core.record import Failure
from fusefs.core.results import SweepSums
from fusefs.core.selection import Selection, SizeBound
from fusefs.linux.kernel import Kernel
from fusefs.sweep.request import SweepWishes, ToCount, ToDelete
from tests.support.background_processes import EndsWorkers
from tests.support.make_trees import Symlink, deep_chain, make_tree
from tests.support.many_files import fill, roomy_volume
from tests.support.run_sweep import ALL, EVERY_KIND, names, printed, sweep
from tests.support.store_verbs import Counting, init

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
    first = sweep(top, ALL, wishes=SweepWishes(progress=done.append, stops=lambda: any(sums.n_done for sums in done)))
    assert first.is_stopped
    assert 0 < first.sums.n_done < 30_000
    second = sweep(top, ALL)
    assert (first.sums.n_done + second.sums.n_done, second.is_stopped) == (30_000, False)
