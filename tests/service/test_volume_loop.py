"""When a volume is tried again, how long a look may take, and how users share the time of volumes and the service."""

import errno
import math
import threading
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from fusefs.core.config import POLL_S
from fusefs.core.errors import NoStore
from fusefs.core.events import Event
from fusefs.core.node_heartbeats import Heartbeat
from fusefs.core.record import Method
from fusefs.linux.machine_identity import clocks_ns
from fusefs.service import volume_loop
from fusefs.service.fair_turns import FairTurns, order_of_node
from fusefs.service.forker import Forker
from fusefs.service.inotify_watches import InotifyWatches
from fusefs.service.messages import ContainerEntry, Page, ReadRecords
from fusefs.service.open_volume import Elsewhere, OpenVolume
from fusefs.service.orphan_schedule import OrphanSchedule
from fusefs.service.other_nodes import OtherNodes
from fusefs.service.served_stores import OwnStoreLimits
from fusefs.service.shared_context import ServiceContext, in_time
from fusefs.service.user_state import UserState
from fusefs.service.volume_loop import VolumeLoop
from tests.service.test_user_state import BASE, looked_at, new_intake, new_user, part_of
from tests.support.read_configs import read_config
from tests.support.service_process import REAL

DAY_S = 86_400.0


class Opening:
    """A volume that can't be opened, and when that was tried."""

    def __init__(self, context: ServiceContext, events: list[Event], monkeypatch: pytest.MonkeyPatch) -> None:
        self.context = context
        self._monkeypatch = monkeypatch
        self.events = events

    def attempts_s(self, error: Exception, *, stays: bool = True, event_pause_s: float = math.inf) -> list[float]:
        """When a service tries to open it in the course of a day.

        event_pause_s  between two changes there, of which the kernel notifies the service
        """
        attempts_s: list[float] = []

        async def open_() -> OpenVolume:
            attempts_s.append(trio.current_time())
            raise error

        async def change(loop: VolumeLoop) -> None:
            while True:
                await trio.sleep(event_pause_s)
                loop.wake()

        async def body() -> None:
            loop = VolumeLoop(self.context, b"/volume", stays=stays)
            self._monkeypatch.setattr(loop, "_open", open_)
            with trio.move_on_after(DAY_S):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(change, loop)
                    await loop.serve()
                    nursery.cancel_scope.cancel()

        trio.run(body, clock=trio.testing.MockClock(autojump_threshold=0.0))
        return attempts_s


@pytest.fixture
def opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opening]:
    monkeypatch.setattr(volume_loop, "boot_s", trio.current_time)
    events = list[Event]()
    with Forker() as forker, InotifyWatches() as watcher:
        context = ServiceContext(forker, watcher, read_config([]), bytes(tmp_path), events.append, lambda: None)
        yield Opening(context, events, monkeypatch)


def pauses_s(attempts_s: list[float]) -> list[float]:
    return [later - sooner for sooner, later in pairwise(attempts_s)]


def test_a_volume_that_fails_rests_twice_as_long_each_time_up_to_an_hour(opening: Opening) -> None:
    rests_s = pauses_s(opening.attempts_s(OSError(errno.EIO, "Input/output error")))
    assert rests_s[:7] == [60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 3600.0]
    assert set(rests_s[7:]) == {REAL.last_rest_pause_s}
    assert {event.kind.value for event in opening.events} == {"broken"}


def test_changes_in_a_volume_that_rests_do_not_end_its_rest(opening: Opening) -> None:
    error = OSError(errno.EIO, "Input/output error")
    assert pauses_s(opening.attempts_s(error, event_pause_s=50.0))[:4] == [60.0, 120.0, 240.0, 480.0]


def test_a_volume_of_another_reaper_is_tried_again_each_minute(opening: Opening) -> None:
    assert set(pauses_s(opening.attempts_s(Elsewhere(b"/volume")))) == {REAL.elsewhere_pause_s}
    assert opening.events == []


def test_a_volume_that_is_named_is_waited_for(opening: Opening) -> None:
    attempts_s = opening.attempts_s(NoStore(b"/volume"))
    assert set(pauses_s(attempts_s)) == {float(POLL_S)}
    assert len(attempts_s) == DAY_S / POLL_S


def test_a_volume_that_is_not_named_is_given_up_at_the_third_attempt(opening: Opening) -> None:
    assert opening.attempts_s(NoStore(b"/volume"), stays=False) == [0.0, POLL_S, 2 * POLL_S]


