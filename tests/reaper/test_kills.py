"""A reap killed at any time, whole or in part: the next ones finish it, and nothing outside it is touched."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from time import monotonic

import pytest

from fusefs.core.container_states import State
from tests.support.many_files import bulky_tree, roomy_volume
from tests.support.outside_tree import Canary
from tests.support.real_filesystems import ALL_FILESYSTEMS
from tests.support.reap_process import BROKEN, DONE, KILLED, QUARANTINED, Reaping, start_reap, state_of
from tests.support.store_verbs import assert_silent, place, recover_all, swap

pytestmark = pytest.mark.needs("root")

N_KILLS = int(os.environ.get("TRASHD_TEST_KILLS", "24")) // len(ALL_FILESYSTEMS)
"""On each filesystem; `make soak-reap` asks for a thousand in all."""
WAYS = ("all", "first", "worker")


@dataclass
class Killer:
    random: Random
    longest_s: float | None = None  # how long a whole reap takes here, about; the first is left alone to tell
    n_reaps: int = 0
    n_hits: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WAYS, 0))

    def reap(self, volume: Path, identifier: str) -> tuple[int, bool]:
        """Reap, and kill what does it; its exit code, and whether a kill hit it."""
        began_s = monotonic()
        reaping = start_reap(volume, identifier)
        self.n_reaps += 1
        is_hit = False
        if self.longest_s is not None:
            # Twice random: what earlier kills left takes less than a whole tree.
            is_hit = not reaping.has_ended(self.random.random() * self.random.random() * self.longest_s)
        if is_hit:
            self._kill(reaping)
        code = reaping.wait()
        if self.longest_s is None:
            self.longest_s = monotonic() - began_s
        elif not is_hit:
            self.longest_s *= 0.9  # a busy machine may have been slow at the first
        return code, is_hit

    def _kill(self, reaping: Reaping) -> None:
        workers = reaping.workers()
        way = self.random.choice([*WAYS, "worker"] if workers else WAYS[:2])
        match way:
            case "all":
                reaping.signal_all(signal.SIGKILL)
            case "first":
                reaping.signal_one(reaping.pid, signal.SIGKILL)
            case _:
                reaping.signal_one(self.random.choice(workers), signal.SIGKILL)
        self.n_hits[way] += 1


@pytest.fixture(params=ALL_FILESYSTEMS)
def roomy(request: pytest.FixtureRequest) -> Iterator[Path]:
    with roomy_volume(request.param, 40_000) as path:
        yield path
        assert_silent(path)


def reap_on(killer: Killer, volume: Path, identifier: str, canary: Canary) -> int:
    """Reap and kill until one reap ends as it wants to; its exit code."""
    while True:
        code, is_hit = killer.reap(volume, identifier)
        canary.assert_untouched()
        assert recover_all(volume) == []
        assert_silent(volume)
        if not is_hit:
            return code
        # A reap that lost a worker may give up, or go on; it must not say that it is done when it is not.
        assert code in (DONE, QUARANTINED, KILLED, BROKEN), code
        if state_of(volume, identifier) is None:
            return DONE  # killed after the record had gone, and the empty container swept by recovery
        assert code != DONE


@pytest.mark.long
@pytest.mark.timeout(900 if N_KILLS > 100 else 120)
def test_reap_killed_at_any_time_is_finished_by_the_next_and_touches_nothing_outside(
    roomy: Path, request: pytest.FixtureRequest
) -> None:
    killer, canary = Killer(Random(f"kills on {request.node.name}")), Canary(roomy)
    while sum(killer.n_hits.values()) < N_KILLS:
        tree = bulky_tree(roomy / "job", 12, 150, 2500)
        (tree / "d0/mount").mkdir()
        canary.link_into(tree)
        identifier = swap(tree).id
        inside = place(roomy, identifier) / "tree"
        with ExitStack() as mounted:
            mounted.enter_context(canary.mounted_in(inside / "d0/mount", inside / "d1/f7"))
            assert reap_on(killer, roomy, identifier, canary) == QUARANTINED
            left = place(roomy, identifier) / "tree"
            assert state_of(roomy, identifier) is State.QUARANTINE
            assert sorted(os.listdir(left)) == ["d0", "d1"]
            assert (os.listdir(left / "d0"), os.listdir(left / "d1")) == (["mount"], ["f7"])
        assert reap_on(killer, roomy, identifier, canary) == DONE
        assert state_of(roomy, identifier) is None
        canary.assert_alone()
        (roomy / "job").rmdir()
    print(f"{request.node.name}: {killer.n_hits} kills in {killer.n_reaps} reaps, {killer.longest_s:.3f} s the longest")
