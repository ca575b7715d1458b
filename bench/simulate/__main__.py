"""A reap on many machines, simulated: python -m bench.simulate, or make simulate.

    python -m bench.simulate                     what the model says of reaps that were measured; then of other machines
    python -m bench.simulate --measure           measure both sets anew, first: as root, twenty minutes, alone
    python -m bench.simulate --nodes 1,8,64 --users 100 --entries 1000000000 --json

The model of the server is made of single calls (bench/stored/server_calls.json). It must predict reaps by ranks
(bench/stored/server_reaps.json) within 25 %, each of them, before it says anything of machines that are not here. The
plan, the drive, the pace and the turns of users are the engine's and the service's own. How the tree is drawn:
bench/simulate/tree.py. Of a huge tree a part is simulated, call by call, and the rest is taken to be like it.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from bench.simulate import fit
from bench.simulate.fairness import fairness
from bench.simulate.measure import CALLS, REAPS, measure
from bench.simulate.neighbour import neighbour
from bench.simulate.server import Model
from bench.simulate.throughput import throughput
from bench.support import measuring
from tests.support.mount_namespaces import see_own_mounts_only

PLANNERS_NODES = (256, 1024)
"""Ranks with which it is looked for where the first one is the limit."""


def parse() -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.simulate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", default="1,8,64", help="numbers of machines")
    parser.add_argument("--threads", type=int, default=16, help="of each")
    parser.add_argument("--entries", type=int, default=10**9, help="of the huge tree")
    parser.add_argument("--users", type=int, default=40, help="who share the machines, one of them with a huge tree")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="a line for each figure")
    parser.add_argument("--measure", action="store_true", help="measure both sets anew, first")
    parser.add_argument("--rounds", type=int, default=3, help="of what is measured")
    return parser.parse_args()


def check(predicted: list[fit.Prediction]) -> None:
    """Raises  SystemExit: one of them is too far from what was measured"""
    if not fit.is_trusted(predicted):
        worst = max(predicted, key=lambda one: abs(one.off))
        sys.exit(
            f"{worst.tree}, {worst.n_clients} clients: {worst.off:+.0%}, where {fit.WITHIN:.0%} is the most: "
            "nothing is said of other machines"
        )


def simulated(arguments: argparse.Namespace, model: Model) -> Iterator[tuple[str, Any]]:
    """Yield each figure with its kind."""
    nodes = [int(word) for word in arguments.nodes.split(",")]
    endless = model._replace(n_slots=0)
    for n in nodes:
        yield "as measured", throughput(model, n, arguments.threads, arguments.entries, arguments.seed)
    for n in (*nodes, *PLANNERS_NODES):
        yield "without a limit", throughput(endless, n, arguments.threads, arguments.entries, arguments.seed)
    for n in (0, *nodes):
        for is_paced in (False, True) if n else (False,):
            yield "neighbour", neighbour(model, n, arguments.threads, is_paced=is_paced, seed=arguments.seed)
    for n in nodes:
        yield "users", fairness(model, n, arguments.threads, arguments.users, arguments.seed)


def format_figure(what: str, figure: Any, *, as_json: bool) -> str:
    """Return a figure as one line of text or JSON."""
    figures = figure._asdict()
    if as_json:
        return json.dumps({"of": what, **figures})
    return f"{what}: " + ", ".join(f"{name} {_short(value)}" for name, value in figures.items())


def _short(value: Any) -> str:
    if isinstance(value, tuple):
        return " and ".join(map(_short, value))
    if isinstance(value, str):
        return value
    return f"{value:.3g}" if isinstance(value, float) and value < 100 else f"{value:,.0f}"


def main() -> None:
    """Measure if asked to; fit, predict, and then simulate."""
    arguments = parse()
    if arguments.measure:
        if os.geteuid():
            sys.exit("only root may mount for all")
        with measuring():
            see_own_mounts_only()
            measure(arguments.rounds)
    calls, reaps = fit.read(CALLS), fit.read(REAPS)
    here = fit.fitted(calls, calls["machine"]["n_cpus"])
    predicted = fit.predictions(here, reaps)
    for one in predicted:
        off = "" if arguments.json else f", off by {one.off:+.0%}"
        print(format_figure("predicted", one, as_json=arguments.json) + off, flush=True)
    check(predicted)
    model = here.apart()
    print(format_figure("model", model, as_json=arguments.json), flush=True)
    for what, figure in simulated(arguments, model):
        print(format_figure(what, figure, as_json=arguments.json), flush=True)


if __name__ == "__main__":
    main()
