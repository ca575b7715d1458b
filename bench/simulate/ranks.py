"""One reap by the engine's own plan and drive, with workers on simulated machines."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from bench.simulate.clock import Signal, SimulatedClock
from bench.simulate.remover import SimulatedRemover
from bench.simulate.server import MetadataServer
from bench.simulate.tree import Tree
from fusefs.core.slice_budget import SliceBudget
from fusefs.core.slices import RemovalSliceResult, Slice, SlicePlan, SliceWork
from fusefs.engine.mpi_ranks import in_turn, least_slice_s
from fusefs.engine.run_slices import SliceRunner
from fusefs.engine.slice_pace import FULL_SPEED, KeepsTime, SetsSpeed, SlicePace
from fusefs.engine.slice_runners import EndedSlice
from fusefs.engine.strategy import Strategy, Workers, ranks_window
from fusefs.store.layout import HOISTED, TREE

LEAST_SHARE = 8


class Crew(NamedTuple):
    """So many threads on each of some machines.

    is_job  they are ranks: the first has the plan. Otherwise all are threads of one machine
    """

    machines: tuple[int, ...]
    n_threads: int
    is_job: bool = True

    @property
    def n_workers(self) -> int:
        """Slices beside each other."""
        return len(self.machines) * self.n_threads

    def strategy(self) -> Strategy:
        """What choose_for_rank, or choose, says of a filesystem with a server."""
        window = ranks_window(self.n_workers) if self.is_job else (1 << 20) // self.n_workers**2
        return Strategy(
            n_workers=self.n_workers,
            workers=Workers.THREADS,
            window=min(16_384, window),
            window_chars=1 << 22,
            by_inode=False,
            splits=True,
            least_share=LEAST_SHARE,
            looks_ahead=True,
            tells_types=True,
            is_at_once=False,
            group_shift=None,
            afterwork=0.0,
        )


class SimulatedReap:
    """A tree, its plan, and who works on it: what reaper/remove_tree.py has of a reap."""

    def __init__(
        self,
        server: MetadataServer,
        tree: Tree,
        crew: Crew,
        pacer: SetsSpeed = FULL_SPEED,
        is_stopped: Callable[[], bool] = lambda: False,
        gone: Callable[[int], None] = lambda _n: None,
        plan_of: type[SlicePlan] = SlicePlan,
        clock: KeepsTime | None = None,
    ) -> None:
        """Be ready.

        gone   told how many entries a slice has removed
        clock  of the machine that has the plan, if it is not everybody's
        """
        self.server = server
        self.tree = tree
        self.crew = crew
        self.clock = server.clock
        self.n_slices = self.n_begun = 0
        self._gone = gone
        strategy = crew.strategy()
        n_machines = len(crew.machines) if crew.is_job else 0
        self.plan = plan_of(
            strategy.n_workers, splits_names=strategy.splits, least_share=strategy.least_share, n_machines=n_machines
        )
        self.remover = SimulatedRemover(server, tree, strategy.window)
        self._hoisted: int | None = None
        self.plan.add(0, b"", SliceWork(subdirs=[TREE.decode()]))
        pace = SlicePace(pacer, clock=clock or self.clock)
        self._drive = SliceRunner(self.plan, self, strategy, pace, is_stopped, self._done, self._opens)

    def drive(self) -> None:
        """All of it, or until it is stopped; of an actor."""
        self._drive.run()

    def run(self, work: Slice, budget: SliceBudget) -> RemovalSliceResult:
        """See RunsSlices: by the first machine, while whoever has the plan waits."""
        ended, found = Signal(self.clock), list[RemovalSliceResult]()

        def take(result: RemovalSliceResult) -> None:
            found.append(result)
            ended.set()

        self.clock.sleep(self.server.model.planning_s)
        self.clock.start(self.remover.steps(self.crew.machines[0], work, budget), take)
        while not found:
            ended.wait(_LONG_S)
        return found[0]

    @contextmanager
    def _opens(self) -> Iterator["_SimulatedPool"]:
        yield _SimulatedPool(self)

    def _done(self, work: Slice, outcome: RemovalSliceResult) -> None:
        self.n_slices += 1
        self.n_begun += len(outcome.left) - len(self.plan.done(work, outcome))
        if outcome.hoisted:
            if self._hoisted is None:
                self._hoisted = self.plan.add(0, HOISTED, SliceWork(), is_hoisted=True)
            self.plan.push(self._hoisted, outcome.hoisted)
        self._gone(outcome.removed)


_LONG_S = 1e6


class _SimulatedPool:
    """See SlicePool; as engine/mpi_ranks.py has it."""

    def __init__(self, reap: SimulatedReap) -> None:
        self._reap = reap
        self._clock: SimulatedClock = reap.clock
        crew = reap.crew
        n_slices = [crew.n_threads] * len(crew.machines)
        self._least_s = least_slice_s(crew.n_workers) if crew.is_job else 0.0
        self._free = deque(in_turn(n_slices))
        self._ended: list[EndedSlice[Slice, RemovalSliceResult]] = []
        self._came = Signal(self._clock)

    def submit(self, work: Slice, budget: SliceBudget) -> None:
        """See SlicePool."""
        if not budget.is_paced():
            budget = budget._replace(seconds=max(budget.seconds, self._least_s))
        model, rank = self._reap.server.model, self._free.popleft()
        away_s = model.handover_s if rank else 0.0
        steps = self._reap.remover.steps(self._reap.crew.machines[rank], work, budget)

        def come(result: RemovalSliceResult) -> None:
            self._free.append(rank)
            self._ended.append(EndedSlice(work, budget, result))
            self._came.set()

        def end(result: RemovalSliceResult) -> None:
            self._clock.after(away_s / 4, lambda: come(result))

        self._clock.sleep(model.planning_s)
        self._clock.after(away_s, lambda: self._clock.start(steps, end))

    def ended(self, most_s: float) -> list[EndedSlice[Slice, RemovalSliceResult]]:
        """See SlicePool."""
        if not self._ended:
            self._came.wait(most_s)
        ended, self._ended = self._ended, []
        return ended
