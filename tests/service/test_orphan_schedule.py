"""A look at orphans, or at clocks, takes a while: what happens meanwhile is not mistaken for something else."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from fusefs.core.record import Method
from fusefs.linux.machine_identity import clocks_ns
from fusefs.service.messages import Page, ReadRecords, SeenContainer
from fusefs.service.orphan_schedule import OrphanSchedule
from fusefs.service.user_state import UserState
from tests.service.test_user_state import BASE, looked_at, new_intake, new_user, part_of

ONE = "20260101T000000.000Z-job-000000000001"
S = 1_000_000_000


def look_at_it(user: UserState) -> ReadRecords:
    """The order that is given when it fell in."""
    part_of(user).look_at(ONE)
    order = user.next_order(0.0)
    assert isinstance(order, ReadRecords)
    return order


def told_of_it(*, is_claimed: bool = False) -> Page:
    """The answer of a child that saw it: it is due in an hour, or is being reaped."""
    seen = SeenContainer(ONE, is_claimed, time.time_ns(), 3600, b"/volume/job", Method.EXCHANGE)
    return Page(BASE, [seen], "", 1, 0)


def left_while_looked_at() -> tuple[UserState, OrphanSchedule, ReadRecords]:
    """A user whose orphan left while a child had the order to look at it."""
    user = new_user()
    looked_at(user)
    order = look_at_it(user)
    part_of(user).leaves(ONE)
    return user, new_intake(), order


@pytest.mark.parametrize("is_claimed", [False, True], ids=["gone", "claimed and parked"])
def test_an_orphan_that_leaves_while_it_is_looked_at_is_due_only_if_it_was_claimed(is_claimed: bool) -> None:
    user, intake, order = left_while_looked_at()
    intake.take(user, order, told_of_it(is_claimed=is_claimed))
    assert (user.due_at_s() < float("inf")) is is_claimed


def test_an_orphan_that_leaves_and_comes_back_is_looked_at_again() -> None:
    user, intake, order = left_while_looked_at()
    again = look_at_it(user)
    intake.take(user, order, told_of_it())
    intake.take(user, again, told_of_it())
    assert user.due_at_s() < float("inf")


def test_a_stall_between_the_clocks_is_no_jump_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def boot_ns() -> Iterator[int]:
        yield from (10 * S, 13 * S)  # three seconds in which the wall clock was read
        yield from (14 * S, 14 * S + 1)

    wall, boot = iter((1010 * S, 1014 * S)), boot_ns()
    monkeypatch.setattr(time, "time_ns", lambda: next(wall))
    monkeypatch.setattr(time, "clock_gettime_ns", lambda _clock: next(boot))
    assert clocks_ns() == (1014 * S, 14 * S + 1)
