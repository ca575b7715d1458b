"""One huge tree by ranks: entries a second, what the plan needs, and what the first rank has to do."""

import gc
import sys
import time
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import NamedTuple

from bench.simulate.clock import SimulatedClock
from bench.simulate.ranks import Crew, SimulatedReap
from bench.simulate.server import MetadataServer, Model
from bench.simulate.tree import Tree, project_tree
from fusefs.core.pacing import SLICE_S
from fusefs.core.slices import FinishedDirectory, RemovalSliceResult, Slice, SlicePlan
from fusefs.engine.mpi_ranks import least_slice_s

_BEGINS, _LASTS = 2, 1
"""Slices, one after the other, before which a reap is not at its full rate; and in which what is told is measured."""
_BEGINS_S, _LASTS_S = 30.0, 60.0
"""The same where the server is the limit, at the least: slices take longer there."""
_LEAST_S = 6.0
"""That each of the two is, wherever."""
_N_LOOKS = 5
_NO_PART = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)


class Throughput(NamedTuple):
    """Of a tree by so many nodes.

    entries_per_s  when all have something to do
    simulated_s    of which that is the average
    plan_bytes     the most that the plan had, in Python's memory
    n_begun        directories, at the same time
    told_per_s     slices that are reported to the first rank, at their end or before
    planner_busy   part of the time in which the first rank plans, with the model's planning_s
    plan_us        processor time of this machine in the plan, for each report of a slice; not simulated
    """

    n_nodes: int
    n_threads: int
    n_entries: int
    entries_per_s: float
    simulated_s: float
    n_simulated: int
    plan_bytes: int
    n_begun: int
    told_per_s: float
    planner_busy: float
    plan_us: float


class WatchedPlan(SlicePlan):
    """The engine's own, with a look at the clock around what it does."""

    used_s = 0.0
    n_finished = 0

    def next(self) -> Slice | None:
        """See SlicePlan."""
        began_s = time.thread_time()
        found = super().next()
        self.used_s += time.thread_time() - began_s
        return found

    def finish_slice(self, finished: Slice, outcome: RemovalSliceResult) -> list[FinishedDirectory]:
        """See SlicePlan."""
        began_s = time.thread_time()
        found = super().finish_slice(finished, outcome)
        self.used_s += time.thread_time() - began_s
        self.n_finished += 1
        return found


def throughput(model: Model, n_nodes: int, n_threads: int, n_entries: int, seed: int = 0) -> Throughput:
    """Of a tree by ranks on so many machines: from when all are busy for some slices' time, or to its end."""
    clock = SimulatedClock()
    server = MetadataServer(clock, model, seed)
    tree = Tree(project_tree, n_entries, seed)
    crew = Crew(tuple(range(n_nodes)), n_threads)
    slice_s = max(least_slice_s(crew.n_workers), SLICE_S, model.unlink_s())
    begins_s, lasts_s = _BEGINS * slice_s, _LASTS * slice_s
    if model.n_slots:
        begins_s, lasts_s = max(begins_s, _BEGINS_S), max(lasts_s, _LASTS_S)
    else:
        begins_s, lasts_s = max(begins_s, _LEAST_S), max(lasts_s, _LEAST_S)
    ends_s = begins_s + lasts_s
    reap = SimulatedReap(server, tree, crew, is_stopped=lambda: clock.now_s >= ends_s, plan_of=WatchedPlan)
    assert isinstance(reap.plan, WatchedPlan)
    watched = _Watched(reap, reap.plan)
    for number in range(_N_LOOKS + 1):
        clock.after(begins_s + number * lasts_s / _N_LOOKS, watched.take_sample)
    clock.act(reap.drive)
    clock.run()
    return watched.to_throughput(n_nodes, n_threads, n_entries)


class _Watched:
    """Takes samples of a reap."""

    def __init__(self, reap: SimulatedReap, plan: WatchedPlan) -> None:
        self._reap = reap
        self._plan = plan
        self._samples = list[tuple[float, int, int, float]]()
        self._plan_bytes = self._n_begun = 0

    def take_sample(self) -> None:
        """Record the time and the counts of this moment."""
        reap = self._reap
        self._samples.append((reap.clock.now_s, reap.tree.n_gone, self._plan.n_finished, reap.planned_s))
        self._plan_bytes = max(self._plan_bytes, size_of(self._plan))
        self._n_begun = max(self._n_begun, reap.n_begun)

    def to_throughput(self, n_nodes: int, n_threads: int, n_entries: int) -> Throughput:
        """Return the throughput between the first sample and the last."""
        (began_s, before, told_before, planned_before_s), *_, (ended_s, after, told_after, planned_s) = self._samples
        seconds = ended_s - began_s
        return Throughput(
            n_nodes,
            n_threads,
            n_entries,
            (after - before) / seconds,
            seconds,
            after,
            self._plan_bytes,
            self._n_begun,
            (told_after - told_before) / seconds,
            (planned_s - planned_before_s) / seconds,
            self._plan.used_s / max(self._plan.n_finished, 1) * 1e6,
        )


def size_of(what: object) -> int:
    """Bytes of a value and of all that it refers to, but for code."""
    seen, ahead, n_bytes = set[int](), [what], 0
    while ahead:
        one = ahead.pop()
        if id(one) in seen or isinstance(one, _NO_PART):
            continue
        seen.add(id(one))
        n_bytes += sys.getsizeof(one)
        ahead += gc.get_referents(one)
    return n_bytes
