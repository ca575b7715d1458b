"""Where an orphan ends: links across its border, mounts in it, open files; what is beyond keeps its content (I6)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.make_trees import make_tree, snapshot
from tests.support.many_files import bulky_tree, fill
from tests.support.mount_namespaces import bind_elsewhere
from tests.support.outside_tree import Canary, unmount_below
from tests.support.real_filesystems import bind_mount
from tests.support.reap_process import assert_quarantined, state_of
from tests.support.store_verbs import place, reap_now, swap

pytestmark = pytest.mark.needs("root")


@contextmanager
def canary_in(volume: Path) -> Iterator[Canary]:
    """A canary; in the end it is untouched, and there is no other name for its files."""
    canary = Canary(volume)
    yield canary
    canary.assert_alone()


def test_hard_links_across_the_border_keep_their_content(volume: Path) -> None:
    with canary_in(volume) as canary:
        job = bulky_tree(volume / "job", 5, 100, 1000)
        canary.link_into(job)
        identifier = swap(job).id
        assert reap_now(volume, identifier).report.failures == ()


@pytest.mark.parametrize("where", ["d0", "chain/" + "d/" * 100])
def test_mounts_made_in_an_orphan_keep_what_is_mounted_and_all_else_goes(volume: Path, where: str) -> None:
    with canary_in(volume) as canary:
        job = bulky_tree(volume / "job", 5, 100, 1000)
        (job / where / "mount").mkdir()
        (job / where / "file").touch()
        identifier = swap(job).id
        at = place(volume, identifier) / "tree" / where
        with canary.mounted_in(at / "mount", at / "file"):
            assert reap_now(volume, identifier).report.n_failed > 0
            canary.assert_untouched()
        below = [path for path in place(volume, identifier).rglob("*") if path.name not in ("record.json", "hoisted")]
        assert [path.name for path in below if path.is_file()] == ["file"]
        assert [path.name for path in below if path.is_dir() and not os.listdir(path)] == ["mount"]
        assert reap_now(volume, identifier).report.failures == ()
        assert state_of(volume, identifier) is None


def test_tree_that_is_mounted_on_keeps_what_is_mounted(volume: Path) -> None:
    make_tree(volume / "canary", {"a": "1", "sub": {"b": "2"}})
    before = snapshot(volume / "canary", with_times=True)
    identifier = swap(fill(volume / "job", 100)).id
    with bind_mount(volume / "canary", place(volume, identifier) / "tree"):
        reaped = reap_now(volume, identifier)
        assert reaped.report.n_failed > 0
        assert_quarantined(volume, reaped)
        assert snapshot(volume / "canary", with_times=True) == before
        unmount_below(volume / ".trashd")
    assert reap_now(volume, identifier).report.failures == ()
    assert snapshot(volume / "canary", with_times=True) == before


@pytest.mark.parametrize("where", ["sub", "sub/deeper", "."])
def test_what_is_mounted_in_another_namespace_stays_and_the_orphan_goes(volume: Path, where: str) -> None:
    make_tree(volume / "canary", {"a": "1", "sub": {"b": "2"}})
    before = snapshot(volume / "canary", with_times=True)
    identifier = swap(make_tree(volume / "job", {"f": "1", "sub": {"g": "2", "deeper": {"h": "3"}}})).id
    with bind_elsewhere(volume / "canary", place(volume, identifier) / "tree" / where):
        reaped = reap_now(volume, identifier)
        assert reaped.report.failures == ()
        assert state_of(volume, identifier) is None
        assert snapshot(volume / "canary", with_times=True) == before
    assert snapshot(volume / "canary", with_times=True) == before
