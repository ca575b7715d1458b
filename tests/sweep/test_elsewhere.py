"""Directories that go somewhere else while a sweep is at them: what is in them is not where it was asked for."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from fusefs.core.results import SweepSums, Swept
from fusefs.linux.kernel import Kernel
from fusefs.store.victim import find_scope
from fusefs.store.walk import DeepOpeners
from fusefs.sweep.actions import open_move
from fusefs.sweep.request import ActionPlace, IfExists, SweepRoot, ToMove
from tests.support.store_verbs import init, place, raw
from tests.support.trash_without_walk import trashing

pytestmark = pytest.mark.needs("root")


@pytest.fixture
def job(volume: Path) -> Path:
    init(volume)
    (volume / "job/sub/deep").mkdir(parents=True)
    (volume / "job/sub/deep/c.log").touch()
    return volume / "job"


def test_directory_that_has_another_path_by_now_is_left_alone(volume: Path, job: Path) -> None:
    kernel = Kernel()
    with trashing(job, kernel) as (scope, action):
        with scope.sides.beneath(kernel, b"sub/deep") as sides:
            os.rename(job / "sub", volume / "outside")
            taken = action.take(ActionPlace(kernel, sides, b"sub/deep", False, DeepOpeners(kernel)), ["c.log"])
        assert list(taken.refused) == [("c.log", errno.ENOENT)]
        assert action.end(Swept(raw(job), SweepSums())).orphan is None
    assert (volume / "outside/deep/c.log").exists()


def test_directory_that_is_in_the_container_by_now_loses_nothing(volume: Path, job: Path) -> None:
    kernel = Kernel()
    with trashing(job, kernel) as (scope, action):
        with scope.sides.beneath(kernel, b"sub") as sides, DeepOpeners(kernel) as ways:
            (job / "sub/empty").mkdir()
            here = ActionPlace(kernel, scope.sides, b"", True, ways)
            assert action.take(here, ["sub"]).refused == []
            # A process that had it open goes on in there.
            taken = action.take(ActionPlace(kernel, sides, b"sub", True, ways), ["empty"])
        assert list(taken.refused) == [("empty", errno.ENOENT)]
        orphan = action.end(Swept(raw(job), SweepSums(n_done=1))).orphan
    assert orphan is not None
    assert (place(volume, orphan) / "tree/sub/empty").is_dir()


@pytest.mark.parametrize("if_exists", IfExists)
def test_directory_that_its_names_go_to_by_now_loses_nothing(volume: Path, job: Path, if_exists: IfExists) -> None:
    kernel = Kernel()
    (volume / "archive").mkdir()
    to = ToMove(raw(volume / "archive"), if_exists=if_exists)
    with find_scope(kernel, raw(job)) as scope, open_move(kernel, SweepRoot(raw(job), scope.sides), to) as action:
        with scope.sides.beneath(kernel, b"sub/deep") as sides, DeepOpeners(kernel) as ways:
            os.rename(job / "sub", volume / "archive/sub")
            taken = action.take(ActionPlace(kernel, sides, b"sub/deep", False, ways), ["c.log"])
        assert list(taken.refused) == [("c.log", errno.ENOENT)]
    assert os.listdir(volume / "archive/sub/deep") == ["c.log"]
