"""What somebody else's program waits for on the server, alone and beside reaps, paced and not."""

import os
from collections.abc import Callable
from random import Random
from typing import NamedTuple

from bench.simulate.clock import Signal, SimulatedClock, Steps
from bench.simulate.ranks import Crew, SimulatedReap
from bench.simulate.server import MetadataServer, Model
from bench.simulate.tree import Tree, project_tree
from bench.support import percentile
from fusefs.core.pacing import Backlog, RateCaps, Speed, WorkTotals
from fusefs.engine.pace import FULL_SPEED, Pacer, PressurePacer
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.pressure import Psi, StallTimes

_BEGINS_S = 30.0
"""By then the pacers have found their pace; for as long again it is looked at."""
_PART = 0.1
"""Of what the server can do is asked for by the neighbour, at times that don't depend on the answers."""
_NEIGHBOUR, _PROBES = -1, -2
_DIRECTORIES = 1000
"""Of the neighbour: his changes don't wait for each other."""
_LONG_S = 1e6


class Neighbour(NamedTuple):
    """Milliseconds that a message of his takes, of a hundred the middle one and the last but one; entries/s of ours."""

    n_nodes: int
    is_paced: bool
    p50_ms: float
    p99_ms: float
    entries_per_s: float


class _NoPressure(Psi):
    """A machine on which nothing stalls: what waits for a server is not told."""

    def __init__(self) -> None:
        super().__init__(os.devnull)

    def read(self) -> StallTimes:
        """See Psi."""
        return StallTimes(0.0, 0.0, 0.0)


class NodeClock:
    """A machine's own: rests are by it, and no two machines came up at the same time."""

    def __init__(self, clock: SimulatedClock, ahead_s: float) -> None:
        self._clock = clock
        self._ahead_s = ahead_s

    def monotonic(self) -> float:
        """See MonotonicClock."""
        return self._clock.now_s + self._ahead_s

    def sleep(self, seconds: float, /) -> None:
        """See MonotonicClock."""
        self._clock.sleep(seconds)


class ServicePace:
    """The pacer as the service leads it (service/work_session.py): ticks, and probes beside the work."""

    def __init__(self, server: MetadataServer, node: int, own: NodeClock, directory: Fd) -> None:
        self._server = server
        self._clock = server.clock
        self._own = own
        self._node = node
        self._totals = WorkTotals()
        self._is_probing = False
        psi = _NoPressure()
        self._pacer = PressurePacer(Kernel(), directory, RateCaps(), own.monotonic, psi, write=self._write_little)
        self._next_s = 0.0
        self._tempo = self._tick()

    def tempo(self) -> Speed:
        """See Pacer."""
        return self._tick() if self._own.monotonic() >= self._next_s else self._tempo

    def record_work(self, n_entries: int, n_bytes: int, busy_s: float) -> None:
        """See Pacer."""
        totals = self._totals
        self._totals = WorkTotals(totals.n_entries + n_entries, totals.n_bytes + n_bytes, totals.busy_s + busy_s)

    def wait(self, seconds: float) -> None:
        """See Pacer."""
        before, until_s = self._tempo, self._own.monotonic() + seconds
        while (now_s := self._own.monotonic()) < until_s and self.tempo() == before:
            self._own.sleep(max(min(until_s, self._next_s) - now_s, 0.0001))

    def _tick(self) -> Speed:
        self._tempo = self._pacer.tick(self._totals, Backlog())
        if self._pacer.is_probe_due() and not self._is_probing:
            self._is_probing = True
            self._clock.act(self._probe)
        self._next_s = self._own.monotonic() + self._pacer.next_tick_s()
        return self._tempo

    def _probe(self) -> None:
        self._pacer.probe()
        self._is_probing = False

    def _write_little(self) -> None:
        """A change on the server, in the node's own file: nobody else has a lock of that."""
        ended = Signal(self._clock)

        def steps() -> Steps:
            yield self._server.change(self._node, (_PROBES, self._node))

        self._clock.start(steps(), lambda _: ended.set())
        ended.wait(_LONG_S)


def neighbour(
    model: Model, n_nodes: int, n_threads: int, *, is_paced: bool, seed: int = 0, begins_s: float = _BEGINS_S
) -> Neighbour:
    """One who asks at a fixed rate, beside so many nodes each of which reaps a huge tree of its own; 0: alone."""
    clock = SimulatedClock()
    server = MetadataServer(clock, model, seed)
    random = Random(seed)
    waits, gone = list[float](), [0]
    per_s = _PART * model.n_slots / model.look_s

    def ask(due_s: float) -> None:
        def steps() -> Steps:
            directory = (_NEIGHBOUR, random.randrange(_DIRECTORIES))
            yield server.change(_NEIGHBOUR, directory) if random.random() < 0.5 else server.request_read()

        def end(_: object) -> None:
            if due_s >= begins_s:
                waits.append(clock.now_s - due_s)

        clock.start(steps(), end)
        clock.after(random.expovariate(per_s), lambda: ask(clock.now_s))

    def count(n: int) -> None:
        gone[0] += n if clock.now_s >= begins_s else 0

    def reap_of(node: int, own: NodeClock, pacer: Pacer) -> Callable[[], None]:
        tree, crew = Tree(project_tree, 10**9, node), Crew((node,), n_threads, is_job=False)
        return SimulatedReap(server, tree, crew, pacer, lambda: clock.now_s >= 2 * begins_s, count, clock=own).drive

    clock.after(0.0, lambda: ask(clock.now_s))
    with Fd(os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)) as nowhere:  # on no device that tells of its requests
        for node in range(n_nodes):
            own = NodeClock(clock, random.random())
            pacer = ServicePace(server, node, own, nowhere) if is_paced else FULL_SPEED
            clock.act(reap_of(node, own, pacer))
        clock.act(lambda: clock.sleep(2 * begins_s))
        clock.run()
    return Neighbour(
        n_nodes,
        is_paced,
        percentile(waits, 50) * 1e3,
        percentile(waits, 99) * 1e3,
        gone[0] / begins_s,
    )
