"""Rounds on a logged volume, and what each crash state of it is, on each filesystem."""

import os
import stat
from collections.abc import Callable
from itertools import count

import pytest

from fusefs.linux.kernel import Kernel
from tests.crash.powerfail_work import Cut, Scenario
from tests.support.covering_sets import runs_every_case
from tests.support.crash_states import Result, check_states
from tests.support.write_log_disk import logged_volume

SIZE_MB = {"ext4": 64, "xfs": 300, "btrfs": 128}
EXT4, XFS, BTRFS = (
    pytest.param("ext4", marks=pytest.mark.needs("root", "loop", "fuse")),
    pytest.param("xfs", marks=pytest.mark.needs("root", "loop", "fuse", "xfs")),
    pytest.param("btrfs", marks=pytest.mark.needs("root", "loop", "fuse", "btrfs")),
)
IS_EVERYWHERE = runs_every_case()
on_some_fs = pytest.mark.parametrize("fstype", [EXT4, XFS, BTRFS] if IS_EVERYWHERE else [BTRFS])
"""btrfs has shown most: there the two sides of a plain rename need not come to the disk together."""


class NoRecordFsync(Kernel):
    """Does not flush files, records above all; nor sets their length, which on xfs writes them."""

    def write(self, fd: int, content: bytes) -> None:
        os.pwrite(fd, content, 0)

    def fsync(self, fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            super().fsync(fd)


def replay_a_sample(fstype: str, scenario: Scenario, kind: type[Kernel] = Kernel) -> Result:
    """Run one of the rounds, each epoch torn once; with `make every` all of them."""
    if IS_EVERYWHERE:
        return replay(fstype, scenario, kind)
    return replay(fstype, scenario._replace(n_rounds=1), kind, n_torn=1)


def replay(
    fstype: str,
    scenario: Scenario,
    kind: type[Kernel] = Kernel,
    *,
    meddle: Callable[[Cut, int], bool] | None = None,
    stop_after: int | None = None,
    n_torn: int = 2,
) -> Result:
    """Run the rounds on a logged volume and check each crash state.

    Each filesystem has half of the torn states, another half in the next epoch, and with `make every` all of them.

    meddle  comes before round k, which takes place if it says so
    n_torn  torn states of each epoch
    """
    with logged_volume(fstype, SIZE_MB[fstype]) as volume:
        cut = Cut(volume, scenario, kind)
        for k in count():
            if not (k < scenario.n_rounds if meddle is None else meddle(cut, k)):
                break
            scenario.round(cut, k)
        log = volume.stop()
    return check_states(
        log,
        fstype,
        scenario.check,
        n_torn=n_torn,
        fsck_stride=20,
        stop_after=stop_after,
        since=scenario.since,
        share=(0, 1) if IS_EVERYWHERE else (list(SIZE_MB).index(fstype), 2),
    )
