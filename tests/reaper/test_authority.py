"""A reap does what the user who asked could have done, and nothing more (I13): by root's command too."""

import errno
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random

import pytest

from fusefs.core.errors import NotFound
from fusefs.core.results import Reaped
from tests.support.make_trees import (
    Dir,
    File,
    Spec,
    bulky_tree,
    deep_chain,
    fill,
    make_tree,
    remove_tree_hard,
    roomy_volume,
    snapshot,
)
from tests.support.other_users import as_user
from tests.support.proc_stat import status_of
from tests.support.reap_process import Reaping, assert_quarantined, left_in, reasons, start_reap, state_of
from tests.support.store_verbs import assert_silent, place, reap_now, swap
from tests.support.team_trees import tick

pytestmark = pytest.mark.needs("root")

USER, OTHER = 1000, 1001


def by_himself(volume: Path, identifier: str) -> Reaped:
    return as_user(USER, partial(reap_now, volume, identifier))


by_both = pytest.mark.parametrize("reap", [by_himself, reap_now], ids=["himself", "root"])
Reap = Callable[[Path, str], Reaped]


def orphan_with(volume: Path, name: str, spec: Spec | Dir, more: Callable[[Path], object] = bool) -> str:
    """The id of a user's orphan, in which root had made something, and done more there; the user filled the rest."""
    home = make_tree(volume / "home", Dir(owner=(USER, USER)))
    job = home / "job"

    def make() -> None:
        make_tree(job, {"a": "1", "sub": {"b": {"c": "2"}}, "closed": Dir({"d": "3"}, mode=0o500)})
        fill(job / "many", 500)

    as_user(USER, make)
    more(make_tree(job / name, spec))
    tick(volume)
    return as_user(USER, lambda: str(swap(job).id))


def assert_stays(volume: Path, identifier: str, reap: Reap, name: str, why: dict[bytes, int], left: set[str]) -> None:
    """Reaped, all but what is not the user's goes; that stays as it is, and is told with the kernel's reason."""
    reaped = reap(volume, identifier)
    assert reasons(reaped) == why
    assert_quarantined(volume, reaped)
    assert left_in(volume, identifier) == left
    before = snapshot(place(volume, identifier) / "tree" / name, with_times=True)
    assert reasons(reap(volume, identifier)) == why
    assert snapshot(place(volume, identifier) / "tree" / name, with_times=True) == before
    remove_tree_hard(place(volume, identifier) / "tree" / name)
    assert reap(volume, identifier).report.failures == ()
    assert state_of(volume, identifier) is None


@by_both
def test_file_in_a_directory_of_roots_stays(volume: Path, reap: Reap) -> None:
    identifier = orphan_with(volume, "roots", {"file": "r", "mine": File(b"m", owner=(USER, USER)), "d": {"x": "y"}})
    why = dict.fromkeys([b"tree/roots/file", b"tree/roots/mine", b"tree/roots/d/x"], errno.EACCES)
    left = {"roots", "roots/file", "roots/mine", "roots/d", "roots/d/x"}
    assert_stays(volume, identifier, reap, "roots", why, left)


@by_both
def test_somebody_elses_file_in_a_sticky_directory_stays_and_ones_own_goes(volume: Path, reap: Reap) -> None:
    spec = Dir({"theirs": File(b"t", owner=(OTHER, OTHER)), "mine": File(b"m", owner=(USER, USER))}, mode=0o1777)
    identifier = orphan_with(volume, "sticky", spec)
    left = {"sticky", "sticky/theirs"}
    assert_stays(volume, identifier, reap, "sticky", {b"tree/sticky/theirs": errno.EPERM}, left)


@pytest.mark.parametrize("fs_type", ["tmpfs", pytest.param("ext4", marks=pytest.mark.needs("loop"))])
def test_among_more_refused_files_than_a_reaper_remembers_all_of_ones_own_go(fs_type: str) -> None:
    with roomy_volume(fs_type, 50_000) as volume:
        mine = {f"f{i}" for i in Random("whose").sample(range(40_000), 20_000)}

        def give_some(sticky: Path) -> None:
            fill(sticky, 40_000)
            for name in mine:
                os.chown(sticky / name, USER, USER)

        identifier = orphan_with(volume, "sticky", Dir({}, mode=0o1777), give_some)
        reaped = reap_now(volume, identifier)
        assert reaped.report.n_failed >= 20_000
        assert_quarantined(volume, reaped)
        tree = place(volume, identifier) / "tree"
        assert os.listdir(tree) == ["sticky"]
        assert mine.isdisjoint(os.listdir(tree / "sticky"))
        assert len(os.listdir(tree / "sticky")) == 20_000
        remove_tree_hard(tree / "sticky")
        assert reap_now(volume, identifier).report.failures == ()
        assert_silent(volume)


