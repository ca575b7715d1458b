"""What --volume DIR means: the store in DIR, or else the nearest above it on the same filesystem, and no more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.make_trees import make_tree
from tests.support.real_filesystems import tmpfs_over
from tests.support.store_verbs import assert_silent, init
from tests.support.trashd_command import done_well, swapped, trashd

pytestmark = pytest.mark.needs("root")


class Nested(NamedTuple):
    """Stores in each other's trees, and an orphan in each: of a volume, of one mounted in it, of a directory of that.

    bare  mounted in that directory, without a store
    """

    outer: Path
    inner: Path
    given: Path
    bare: Path
    orphans: dict[Path, str]


@pytest.fixture
def nested(volume: Path) -> Iterator[Nested]:
    inner = make_tree(volume / "inner", {})
    with tmpfs_over(inner):
        given = make_tree(inner / "given", {"bare": {}, "deep": {"er": {}}})
        orphans = {}
        for base in (volume, inner):
            init(base)
            orphans[base] = swapped(make_tree(base / "job", {"f": ""}))["id"]
        init(given)
        orphans[given] = swapped(make_tree(given / "job", {"f": ""}), "--note", "in the inner one")["id"]
        with tmpfs_over(given / "bare"):
            yield Nested(volume, inner, given, given / "bare", orphans)
        assert_silent(inner)


def listed(volume: Path) -> set[str]:
    return {str(one["id"]) for one in done_well("list", "--json", "--volume", volume).objects()}


def test_it_is_one_store_in_the_directory_or_the_nearest_above(nested: Nested) -> None:
    assert listed(nested.outer) == {nested.orphans[nested.outer]}
    assert listed(nested.outer / "job") == {nested.orphans[nested.outer]}
    assert nested.orphans[nested.outer] not in listed(nested.inner / "job")


def test_it_leaves_no_filesystem(nested: Nested) -> None:
    assert listed(nested.bare) == set()
    assert trashd("restore", "--volume", nested.bare, nested.orphans[nested.inner]).code == 5


@pytest.mark.quick("reap")
def test_a_reap_of_all_takes_no_other_volumes_orphans(nested: Nested) -> None:
    done_well("reap", "--all", "--now", "--yes", "--volume", nested.bare)
    done_well("reap", "--all", "--now", "--yes", "--volume", nested.inner / "job")
    assert listed(nested.outer) == {nested.orphans[nested.outer]}
    assert listed(nested.inner) == set()


def test_one_that_is_named_twice_is_looked_at_once(nested: Nested) -> None:
    words = ("--volume", nested.outer, "--volume", nested.outer / "job")
    assert [one["id"] for one in done_well("list", "--json", *words).objects()] == [nested.orphans[nested.outer]]


def test_what_goes_at_once_is_found_where_it_went(nested: Nested) -> None:
    victim = make_tree(nested.given / "deep/er/most", {"f": ""})
    done_well("swap", "--now", victim)
    assert not list(victim.iterdir())
    done_well("rm", "--now", "-r", victim)
    assert not victim.exists()
