"""Each row of bench/nodes.py, in small: what is measured is done, nothing is left, and the figures are of that."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import nodes, reap
from bench.nodes_rank import plan_alone
from bench.runner import Case
from bench.subjects import Unable

pytestmark = pytest.mark.needs("root", "fuse")
MPI = pytest.mark.needs("mpich")
MS = 1.0


def test_a_machines_threads_empty_what_rm_does() -> None:
    assert min(nodes.by_machine(name, 60, MS) for name in (reap.OURS, reap.RM)) > 0


@MPI
@pytest.mark.parametrize("make", [nodes.make_small, nodes.make_one])
def test_ranks_on_mounts_of_their_own_tell_what_they_used(make: nodes.MakesTree) -> None:
    figures = nodes.by_ranks(make, 120, 2, 2, MS)
    assert figures[""] > 120 * MS / 1e3 / 4
    assert 0 < figures["threads at work"] <= 1
    assert 0 < figures["processors"] < 4


def test_unlinks_in_c_through_all_mounts_leave_nothing() -> None:
    with nodes.mounts(2) as made:
        nodes.make_one(made.source / nodes.VICTIM, 100)
        nodes.unlink_in_c(made, 3, 100)
        assert list((made.source / nodes.VICTIM).iterdir()) == []
        assert sum(one.n_messages.get("unlink", 0) for one in made.each) == 100


@MPI
def test_a_plan_by_mpi_tells_its_processor_time_a_slice() -> None:
    figures = nodes.by_mpi(2, 200)
    assert 0 < figures[""] < 0.1


def test_a_plan_of_many_workers_costs_a_slice_not_ten_times_that_of_few() -> None:
    assert min(plan_alone(4000, 1000) for _ in range(3)) < 10 * min(plan_alone(64, 1000) for _ in range(3))


@MPI
def test_a_job_of_ours_is_timed_whole_and_drm_is_left_out_where_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert nodes.whole_job(nodes.reap_job, 2, 60, MS) > 0
    monkeypatch.setattr(nodes, "DRM", tmp_path / "drm")
    with pytest.raises(Unable, match="missing"):
        nodes.whole_job(nodes.drm_job, 2, 10, MS)


@pytest.mark.parametrize("case", nodes.BENCHMARK.cases, ids=lambda case: case.told)
def test_each_target_is_of_subjects_that_take_turns(case: Case) -> None:
    with nodes.bed(case) as bed:
        ones = dict.fromkeys(bed.turns, 1.0)
    assert [target.told for target in nodes.targets(case) if not target.of([ones])] == []
