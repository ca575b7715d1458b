"""Killed again: wherever an act died, and wherever the recovery after it died too, the next recovery loses nothing."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from fusefs.linux.kernel import Kernel
from tests.support.acts import SCENES
from tests.support.scenes import EVERY_CALL, Scene, assert_nothing_lost, changing, settle
from tests.support.store import DyingAt, in_child, numbered_calls, recover_all
from tests.support.volumes import tmpfs_volume

pytestmark = pytest.mark.needs("root")

TWICE = ["swap", "swap-two-rename", "swap-lent", "restore-late", "restore-two-rename-late", "restore-late-lent", "reap"]
STRIDE = 1 if EVERY_CALL else 3
"""After each death another third of those of the recovery; all of them in `make soak-store`."""


@pytest.fixture(scope="module")
def volume() -> Iterator[Path]:
    with tmpfs_volume() as path:
        yield path


def die(scene: Scene, volume: Path, n: int) -> None:
    in_child(lambda: scene.run(volume, DyingAt(n)))


def recover_dying(volume: Path, m: int) -> None:
    in_child(lambda: recover_all(volume, Kernel(DyingAt(m))))


@pytest.mark.parametrize("name", TWICE)
def test_nothing_is_lost_by_a_second_kill_in_recovery(volume: Path, name: str) -> None:
    scene = SCENES[name]
    scene.set_up(volume)
    for i, n in enumerate(changing(scene.calls(volume))):
        scene.set_up(volume)
        die(scene, volume, n)
        for m in changing(numbered_calls(partial(recover_all, volume)))[i % STRIDE :: STRIDE]:
            before = scene.set_up(volume)
            die(scene, volume, n)
            recover_dying(volume, m)
            try:
                settle(volume)
                assert_nothing_lost(scene, volume, before)
            except BaseException as error:
                error.add_note(f"killed before call {n}, its recovery before call {m}")
                raise
