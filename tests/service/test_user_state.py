"""What the service knows of a user: no orphan is lost, none goes before its time, the soonest due goes first."""

import math
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fusefs.core.names import VolumeId
from fusefs.core.policy import VolumePolicy
from fusefs.core.record import Method
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.service.forker import Forker
from fusefs.service.inotify_watches import InotifyWatches
from fusefs.service.messages import (
    Answer,
    ContainerEntry,
    DueContainer,
    Measure,
    Measured,
    Order,
    OrderDone,
    OrphanEnded,
    Page,
    ReadRecords,
    Reap,
    Tend,
    Tended,
)
from fusefs.service.open_volume import OpenVolume
from fusefs.service.orphan_schedule import OrphanSchedule
from fusefs.service.shared_context import ServiceContext, boot_s
from fusefs.service.user_state import DueQueue, FolderPart, UserState
from fusefs.service.volume_figures import VolumeFigures
from fusefs.store.backing_and_mount import BackingAndMount
from fusefs.store.layout import Areas, Store, Volume
from tests.support.read_configs import read_config

UID, BASE = 1000, b"/volume"
MOST, PAGE = 3, 2
OLDEST_S, LATER_S, MUCH_LATER_S = 100_000, 1_000_000, 2_000_000
WHICH = st.integers(0, 100)
HOUR_S = 3600.0


def new_user(most: int = MOST) -> UserState:
    return UserState(UID, BASE, lambda: most, 0)


def part_of(user: UserState) -> FolderPart:
    return user.parts[BASE]


def new_intake() -> OrphanSchedule:
    """It takes in answers for the usual rules; no child is asked for, and no fd used."""
    nowhere = Fd(-1)
    areas, volume = Areas(nowhere), Volume(VolumeId("0" * 32), True, 0)
    store = Store(Kernel(), BackingAndMount(nowhere), BASE, nowhere, areas, volume, 0, 0)
    with InotifyWatches() as watcher:
        nobody, config = cast(Forker, None), read_config([])
        context = ServiceContext(nobody, watcher, config, b"/nowhere", lambda _: None, lambda: None)
    opened = OpenVolume(store, "", nowhere, ExitStack())
    outer = VolumePolicy(BASE), VolumeFigures()
    return OrphanSchedule(context, opened, *outer, lambda: None, lambda uid: uid, is_local=True)


def looked_at(user: UserState, *identifiers: str, at_s: float = 0.0) -> None:
    """The user was tended and looked at, and has these, due then."""
    assert user.next_order(0.0) == Tend()
    look = user.next_order(0.0)
    assert isinstance(look, ReadRecords)
    assert (look.base, look.after, look.ids) == (BASE, "", None)
    for identifier in identifiers:
        part_of(user).upcoming.add(DueContainer(identifier, 0), at_s)
    part_of(user).note_page("", 0.0, 0)


def test_first_of_all_a_user_is_tended_and_looked_at() -> None:
    user = new_user()
    assert user.has_work(0.0)
    looked_at(user)
    assert not user.has_work(0.0)
    assert user.next_at_s() == float("inf")


def test_what_is_due_is_ordered_at_its_time_and_not_before() -> None:
    user = new_user()
    looked_at(user, "a", at_s=10.0)
    assert user.next_at_s() == 10.0
    assert user.next_order(9.0) is None
    assert user.next_order(10.0) == Reap(BASE, [DueContainer("a", 0)])


def test_what_falls_in_is_looked_at_before_anything_else_is_reaped() -> None:
    user = new_user()
    looked_at(user, "a")
    part_of(user).unread_ids.add("b")
    assert user.next_order(1.0) == ReadRecords(BASE, ids=["b"])


def test_order_that_a_child_did_not_live_to_carry_out_is_given_again() -> None:
    user = new_user()
    order = user.next_order(0.0)
    assert order == Tend()
    user.take_back_order(order)
    looked_at(user)
    part_of(user).unread_ids.add("b")
    order = user.next_order(0.0)
    assert order is not None
    user.take_back_order(order)
    assert user.next_order(0.0) == order


def test_user_whose_child_fails_waits_longer_each_time() -> None:
    user = new_user()
    waits = [user.retry.note_failure(100.0) for _ in range(4)]
    assert waits == [1.0, 2.0, 4.0, 8.0]
    assert user.next_order(100.0) is None
    assert user.next_at_s() == 108.0
    assert user.next_order(108.0) == Tend()


def test_large_orphan_makes_way_after_a_while_and_has_longer_the_next_time() -> None:
    user = new_user()
    looked_at(user, "small", at_s=5.0)
    user.set_current("large")
    user.had_s = 3.0
    assert not user.should_park(4.0), "nobody waits"
    assert user.should_park(5.0)
    part = part_of(user)
    part.unread_ids.add("fell in")
    assert user.should_park(4.0)


def one_of(identifiers: Collection[str], which: int) -> str:
    return sorted(identifiers)[which % len(identifiers)]


