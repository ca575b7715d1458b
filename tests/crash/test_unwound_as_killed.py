"""A command that unwinds before a call leaves on disk what one that is killed there leaves: most tests here unwind."""

import re
from functools import partial
from pathlib import Path

import pytest

from tests.support.crash_scenarios import CrashScenario, changing, end_of
from tests.support.shared_memory_children import code_of_child
from tests.support.store_verbs import DyingAt, in_child
from tests.support.verb_scenarios import SCENES

pytestmark = pytest.mark.needs("root")

_CHANGING_NAME = re.compile(r"\d{8}T[\d.]+Z|[0-9a-f]{8,}")


def list_tree(volume: Path) -> list[tuple[str, int, int, bool]]:
    """List what is on a volume, without what is another one each time."""
    stats = [(_CHANGING_NAME.sub("X", str(path)), path.lstat()) for path in volume.rglob("*")]
    return sorted((name, st.st_mode, st.st_uid, st.st_size > 0) for name, st in stats)


def end_unwound(scene: CrashScenario, volume: Path, n: int) -> int:
    end = code_of_child if scene.by is None else end_of
    return end(partial(scene.run, volume, DyingAt(n)))


@pytest.mark.every
@pytest.mark.parametrize("name", SCENES)
def test_a_command_that_unwinds_leaves_what_a_killed_one_leaves(volume: Path, name: str) -> None:
    scene = SCENES[name]
    scene.set_up(volume)
    for n in changing(scene.calls(volume)):
        scene.set_up(volume)
        killed = in_child(partial(scene.run, volume, DyingAt(n))), list_tree(volume)
        scene.set_up(volume)
        assert (end_unwound(scene, volume, n), list_tree(volume)) == killed, f"call {n}"
