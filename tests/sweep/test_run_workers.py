"""Several workers, and one that is lost; a sweep that was stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusefs.core.results import SweepSums
from fusefs.core.selection import Selection
from fusefs.linux.kernel import Kernel
from fusefs.sweep.request import SweepWishes
from tests.support.background_processes import EndsWorkers
from tests.support.many_files import fill, roomy_volume
from tests.support.run_sweep import ALL, EVERY_KIND, names, sweep

pytestmark = pytest.mark.needs("root")

LOGS = Selection(names=("*.log",))


# Workers


@pytest.mark.parametrize("fs_type", ["tmpfs", "ext4"])
def test_workers_share_what_one_would_do(fs_type: str) -> None:
    with roomy_volume(fs_type, 60_000) as path:
        top = path / "top"
        fill(top / "flat", 20_000)
        for n in range(10):
            fill(top / str(n), 1000)
        assert sweep(top, Selection(names=("*[13579]",)), n_workers=2).sums.n_done == 15_000
        assert sweep(top, EVERY_KIND, n_workers=2).sums.n_done == 15_000 + 11
        assert names(top) == set()


def test_workers_that_are_killed_cost_nothing_but_time(top: Path) -> None:
    fill(top / "flat", 20_000)
    for n in range(10):
        fill(top / str(n), 500)
    swept = sweep(top, EVERY_KIND, kernel=Kernel(EndsWorkers(6000)), n_workers=2)
    assert (swept.sums.n_failed, names(top)) == (0, set())


def test_stopped_it_is_finished_by_the_next(top: Path) -> None:
    fill(top, 30_000)
    done: list[SweepSums] = []
    first = sweep(top, ALL, wishes=SweepWishes(progress=done.append, stops=lambda: any(sums.n_done for sums in done)))
    assert first.is_stopped
    assert 0 < first.sums.n_done < 30_000
    second = sweep(top, ALL)
    assert (first.sums.n_done + second.sums.n_done, second.is_stopped) == (30_000, False)
