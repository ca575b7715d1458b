"""The crash laws of every verb with a mounted tree: killed before any call, nothing is lost, and the mount shows it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.crash_scenarios import assert_nothing_lost, deaths, home, settle
from tests.support.foreground_mount import SHARED_LIMIT_S, Mounted, trashd_mount
from tests.support.real_filesystems import tmpfs_volume
from tests.support.verb_scenarios import SCENES

pytestmark = pytest.mark.needs("root", "fuse")

NAMES = [
    "swap",
    "swap-two-rename-lent",
    "swap-for-owner",
    "rm",
    "restore-late",
    "restore-parts",
    "restore-inside-free",
    "recover-swap-in-the-gap",
    "recover-restore-in-the-gap",
]


@pytest.fixture(scope="module")
def mount() -> Iterator[Mounted]:
    """A mounted tmpfs, which the scenes know by its backing path: they look at the store's files there."""
    with tmpfs_volume() as path:
        (path / "source").mkdir()
        with trashd_mount(path / "source", options=["timeout=0"], limit_s=SHARED_LIMIT_S) as mounted:
            yield mounted


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_lost_by_a_kill_before_any_call(mount: Mounted, name: str) -> None:
    """tests/crash/test_killed.py has all calls of each; here every other one shows what the mount makes of it."""
    scene = SCENES[name]
    for n, before in deaths(scene, mount.backing, NAMES.index(name), 2):
        try:
            if scene.is_gapless:
                assert home(mount.path).is_dir(), "the name does not resolve (I1)"
            settle(mount.backing)
            assert_nothing_lost(scene, mount.backing, before)
            seen = [sorted(os.listdir(home(path).parent)) for path in (mount.path, mount.backing)]
            assert seen[0] == seen[1]
            if home(mount.backing).is_dir():
                assert os.listdir(home(mount.path)) == os.listdir(home(mount.backing))
        except BaseException as error:
            error.add_note(f"killed before call {n}")
            raise
