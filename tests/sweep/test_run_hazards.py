"""What stands in a walk's way, and what else is at work there: told, left alone, and no reason to end."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from fusefs.core.errors import Refused
from fusefs.core.pacing import Speed
from fusefs.core.record import Failure
from fusefs.core.results import Spared, SweepSums
from fusefs.core.selection import Selection, TimeBound
from fusefs.engine.pace import ConstantSpeed
from fusefs.linux.kernel import Kernel
from fusefs.store.backing_and_mount import BackingAndMount
from fusefs.sweep.request import SweepWishes, ToCount, ToDelete, ToMove, ToTrash
from tests.support.background_processes import workers
from tests.support.make_trees import Spec, Symlink, make_tree
from tests.support.many_files import fill, roomy_volume
from tests.support.move_entries import AfterThe
from tests.support.other_users import as_user
from tests.support.real_filesystems import bind_mount
from tests.support.run_sweep import ALL, EVERY_KIND, names, printed, sweep
from tests.support.store_verbs import ActingBefore

pytestmark = pytest.mark.needs("root")

DIRECTORIES = Selection(types=frozenset("d"))
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
            assert swept.spared == (Spared(b"holds", "something is mounted in it"),)
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
    slowly = SweepWishes(ConstantSpeed(Speed(entries_per_s=500)))  # 25 in a slice, twice as many after a pause
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

    swept = sweep(top, ALL, wishes=SweepWishes(progress=other))
    assert swept.sums.n_done + done[0] == 20_000
    assert (swept.sums.n_failed, names(top)) == (0, set())
