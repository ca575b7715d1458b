"""Rounds on a logged volume, and what each crash state of it is, on each filesystem."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import count

import pytest

from fusefs.linux.kernel import Kernel
from tests.crash.powerfail_work import Cut, Scenario
from tests.support.logdisk import logged_volume
from tests.support.replay import Result, check_states
from tests.support.scenes import EVERY_CALL

SIZE_MB = {"ext4": 64, "xfs": 300, "btrfs": 128}
N_TORN = int(os.environ.get("TRASHD_TEST_TORN_STATES", "2"))
"""Torn states of each epoch; `make soak` asks for thousands in all."""
IS_SOAK = N_TORN > 10
_N_PROCESSES = 2 if IS_SOAK else 1  # among other tests the second one costs a fifth more, and gains nothing
EXT4, XFS, BTRFS = (
    pytest.param("ext4", marks=pytest.mark.needs("root", "loop", "fuse")),
    pytest.param("xfs", marks=pytest.mark.needs("root", "loop", "fuse", "xfs")),
    pytest.param("btrfs", marks=pytest.mark.needs("root", "loop", "fuse", "btrfs")),
)
on_some_fs = pytest.mark.parametrize("fstype", [EXT4, XFS, BTRFS] if IS_SOAK or EVERY_CALL else [BTRFS])
"""btrfs has shown most: there the two sides of a plain rename need not come to the disk together."""


def replay(
    fstype: str,
    scenario: Scenario,
    kind: type[Kernel] = Kernel,
    *,
    meddle: Callable[[Cut, int], bool] | None = None,
    stop_after: int | None = None,
) -> Result:
    """Run the rounds on a logged volume and check each crash state.

    meddle  comes before round k, which takes place if it says so
    """
    with logged_volume(fstype, SIZE_MB[fstype]) as volume:
        cut = Cut(volume, scenario, kind)
        for k in count():
            if not (k < scenario.n_rounds if meddle is None else meddle(cut, k)):
                break
            scenario.round(cut, k)
        log = volume.stop()
    n_processes = 0 if stop_after else _N_PROCESSES
    return check_states(
        log,
        fstype,
        scenario.check,
        n_torn=N_TORN,
        fsck_stride=20,
        n_processes=n_processes,
        stop_after=stop_after,
        since=scenario.since,
    )
