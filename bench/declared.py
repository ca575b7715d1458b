"""The benchmarks that the runner runs itself."""

from collections.abc import Sequence

from bench import cost, gap, many, nodes, reap, service, swap, sweep, threads
from bench.runner import Case
from bench.runs import Run
from bench.verdicts import Target

BENCHMARKS = tuple(one.BENCHMARK for one in (swap, reap, sweep, cost, many, gap, threads, nodes, service))


def targets_of(run: Run) -> Sequence[Target]:
    """Return the targets of a run's case; none if its benchmark no longer exists."""
    case = Case(tuple(run.case.split()), run.n)
    return next((one.targets(case) for one in BENCHMARKS if one.name == run.benchmark), ())
