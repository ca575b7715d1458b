"""`trashd reap --free`: so much comes back, expired ones first, and nothing restorable goes without a yes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.terminals import Terminal
from tests.support.trashd_command import done_well, swapped, trashd

pytestmark = pytest.mark.needs("root")

MIB = 1 << 20


@pytest.fixture
def ids(volume: Path) -> dict[str, str]:
    """Of orphans of 3 MiB each: two that have expired, two that have not, of which one is pinned."""
    made = {}
    for name, keep_for in (("first", "1s"), ("second", "1s"), ("later", "1d"), ("pinned", "1d")):
        directory = volume / name
        directory.mkdir()
        (directory / "file").write_bytes(bytes(3 * MIB))
        made[name] = swapped(directory, "--keep-for", keep_for)["id"]
    done_well("keep", made["pinned"])
    time.sleep(2.1)  # a term ends in seconds
    return made


def left(volume: Path, ids: dict[str, str]) -> set[str]:
    there = {one["id"] for one in done_well("list", "--json", "--volume", volume).objects()}
    return {name for name, identifier in ids.items() if identifier in there}


def test_the_oldest_that_have_expired_go_first_and_no_more_than_is_wanted(volume: Path, ids: dict[str, str]) -> None:
    assert "second" not in done_well("reap", "--free", "2M", "--dry-run", "--volume", volume).out
    done_well("reap", "--free", "2M", "--volume", volume)
    assert left(volume, ids) == {"second", "later", "pinned"}


def test_what_can_be_restored_goes_by_a_yes_alone(volume: Path, ids: dict[str, str]) -> None:
    done = trashd("reap", "--free", "8M", "--volume", volume)
    assert done.code == 3
    assert ids["later"] in done.err
    assert left(volume, ids) == set(ids)
    for answer, code, there in (("n\n", 3, set(ids)), ("y\n", 0, {"pinned"})):
        terminal = Terminal("reap", "--free", "8M", "--volume", volume)
        terminal.wait_for("Delete this for good, before its time?")
        terminal.type(answer)
        assert (terminal.end(), left(volume, ids)) == (code, there), terminal.seen


def test_what_is_pinned_never_goes_so(volume: Path, ids: dict[str, str]) -> None:
    done = trashd("reap", "--free", "11M", "--yes", "--volume", volume)
    assert done.code == 13, done
    assert "nothing was deleted" in done.err
    assert left(volume, ids) == set(ids)
    assert trashd("reap", "--free", "1M", "--all", "--volume", volume).code == 2
    done_well("reap", "--free", "8M", "--yes", "--json", "--volume", volume)
    assert left(volume, ids) == {"pinned"}
