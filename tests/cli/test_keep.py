"""trashd keep: says how long, or why not."""

from pathlib import Path

import pytest

from tests.support.make_trees import make_tree
from tests.support.trashd_command import done_well, swapped, trashd

pytestmark = pytest.mark.needs("root")


def orphan(volume: Path) -> str:
    """The id of a swapped directory."""
    return str(swapped(make_tree(volume / "job", {"a": "1"}), "--keep-for", "1s")["id"])


def test_pinned_orphan_survives_a_reap(volume: Path) -> None:
    identifier = orphan(volume)
    assert "until you release it" in done_well("keep", "--volume", volume, identifier[-12:]).out
    done_well("reap", "--volume", volume)
    (listed,) = done_well("list", "--json", "--volume", volume).objects()
    assert (listed["id"], listed["expires_ns"]) == (identifier, None)


def test_kept_for_a_time_says_how_long(volume: Path) -> None:
    assert done_well("keep", "--for", "7d", "--volume", volume, orphan(volume)).out.endswith(": expires in 1w\n")


def test_kept_for_no_time_goes_with_the_next_reap(volume: Path) -> None:
    identifier = str(swapped(make_tree(volume / "job", {"a": "1"}))["id"])
    assert done_well("keep", "--for", "0", "--volume", volume, identifier).out.endswith(
        ": no longer kept; already expired\n"
    )
    done_well("reap", "--volume", volume)
    assert done_well("list", "--json", "--volume", volume).out == ""


def test_released_it_says_when_it_goes(volume: Path) -> None:
    assert "expires in 23h59m" in done_well("keep", "--release", "--volume", volume, orphan(volume)).out


def test_what_is_being_reaped_already_is_said_to_be(volume: Path) -> None:
    identifier = orphan(volume)
    reaping = volume / ".trashd/u/0/reaping"
    (volume / ".trashd/u/0/orphans" / identifier).rename(reaping / identifier)
    done = trashd("keep", "--volume", volume, identifier)
    assert done.code == 3
    assert "already being reaped" in done.err
    assert "trashd restore" in done.err
