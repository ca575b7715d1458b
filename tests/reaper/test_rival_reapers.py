"""Others that want the orphan that is being reaped: its holder has it alone, to the last of its processes (I5)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from fusefs.core.container_states import State
from fusefs.core.errors import Busy
from fusefs.core.names import ContainerId
from fusefs.linux.kernel import Kernel
from fusefs.reaper.reap import reap
from tests.support.make_trees import make_tree, snapshot
from tests.support.many_files import bulky_tree
from tests.support.reap_process import DONE, Reaping, start_and_stop, state_of
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
