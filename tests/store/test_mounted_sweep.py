"""A sweep of a directory in a mount of ours: a process that looks there sees its names go, and come back, at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fusefs.core.selection import Selection
from fusefs.linux.kernel import Kernel
from fusefs.store.victim import find_scope
from fusefs.sweep.request import Request, ToTrash
from fusefs.sweep.run import run
from tests.support.foreground_mount import Mounted
from tests.support.mount_and_backing import both, opened
from tests.support.store_verbs import raw

pytestmark = pytest.mark.needs("root", "fuse")


def looked_up(job: Path) -> Callable[[], list[str]]:
    """Every name below, remembered by the kernel now; and those that it finds there later, asked by name alone."""
    paths = [path for path in (job, *sorted(job.rglob("*"))) if path.stat()]
    return lambda: [str(path.relative_to(job)) for path in paths if path.exists()]


def test_what_is_open_follows_into_the_store_as_the_mount_shows_it(mount: Mounted, job: Path) -> None:
    with opened(job / "deep") as where:
        swept = run(Kernel(), Request(raw(job), Selection(types=frozenset("d")), ToTrash()))
        assert where() == str(mount.path / f".trashd/u/0/stage/{swept.orphan}/tree/deep")
    assert not (job / "deep").exists()


def test_directory_has_both_sides_whichever_path_was_typed(mount: Mounted, job: Path) -> None:
    for path in both(mount, job):
        with find_scope(Kernel(), raw(path)) as scope:
            assert scope.sides.mounted is not None
            assert os.fstat(scope.sides.fd).st_dev == (mount.backing / "job").stat().st_dev
