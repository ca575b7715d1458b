"""The single calls of bench/simulate/measure.py, on the model."""

from bench.simulate.clock import SimulatedClock, Steps
from bench.simulate.server import MetadataServer, Model

_EACH = 60


def own_per_s(model: Model, n: int, *, is_change: bool) -> float:
    """Calls a second by so many threads of one machine, each in a directory of its own."""
    clock = SimulatedClock()
    server = MetadataServer(clock, model)

    def steps(number: int) -> Steps:
        for _ in range(_EACH):
            if is_change:
                yield from server.unlink(0, number)
            else:
                yield server.request_read()

    return n * _EACH / _ended_s(clock, [steps(number) for number in range(n)])


def _ended_s(clock: SimulatedClock, all_steps: list[Steps]) -> float:
    """When the last of them have ended, all begun at once."""
    ended = list[float]()
    for steps in all_steps:
        clock.start(steps, lambda _: ended.append(clock.now_s))
    clock.run()
    return max(ended)