class Machine(RuleBasedStateMachine):
    """A folder whose owner throws away, keeps and restores, and a child that may die over every order."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.intake = new_user(), new_intake()
        self.there: dict[str, int | None] = {}
        self.claimed: set[str] = set()
        self.held: set[str] = set()
        self.n_made = 0
        self.ahead_s = 0.0

    def now_s(self) -> float:
        return boot_s() + self.ahead_s

    def tell(self, identifier: str, *, by_name: bool) -> None:
        """inotify tells of it, or that it lost something."""
        if by_name:
            part_of(self.user).unread_ids.add(identifier)
        else:
            self.user.rescan()

    # What people do

    @rule(retentions=st.lists(st.sampled_from([0, LATER_S, None]), min_size=1, max_size=6), by_name=st.booleans())
    def throw(self, retentions: list[int | None], by_name: bool) -> None:
        for retention_s in retentions:
            identifier = f"id{self.n_made:04}"
            self.n_made += 1
            self.there[identifier] = retention_s
            self.tell(identifier, by_name=by_name)

    @precondition(lambda self: self.there.keys() - self.claimed)
    @rule(which=WHICH, retention_s=st.sampled_from([0, None]))
    def keep(self, which: int, retention_s: int | None) -> None:
        identifier = one_of(self.there.keys() - self.claimed, which)
        self.there[identifier] = retention_s
        self.tell(identifier, by_name=True)

    @precondition(lambda self: self.there)
    @rule(which=WHICH)
    def restore(self, which: int) -> None:
        identifier = one_of(self.there, which)
        del self.there[identifier]
        self.claimed.discard(identifier)
        part_of(self.user).unread_ids.discard(identifier)
        self.user.forget(identifier)

    @precondition(lambda self: self.there)
    @rule(which=WHICH)
    def hold(self, which: int) -> None:
        self.held.add(one_of(self.there, which))

    @rule()
    def release(self) -> None:
        self.held.clear()

    @rule()
    def time_passes(self) -> None:
        self.ahead_s += MUCH_LATER_S

    # What the service and the child do

    @rule(n_answers=st.integers(0, 2), end=st.sampled_from(["well", "dies", "fails"]), is_parked=st.booleans())
    def work(self, n_answers: int, end: str, is_parked: bool) -> None:
        self.carry_out(None if end == "well" else n_answers, has_failed=end == "fails", is_parked=is_parked)

    @rule(most=st.integers(1, 20))
    def work_well(self, most: int) -> None:
        for _ in range(most):
            self.carry_out()

    def carry_out(self, n_answers: int | None = None, *, has_failed: bool = False, is_parked: bool = False) -> bool:
        """One order, as a session has it carried out; whether there was one.

        n_answers  of the child before it is lost; None: it lives
        """
        order = self.user.next_order(self.now_s())
        if order is None:
            return False
        if isinstance(order, Reap):
            self.user.note_ordered(order.ids())
            self.user.set_current(order.ids()[0])
        answers = self.answers(order, is_parked=is_parked)
        for number, answer in enumerate(answers):
            if number == n_answers:
                self.user.take_back_order(order)
                if has_failed:
                    self.intake.note_user_failure(self.user, 13, "the user's directory in the store can't be used", "")
                else:
                    self.user.retry.note_failure(boot_s())
                break
            self.intake.handle_answer(self.user, order, answer)
        self.user.put_back(boot_s())
        self.user.set_current(None)
        return True

    def answers(self, order: Order, *, is_parked: bool) -> Iterator[Answer]:
        """What a child says that lives; what it does is done before it is said."""
        match order:
            case Tend():
                yield Tended([BASE], [])
            case ReadRecords(ids=None):
                names = sorted(name for name in self.there if name > order.after)
                last = names[PAGE - 1] if len(names) > PAGE else ""
                yield Page(BASE, [self.seen(name) for name in names[:PAGE]], last, len(self.there), 0)
            case ReadRecords():
                names = [name for name in order.ids or () if name in self.there]
                yield Page(BASE, [self.seen(name) for name in names], "", len(self.there), 0)
            case Reap():
                for chosen in order.chosen:
                    yield self.reap(chosen, is_parked=is_parked)
                    if is_parked:
                        break
                yield OrderDone()
            case Measure():
                if not is_parked:
                    yield from (Measured(identifier, 1, 1) for identifier in order.ids)
                yield OrderDone()

    def seen(self, identifier: str) -> ContainerEntry:
        is_claimed = identifier in self.claimed
        # Far enough from each other that the clock does not tell who is first.
        created_ns = time.time_ns() - (OLDEST_S - 10 * int(identifier[2:])) * 10**9
        return ContainerEntry(
            identifier, is_claimed, created_ns, self.there[identifier], b"/volume/job", Method.EXCHANGE
        )

    def reap(self, chosen: DueContainer, *, is_parked: bool) -> OrphanEnded:
        if chosen.id not in self.there:
            return OrphanEnded(chosen.id, lost="gone")
        if chosen.id in self.held:
            return OrphanEnded(chosen.id, lost="busy")
        if chosen.id not in self.claimed:
            retention_s = self.there[chosen.id]
            if retention_s != chosen.retention_s:
                return OrphanEnded(chosen.id, lost="changed")
            assert retention_s is not None, "it is pinned"
            assert retention_s == 0 or self.ahead_s > 0, "it is not due"
        if is_parked:
            self.claimed.add(chosen.id)
            return OrphanEnded(chosen.id, stopped=True)
        del self.there[chosen.id]
        self.claimed.discard(chosen.id)
        return OrphanEnded(chosen.id, n_removed=1)

    def teardown(self) -> None:
        """In the end nothing is held, all that ever was wrong is well, and time passes."""
        self.held.clear()
        self.ahead_s += MUCH_LATER_S
        idle = 0
        while idle < 10:
            self.ahead_s += HOUR_S
            idle = 0 if self.carry_out() else idle + 1
        left = {identifier for identifier, retention_s in self.there.items() if retention_s is not None}
        assert not left, "lost"
        assert not self.claimed & self.there.keys()


TestNothingIsLost = pytest.mark.allows_warnings(Machine.TestCase)
TestNothingIsLost.settings = settings(stateful_step_count=60)


N_DUE = 5
ids = st.sampled_from([f"id{n}" for n in range(12)])
times = st.integers(0, 20).map(float)


def test_the_longest_overdue_is_taken_first() -> None:
    upcoming = DueQueue(10)
    for identifier, at_s in (("b", 2.0), ("c", 3.0), ("a", 1.0), ("d", 9.0)):
        upcoming.add(DueContainer(identifier, 5), at_s)
    assert upcoming.n_due(3.0) == 3
    assert upcoming.take(3.0, 2) == [DueContainer("a", 5), DueContainer("b", 5)]
    assert upcoming.take(3.0, 2) == [DueContainer("c", 5)]
    assert upcoming.next_at_s() == 9.0


def test_another_time_takes_the_place_of_the_old_one() -> None:
    upcoming = DueQueue(10)
    upcoming.add(DueContainer("a", None), 1.0)
    upcoming.add(DueContainer("a", None), 5.0)
    assert (len(upcoming), upcoming.n_due(4.0), upcoming.next_at_s()) == (1, 0, 5.0)


def test_whoever_took_all_that_was_kept_must_look_again() -> None:
    upcoming = DueQueue(2)
    for n in range(3):
        upcoming.add(DueContainer(f"id{n}", None), float(n))
    assert upcoming.is_cut()
    assert not upcoming.must_rescan()
    assert upcoming.take(10.0, 5) == [DueContainer("id0", None), DueContainer("id1", None)]
    assert upcoming.must_rescan()
    upcoming.clear()
    assert not upcoming.must_rescan()


@given(st.dictionaries(ids, times, max_size=12))
def test_what_is_kept_is_what_comes_soonest(added: dict[str, float]) -> None:
    upcoming = DueQueue(N_DUE)
    for identifier, at_s in added.items():
        upcoming.add(DueContainer(identifier, 5), at_s)
    soonest = sorted((at_s, identifier) for identifier, at_s in added.items())[:N_DUE]
    assert upcoming.is_cut() == (len(added) > N_DUE)
    assert upcoming.take(100.0, 100) == [DueContainer(identifier, 5) for _at_s, identifier in soonest]


class DueQueueMachine(RuleBasedStateMachine):
    """Against a plain dictionary, as long as nothing has to be dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.upcoming = DueQueue(100)
        self.model: dict[str, float] = {}

    @rule(identifier=ids, at_s=times)
    def add(self, identifier: str, at_s: float) -> None:
        self.upcoming.add(DueContainer(identifier, 5), at_s)
        self.model[identifier] = at_s

    @rule(identifier=ids)
    def remove(self, identifier: str) -> None:
        self.upcoming.remove(identifier)
        self.model.pop(identifier, None)

    @precondition(lambda self: self.model)
    @rule(now_s=times, most=st.integers(1, 4))
    def take(self, now_s: float, most: int) -> None:
        wanted = sorted((at_s, one) for one, at_s in self.model.items() if at_s <= now_s)[:most]
        assert self.upcoming.take(now_s, most) == [DueContainer(one, 5) for _at_s, one in wanted]
        for _at_s, one in wanted:
            del self.model[one]

    @invariant()
    def same(self) -> None:
        assert len(self.upcoming) == len(self.model)
        assert self.upcoming.next_at_s() == min(self.model.values(), default=math.inf)
        for now_s in (0.0, 7.0, 20.0):
            assert self.upcoming.n_due(now_s) == sum(at_s <= now_s for at_s in self.model.values())
        assert not self.upcoming.is_cut()


TestMachine = DueQueueMachine.TestCase
