"""What the engine asks before each slice: shares of time, small slices, gaps of the device, and rests that all keep."""

import time
from collections import Counter
from pathlib import Path

import pytest

from fusefs.core.pacing import HOLD, SLICE_S, SMALL_SLICE_S, UNLIMITED, SliceBudget, Speed, WorkTotals, rest_at
from fusefs.engine.pace import ConstantSpeed, SlicePace
from fusefs.linux.kernel import Kernel
from fusefs.reaper.reap import RemovalOptions
from tests.support.reap_process import empty_container

YIELDING = Speed(is_alone=False, share=0.1)
_LIMIT_S = 60.0
_N_TRIES = 5
"""Of what a busy machine may spoil, by giving the processor to another process in the middle of a slice."""


class Waiter:
    """Sets one tempo, and knows how long the work took, and where slices began."""

    def __init__(self, tempo: Speed) -> None:
        self.now = tempo
        self.busy_s = 0.0
        self.n_entries = 0
        self.begun_in_rests = 0

    def tempo(self) -> Speed:
        return self.now

    def record_work(self, n_entries: int, n_bytes: int, busy_s: float) -> None:
        assert n_bytes >= 0
        self.n_entries += n_entries
        self.busy_s += busy_s
        # One that begins a little within a rest was held up on its way.
        began_s = time.monotonic() - busy_s
        begins_s, _ = rest_at(began_s, is_alone=self.now.is_alone)
        self.begun_in_rests += began_s - begins_s > 0.01

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)


def next_budget(pace: SlicePace) -> SliceBudget:
    return next_at(pace)[1]


def next_at(pace: SlicePace) -> tuple[float, SliceBudget]:
    """The moment before it was asked for, and the next budget that there is."""
    until_s = time.monotonic() + _LIMIT_S
    while (began_s := time.monotonic()) < until_s:
        budget = pace.budget()
        if budget is not None:
            return began_s, budget
        pace.sleep()
    raise TimeoutError


def removed(volume: Path, pacer: Waiter, n_files: int, kernel: Kernel | None = None) -> float:
    """Seconds that a tree took."""
    kernel = kernel or Kernel()
    tree = volume / "container" / "tree"
    tree.mkdir(parents=True, exist_ok=True)
    for i in range(n_files):
        (tree / f"{i}").touch()
    began = time.monotonic()
    with kernel.open_path(bytes(tree.parent)) as container:
        assert empty_container(kernel, container, RemovalOptions(pace=pacer)).n_failed == 0
    return time.monotonic() - began


def test_alone_a_slice_has_no_limit_but_time() -> None:
    assert SlicePace(ConstantSpeed(UNLIMITED)).budget() == SliceBudget(SLICE_S, None, None)


def test_beside_others_a_slice_is_a_sip() -> None:
    pace = SlicePace(ConstantSpeed(YIELDING))
    for _ in range(20):
        budget = next_budget(pace)
        assert budget.seconds <= SMALL_SLICE_S
        n_entries = budget.n_entries or 0
        pace.finish_slice(budget, WorkTotals(n_entries, 0, n_entries * 1e-5))
    assert n_entries == pytest.approx(SMALL_SLICE_S / 1e-5, abs=2)


def test_a_slow_entry_is_a_sip_of_its_own() -> None:
    pace = SlicePace(ConstantSpeed(YIELDING))
    for _ in range(3):
        budget = next_budget(pace)
        assert budget.n_entries == 1
        pace.finish_slice(budget, WorkTotals(1, 0, 0.01))


def test_after_a_sip_there_is_a_pause() -> None:
    pace = SlicePace(ConstantSpeed(YIELDING))
    budget = next_budget(pace)
    began = time.monotonic()
    pace.finish_slice(budget, WorkTotals(1, 0, 0.05))
    next_budget(pace)
    assert time.monotonic() - began >= 0.05


def test_a_sip_waits_for_a_gap_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusefs.engine.pace._PATIENCE_S", _LIMIT_S)
    looks = [True] * 5 + [False]
    next_budget(SlicePace(ConstantSpeed(YIELDING), lambda: looks.pop(0)))
    assert not looks


