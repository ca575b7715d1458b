"""A plain `trashd swap` as a process: what it loads (tests/unit/test_import_cost.py says what that may be)."""

from pathlib import Path

import pytest

from tests.support.make_trees import make_tree
from tests.support.trashd_command import trashd

pytestmark = pytest.mark.needs("root")


def test_a_plain_swap_imports_nothing_of_ours_once_it_is_under_way(volume: Path) -> None:
    victim = make_tree(volume / "victim", {"file": "content"})
    done = trashd("swap", victim, PYTHONPROFILEIMPORTTIME="1")
    assert done.code == 0
    imported = [line.rpartition("|")[2].strip() for line in done.err.splitlines()]
    assert [name for name in imported if name.startswith("fusefs.")][-1] == "fusefs.cli.swap_fast_lane"