def test_two_who_always_want_share_evenly() -> None:
    turns, had = FairTurns(), Counter[int]()
    for _ in range(100):
        uid = turns.next([1000, 1001])
        had[uid] += 1
        turns.charge(uid, 0.5)
    assert had == {1000: 50, 1001: 50}


def test_whoever_comes_anew_is_next() -> None:
    turns = FairTurns()
    for _ in range(1000):
        turns.charge(turns.next([1000]), 1.0)
    assert turns.next([1000, 1001]) == 1001


def test_nobody_saves_up_time_by_staying_away() -> None:
    turns = FairTurns()
    turns.charge(turns.next([1000, 1001]), 1.0)
    turns.charge(turns.next([1000, 1001]), 1.0)
    for _ in range(100):
        turns.charge(turns.next([1000]), 1.0)
    had = Counter[int]()
    for _ in range(20):
        uid = turns.next([1000, 1001])
        had[uid] += 1
        turns.charge(uid, 1.0)
    assert abs(had[1000] - had[1001]) <= 1


@given(st.lists(st.sets(st.integers(0, 4), min_size=1), min_size=1, max_size=200))
def test_of_equal_turns_nobody_who_wants_is_passed_over_by_the_same_one_twice(wanting: list[set[int]]) -> None:
    turns, since = FairTurns(), Counter[int]()
    for others in wanting:
        uid = turns.next([99, *others])
        if uid == 99:
            since.clear()
        else:
            since[uid] += 1
            assert since[uid] <= 2
        turns.charge(uid, 1.0)


def test_who_is_many_users_has_one_persons_share_and_each_of_them_some_of_it() -> None:
    many = range(100_000, 100_100)
    turns, had = FairTurns(lambda uid: 1002 if uid >= 100_000 else uid), Counter[int]()
    for _ in range(400):
        uid = turns.next([*many, 1001])
        had[uid] += 1
        turns.charge(uid, 0.5)
    assert had[1001] == 200
    assert {had[uid] for uid in many} == {2}


def test_who_comes_anew_waits_for_one_turn_of_who_is_many_users() -> None:
    turns = FairTurns(lambda uid: 1002 if uid < 200_000 else uid)
    for _ in range(3):
        turns.charge(turns.next(range(100_000, 100_100)), 1.0)
    assert turns.next([*range(100_000, 100_100), 200_001]) == 200_001


def test_nodes_begin_with_different_users_and_give_each_as_much() -> None:
    uids, first = range(1000, 1008), set()
    for number in range(20):
        turns, had = FairTurns(order=order_of_node(b"node%d" % number)), Counter[int]()
        first.add(turns.next(uids))
        for _ in range(80):
            uid = turns.next(uids)
            had[uid] += 1
            turns.charge(uid, 0.5)
        assert set(had.values()) == {10}
    assert len(first) > 4


def test_a_nodes_order_is_its_own_every_time() -> None:
    one, same, other = (order_of_node(name) for name in (b"alpha", b"alpha", b"beta"))
    assert sorted(range(50), key=one) == sorted(range(50), key=same) != sorted(range(50), key=other)


ALICE, BOB = 1001, 1002
HOME, DISK = 1, 2


async def _open(limits: OwnStoreLimits, uid: int, mnt_id: int, opened: list[int], end: trio.Event) -> None:
    async with limits.of(uid, mnt_id).hold():
        opened.append(uid)
        await end.wait()


def test_two_stores_of_a_user_are_open_at_a_time_and_others_are_not_kept_waiting() -> None:
    async def body() -> None:
        limits, opened, end = OwnStoreLimits(), list[int](), trio.Event()
        async with trio.open_nursery() as nursery:
            for uid in (ALICE, ALICE, ALICE, BOB):
                nursery.start_soon(_open, limits, uid, HOME, opened, end)
            await wait_all_tasks_blocked()
            assert sorted(opened) == [ALICE, ALICE, BOB]
            assert limits.of(ALICE, HOME).has_waiters()
            assert not limits.of(BOB, HOME).has_waiters()
            end.set()
        assert sorted(opened) == [ALICE, ALICE, ALICE, BOB]

    trio.run(body)


