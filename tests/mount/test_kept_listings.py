"""Listings that the kernel keeps of a shared mount, where it opens directories by requests, as of an overlayfs: as long
as the directory is as it was."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from fusefs.mount.tree import mount_state
from tests.support.foreground_mount import SHARED_LIMIT_S, Mounted, trashd_mount, until
from tests.support.real_filesystems import overlay_volume

pytestmark = [pytest.mark.needs("root", "fuse", "loop"), pytest.mark.takes_engine]

LIMIT_S = 40.0
N_NAMES, N_CHANGES = 100, 50
RACY_S = 0.1
"""A directory that changed less than so long ago may change once more without another time; a tick is 10 ms at most."""


class Listed(NamedTuple):
    """A directory, through the mount and behind it.

    late_s  for how long a listing may be as it was before a change behind the mount; 0: not once
    """

    mounted: Mounted
    seen: Path
    behind: Path
    late_s: float

    def is_right_in_time(self) -> bool:
        """Whether a change behind the mount is listed in time."""
        return until(self.is_right, self.late_s)

    def is_right(self) -> bool:
        """Whether the listing is what is there."""
        return sorted(os.listdir(self.seen)) == sorted(os.listdir(self.behind))

    def costs_a_read(self) -> bool:
        """Whether the daemon was asked for the entries of a listing, which must be right."""
        before = self.mounted.stats().operations["readdir"].n()
        assert self.is_right()
        return self.mounted.stats().operations["readdir"].n() > before


@pytest.fixture(scope="module", params=["local", "slow"])
def mount(request: pytest.FixtureRequest) -> Iterator[tuple[Mounted, float]]:
    """And for how long a listing there may be as it was before a change behind it."""
    options = ["coherence=shared", f"backing={request.param}"]
    with overlay_volume() as overlay, pytest.MonkeyPatch.context() as patch:
        patch.setattr(mount_state, "_RACY_NS", round(RACY_S * 1e9))
        with trashd_mount(overlay.path / "source", options=options, limit_s=SHARED_LIMIT_S) as mounted:
            yield mounted, LIMIT_S if request.param == "slow" else 0


@pytest.fixture
def listed(mount: tuple[Mounted, float], own_name: str) -> Listed:
    mounted, late_s = mount
    behind = mounted.backing / own_name
    behind.mkdir()
    for number in range(N_NAMES):
        (behind / f"{number}").touch()
    return Listed(mounted, mounted.path / own_name, behind, late_s)


def test_a_directory_that_has_not_changed_for_a_while_is_read_once(listed: Listed) -> None:
    assert listed.costs_a_read()
    assert until(lambda: not any(listed.costs_a_read() for _ in range(3)), LIMIT_S)  # but for a kernel short of memory


@pytest.mark.parametrize("is_made", [True, False])
def test_what_is_made_or_removed_behind_is_seen_in_the_next_listing(listed: Listed, is_made: bool) -> None:
    assert until(lambda: not listed.costs_a_read(), LIMIT_S)
    (listed.behind / "new").touch() if is_made else (listed.behind / "0").unlink()
    assert listed.is_right_in_time()


def test_changes_in_the_same_tick_are_listed_too(listed: Listed) -> None:
    for number in range(N_CHANGES):
        (listed.behind / f"new-{number}").touch()
        assert listed.is_right() or listed.late_s
        (listed.behind / f"{number}").unlink()
        assert listed.is_right() or listed.late_s
    assert listed.is_right_in_time()
    assert until(lambda: not listed.costs_a_read(), LIMIT_S)


def test_a_time_that_is_set_back_hides_no_name(listed: Listed) -> None:
    before = listed.behind.stat()
    assert until(lambda: not listed.costs_a_read(), LIMIT_S)
    (listed.behind / "new").touch()
    os.utime(listed.behind, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert listed.is_right_in_time()


def test_what_is_made_through_the_mount_is_listed_at_once(listed: Listed) -> None:
    assert until(lambda: not listed.costs_a_read(), LIMIT_S)
    (listed.seen / "new").touch()
    (listed.seen / "0").unlink()
    assert listed.is_right()
