"""Several workers, and one that is lost; a sweep that was stopped; names from a list."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusefs.core.record import Failure
from fusefs.core.selection import Selection
from fusefs.core.swept import Sums
from fusefs.linux.kernel import Kernel
from fusefs.sweep.request import Wishes
from tests.support.bulk import fill
from tests.support.sweeping import ALL, EVERY_KIND, names, sweep
from tests.support.tree import Symlink, make_tree
from tests.support.volumes import loop_volume, tmpfs_volume
from tests.support.workers import EndsWorkers

pytestmark = pytest.mark.needs("root")

LOGS = Selection(names=("*.log",))


# Workers


@pytest.mark.parametrize("fs_type", ["tmpfs", "ext4"])
def test_workers_share_what_one_would_do(fs_type: str) -> None:
    volume = tmpfs_volume("256m") if fs_type == "tmpfs" else loop_volume("ext4", 128, ["-N", "60000"])
    with volume as path:
        top = path / "top"
        top.mkdir()
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
    done: list[Sums] = []
    first = sweep(top, ALL, wishes=Wishes(progress=done.append, stops=lambda: any(sums.n_done for sums in done)))
    assert first.is_stopped
    assert 0 < first.sums.n_done < 30_000
    second = sweep(top, ALL)
    assert (first.sums.n_done + second.sums.n_done, second.is_stopped) == (30_000, False)


# Names that somebody listed


def listed(*paths: str) -> Iterator[bytes]:
    return map(os.fsencode, paths)


def test_only_what_is_listed_goes(volume: Path) -> None:
    top = make_tree(volume / "top", {"a.log": "", "d": {"b.log": "", "c.log": "", "e": {}}, "x.txt": ""})
    swept = sweep(top, LOGS, names=listed("d/b.log", "./d//c.log", str(top / "a.log"), "d/gone.log", "x.txt", "d/e"))
    assert (swept.sums.n_done, swept.sums.n_vanished, swept.failures) == (3, 1, ())
    assert names(top) == {"d", "d/e", "x.txt"}


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "d/../../x", "d/../a.log"])
def test_a_name_outside_is_told(volume: Path, path: str) -> None:
    top = make_tree(volume / "top", {"a.log": "", "d": {}})
    swept = sweep(top, ALL, names=listed(path, "a.log"))
    assert (swept.sums.n_done, swept.sums.n_failed) == (1, 1)


@pytest.mark.parametrize("path", ["", ".", "./", "{top}", "{top}/."])
def test_the_directory_itself_is_listed_in_vain(volume: Path, path: str) -> None:
    top = make_tree(volume / "top", {"a.log": "", "d": {}})
    swept = sweep(top, EVERY_KIND, names=listed(path.format(top=top)))
    assert (swept.sums, names(top)) == (Sums(), {"a.log", "d"})


def test_a_link_on_the_way_to_a_listed_name_is_told(volume: Path) -> None:
    make_tree(volume / "outside", {"f": ""})
    top = make_tree(volume / "top", {"link": Symlink(str(volume / "outside")), "g": ""})
    swept = sweep(top, ALL, names=listed("link/f", "g", "link/sub/f"))
    told = (Failure(b"link", errno.ENOTDIR, "open"), Failure(b"link/sub", errno.ELOOP, "open"))
    assert (swept.sums.n_done, swept.failures) == (1, told)
    assert names(volume / "outside") == {"f"}


def test_a_listed_name_below_what_is_excluded_stays(volume: Path) -> None:
    top = make_tree(volume / "top", {"keep": {"d": {"f": ""}}, ".trashd": {"g": ""}})
    assert sweep(top, Selection(excludes=("keep",)), names=listed("keep/d/f", ".trashd/g")).sums.n_done == 0
    assert len(names(top)) == 5


def test_a_list_is_begun_with_before_it_ends(top: Path) -> None:
    fill(top, 5000)
    read: list[int] = []

    def paths() -> Iterator[bytes]:
        for n in range(5000):
            read.append(n)
            yield b"f%d" % n

    first: list[int] = []
    swept = sweep(top, ALL, names=paths(), wishes=Wishes(progress=lambda _sums: first.append(len(read))), n_workers=1)
    assert swept.sums.n_done == 5000
    assert first[0] < 2000
