"""`trashd init` tries what a store relies on, and writes what it found to volume.json."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fusefs.linux.kernel import Kernel
from tests.support.fuse_bad_rename import lying_volume
from tests.support.make_trees import make_tree
from tests.support.real_filesystems import ALL_FILESYSTEMS, loop_volume, tmpfs_volume
from tests.support.store_verbs import (
    ENTRIES,
    ActingBefore,
    DyingAt,
    assert_silent,
    die,
    in_child,
    init,
)
from tests.support.trashd_command import done_well

pytestmark = pytest.mark.needs("root")


def facts(volume: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((volume / ".trashd/volume.json").read_text())
    return told


def old_facts(volume: Path) -> dict[str, Any]:
    """What it said before there was this key."""
    return {key: one for key, one in facts(volume).items() if key != "noreplace"}


@pytest.mark.parametrize("filesystem", ALL_FILESYSTEMS)
def test_a_local_filesystem_proves_all(filesystem: str) -> None:
    with tmpfs_volume() if filesystem == "tmpfs" else loop_volume(filesystem) as volume:
        init(volume)
        proven = {key for key, value in facts(volume).items() if value is True}
        assert proven >= {"noreplace", "exchange", "strangers_refused", "unnamed"}
        assert sorted(os.listdir(volume / ".trashd")) == ENTRIES
        assert_silent(volume)


@pytest.mark.needs("fuse")
@pytest.mark.parametrize(
    ("mode", "spares"), [("honest", True), ("ignore", False), ("lie", False), ("einval", False), ("enosys", False)]
)
def test_a_filesystem_that_ignores_one_flag_is_not_believed_to_read_the_other(mode: str, spares: bool) -> None:
    with lying_volume(mode) as served:
        init(served.path)
        assert (facts(served.path)["noreplace"], facts(served.path)["exchange"]) == (spares, spares)
        assert_silent(served.path)


def test_a_store_of_before_is_proven_by_its_next_init_and_then_left() -> None:
    with tmpfs_volume() as volume:
        init(volume)
        path = volume / ".trashd/volume.json"
        path.write_text(json.dumps(old_facts(volume)))
        init(volume)
        assert facts(volume)["noreplace"] is True
        renewed = path.stat().st_mtime_ns
        init(volume)
        assert path.stat().st_mtime_ns == renewed


def test_a_swap_does_not_prove_anything_in_a_store_of_before() -> None:
    with tmpfs_volume() as volume:
        init(volume)
        path = volume / ".trashd/volume.json"
        path.write_text(json.dumps(old := old_facts(volume)))
        done_well("swap", make_tree(volume / "job", {"a": "1"}))
        assert facts(volume) == old


@pytest.mark.parametrize("call", ["exchange", "renameat2", "tmpfile", "strangers"])
def test_what_a_killed_trial_of_one_mount_left_the_next_init_removes(call: str) -> None:
    """None of it is set aside as planted."""
    with tmpfs_volume() as volume:
        init(volume)
        path = volume / ".trashd/volume.json"
        path.write_text(json.dumps({**facts(volume), "noreplace": None}))
        assert in_child(partial(init, volume, Kernel(ActingBefore(call, die)))) == DyingAt.EXIT_CODE
        init(volume)
        assert sorted(os.listdir(volume / ".trashd")) == ENTRIES
        assert facts(volume)["noreplace"] is True
