"""Killed before any system call of any verb: what the next command recovers has lost nothing."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.acts import SCENES
from tests.support.scenes import Scene, assert_nothing_lost, deaths, home, settle
from tests.support.volumes import loop_volume, tmpfs_volume

pytestmark = pytest.mark.needs("root")


@pytest.fixture(scope="module")
def volume() -> Iterator[Path]:
    with tmpfs_volume() as path:
        yield path


def assert_law(scene: Scene, volume: Path) -> None:
    for n, before in deaths(scene, volume):
        try:
            if scene.is_gapless:
                assert home(volume).is_dir(), "the name does not resolve (I1)"
            settle(volume)
            assert_nothing_lost(scene, volume, before)
        except BaseException as error:
            error.add_note(f"killed before call {n}: {told(scene, volume, n)}")
            raise


def told(scene: Scene, volume: Path, n: int) -> str:
    scene.set_up(volume)
    calls = [call.name for call in scene.calls(volume)]
    return " ".join([*calls[max(n - 6, 0) : n], "†", *calls[n : n + 3]])


@pytest.mark.parametrize("name", SCENES)
def test_nothing_is_lost_by_a_kill_before_any_call(volume: Path, name: str) -> None:
    assert_law(SCENES[name], volume)


@pytest.mark.needs("loop")
@pytest.mark.parametrize("name", ["swap", "restore-late", "swap-two-rename-lent"])
def test_nothing_is_lost_by_a_kill_before_any_call_on_ext4(name: str) -> None:
    with loop_volume("ext4", 16) as ext4:
        assert_law(SCENES[name], ext4)
