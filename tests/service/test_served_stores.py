"""Users' own stores share the service: few of a user's are open at a time, and what hangs is given up."""

from __future__ import annotations

import threading

import trio
from trio.testing import wait_all_tasks_blocked

from fusefs.service.served_stores import OwnStoreLimits
from fusefs.service.shared_context import in_time

ALICE, BOB = 1001, 1002
HOME, DISK = 1, 2


async def _open(limits: OwnStoreLimits, uid: int, mnt_id: int, opened: list[int], end: trio.Event) -> None:
    async with limits.of(uid, mnt_id).taken():
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
            assert limits.of(ALICE, HOME).is_wanted()
            assert not limits.of(BOB, HOME).is_wanted()
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
