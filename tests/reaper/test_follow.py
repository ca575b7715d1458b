"""Following orphans: to their end, or until it is known what keeps them; by a clock that only pauses move."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fcntl import LOCK_EX, flock
from functools import partial
from pathlib import Path

import msgspec
import pytest

from fusefs.core.freed_space import SpaceKeeper
from fusefs.core.service_status import VolumePhase, volume_status
from fusefs.core.space_goal import ALL
from fusefs.linux.file_locks import take
from fusefs.linux.kernel import Kernel
from fusefs.store.stage import SwapOptions
from fusefs.store.swap import Swapped
from fusefs.waiting.wait_for_reaper import Followed, FollowedOrphan, LeftToReaper, follow, hand_over
from fusefs.waiting.wait_for_space import FreeSpaceGauge
from tests.support.make_trees import make_tree
from tests.support.minimal_reaper import own_runtime_dir, tell
from tests.support.store_calls import forge, own, place, raw, reap_now, restore, swap, tree_of

pytestmark = pytest.mark.needs("root")


class Following:
    """One orphan in the hands of a reaper that does what the test does at a time of its clock."""

    def __init__(self, volume: Path, orphan: FollowedOrphan, acts: Mapping[float, Callable[[], object]]) -> None:
        self.volume = volume
        self.orphan = orphan
        self.acts = dict(acts)
        self.now_s = 0.0
        self.told: list[str] = []

    def pause(self, seconds: float) -> None:
        self.now_s += seconds
        for at_s in [at_s for at_s in self.acts if at_s <= self.now_s]:
            self.acts.pop(at_s)()

    def follow(self, until_s: float = 100.0) -> Followed:
        kernel = Kernel()
        with kernel.open_path(raw(self.volume)) as fd:
            return follow(
                [self.orphan],
                FreeSpaceGauge(kernel, fd),
                ALL,
                tell=self.told.append,
                stops=lambda: self.now_s > until_s,
                clock=lambda: self.now_s,
                pause=self.pause,
            )


@contextmanager
def served(volume: Path, phase: VolumePhase = VolumePhase.REAPING) -> Iterator[Callable[[VolumePhase], None]]:
    """This process is the service; how it says something else."""
    with own_runtime_dir() as directory:
        lock = take(directory)
        assert lock is not None
        with own(volume) as folder, lock:
            status = msgspec.structs.replace(volume_status(raw(volume)), id=folder.store.volume.id)

            def say(phase: VolumePhase) -> None:
                tell(directory, msgspec.structs.replace(status, phase=phase))

            say(phase)
            yield say


@contextmanager
def followed(
    volume: Path, *, due_ns: int = 0, keeps: bool = False, **acts: Callable[[Swapped], object]
) -> Iterator[tuple[Following, Swapped]]:
    """An orphan that was left to the reaper; `at_5=...` does something after 5 seconds."""
    swapped = swap(make_tree(volume / "victim", {"file": b"x" * 100_000}), options=SwapOptions(retention_s=3600))
    with own(volume) as folder:
        orphan = FollowedOrphan(folder, swapped.id, due_ns)
        orphan.mark()
        handed = hand_over(folder, swapped.id, lambda _entries, _bytes: None, lambda: False, keeps=keeps)
        assert handed.survey is not None
        orphan.survey = handed.survey
        timed = {float(name.removeprefix("at_")): partial(act, swapped) for name, act in acts.items()}
        yield Following(volume, orphan, timed), swapped
        orphan.close()


def test_it_ends_with_the_orphan(volume: Path) -> None:
    with served(volume), followed(volume, at_3=lambda one: reap_now(volume, one.id)) as (following, _):
        assert following.follow() == Followed(None, ())
        assert 3 <= following.now_s < 4


def test_what_is_counted_is_told_by_whoever_counted(volume: Path) -> None:
    swapped = swap(make_tree(volume / "victim", {"file": b"x" * 100_000}))
    with own(volume) as folder:
        handed = hand_over(folder, swapped.id, lambda _entries, _bytes: None, lambda: False, keeps=False)
    assert handed.is_handed
    assert handed.survey is not None
    assert handed.survey.n_entries == 2
    assert handed.survey.n_bytes >= 100_000


def test_what_somebody_has_is_not_left_to_the_reaper(volume: Path) -> None:
    swapped = swap(make_tree(volume / "victim", {"file": ""}))
    with (tree_of(swapped).parent / "record.json").open() as record:
        flock(record, LOCK_EX)
        with own(volume) as folder:
            handed = hand_over(folder, swapped.id, lambda _entries, _bytes: None, lambda: False, keeps=False)
    assert handed == LeftToReaper(None, False)
    assert tree_of(swapped).exists()


def test_who_stops_the_counting_keeps_the_orphan(volume: Path) -> None:
    swapped = swap(make_tree(volume / "victim", {"file": ""}))
    with own(volume) as folder:
        handed = hand_over(folder, swapped.id, lambda _entries, _bytes: None, lambda: True, keeps=False)
    assert not handed.is_handed
    assert tree_of(swapped).exists()


def test_a_service_that_is_started_anew_is_waited_for(volume: Path) -> None:
    with own_runtime_dir(), followed(volume, at_4=lambda one: reap_now(volume, one.id)) as (following, _):
        assert following.follow().hindrance is None


def test_a_service_that_stays_away_is_gone(volume: Path) -> None:
    with own_runtime_dir(), followed(volume) as (following, _):
        hindrance = following.follow().hindrance
    assert hindrance is not None
    assert hindrance.kind is SpaceKeeper.NOBODY
    assert 5 < following.now_s < 7


def test_a_pause_ends_it_at_once(volume: Path) -> None:
    with served(volume) as say, followed(volume, at_3=lambda _one: say(VolumePhase.PAUSED)) as (following, _):
        hindrance = following.follow().hindrance
    assert hindrance is not None
    assert hindrance.kind is SpaceKeeper.PAUSED
    assert following.now_s < 5


def test_a_window_is_waited_for_and_told(volume: Path) -> None:
    with (
        served(volume, VolumePhase.WINDOW),
        followed(volume, at_50=lambda one: reap_now(volume, one.id)) as (following, _),
    ):
        assert following.follow() == Followed(None, ())
    assert set(following.told) == {"window"}


def test_until_it_is_due_the_time_is_told(volume: Path) -> None:
    in_an_hour = Kernel().now_ns() + 3_600_000_000_000
    with served(volume), followed(volume, due_ns=in_an_hour, keeps=True) as (following, swapped):
        following.follow(until_s=20)
        assert tree_of(swapped).exists()
    assert all(told.startswith("may be reaped in ") for told in following.told)


def test_of_an_orphan_that_nobody_takes_the_lock_s_holder_is_named(volume: Path) -> None:
    with (
        served(volume),
        followed(volume, keeps=True) as (following, swapped),
        (tree_of(swapped).parent / "record.json").open() as record,
    ):
        flock(record, LOCK_EX)
        hindrance = following.follow().hindrance
    assert hindrance is not None
    assert hindrance.kind is SpaceKeeper.PINNED
    assert f"(pid {os.getpid()}) holds the lock of {swapped.id}" in hindrance.detail
    assert 10 < following.now_s < 12


def test_a_restore_ends_it_and_its_space_is_not_expected(volume: Path) -> None:
    with served(volume), followed(volume, at_3=lambda one: restore(volume, one.id)) as (following, swapped):
        hindrance, kept = following.follow()
    assert hindrance is None
    assert [(reason.kind, reason.n_bytes) for reason in kept] == [
        (SpaceKeeper.RESTORED, following.orphan.survey.n_bytes)
    ]
    assert kept[0].detail == f"{swapped.id} was restored"


def test_a_restore_is_told_from_a_reap_by_the_trees_last_name(volume: Path) -> None:
    with served(volume), followed(volume) as (following, swapped):
        reap_now(volume, swapped.id)
        assert following.orphan.state() is None
        assert following.orphan.ended() is None


def test_what_a_user_wrote_about_a_quarantined_orphan_is_told_without_harm(volume: Path) -> None:
    with served(volume), followed(volume) as (following, swapped):
        container = place(volume, swapped.id)
        failures = [{"name": "a%1B[31m", "errno": 10**18, "call": "\x1b[2J"}]
        forge(container / "record.json", failures=failures)
        container.rename(container.parent.with_name("quarantine") / container.name)
        _hindrance, (reason,) = following.follow()
    assert reason.kind is SpaceKeeper.LEFT
    assert reason.n_bytes >= 100_000
    assert reason.detail == rf"could not be removed, in quarantine: \x1b[2J a\x1b[31m: error {10**18}"
