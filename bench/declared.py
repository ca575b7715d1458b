"""The benchmarks that the runner runs itself."""

from collections.abc import Sequence

from bench import cost, gap, many, nodes, reap, service, swap, sweep, threads
from bench.runner import Case
from bench.runs import Run
from bench.verdicts import Target

BENCHMARKS = tuple(one.BENCHMARK for one in (swap, reap, sweep, cost, many, gap, threads, nodes, service))


def targets_of(run: Run) -> Sequence[Target]:
    """Those of a run's case; none of a benchmark that is gone."""
    case = Case(tuple(run.case.split()), run.n)
    return next((one.targets(case) for one in BENCHMARKS if one.name == run.benchmark), ())