@by_both
def test_directory_of_roots_that_can_not_be_opened_stays_with_what_is_in_it(volume: Path, reap: Reap) -> None:
    identifier = orphan_with(volume, "secret", Dir({"file": "s", "sub": {"x": "y"}}, mode=0o700))
    reaped = reap(volume, identifier)
    assert set(reasons(reaped)) == {b"tree/secret"}
    assert set(reasons(reaped).values()) <= {errno.EACCES, errno.EPERM}
    assert left_in(volume, identifier) == {"secret", "secret/file", "secret/sub", "secret/sub/x"}
    assert (place(volume, identifier) / "tree/secret").stat().st_mode & 0o7777 == 0o700
    remove_tree_hard(place(volume, identifier) / "tree/secret")
    assert reap(volume, identifier).report.failures == ()


@by_both
def test_depth_in_a_directory_of_roots_is_not_moved_up(volume: Path, reap: Reap) -> None:
    identifier = orphan_with(volume, "roots", {})
    deep_chain(place(volume, identifier) / "tree/roots/deep", 300)
    before = snapshot(place(volume, identifier) / "tree/roots")
    reaped = reap(volume, identifier)
    assert set(reasons(reaped).values()) == {errno.EACCES}
    assert snapshot(place(volume, identifier) / "tree/roots") == before
    hoisted = place(volume, identifier) / "hoisted"
    assert not hoisted.exists() or os.listdir(hoisted) == []
    remove_tree_hard(place(volume, identifier) / "tree/roots")
    assert reap(volume, identifier).report.failures == ()


@by_both
def test_what_others_own_in_ones_own_directory_goes(volume: Path, reap: Reap) -> None:
    """As rm would: the directory's owner may remove any name in it, and an empty directory too."""
    identifier = orphan_with(volume, "roots", Dir({}))
    tree = place(volume, identifier) / "tree"
    (tree / "file").write_text("root's")
    os.mkfifo(tree / "fifo")
    assert reap(volume, identifier).report.failures == ()
    assert state_of(volume, identifier) is None


@by_both
def test_a_users_link_to_roots_file_is_his_to_unlink_and_the_file_stays(volume: Path, reap: Reap) -> None:
    roots = make_tree(volume / "roots", {"file": File(b"r" * 10_000, mode=0o600)})
    before = snapshot(roots, with_times=True)
    identifier = orphan_with(volume, "sub2", Dir({}, owner=(USER, USER)))
    os.link(roots / "file", place(volume, identifier) / "tree/sub2/link")
    assert reap(volume, identifier).report.failures == ()
    assert snapshot(roots, with_times=True) == before


def test_users_orphans_are_out_of_each_others_reach(volume: Path) -> None:
    identifier = orphan_with(volume, "mine", Dir({}, owner=(USER, USER)))
    before = snapshot(place(volume, identifier), with_times=True)
    with pytest.raises(NotFound):
        as_user(OTHER, partial(reap_now, volume, identifier))
    assert snapshot(place(volume, identifier), with_times=True) == before
    reap_now(volume, identifier)


def his_processes(reaping: Reaping) -> list[int]:
    """The processes of a reap that have the user's uid, those that another of them started last."""
    found = []
    for pid in reaping.workers():
        with suppress(OSError):
            field = status_of(pid)
            if field["Uid"][0] == str(USER):
                found.append((int(field["PPid"][0]) != reaping.pid, pid))
    return [pid for _, pid in sorted(found)]


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_process_that_its_user_stops_or_kills_holds_up_no_reap_of_roots(volume: Path, number: signal.Signals) -> None:
    home = make_tree(volume / "home", Dir(owner=(USER, USER)))
    n_hit = 0
    for n in range(10):
        identifier = as_user(USER, lambda n=n: str(swap(bulky_tree(home / f"job-{n}")).id))  # type: ignore[misc]
        reaping = start_reap(volume, identifier)
        try:
            while len(his_processes(reaping)) < 2 and not reaping.has_ended(0.001):
                pass
            for pid in his_processes(reaping)[-1:]:
                with suppress(ProcessLookupError):
                    as_user(USER, partial(os.kill, pid, number))
                    n_hit += 1
            while not reaping.has_ended(1):
                pass
        finally:
            reaping.signal_all(signal.SIGKILL)
            reaping.wait()
        if state_of(volume, identifier) is not None:
            assert reap_now(volume, identifier).report.failures == ()
        if n_hit >= 3:
            break
    assert n_hit
