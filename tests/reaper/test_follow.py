"""Following orphans: to their end, or until it is known what keeps them; by a clock that only pauses move."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fcntl import LOCK_EX, flock
from functools import partial
from pathlib import Path

import msgspec
import pytest

from fusefs.core.service_status import VolumePhase, volume_status
from fusefs.core.space_goal import DONE, WaitReason, WaitReasonKind
from fusefs.linux.file_locks import take
from fusefs.linux.kernel import Kernel
from fusefs.store.swap import Swapped
from fusefs.waiting import wait_for_space
from fusefs.waiting.wait_for_space import (
    FollowedOrphan,
    FreeSpaceGauge,
    SwapWait,
    follow,
    hand_over,
)
from tests.support.make_trees import make_tree
from tests.support.minimal_reaper import own_runtime_dir, tell
from tests.support.store_calls import forge, own, place, raw, reap_now, restore, swap, tree_of

pytestmark = pytest.mark.needs("root")


class Following:
    """One orphan, and a reaper that does what the test says at a time of its clock; it stands in for `time`."""

    def __init__(self, volume: Path, orphan: FollowedOrphan, acts: Mapping[float, Callable[[], object]]) -> None:
        self.volume = volume
        self.orphan = orphan
        self.acts = dict(acts)
        self.now_s = 0.0
        self.shown: list[str] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        for at_s in [at_s for at_s in self.acts if at_s <= self.now_s]:
            self.acts.pop(at_s)()

    def follow(self) -> tuple[list[WaitReason], bool]:
        kernel = Kernel()
        with kernel.open_path(raw(self.volume)) as fd, pytest.MonkeyPatch.context() as patch:
            patch.setattr(wait_for_space, "time", self)
            gauge = FreeSpaceGauge(kernel, raw(self.volume), fd)
            return follow([self.orphan], gauge, DONE, self.shown.append, lambda: False)


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
def followed(volume: Path, **acts: Callable[[Swapped], object]) -> Iterator[tuple[Following, Swapped]]:
    """An orphan that was left to the reaper; `at_5=...` does something after 5 seconds."""
    swapped = swap(make_tree(volume / "victim", {"file": b"x" * 100_000}))
    with own(volume) as folder:
        orphan = FollowedOrphan(folder, swapped)
        orphan.mark()
        hand_over(orphan, lambda: False, keeps=False, counts=False)
        timed = {float(name.removeprefix("at_")): partial(act, swapped) for name, act in acts.items()}
        yield Following(volume, orphan, timed), swapped
        orphan.close()


def give_up(volume: Path, swapped: Swapped, *, stops: bool = False, keeps: bool = False, counts: bool = False) -> int:
    with own(volume) as folder:
        return hand_over(FollowedOrphan(folder, swapped), lambda: stops, keeps=keeps, counts=counts)


def test_it_ends_with_the_orphan(volume: Path) -> None:
    with served(volume), followed(volume, at_3=lambda one: reap_now(volume, one.id)) as (following, _):
        assert following.follow() == ([], True)
        assert 3 <= following.now_s < 4


@pytest.mark.parametrize("keeps", [False, True])
def test_the_tree_is_counted_on_request(volume: Path, keeps: bool) -> None:
    swapped = swap(make_tree(volume / "victim", {"file": b"x" * 100_000}))
    assert give_up(volume, swapped, keeps=keeps, counts=True) >= 100_000
    assert tree_of(swapped).exists() is keeps


def test_an_orphan_that_another_process_has_locked_stays_where_it_is(volume: Path) -> None:
    swapped = swap(make_tree(volume / "victim", {"file": ""}))
    with (tree_of(swapped).parent / "record.json").open() as record:
        flock(record, LOCK_EX)
        give_up(volume, swapped)
    assert tree_of(swapped).exists()


def test_after_a_stop_the_orphan_stays_where_it_is(volume: Path) -> None:
    swapped = swap(make_tree(volume / "victim", {"file": ""}))
    give_up(volume, swapped, stops=True)
    assert tree_of(swapped).exists()


def test_a_service_that_is_started_anew_is_waited_for(volume: Path) -> None:
    with own_runtime_dir(), followed(volume, at_4=lambda one: reap_now(volume, one.id)) as (following, _):
        assert following.follow() == ([], True)


def test_a_service_that_stays_away_is_gone(volume: Path) -> None:
    with own_runtime_dir(), followed(volume) as (following, _):
        (reason,), are_gone = following.follow()
    assert (reason.kind, are_gone) == (WaitReasonKind.NOBODY, False)
    assert 5 < following.now_s < 7


def test_a_pause_ends_it_at_once(volume: Path) -> None:
    with served(volume) as say, followed(volume, at_3=lambda _one: say(VolumePhase.PAUSED)) as (following, _):
        (reason,), are_gone = following.follow()
    assert (reason.kind, are_gone) == (WaitReasonKind.PAUSED, False)
    assert following.now_s < 5


def test_a_window_is_waited_for_and_shown(volume: Path) -> None:
    with (
        served(volume, VolumePhase.WINDOW),
        followed(volume, at_50=lambda one: reap_now(volume, one.id)) as (following, _),
    ):
        assert following.follow() == ([], True)
    assert {shown.partition("; ")[2] for shown in following.shown} == {"window"}


def test_a_restore_ends_it_with_a_reason(volume: Path) -> None:
    with served(volume), followed(volume, at_3=lambda one: restore(volume, one.id)) as (following, swapped):
        reasons, are_gone = following.follow()
    assert are_gone
    assert reasons == [WaitReason(WaitReasonKind.RESTORED, 0, f"{swapped.id} was restored")]


def test_a_restore_is_told_from_a_reap_by_the_trees_last_name(volume: Path) -> None:
    with served(volume), followed(volume) as (following, swapped):
        reap_now(volume, swapped.id)
        assert following.orphan.state() is None
        assert following.orphan.find_end() == []


def test_what_a_user_wrote_about_a_quarantined_orphan_is_printed_without_harm(volume: Path) -> None:
    with served(volume), followed(volume) as (following, swapped):
        container = place(volume, swapped.id)
        failures = [{"name": "a%1B[31m", "errno": 10**18, "call": "\x1b[2J"}]
        forge(container / "record.json", failures=failures)
        container.rename(container.parent.with_name("quarantine") / container.name)
        (reason,), are_gone = following.follow()
    assert (reason.kind, are_gone) == (WaitReasonKind.LEFT, True)
    assert reason.detail == rf"{swapped.id} could not be removed, in quarantine: \x1b[2J a\x1b[31m: error {10**18}"


def test_an_orphan_that_another_process_has_locked_is_named_and_the_others_are_followed(volume: Path) -> None:
    locked, free = (swap(make_tree(volume / name, {"file": ""})) for name in "ab")

    def reap_free(_text: str) -> None:
        reap_now(volume, free.id)

    with (
        served(volume),
        SwapWait(DONE, keeps=False) as swap_wait,
        (tree_of(locked).parent / "record.json").open() as record,
    ):
        for swapped in (locked, free):
            swap_wait.add(swapped)
        flock(record, LOCK_EX)
        (base,) = swap_wait.orphans
        waited = swap_wait.wait_for(base, reap_free, lambda: False)
        assert [one.is_given_up for one in swap_wait.orphans[base]] == [False, True]
    assert not waited.is_reached
    assert waited.reasons == (WaitReason(WaitReasonKind.PINNED, 0, f"another process has locked {locked.id}"),)
