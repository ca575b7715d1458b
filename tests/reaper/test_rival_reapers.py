"""Others that want the orphan that is being reaped: its holder has it alone, to the last of its processes (I5)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from random import Random

import pytest

from fusefs.core.container_states import State
from fusefs.core.errors import Busy, NotFound
from fusefs.core.names import ContainerId
from fusefs.linux.kernel import Kernel
from fusefs.reaper.reap import reap
from tests.support.make_trees import make_tree, snapshot
from tests.support.many_files import bulky_tree, fill
from tests.support.reap_process import DONE, LOST, Reaping, is_claimed, start_and_stop, start_reap, state_of
from tests.support.store_verbs import ActingAt, Counting, own, reap_now, recover_all, restore, swap

pytestmark = pytest.mark.needs("root")

N_TRIES = 20


@pytest.fixture
def orphan(volume: Path) -> str:
    return swap(bulky_tree(volume / "job")).id


@pytest.fixture
def reaping(volume: Path, orphan: str) -> Iterator[Reaping]:
    """A reap of it, stopped in the middle."""
    random = Random("stopped")
    for _ in range(N_TRIES):
        stopped = start_and_stop(volume, orphan, random.uniform(0.01, 0.05))
        if stopped is not None:
            yield stopped
            return
        (volume / "job").rmdir()
        bulky_tree(volume / "again").rename(volume / "job")
        orphan = swap(volume / "job").id
    raise AssertionError("every reap was faster than its stop")


def only_id(volume: Path) -> str:
    [container] = (volume / ".trashd/u/0/reaping").iterdir()
    return container.name


def test_second_reaper_is_told_that_the_orphan_is_busy(volume: Path, reaping: Reaping) -> None:
    assert reap_now(volume, only_id(volume)).lost == "busy"
    reaping.signal_all(signal.SIGCONT)
    assert reaping.wait() == DONE


def test_restore_loses_to_a_running_reap_and_changes_nothing(volume: Path, reaping: Reaping) -> None:
    identifier, before = only_id(volume), snapshot(volume / "job")
    with pytest.raises(Busy):
        restore(volume, identifier)
    with pytest.raises(Busy):
        restore(volume, identifier, inside=b"d0", to=volume / "part")
    assert (snapshot(volume / "job"), (volume / "part").exists()) == (before, False)
    reaping.signal_all(signal.SIGCONT)
    assert reaping.wait() == DONE


def test_recovery_leaves_a_running_reap_alone(volume: Path, reaping: Reaping) -> None:
    identifier = only_id(volume)
    assert recover_all(volume) == []
    assert state_of(volume, identifier) is State.REAPING
    reaping.signal_all(signal.SIGCONT)
    assert reaping.wait() == DONE


def test_what_a_killed_reap_left_is_busy_as_long_as_one_of_its_workers_lives(volume: Path, reaping: Reaping) -> None:
    identifier, before = only_id(volume), snapshot(volume / "job")
    reaping.signal_one(reaping.pid, signal.SIGKILL)
    while reaping.pid in reaping.processes():
        os.sched_yield()
    try:
        lost = reap_now(volume, identifier).lost
        if reaping.workers():
            assert lost == "busy"
            with pytest.raises(Busy):
                restore(volume, identifier)
            assert snapshot(volume / "job") == before
    finally:
        reaping.signal_all(signal.SIGCONT)
        reaping.wait()
    if lost is not None:
        assert lost == "busy"
        assert reap_now(volume, identifier).lost is None
    assert state_of(volume, identifier) is None


def test_of_two_reaps_begun_at_once_one_wins_and_the_other_says_so(volume: Path) -> None:
    for n in range(30):
        identifier = swap(fill(volume / f"job-{n}", 300)).id
        both = [start_reap(volume, identifier) for _ in range(2)]
        assert sorted(one.wait() for one in both) == [DONE, LOST], f"round {n}"
        assert state_of(volume, identifier) is None


def test_of_a_reap_and_a_restore_begun_at_once_one_wins_and_the_tree_is_whole_or_gone(volume: Path) -> None:
    for n in range(30):
        job = make_tree(volume / "job", {"a": "1", "sub": {f"{i}": "x" for i in range(100)}})
        before = snapshot(job)
        identifier = swap(job).id
        reaping = start_reap(volume, identifier)
        reaping.has_ended(n / 10_000)
        while n % 3 == 0 and not (reaping.has_ended() or is_claimed(volume, identifier)):
            os.sched_yield()
        try:
            restored = restore(volume, identifier)
        except (Busy, NotFound):
            assert reaping.wait() == DONE
            assert os.listdir(job) == []
            job.rmdir()
        else:
            assert n % 3, "it was claimed"
            assert reaping.wait() == LOST
            assert (snapshot(job), restored.partial) == (before, False)
            job.rename(volume / f"restored-{n}")
        assert state_of(volume, identifier) is None


def test_a_reap_between_any_two_calls_of_a_restore_has_all_of_the_tree_or_nothing(volume: Path) -> None:
    job = volume / "job"
    outcomes: set[bool] = set()
    reaped = False

    def reap_it() -> None:
        nonlocal reaped
        try:
            reaped = reap_now(volume, identifier).lost is None
        except NotFound:
            reaped = False

    for n in count():
        identifier = swap(make_tree(job, {"a": "1", "sub": {"b": "2"}})).id
        reaped = False
        hook = ActingAt(n, reap_it)
        try:
            restore(volume, identifier, Kernel(hook))
        except (Busy, NotFound):
            assert (reaped, os.listdir(job)) == (True, []), f"before call {n}"
        else:
            assert (reaped, sorted(os.listdir(job))) == (False, ["a", "sub"]), f"before call {n}"
        assert state_of(volume, identifier) is None
        if hook.left >= 0:
            break
        outcomes.add(reaped)
        job.rename(volume / f"job-{n}")
    assert outcomes == {True, False}


def test_what_another_reap_is_just_ending_is_gone_and_not_broken(volume: Path) -> None:
    """For a moment it is a container without a record, which many reaps at once took for one that has lost it."""

    def orphan_of(n: int) -> str:
        return swap(make_tree(volume / f"tree{n}", {"file": ""})).id

    calls = Counting()
    reap_now(volume, orphan_of(-1), Kernel(calls))
    lost = set[str | None]()
    last = max(at for at, call in enumerate(calls.calls) if call == "rmdir")
    for n in range(last - 8, last + 1):
        identifier = orphan_of(n)

        def act(identifier: str = identifier) -> None:
            with own(volume) as folder:
                lost.add(reap(folder, ContainerId(identifier)).lost)

        reap_now(volume, identifier, Kernel(ActingAt(n, act)))
    assert lost == {"busy", "gone"}