def test_a_device_without_gaps_starves_nobody() -> None:
    pace = SlicePace(ConstantSpeed(YIELDING), lambda: True)
    assert next_budget(pace).n_entries == 1


def test_a_sip_that_waited_for_a_gap_makes_up_for_those_that_it_missed() -> None:
    """But for a few alone, and one that had not to wait is as small as ever."""
    for pace, n_entries in (
        (SlicePace(ConstantSpeed(YIELDING), lambda: True), 5),
        (SlicePace(ConstantSpeed(YIELDING)), 1),
    ):
        pace.finish_slice(next_budget(pace), WorkTotals(1, 0, SMALL_SLICE_S))
        assert next_budget(pace).n_entries == n_entries


def test_alone_nobody_looks_at_the_device() -> None:
    def never() -> bool:
        raise AssertionError

    assert SlicePace(ConstantSpeed(UNLIMITED), never).budget() is not None


def test_who_holds_gets_at_most_one_entry() -> None:
    pace = SlicePace(ConstantSpeed(HOLD))
    n_entries = 0
    for _ in range(10):
        budget = pace.budget()
        if budget is not None:
            n_entries += budget.n_entries or 0
            pace.finish_slice(budget, WorkTotals(budget.n_entries or 0, 0, 1e-5))
    assert n_entries <= 1


@pytest.mark.needs("root")
def test_a_sip_asks_for_each_file_once_and_for_nothing_else(volume: Path) -> None:
    def calls(n_files: int) -> Counter[str]:
        counts: Counter[str] = Counter()
        removed(volume, Waiter(Speed(is_alone=False, share=1.0)), n_files, Kernel(lambda call: counts.update([call])))
        return counts

    assert calls(300) - calls(100) == {"stat": 200, "unlink": 200}


@pytest.mark.needs("root")
def test_caps_are_kept_beside_others_too(volume: Path) -> None:
    pacer = Waiter(Speed(entries_per_s=500, is_alone=False, share=0.5))
    assert removed(volume, pacer, 200) >= 0.3


@pytest.mark.needs("root")
@pytest.mark.parametrize("share", [0.1, 0.4])
def test_the_work_is_no_more_than_its_share_of_the_time(volume: Path, share: float) -> None:
    def keeps_to_it() -> bool:
        pacer = Waiter(Speed(is_alone=False, share=share))
        seconds = removed(volume, pacer, 2000)
        assert pacer.n_entries == 2001
        return pacer.busy_s <= 1.5 * share * seconds

    assert any(keeps_to_it() for _ in range(_N_TRIES))


@pytest.mark.needs("root")
@pytest.mark.parametrize("is_alone", [True, False])
def test_in_the_common_rests_nothing_begins(volume: Path, is_alone: bool) -> None:
    def n_in_rests() -> int:
        pacer = Waiter(Speed(is_alone=is_alone, rests=True, share=1.0))
        removed(volume, pacer, 3000)
        return pacer.begun_in_rests

    assert any(n_in_rests() <= 1 for _ in range(_N_TRIES))


def test_on_a_network_filesystem_slices_end_so_early_that_their_last_call_is_over_in_a_rest() -> None:
    overrun_s = 0.15
    pace = SlicePace(ConstantSpeed(Speed(rests=True, is_remote=True)))
    pace.finish_slice(SliceBudget(SLICE_S), WorkTotals(1, 0, SLICE_S + overrun_s))
    for _ in range(20):
        began_s, budget = next_at(pace)
        begins_s, _ = rest_at(began_s, is_alone=True, is_remote=True)
        assert began_s + budget.seconds + overrun_s <= begins_s + 0.01
        time.sleep(0.1)


def test_a_slice_ends_where_a_rest_begins() -> None:
    pace = SlicePace(ConstantSpeed(Speed(rests=True)))
    for _ in range(20):
        began_s, budget = next_at(pace)
        begins_s, _ = rest = rest_at(began_s, is_alone=True)
        if rest == rest_at(time.monotonic(), is_alone=True):  # else it was asked in one span, and answered in the next
            assert began_s + budget.seconds <= begins_s + 0.01
        pace.finish_slice(budget, WorkTotals(1, 0, 0.001))
