"""A rank that is lost ends the job. The claim outlives it: the next job, or the next plain reap, does the rest."""

from __future__ import annotations

import os
import time
from pathlib import Path
from random import Random

import pytest

from tests.mpi.conftest import EACH_MPI
from tests.support.many_files import bulky_tree
from tests.support.mpi_jobs import (
    folder_of_user,
    give_to_user,
    is_gone,
    run_ranks,
    start_ranks,
    state_of_user,
    swap_by_user,
)
from tests.support.outside_tree import Canary

N_RANKS = 3
N_KILLS = int(os.environ.get("TRASHD_TEST_KILLS", "8")) // 2
"""By each MPI; `make soak-mpi` asks for a hundred in all."""
_GLANCE_S = 0.01
_JOB_S = 0.8
"""How long the ranks are at it, about, once they have begun."""


def lose_a_rank(volume: Path, mpi: str, identifier: str, random: Random) -> bool:
    """Begin a job and kill one of its ranks; whether that came before its end."""
    ranks = start_ranks(mpi, N_RANKS, "reap", "--mpi", "--now", "--volume", volume, identifier)
    reaping = folder_of_user(volume) / "reaping"
    while not os.listdir(reaping) and ranks.process.poll() is None:
        time.sleep(_GLANCE_S)
    time.sleep(random.random() * _JOB_S)
    pids = ranks.pids()
    is_hit = bool(pids) and ranks.process.poll() is None
    if is_hit:
        ranks.lose(random.choice(pids))
    code = ranks.wait().code
    assert not ranks.pids()
    return is_hit and code != 0


@pytest.mark.timeout(100 + 20 * N_KILLS)
@pytest.mark.parametrize("mpi", EACH_MPI)
def test_a_reap_that_lost_ranks_at_any_time_is_finished_by_the_next_and_nothing_outside_is_touched(
    volume: Path, mpi: str
) -> None:
    random, canary = Random(f"ranks of {mpi}"), Canary(volume)
    n_hits = n_jobs = 0
    while n_hits < N_KILLS:
        tree = bulky_tree(volume / f"job{n_jobs}", 30, 300, 30_000)
        (tree / "out").symlink_to(canary.path)
        give_to_user(tree)
        canary.link_into(tree)
        identifier = swap_by_user(tree)
        while not is_gone(volume, identifier) and n_hits < N_KILLS:
            n_jobs += 1
            n_hits += lose_a_rank(volume, mpi, identifier, random)
            canary.assert_untouched()
            if not is_gone(volume, identifier):
                assert state_of_user(volume, identifier) in ("orphans", "reaping")
        if not is_gone(volume, identifier):
            done = run_ranks(mpi, N_RANKS, "reap", "--mpi", "--now", "--volume", volume, identifier)
            assert done.code == 0, done
        assert is_gone(volume, identifier)
        canary.assert_alone()
    print(f"{mpi}: {n_hits} ranks lost in {n_jobs} jobs")
