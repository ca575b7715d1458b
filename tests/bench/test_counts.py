"""What commands cost in system calls and messages is what is stored; so are ratios beside rivals; nodes in small."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from bench import cost, nodes, reap
from bench.counts import Counts, of_more_files, of_operations, of_restore, of_verbs, prepare
from bench.messages import counted
from bench.nodes_rank import plan_alone
from bench.runner import Case, take
from bench.subjects import Unable
from bench.verdicts import judged
from tests.support.foreground_mount import trashd_mount
from tests.support.make_trees import Dir, make_tree
from tests.support.other_users import as_user

pytestmark = pytest.mark.needs("root")


STORED = Path(__file__).parents[2] / "bench/stored/counts.json"
USER = 1001


def assert_stored(kind: str, counts: Mapping[str, Counts]) -> None:
    """Fail if the counts differ from the stored ones, in either direction; GOLDEN=write stores them instead."""
    stored = json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {}
    if os.environ.get("GOLDEN") == "write":
        STORED.write_text(json.dumps(stored | {kind: counts}, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        return
    assert counts == stored[kind]


def test_roots_verbs_make_the_calls_that_are_stored(volume: Path) -> None:
    assert_stored("root", of_verbs(volume) | {"restore": of_restore(volume)})


def test_a_users_verbs_make_the_calls_that_are_stored(volume: Path) -> None:
    home = make_tree(volume / "home", Dir(owner=(USER, USER)))
    assert_stored("a user", as_user(USER, lambda: of_verbs(home)))


@pytest.mark.needs("strace")
@pytest.mark.parametrize("native", ["0", "1"])
def test_files_cost_the_calls_that_are_stored_in_c_and_in_python(
    volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: str
) -> None:
    monkeypatch.setenv("TRASHD_NATIVE", native)
    assert_stored("files", of_more_files(volume, tmp_path / "log"))


@pytest.mark.needs("fuse", "passthrough", "fuse_trace")
def test_operations_of_a_mount_take_the_messages_that_are_stored(volume: Path) -> None:
    prepare(volume / "source")
    with (
        trashd_mount(volume / "source", options=["coherence=exclusive"]) as mounted,
        counted(os.minor(mounted.path.stat().st_dev)) as messages,
    ):
        assert_stored("messages", of_operations(mounted.path, messages))


N_ROUNDS = 3


@pytest.mark.long
@pytest.mark.timeout(600)  # seconds on an idle machine
def test_no_ratio_is_far_beyond_what_is_stored(record_property: Callable[[str, object], None]) -> None:
    rounds = take(cost.BENCHMARK, cost.CASE, N_ROUNDS).rounds
    if os.environ.get("GOLDEN") == "write":
        cost.store(rounds)
    for verdict in judged(cost.stored_targets(), rounds):
        if not verdict.is_met:
            requirement = f"{verdict.target.requirement}, {cost.WARN:g} times what it was"
            record_property(
                "told", f"{verdict.target.description}: {verdict.estimate.format_interval()} ({requirement})"
            )
    far_beyond = [verdict for verdict in judged(cost.stored_targets(cost.FAR_BEYOND), rounds) if not verdict.is_met]
    assert len(list(judged(cost.stored_targets(), rounds))) == len(cost.RATIOS)
    assert far_beyond == []


MPI = pytest.mark.needs("mpich")
MS = 1.0


@pytest.mark.needs("fuse")
def test_a_machines_threads_empty_what_rm_does() -> None:
    assert min(nodes.by_machine(name, 60, MS) for name in (reap.OURS, reap.RM)) > 0


@pytest.mark.needs("fuse")
@MPI
@pytest.mark.parametrize("make", [nodes.make_small, nodes.make_one])
def test_ranks_on_mounts_of_their_own_report_what_they_used(make: nodes.MakesTree) -> None:
    figures = nodes.by_ranks(make, 120, 2, 2, MS)
    assert figures[""] > 120 * MS / 1e3 / 4
    assert 0 < figures["threads at work"] <= 1
    assert 0 < figures["processors"] < 4


@pytest.mark.needs("fuse")
def test_unlinks_in_c_through_all_mounts_leave_nothing() -> None:
    with nodes.mounts(2) as made:
        nodes.make_one(made.source / nodes.VICTIM, 100)
        nodes.unlink_in_c(made, 3, 100)
        assert list((made.source / nodes.VICTIM).iterdir()) == []
        assert sum(one.n_messages.get("unlink", 0) for one in made.each) == 100


@pytest.mark.needs("fuse")
@MPI
def test_a_plan_by_mpi_reports_its_processor_time_a_slice() -> None:
    figures = nodes.by_mpi(2, 200)
    assert 0 < figures[""] < 0.1


@pytest.mark.needs("fuse")
def test_a_plan_of_many_workers_costs_a_slice_not_ten_times_that_of_few() -> None:
    assert min(plan_alone(4000, 1000) for _ in range(3)) < 10 * min(plan_alone(64, 1000) for _ in range(3))


@pytest.mark.needs("fuse")
@MPI
def test_a_job_of_ours_is_timed_whole_and_drm_is_left_out_where_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert nodes.whole_job(nodes.reap_job, 2, 60, MS) > 0
    monkeypatch.setattr(nodes, "DRM", tmp_path / "drm")
    with pytest.raises(Unable, match="missing"):
        nodes.whole_job(nodes.drm_job, 2, 10, MS)


@pytest.mark.needs("fuse")
@pytest.mark.parametrize("case", nodes.BENCHMARK.cases, ids=lambda case: case.label)
def test_each_target_is_of_subjects_that_take_turns(case: Case) -> None:
    with nodes.bed(case) as bed:
        ones = dict.fromkeys(bed.turns, 1.0)
    assert [target.description for target in nodes.targets(case) if not target.of([ones])] == []