def test_many_users_on_one_mount_keep_nobody_waiting_on_another() -> None:
    async def body() -> None:
        limits, opened, end = OwnStoreLimits(), list[int](), trio.Event()
        async with trio.open_nursery() as nursery:
            for uid in range(2000, 2100):
                nursery.start_soon(_open, limits, uid, HOME, opened, end)
            nursery.start_soon(_open, limits, ALICE, DISK, opened, end)
            await wait_all_tasks_blocked()
            assert ALICE in opened
            assert len(opened) == 17
            end.set()
        assert len(opened) == 101

    trio.run(body)


def test_more_stores_have_less_remembered_of_each() -> None:
    limits = OwnStoreLimits()
    limits.n_stores = 10
    assert limits.of(ALICE, HOME).most_remembered() == 2000
    limits.n_stores = 10_000
    assert limits.of(ALICE, HOME).most_remembered() == 100


def test_what_comes_too_late_is_undone() -> None:
    go, undone = threading.Event(), threading.Event()

    def body() -> str:
        go.wait()
        return "late"

    async def main() -> None:
        found = await in_time(trio.CapacityLimiter(1), 0.01, body, lambda _late: undone.set())
        assert found is None
        go.set()
        await trio.to_thread.run_sync(undone.wait)

    trio.run(main)


def test_what_comes_in_time_is_kept() -> None:
    undone = list[str]()

    async def main() -> None:
        assert await in_time(trio.CapacityLimiter(1), 100.0, lambda: "here", undone.append) == "here"
        assert not undone

    trio.run(main)


ONE = "20260101T000000.000Z-job-000000000001"
S = 1_000_000_000


def look_at_it(user: UserState) -> ReadRecords:
    """The order that is given when it fell in."""
    part_of(user).mark_unread(ONE)
    order = user.next_order(0.0)
    assert isinstance(order, ReadRecords)
    return order


def told_of_it(*, is_claimed: bool = False) -> Page:
    """The answer of a child that saw it: it is due in an hour, or is being reaped."""
    seen = ContainerEntry(ONE, is_claimed, time.time_ns(), 3600, b"/volume/job", Method.EXCHANGE)
    return Page(BASE, [seen], "", 1, 0)


def left_while_looked_at() -> tuple[UserState, OrphanSchedule, ReadRecords]:
    """A user whose orphan left while a child had the order to look at it."""
    user = new_user()
    looked_at(user)
    order = look_at_it(user)
    part_of(user).note_departed(ONE)
    return user, new_intake(), order


@pytest.mark.parametrize("is_claimed", [False, True], ids=["gone", "claimed and parked"])
def test_an_orphan_that_leaves_while_it_is_looked_at_is_due_only_if_it_was_claimed(is_claimed: bool) -> None:
    user, intake, order = left_while_looked_at()
    intake.handle_answer(user, order, told_of_it(is_claimed=is_claimed))
    assert (user.due_at_s() < float("inf")) is is_claimed


def test_an_orphan_that_leaves_and_comes_back_is_looked_at_again() -> None:
    user, intake, order = left_while_looked_at()
    again = look_at_it(user)
    intake.handle_answer(user, order, told_of_it())
    intake.handle_answer(user, again, told_of_it())
    assert user.due_at_s() < float("inf")


def test_a_stall_between_the_clocks_is_no_jump_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def boot_ns() -> Iterator[int]:
        yield from (10 * S, 13 * S)  # three seconds in which the wall clock was read
        yield from (14 * S, 14 * S + 1)

    wall, boot = iter((1010 * S, 1014 * S)), boot_ns()
    monkeypatch.setattr(time, "time_ns", lambda: next(wall))
    monkeypatch.setattr(time, "clock_gettime_ns", lambda _clock: next(boot))
    assert clocks_ns() == (1014 * S, 14 * S + 1)


def test_a_node_counts_its_beats_on_when_the_volume_was_away(opening: Opening) -> None:
    """Others see by the changed number that it lives."""
    beats = list[int]()

    class Beat:
        name = b"node"

        def write(self, beat: Heartbeat) -> None:
            beats.append(beat.n)

        def read_all(self) -> dict[bytes, Heartbeat | None]:
            return {}

    store = SimpleNamespace(areas=SimpleNamespace(all=lambda: ()))
    opened = cast(OpenVolume, SimpleNamespace(beat=Beat(), is_shared=lambda: True, store=store))

    async def body() -> None:
        nodes = OtherNodes(opening.context, trio.CapacityLimiter(1), lambda: None)
        for _ in range(3):
            nodes.begin(opened)
            await nodes.check(opened, {}, "idle")
            nodes.forget()

    trio.run(body)
    assert beats == [0, 1, 2]
