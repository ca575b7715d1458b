"""The service beside people at work, for as long as you like, its children killed: it needs no more as time goes by.

A few seconds by default, so that it is known to work; `make soak` gives it an hour.
"""

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from random import Random
from statistics import median
from typing import NamedTuple

import pytest

from tests.support.concurrent_users import Traffic, traffic
from tests.support.make_trees import roomy_volume
from tests.support.outside_tree import Canary
from tests.support.proc_stat import status_of
from tests.support.service_process import Service, places, service
from tests.support.store_verbs import assert_silent, recover_all

pytestmark = [pytest.mark.needs("root", "loop"), pytest.mark.timeout(0)]

SOAK_S = float(os.environ.get("TRASHD_TEST_SOAK_S", "2"))
N_LIVES = 2
"""Between two of them the service is killed."""
USERS = (0, 12001, 12002, 12003)
N_SAMPLES = 200 if SOAK_S > 60 else 50
"""Of each life; each takes at least a look at the service, 20 ms."""
_MORE_KIB, _MORE_FDS = 4096, 4
"""What the last third of a life may need beyond the middle one; memory comes in pieces."""


class Sample(NamedTuple):
    """What the service needs at a moment; children: all processes that act for users."""

    memory_kib: int
    n_fds: int
    n_threads: int
    n_children: int


def look(running: Service) -> Sample:
    status, n_fds = status_of(running.process.pid), len(os.listdir(f"/proc/{running.process.pid}/fd"))
    return Sample(int(status["VmRSS"][0]), n_fds, int(status["Threads"][0]), len(running.children()))


def n_reaped(running: Service) -> int:
    observed_status = running.read_status()
    return observed_status.status.volumes[0].n_reaped if observed_status else 0


def is_over(at_s: float) -> bool:
    return time.monotonic() > at_s


def live(running: Service, people: Traffic, random: Random) -> list[Sample]:
    """One life of the service: a child is killed now and then, the configuration read again, samples taken."""
    running.until(lambda: n_reaped(running))  # what it needs once it is at work
    began, samples = time.monotonic(), list[Sample]()
    every_s = SOAK_S / N_LIVES / N_SAMPLES
    # Not too many: a user whose children end again and again waits longer each time.
    kills = set(random.sample(range(N_SAMPLES), 4 + int(SOAK_S / N_LIVES / 100)))
    for n in range(N_SAMPLES):
        running.until(partial(is_over, began + n * every_s))
        samples.append(look(running))
        children = running.children()
        if children and n in kills:
            with suppress(ProcessLookupError):
                os.kill(random.choice(children), signal.SIGKILL)
        if n % 50 == 49:
            running.process.send_signal(signal.SIGHUP)
    assert people.n_acts() > 0
    return samples


def assert_flat(samples: Sequence[Sample]) -> None:
    """The last third needs what the middle one needed. At its least: how much it reaps differs from third to third."""
    third = len(samples) // 3
    middle, last = samples[third : 2 * third], samples[2 * third :]

    def usual(part: Sequence[Sample], of: Callable[[Sample], int]) -> float:
        return median(map(of, part))

    memory = usual(middle, lambda one: one.memory_kib), usual(last, lambda one: one.memory_kib)
    assert memory[1] <= 1.05 * memory[0] + _MORE_KIB, memory
    for of in (lambda one: one.n_fds, lambda one: one.n_threads):
        assert min(map(of, last)) <= max(map(of, middle)) + _MORE_FDS
        assert max(map(of, last)) <= max(map(of, middle)) + 4 * _MORE_FDS
    assert max(one.n_children for one in samples) <= 2 * len(USERS)


@pytest.mark.long
def test_memory_and_fds_stay_what_they_are_and_nothing_is_lost() -> None:
    random = Random("soak")
    with roomy_volume("ext4", 60_000) as volume, places() as base:
        canary = Canary(volume)
        with traffic(volume, USERS, "soak") as people:
            for number in range(N_LIVES):
                with service(base, volume) as running:
                    samples = live(running, people, random)
                    n_gone = n_reaped(running)
                    running.kill()
                assert_flat(samples)
                first, last = samples[len(samples) // 3], samples[-1]
                print(f"life {number}: {people.n_acts()} acts, {n_gone} reaped; {first} … {last}")
            people.stop()
            with service(base, volume) as running:
                running.until(people.is_settled, 120)
                running.stop()
            people.assert_nothing_lost()
        canary.assert_untouched()
        assert recover_all(volume) == []
        assert_silent(volume)
