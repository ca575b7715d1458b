"""One reap by the engine's own plan and drive, with workers on simulated machines."""

from collections.abc import Callable
from typing import NamedTuple

from bench.simulate.clock import Signal, SimulatedClock
from bench.simulate.remover import SimulatedRemover
from bench.simulate.server import MetadataServer
from bench.simulate.tree import Tree
from fusefs.core.pacing import SliceBudget
from fusefs.core.slices import RemovalSliceResult, Slice, SlicePlan, SliceWork
from fusefs.engine.mpi_ranks import SentSlice, SlicesOfRanks
from fusefs.engine.pace import FULL_SPEED, MonotonicClock, Pacer, SlicePace
from fusefs.engine.run_slices import EndedSlice, SliceRunner
from fusefs.engine.strategy import LEAST_RANKS_SHARE, Strategy, Workers, ranks_window
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
            least_share=LEAST_RANKS_SHARE if self.is_job else LEAST_SHARE,
            lookup_first=True,
            lists_types=True,
            is_at_once=False,
            group_shift=None,
            afterwork=0.0,
        )


class SimulatedReap:
    """A tree, its plan, and who works on it: what reaper/reap.py has of a reap."""

    def __init__(
        self,
        server: MetadataServer,
        tree: Tree,
        crew: Crew,
        pacer: Pacer = FULL_SPEED,
        is_stopped: Callable[[], bool] = lambda: False,
        gone: Callable[[int], None] = lambda _n: None,
        plan_of: type[SlicePlan] = SlicePlan,
        clock: MonotonicClock | None = None,
    ) -> None:
        """Be ready.

        gone   called with the number of entries that a slice has removed
        clock  of the machine that has the plan, if it is not everybody's
        """
        self.server = server
        self.tree = tree
        self.crew = crew
        self.clock = server.clock
        self.n_slices = self.n_begun = 0
        self.planned_s = 0.0
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
        pool = _PoolOfRanks(self) if crew.is_job else _PoolOfThreads(self)
        self._drive = SliceRunner(self.plan, self.run_slice, strategy, pace, is_stopped, self._finish_slice, pool)

    def drive(self) -> None:
        """All of it, or until it is stopped; of an actor."""
        self._drive.run_plan()

    def run_slice(self, work: Slice, budget: SliceBudget) -> RemovalSliceResult:
        """See SliceRunner: the first machine runs the slice, while the owner of the plan waits."""
        ended, found = Signal(self.clock), list[RemovalSliceResult]()

        def take(result: RemovalSliceResult) -> None:
            found.append(result)
            ended.set()

        self.clock.sleep(self.server.model.planning_s)
        self.clock.start(self.remover.steps(self.crew.machines[0], work, budget), take)
        while not found:
            ended.wait(_LONG_S)
        return found[0]

    def _finish_slice(self, work: Slice, outcome: RemovalSliceResult) -> None:
        self.n_slices += 1
        self.n_begun += len(outcome.remaining) - len(self.plan.finish_slice(work, outcome))
        if outcome.hoisted:
            if self._hoisted is None:
                self._hoisted = self.plan.add(0, HOISTED, SliceWork(), is_hoisted=True)
            self.plan.add_subdirs(self._hoisted, outcome.hoisted)
        self._gone(outcome.removed)


_LONG_S = 1e6


class _PoolOfThreads:
    """See SlicePool; as engine/run_slices.py has it."""

    def __init__(self, reap: SimulatedReap) -> None:
        self.n_workers = reap.crew.strategy().n_workers
        self._reap = reap
        self._ended: list[EndedSlice[Slice, RemovalSliceResult]] = []
        self._came = Signal(reap.clock)

    def submit(self, work: Slice, budget: SliceBudget) -> None:
        """See SlicePool."""
        reap = self._reap

        def end(result: RemovalSliceResult) -> None:
            self._ended.append(EndedSlice(work, budget, result))
            self._came.set()

        reap.clock.sleep(reap.server.model.planning_s)
        reap.clock.start(reap.remover.steps(reap.crew.machines[0], work, budget), end)

    def collect_ended(self, most_s: float) -> list[EndedSlice[Slice, RemovalSliceResult]]:
        """See SlicePool."""
        if not self._ended:
            self._came.wait(most_s)
        ended, self._ended = self._ended, []
        return ended


class _PoolOfRanks:
    """See SlicePool; as engine/mpi_ranks.py has it, with the engine's own rule of who gets what."""

    def __init__(self, reap: SimulatedReap) -> None:
        self.n_workers = reap.crew.strategy().n_workers
        self._reap = reap
        self._clock: SimulatedClock = reap.clock
        machines = reap.crew.machines
        self._slices = SlicesOfRanks[Slice]([reap.crew.n_threads] * len(machines))
        self._ended: list[tuple[int, RemovalSliceResult]] = []
        self._came = Signal(self._clock)

    def submit(self, work: Slice, budget: SliceBudget) -> None:
        """See SlicePool."""
        model, (rank, sent) = self._reap.server.model, self._slices.send(work, budget)
        self._plan(model.planning_s / 2)
        self._clock.after(model.handover_s if rank else 0.0, lambda: self._begin(rank, sent))

    def _begin(self, rank: int, sent: SentSlice[Slice]) -> None:
        away_s = self._reap.server.model.handover_s / 4 if rank else 0.0

        def end(outcome: RemovalSliceResult) -> None:
            self._clock.after(away_s, lambda: self._come(sent.number, outcome))

        machine = self._reap.crew.machines[rank]
        self._clock.start(self._reap.remover.steps(machine, sent.work, sent.budget), end)

    def _come(self, number: int, outcome: RemovalSliceResult) -> None:
        self._ended.append((number, outcome))
        self._came.set()

    def _plan(self, seconds: float) -> None:
        self._reap.planned_s += seconds
        self._clock.sleep(seconds)

    def collect_ended(self, most_s: float) -> list[EndedSlice[Slice, RemovalSliceResult]]:
        """See SlicePool."""
        if not self._ended:
            self._came.wait(most_s)
        ended, self._ended = self._ended, []
        model = self._reap.server.model
        n_left = sum(len(outcome.remaining) for _number, outcome in ended)
        self._plan(len(ended) * model.planning_s / 2 + n_left * model.left_s)
        return [self._slices.end(number, outcome) for number, outcome in ended]
