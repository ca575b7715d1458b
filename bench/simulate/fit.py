"""The model of what was measured by single calls, and what it says of reaps that were measured and not used for it."""

import json
from collections.abc import Mapping
from math import log, sqrt
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.simulate.clock import SimulatedClock
from bench.simulate.probes import own_per_s
from bench.simulate.ranks import Crew, SimulatedReap
from bench.simulate.server import MetadataServer, Model
from bench.simulate.tree import Tree, regular_tree

WITHIN = 0.25
"""Of each reap that was measured: further off, and nothing is told of machines that are not here."""
UNCOUNTED = 15
"""Entries at either end of a reap that are not timed: there are those of the store's own."""
_SLOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
Measured = Mapping[str, Any]


class Prediction(NamedTuple):
    """Entries a second of a reap of a tree by so many clients."""

    tree: str
    n_clients: int
    measured: float
    predicted: float

    @property
    def off(self) -> float:
        """By which part of what was measured."""
        return self.predicted / self.measured - 1.0


def read(path: Path) -> Measured:
    """What was stored."""
    found: Measured = json.loads(path.read_text(encoding="utf-8"))
    return found


def fitted(calls: Measured, n_processors: int) -> Model:
    """Of single calls, and of what a reap asks for.

    n_processors  that all machines share
    """
    looks, unlinks = _by_number(calls["per_s"]["look"]), _by_number(calls["per_s"]["unlink"])
    look_s, most_per_s = median(calls["look_s"]), max(looks.values())
    counted = calls["counted"]
    one, flat, small = counted["one file"], counted["flat"], counted["directories"]
    n_asked = flat["looks"] + flat["changes"] - one["looks"] - one["changes"]
    cpu_s = max(flat["used_s"], 0.0) / n_asked
    before = max(median(calls["unlink_s"]) / look_s - 1.0, 0.0)
    n_files = flat["n_files"] - one["n_files"]
    shared = _by_number(calls["known_unlinks_per_s_in_one_directory"])
    known_s = 1.0 / shared[1]
    in_lock = min(max(known_s / look_s - 1.0, 0.0), before)

    def model(n_slots: int) -> Model:
        slot_s = n_slots / most_per_s
        way_s = look_s - slot_s - cpu_s
        return Model(
            way_s=way_s,
            look_s=slot_s,
            change_s=slot_s,
            n_slots=n_slots,
            revoke_s=max(1.0 / max(shared.values()) - slot_s, 0.0),
            spread=_spread(calls["look_s"]) * look_s / sqrt(max(way_s, 0.0) ** 2 + slot_s**2),
            looks_before_change=before,
            looks_ahead=max((flat["looks"] - one["looks"]) / n_files - in_lock, 0.0),
            looks_in_lock=in_lock,
            looks_a_directory=max(
                (small["looks"] - one["looks"] - before * small["n_files"]) / small["n_directories"] - in_lock - 1, 1.0
            ),
            cpu_s=cpu_s,
            n_processors=n_processors,
        )

    def miss(candidate: Model) -> float:
        return sum(
            log(own_per_s(candidate, n, is_change=is_change) / per_s) ** 2
            for is_change, rates in ((False, looks), (True, unlinks))
            for n, per_s in rates.items()
        )

    candidates = [each for n in _SLOTS if (each := model(n)).way_s > 0.0]
    return min(candidates, key=miss)


def predictions(model: Model, reaps: Measured) -> list[Prediction]:
    """Of each reap that was measured."""
    found = []
    for name, of_tree in reaps["trees"].items():
        shape = of_tree["n_directories"], of_tree["n_files"]
        for n_clients, per_s in _by_number(of_tree["entries_per_s"]).items():
            predicted = entries_per_s(model, shape, n_clients, reaps["threads_a_rank"])
            found.append(Prediction(name, n_clients, median(per_s), predicted))
    return found


def entries_per_s(model: Model, shape: tuple[int, int], n_clients: int, n_threads: int) -> float:
    """Of a reap by so many clients, as measure.py has it: without the first and the last entries."""
    n_directories, n_files = shape
    n_entries = n_directories + n_files * max(n_directories, 1) + 1
    clock = SimulatedClock()
    tree = Tree(regular_tree(*shape), n_entries)
    server = MetadataServer(clock, model)
    times = list[float]()
    tree.gone = lambda: times.append(clock.now_s)
    reap = SimulatedReap(server, tree, Crew(tuple(range(n_clients)), n_threads))
    clock.act(reap.drive)
    clock.run()
    if not tree.is_gone():
        raise RuntimeError(f"{n_entries - tree.n_gone} entries are left")
    return (n_entries - 2 * UNCOUNTED) / (times[-UNCOUNTED - 1] - times[UNCOUNTED - 1])


def is_trusted(predictions: list[Prediction]) -> bool:
    """Return whether the model may predict machines that were not measured."""
    return all(abs(one.off) <= WITHIN for one in predictions)


def _by_number(by_text: Mapping[str, Any]) -> dict[int, Any]:
    """Return the values by number; JSON has text as keys."""
    return {int(n): value for n, value in by_text.items()}


def _spread(seconds: list[float]) -> float:
    """Standard deviation by median, of what lies between the tenths at either end: the rest is other programs'."""
    n = len(seconds)
    return (seconds[n * 9 // 10] - seconds[n // 10]) / 2.56 / median(seconds)
