"""`trashd swap --print-id`: the id alone on standard output, whatever else is to be said."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.make_trees import make_tree
from tests.support.store_verbs import entries
from tests.support.trashd_command import done_well, trashd

pytestmark = pytest.mark.needs("root")

USAGE = 2


@pytest.mark.quick("swap")
@pytest.mark.parametrize("by", [(), ("--keep", "none*")], ids=["plain", "click"])
def test_it_is_what_restore_takes(volume: Path, by: tuple[str, ...]) -> None:
    victim = make_tree(volume / "job", {"f": "1", "none": ""})
    done = done_well("swap", "--print-id", *by, victim)
    assert (done.out, done.err) == (entries(volume)[0].id + "\n", "")
    done_well("restore", done.out.strip())
    assert (victim / "f").read_text() == "1"


def test_it_is_a_line_for_each_that_was_swapped(volume: Path) -> None:
    victims = [make_tree(volume / name, {"f": ""}) for name in "ab"]
    done = trashd("swap", "--print-id", victims[0], volume / "missing", victims[1])
    assert done.out.split() == [entry.id for entry in entries(volume)]
    assert "missing" in done.err
    assert done.code == 13


@pytest.mark.parametrize("other", ["--json", "--dry-run", "--now", "--wait"])
def test_nothing_else_may_print_beside_it(volume: Path, other: str) -> None:
    victim = make_tree(volume / "job", {"f": "1"})
    done = trashd("swap", "--print-id", other, victim)
    assert (done.code, done.out, entries(volume)) == (USAGE, "", [])
