"""Turns are taken in turn, all is kept, and all that is kept can be read."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench import history, runs
from bench.declared import BENCHMARKS
from bench.program_rows import READERS
from bench.runner import Bed, Benchmark, Case, Result, Turn, Until, take
from bench.subjects import Unable
from bench.verdicts import Target, times

OURS, RIVAL, ABSENT, ONCE = "ours", "rival", "absent", "once"


class Taken:
    """A benchmark of subjects that note their turns; the absent one never has a figure."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def benchmark(self) -> Benchmark:
        return Benchmark("sample", "", (), (), self._bed, lambda _case: [])

    @contextmanager
    def _bed(self, _case: Case) -> Iterator[Bed]:
        turns: dict[str, Turn] = {name: self._turn(name) for name in (OURS, RIVAL, ABSENT)}
        yield Bed(turns, {ONCE: self._turn(ONCE)})

    def _turn(self, name: str) -> Turn:
        def turn() -> dict[str, float]:
            self.order.append(name)
            if name == ABSENT:
                raise Unable("missing", "it is not here")
            return {"": len(self.order), "more": 1}

        return turn


def test_the_first_subject_of_a_round_is_last_in_the_next() -> None:
    taken = Taken()
    take(taken.benchmark(), Case(()), 3)
    assert taken.order == [OURS, RIVAL, ABSENT, RIVAL, OURS, OURS, RIVAL, ONCE]


def test_a_subject_that_failed_is_left_out_and_named() -> None:
    run = take(Taken().benchmark(), Case(()), 3)
    assert run.left_out == {ABSENT: "missing: it is not here"}
    assert [ABSENT in one for one in run.rounds] == [False] * 3


def test_what_is_measured_once_is_in_the_last_round() -> None:
    run = take(Taken().benchmark(), Case(()), 3)
    assert [ONCE in one for one in run.rounds] == [False, False, True]


@pytest.mark.parametrize(("share_s", "end_s", "n"), [(0, float("inf"), 2), (float("inf"), float("inf"), 4), (0, 0, 1)])
def test_a_quick_run_has_the_least_rounds_of_its_case_unless_all_time_is_over(
    share_s: float, end_s: float, n: int
) -> None:
    until = Until(share_s, end_s)
    assert len(take(Taken().benchmark(), Case((), least=2), 4, until).rounds) == n


def test_a_run_is_read_as_it_was_kept(tmp_path: Path) -> None:
    run = take(Taken().benchmark(), Case(("ext4", "tree"), 5), 2)
    runs.keep(run, tmp_path / "runs")
    assert list(map(runs.from_row, runs.read(tmp_path / "runs"))) == [run]
    assert run.title == "sample ext4 tree, 5"


@pytest.mark.parametrize("name", READERS)
def test_every_row_of_a_program_is_read(name: str) -> None:
    rows = list(runs.read(runs.RESULTS / f"{name}.jsonl"))
    assert rows
    assert all(list(READERS[name](row)) for row in rows)


def test_all_results_are_drawn_and_tabulated() -> None:
    found = history.all_results()
    newest = history.newest(found)
    assert history.draw(found).count("<polyline") == len(history.series(found))
    assert history.table(newest).count("| met |") == sum(
        verdict.word == "met" for one in newest for verdict in one.verdicts()
    )


def sample(seconds: float, commit: str) -> Result:
    target = Target("of it", times(OURS, RIVAL), 1)
    run = take(Taken().benchmark(), Case(()), 1)
    return Result(run._replace(rounds=({OURS: seconds, RIVAL: 1},) * 6, commit=commit), [target])


def test_only_intervals_that_do_not_meet_are_better_or_worse() -> None:
    first, same, worse = sample(0.5, "a"), sample(0.5, "b"), sample(0.7, "c")
    assert "| the same |" in history.comparison([first, same], "")
    assert "| worse |" in history.comparison([first, worse], "")
    assert "| better |" in history.comparison([worse, first], "")
    assert "| worse |" in history.comparison([first, same, worse], "a")


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda one: one.name)
def test_a_case_is_named_once(benchmark: Benchmark) -> None:
    words = [case.words for case in benchmark.cases]
    assert len(set(words)) == len(words)
    assert all(json.dumps(case.label) for case in benchmark.quick)
