"""The service, its forker and its children killed at any time, people at work beside it: nothing is lost but time."""

import os
import select
import signal
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from fusefs.core.container_states import State
from tests.support.concurrent_users import Ledger, traffic
from tests.support.make_trees import bulky_tree, roomy_volume
from tests.support.outside_tree import Canary
from tests.support.real_filesystems import ALL_FILESYSTEMS
from tests.support.reap_process import state_of
from tests.support.service_process import LIMIT_S, Service, places, service
from tests.support.small_orphans import EXPIRED
from tests.support.store_verbs import assert_silent, place, reap_now, recover_all, swap

pytestmark = pytest.mark.needs("root")

N_KILLS = int(os.environ.get("TRASHD_TEST_KILLS", "12")) // len(ALL_FILESYSTEMS)
"""On each filesystem; `make soak-service` asks for a thousand in all."""
USERS = (0, 12001, 12002)
_LONGEST_S = 0.7
"""Between two kills."""


class Killer:
    def __init__(self, seed: str) -> None:
        self.random = Random(seed)
        self.n_hits: Counter[str] = Counter()

    def hit(self, running: Service) -> bool:
        """Wait a moment and kill something of a service; whether that was its end."""
        pid_fd = os.pidfd_open(running.process.pid)
        try:
            ended = select.select([pid_fd], [], [], self.random.random() * _LONGEST_S)[0]
            assert not ended, running.log.read_text()
        finally:
            os.close(pid_fd)
        children = running.children()
        way = self.random.choice(["service", "forker", "child", "child"] if children else ["service", "forker"])
        self.n_hits[way] += 1
        match way:
            case "service":
                running.kill()
            case "forker":
                os.kill(running.forker(), signal.SIGKILL)
                running.process.wait(LIMIT_S)
            case _:
                with suppress(ProcessLookupError):
                    os.kill(self.random.choice(children), signal.SIGKILL)
        return way != "child"


def mount_canary_in(volume: Path, canary: Canary) -> str:
    tree = bulky_tree(volume / "job")
    (tree / "d0/mount").mkdir()
    canary.link_into(tree)
    return swap(tree, options=EXPIRED).id


@pytest.mark.long
@pytest.mark.timeout(120 + 8 * N_KILLS if N_KILLS > 10 else 120)
@pytest.mark.parametrize("filesystem", ALL_FILESYSTEMS)
def test_service_killed_at_any_time_loses_nothing_and_touches_nothing_outside(filesystem: str) -> None:
    killer = Killer(f"kills on {filesystem}")
    with roomy_volume(filesystem, 60_000) as volume, places() as base:
        canary = Canary(volume)
        identifier = mount_canary_in(volume, canary)
        inside = place(volume, identifier) / "tree"
        with (
            canary.mounted_in(inside / "d0/mount", inside / "d1/f7"),
            traffic(volume, USERS, filesystem) as people,
        ):
            while killer.n_hits.total() < N_KILLS:
                with service(base, volume) as running:
                    while killer.n_hits.total() < N_KILLS and not killer.hit(running):
                        canary.assert_untouched()
            ledgers = people.stop()
            with service(base, volume) as running:
                running.until(people.is_settled, limit_s=600)  # after a thousand kills on a busy machine, much is due
                running.stop()
            people.assert_nothing_lost(but=[identifier])
            canary.assert_untouched()
            assert state_of(volume, identifier) is State.QUARANTINE
        reap_now(volume, identifier)
        canary.assert_alone()
        assert recover_all(volume) == []
        assert_silent(volume)
    report(filesystem, killer, ledgers)


def report(filesystem: str, killer: Killer, ledgers: list[Ledger]) -> None:
    sums = Counter[str]()
    for ledger in ledgers:
        sums.update({name: n for name, n in vars(ledger).items() if name.startswith("n_")})
    print(f"{filesystem}: killed {dict(killer.n_hits)}; {dict(sums)}")
