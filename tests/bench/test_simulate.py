"""Reaps on a model of a server, in simulated time: what the engine's own plan and drive do there."""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean

import pytest

from bench.simulate import __main__ as command
from bench.simulate import fit
from bench.simulate.clock import Signal, SimulatedClock
from bench.simulate.fairness import fairness, jain
from bench.simulate.measure import CALLS, REAPS
from bench.simulate.neighbour import neighbour
from bench.simulate.ranks import Crew, SimulatedReap
from bench.simulate.server import MetadataServer, Model
from bench.simulate.throughput import throughput
from bench.simulate.tree import Drawn, Shape, Tree, project_tree, regular_tree
from fusefs.core.slices import FinishedDirectory, RemovalSliceResult, Slice, SlicePlan

MODEL = Model(way_s=0.004, look_s=0.004, change_s=0.004, n_slots=8, revoke_s=0.004)
SPREAD = MODEL._replace(spread=0.3)
SLOW = Model(way_s=0.04, look_s=0.04, change_s=0.04, n_slots=8, revoke_s=0.04)


class CountingPlan(SlicePlan):
    """The engine's own plan; remembers what it gave out and did not get back."""

    out: tuple[Slice, ...] = ()
    n_finished = 0

    def next(self) -> Slice | None:
        """See SlicePlan."""
        found = super().next()
        if found is not None:
            self.out += (found,)
        return found

    def finish_slice(self, finished: Slice, outcome: RemovalSliceResult) -> list[FinishedDirectory]:
        """See SlicePlan."""
        assert sum(one is finished for one in self.out) == 1
        self.out = tuple(one for one in self.out if one is not finished)
        self.n_finished += 1
        return super().finish_slice(finished, outcome)


def reaped(shape: Shape, n_entries: int, n_ranks: int, model: Model = MODEL, n_threads: int = 4) -> SimulatedReap:
    """A reap that is over."""
    clock = SimulatedClock()
    server = MetadataServer(clock, model)
    reap = SimulatedReap(server, Tree(shape, n_entries), Crew(tuple(range(n_ranks)), n_threads), plan_of=CountingPlan)
    clock.act(reap.drive)
    clock.run()
    return reap


@pytest.mark.parametrize("n_ranks", [1, 3, 16])
@pytest.mark.parametrize(
    ("shape", "n_entries"), [(project_tree, 700), (regular_tree(0, 499), 500), (regular_tree(9, 50), 9 * 51 + 1)]
)
@pytest.mark.parametrize("model", [SPREAD, MODEL._replace(n_slots=0)], ids=["limited", "without a limit"])
def test_each_entry_goes_once_and_no_slice_is_run_twice(
    shape: Shape, n_entries: int, n_ranks: int, model: Model
) -> None:
    """An entry that goes twice is a KeyError, a directory that goes before what is in it a RuntimeError."""
    reap = reaped(shape, n_entries, n_ranks, model)
    assert isinstance(reap.plan, CountingPlan)
    assert reap.tree.is_gone()
    assert reap.plan.report(paced=False, stopped=False).removed == n_entries
    assert (reap.plan.out, reap.plan.n_finished, reap.n_begun) == ((), reap.n_slices, 0)


def test_what_is_too_deep_for_the_plan_moves_up_and_goes_all_the_same() -> None:
    def chain(_random: Random, n_below: int, _depth: int) -> Drawn:
        return Drawn(1, (n_below - 2,)) if n_below > 2 else Drawn(n_below, ())

    reap = reaped(chain, 400, 2, n_threads=16)
    assert reap.tree.is_gone()


def test_more_nodes_are_faster_up_to_what_the_server_can_do() -> None:
    # At a dozen entries a second a run sees few directories: several trees tell.
    rates = [fmean(throughput(SLOW, n, 4, 10**9, seed).entries_per_s for seed in range(4)) for n in (1, 2, 16)]
    assert rates[1] == pytest.approx(2 * rates[0], rel=0.25)
    assert 1.2 * rates[1] < rates[2] < SLOW.most_unlinks_per_s()


@pytest.mark.parametrize("call_s", [0.001, 0.004])
def test_the_pacer_notices_in_every_run_that_another_client_waits(call_s: float) -> None:
    """16 threads fill a server that serves two calls at a time. Paced, others hardly wait longer than alone."""
    few = MODEL._replace(n_slots=2, look_s=call_s, change_s=call_s)
    alone, beside = (neighbour(few, n, 16, is_paced=False, begins_s=20.0) for n in (0, 1))
    assert beside.p50_ms > 1.5 * alone.p50_ms
    for seed in range(5):
        paced = neighbour(few, 1, 16, is_paced=True, seed=seed, begins_s=20.0)
        assert paced.p50_ms < 1.15 * alone.p50_ms
        assert paced.p99_ms < (alone.p99_ms + beside.p99_ms) / 2
        assert paced.entries_per_s > 0


def test_a_small_tree_does_not_wait_for_a_huge_one() -> None:
    found = fairness(SLOW, 2, 4, 5)
    assert found.small_s[1] < 3 * found.without_s[1]
    assert jain([5, 5, 5]) == 1
    assert jain([9, 0, 0]) == pytest.approx(1 / 3)


def test_actors_take_turns_in_the_order_of_the_clock() -> None:
    clock, told = SimulatedClock(), list[tuple[str, float]]()
    signal = Signal(clock)

    def waits() -> None:
        signal.wait(5.0)
        told.append(("set", clock.now_s))
        signal.wait(5.0)
        told.append(("late", clock.now_s))

    def sets() -> None:
        clock.sleep(2.0)
        told.append(("slept", clock.now_s))
        signal.set()

    clock.act(waits)
    clock.act(sets)
    clock.run()
    assert told == [("slept", 2.0), ("set", 2.0), ("late", 7.0)]


def test_what_an_actor_raises_ends_the_run() -> None:
    def check(n: int) -> None:
        raise ValueError(f"no number: {n}")

    clock = SimulatedClock()
    clock.act(partial(check, 0))
    clock.act(lambda: clock.sleep(1.0))
    with pytest.raises(ValueError, match="no number"):
        clock.run()


def test_the_model_of_the_stored_calls_predicts_the_stored_reaps() -> None:
    calls = fit.read(CALLS)
    found = fit.predictions(fit.fitted(calls, calls["machine"]["n_cpus"]), fit.read(REAPS))
    assert {(one.tree, one.n_clients) for one in found} == {
        (tree, n) for tree in ("wide", "flat") for n in (1, 2, 4, 8)
    }
    assert fit.is_trusted(found), found


@pytest.mark.parametrize(("by", "is_predicted"), [(1.0, True), (1.5, False)])
def test_nothing_is_predicted_for_other_machines_after_a_wrong_prediction(
    by: float, is_predicted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reaps = json.loads(REAPS.read_text())
    for tree in reaps["trees"].values():
        tree["entries_per_s"]["2"] = [by * one for one in tree["entries_per_s"]["2"]]
    (stored := tmp_path / "reaps.json").write_text(json.dumps(reaps))
    monkeypatch.setattr(command, "REAPS", stored)
    monkeypatch.setattr(command, "simulated", lambda *_: iter([("as measured", fit.Prediction("64 nodes", 64, 1, 1))]))
    monkeypatch.setattr(sys, "argv", ["simulate"])
    run: Callable[[], None] = command.main
    if is_predicted:
        run()
    else:
        with pytest.raises(SystemExit, match="nothing is said of other machines"):
            run()
    assert ("64 nodes" in capsys.readouterr().out) == is_predicted
