"""A store that a sweep made: it stays with what was taken, and goes where nothing was."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusefs.core.selection import Selection
from fusefs.sweep.request import ToTrash
from tests.support.make_trees import make_tree
from tests.support.other_users import as_user
from tests.support.run_sweep import ALL, give, names, sweep
from tests.support.store_verbs import init

pytestmark = pytest.mark.needs("root")

NOTHING = Selection(names=("nothing",))
ALICE = 12345


def test_a_store_made_for_a_sweep_that_takes_nothing_goes_again(volume: Path, top: Path) -> None:
    make_tree(top / "d", {"f": ""})
    before = names(volume)
    assert sweep(top, NOTHING, ToTrash()).orphan is None
    assert names(volume) == before


def test_a_store_that_was_there_stays_whatever_is_taken(volume: Path, top: Path) -> None:
    init(volume)
    assert sweep(top, NOTHING, ToTrash()).orphan is None
    assert (volume / ".trashd/volume.json").exists()
    assert list(volume.glob(".trashd/u/0/[!r]*/*")) == [], "no container is left"


def test_a_users_own_store_goes_again_too(volume: Path, top: Path) -> None:
    volume.chmod(0o755)
    make_tree(top / "d", {"f": ""})
    give(top, ALICE)
    before = names(volume)
    assert as_user(ALICE, lambda: sweep(top / "d", NOTHING, ToTrash())).orphan is None
    assert names(volume) == before
    orphan = as_user(ALICE, lambda: sweep(top / "d", ALL, ToTrash())).orphan
    assert [path.name for path in top.glob(f".trashd-{ALICE}/u/{ALICE}/orphans/*")] == [orphan]
