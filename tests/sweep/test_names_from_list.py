"""Names from a list: only those, told as they are; and lists that are none."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from fusefs.core.pacing import AT_ONCE, HOLD, Speed
from fusefs.core.record import Failure
from fusefs.core.results import SweepSums
from fusefs.core.selection import Selection
from fusefs.linux.kernel import RefusedNames
from fusefs.sweep.names_from_list import BrokenList, read_names
from fusefs.sweep.request import ActionPlace, SweepWishes, ToPrint, ToTrash
from tests.support.make_trees import Symlink, make_tree
from tests.support.many_files import fill
from tests.support.run_sweep import ALL, EVERY_KIND, names, sweep

pytestmark = pytest.mark.needs("root")

LOGS = Selection(names=("*.log",))


def listed(*paths: str) -> Iterator[bytes]:
    return map(os.fsencode, paths)


def test_only_what_is_listed_goes(volume: Path) -> None:
    top = make_tree(volume / "top", {"a.log": "", "d": {"b.log": "", "c.log": "", "e": {}}, "x.txt": ""})
    swept = sweep(top, LOGS, names=listed("d/b.log", "./d//c.log", str(top / "a.log"), "d/gone.log", "x.txt", "d/e"))
    assert (swept.sums.n_done, swept.sums.n_missing, swept.failures) == (3, 1, ())
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
    assert (swept.sums, names(top)) == (SweepSums(), {"a.log", "d"})


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
    swept = sweep(
        top, ALL, names=paths(), wishes=SweepWishes(progress=lambda _sums: first.append(len(read))), n_workers=1
    )
    assert swept.sums.n_done == 5000
    assert first[0] < 2000


def test_names_of_a_directory_have_their_turn_in_the_list_s_order(top: Path) -> None:
    fill(top, 3000)
    paths = [f"f{n * 7 % 3000}" for n in range(3000)]
    told: list[str] = []

    def tell(_here: ActionPlace, names: Sequence[str]) -> RefusedNames:
        told.extend(names)
        return []

    sweep(top, ALL, ToPrint(tell), names=listed(*paths), n_workers=1)
    assert told == paths


def test_a_list_in_no_order_takes_no_slice_a_name(volume: Path) -> None:
    top = make_tree(volume / "top", {f"d{n}": {"f": "", "g": ""} for n in range(1000)})
    slices: list[SweepSums] = []
    paths = [f"d{n}/{name}" for name in "fg" for n in range(1000)]
    swept = sweep(top, ALL, names=listed(*paths), wishes=SweepWishes(progress=slices.append), n_workers=1)
    assert swept.sums.n_done == 2000
    assert len(slices) < 200


def test_late_names_are_asked_for_when_they_can_be_acted_on(top: Path) -> None:
    fill(top, 5)
    asked: list[int] = []

    def paths() -> Iterator[bytes]:
        for n in range(5):
            asked.append(n)
            yield b"f%d" % n

    halting = Halting(lambda: (len(asked), 5 - len(os.listdir(top))))
    assert sweep(top, ALL, names=paths(), late=True, wishes=SweepWishes(halting), n_workers=1).sums.n_done == 5
    # A slice whose time is over before it acts asks for a name, which the next slice acts on: the first look counts.
    first = {n_gone: n_asked for n_asked, n_gone in reversed(halting.seen)}
    assert [first[n] for n in range(5)] == [*range(5)]


class Halting:
    """Lets nothing be done before each slice until the test has waited, which then looks."""

    def __init__(self, look: Callable[[], tuple[int, int]]) -> None:
        self.look = look
        self.seen: list[tuple[int, int]] = []
        self.holds = True

    def tempo(self) -> Speed:
        return HOLD if self.holds else AT_ONCE

    def done(self, _n_entries: int, _n_bytes: int, _busy_s: float) -> None:
        self.holds = True

    def wait(self, _seconds: float) -> None:
        self.seen.append(self.look())
        self.holds = False


def test_a_list_that_breaks_off_is_a_stop_that_tells_what_was_done(volume: Path) -> None:
    top = make_tree(volume / "top", {"d": {"f": "", "g": ""}, "e": {"h": ""}})

    def broken() -> Iterator[bytes]:
        yield from (b"d/f", b"e/h")
        raise BrokenList("the disk says no")

    swept = sweep(top, ALL, ToTrash(), names=broken())
    assert (swept.sums.n_done, swept.is_stopped, swept.why) == (2, True, "the list can't be read on: the disk says no")
    assert [path.name for path in volume.glob(".trashd/u/0/orphans/*")] == [swept.orphan]


def test_what_is_not_there_at_the_first_look_is_missing_and_nothing_vanished(volume: Path) -> None:
    top = make_tree(volume / "top", {"d": {"f": ""}})
    swept = sweep(top, ALL, names=listed("d/f", "d/no", "no/f", "no/g"))
    assert (swept.sums, names(top)) == (SweepSums(n_seen=1, n_matched=1, n_done=1, n_missing=3), {"d"})


@pytest.mark.parametrize("end", [b"\n", b"\0"])
def test_a_list_that_the_kernel_can_not_read_is_broken(end: bytes) -> None:
    with Path("/proc/self/mem").open("rb", buffering=0) as file, pytest.raises(BrokenList, match="Input/output error"):
        next(read_names(file.fileno(), end))
