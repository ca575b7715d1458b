"""Threads for what may wait: no user has so many that others have none, and each has a turn."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fusefs.mount.requests.thread_pool import Key, PoolTask, ThreadPool
from tests.support.foreground_mount import until

N_THREADS = 40
N_USERS = 7
ONE: Key = (1000, 1)


class Crowd:
    """Tasks that wait until they are let go, and what has become of them."""

    def __init__(self, n_threads: int) -> None:
        self.pool = ThreadPool(n_threads)
        self.goes_on = threading.Event()
        self.begun: list[int] = []
        self.waited: list[bool] = []

    def ask(self, key: Key, *numbers: int, n_bytes: int = 0) -> list[bool]:
        def act(number: int, has_waited: bool) -> None:
            self.begun.append(number)
            self.waited.append(has_waited)
            self.goes_on.wait()

        def task(number: int) -> PoolTask:
            return PoolTask(key, lambda has_waited: act(number, has_waited), number, n_bytes=n_bytes)

        return [self.pool.submit(task(number)) for number in numbers]

    def have_begun(self, n: int) -> bool:
        return until(lambda: len(self.begun) == n)


@contextmanager
def crowd(n_threads: int = N_THREADS) -> Iterator[Crowd]:
    crowd = Crowd(n_threads)
    try:
        yield crowd
    finally:
        crowd.goes_on.set()
        assert until(lambda: not crowd.pool.n_under_way())


def test_one_user_has_half_at_most_and_all_of_his_are_done_in_their_order() -> None:
    with crowd() as many:
        assert all(many.ask(ONE, *range(1, 101)))
        n = many.pool.n_under_way()
        assert 0 < n <= N_THREADS / 2
        many.goes_on.set()
        assert many.have_begun(100)
        assert sorted(many.begun) == list(range(1, 101))
        assert sum(many.waited) == 100 - n


def test_whoever_comes_later_has_one_too() -> None:
    with crowd() as many:
        for uid in range(N_USERS):
            many.ask((uid, 1), *range(1 + 100 * uid, 51 + 100 * uid))
        assert until(lambda: len({number // 100 for number in many.begun}) == N_USERS)
        assert many.pool.n_under_way() <= N_THREADS


def test_who_waits_for_his_turn_may_leave() -> None:
    with crowd(2) as many:
        many.ask(ONE, 1, 2, 3)
        task = many.pool.queued_task(2)
        assert task is not None
        assert task.unique == 2
        assert many.pool.remove(2)
        assert not many.pool.remove(2)
        assert many.pool.queued_task(1) is None
        many.goes_on.set()
        assert many.have_begun(2)
        assert many.begun == [1, 3]


def test_who_has_too_much_waiting_is_refused_and_nobody_else() -> None:
    with crowd(4) as many:
        assert many.ask(ONE, *range(1, 7), n_bytes=30 << 20).count(False)
        assert all(many.ask((1001, 1), 10, n_bytes=30 << 20))


def test_without_a_thread_somebody_else_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with crowd() as many:
        many.ask(ONE, 1)
        assert many.have_begun(1)

        def refused(_thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refused)
            assert many.ask((1001, 1), 2) == [True]
        many.goes_on.set()
        assert many.have_begun(2)


def test_without_any_thread_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with crowd() as many, monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        assert many.ask(ONE, 1) == [False]
