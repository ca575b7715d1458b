"""A call of `trashd init`, or of root's first look, fails, or another comes between: what stores hold stays listed.

tests/store/test_init_store.py says what else holds where a disk fails.
"""

import errno
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path

import pytest

from fusefs.core.errors import Untrusted
from fusefs.linux.kernel import Kernel
from tests.support.covering_sets import runs_every_case
from tests.support.crash_invariants import hold_when_failing, hold_when_stopped, spread, telling
from tests.support.crash_scenarios import BROKEN, HOME, USER, WON, CrashScenario, VolumeContents, outcome, read_contents
from tests.support.make_trees import Dir, make_tree
from tests.support.other_users import as_user
from tests.support.real_filesystems import tmpfs_volume
from tests.support.store_verbs import NumberedCall, entries, init, problems, recover_all, swap
from tests.support.verb_scenarios import TREE

pytestmark = pytest.mark.needs("root")

ERRNOS = (errno.ENOSPC, errno.EIO, errno.EROFS)
STEP = 1 if runs_every_case() else 31


@pytest.fixture(scope="module")
def volume() -> Iterator[Path]:
    with tmpfs_volume("4m") as path:
        yield path


def make_her_orphan(volume: Path) -> None:
    """A user's orphan in a folder that root has not looked at."""
    make_tree(volume / HOME / "hers", Dir({"job": Dir(TREE, owner=(USER, USER))}, owner=(USER, USER)))
    as_user(USER, lambda: swap(volume / HOME / "hers/job"))


def make_nothing(volume: Path) -> None:
    shutil.rmtree(volume / ".trashd")


def make_open(volume: Path) -> None:
    """A store in which others could make names, and root has nothing."""
    make_her_orphan(volume)
    shutil.rmtree(volume / ".trashd/u/0")
    recover_all(volume)
    (volume / ".trashd/u").chmod(0o777)


def make_copy(volume: Path) -> None:
    make_her_orphan(volume)
    recover_all(volume)
    subprocess.run(["cp", "-a", volume / ".trashd", volume / "copy"], check=True)
    shutil.rmtree(volume / ".trashd")
    (volume / "copy").rename(volume / ".trashd")


def _init(volume: Path, kernel: Kernel) -> None:
    init(volume, kernel)


def _tend(volume: Path, kernel: Kernel) -> None:
    recover_all(volume, kernel)


SCENES = {
    "init": CrashScenario(make_nothing, _init),
    "init-of-an-open-store": CrashScenario(make_open, _init),
    "init-of-a-copy": CrashScenario(make_copy, _init),
    "first-look": CrashScenario(make_her_orphan, _tend),
}


def listed(volume: Path) -> None:
    """What there is can be shown, or why not."""
    with suppress(Untrusted):
        entries(volume)


def users_of(volume: Path) -> list[int]:
    return sorted({path.stat().st_uid for path in (volume / ".trashd").glob("[un]*/*")} - {0})


def assert_made_good(volume: Path, before: VolumeContents, users: list[int]) -> None:
    """All users are shown what is there; after an init, and a command of each, it is one store with all of it."""
    for uid in users:
        as_user(uid, partial(listed, volume))
    listed(volume)
    init(volume)
    for uid in users:
        as_user(uid, partial(recover_all, volume))
    recover_all(volume)
    assert read_contents(volume).trees == before.trees
    assert [path.name for path in volume.iterdir() if path.name.startswith(".trashd")] == [".trashd"]
    assert list((volume / ".trashd").glob("old-*")) == []
    assert list((volume / ".trashd/new").iterdir()) == []
    # Nothing in a copy is what a record says.
    assert {problem.what for problem in problems(volume)} <= {"its tree is not the one in its record"}


FAULTS = {case: calls[::STEP] for case, calls in spread(product(SCENES, ERRNOS)).items()}


@pytest.mark.parametrize(("name", "number"), FAULTS, ids=lambda value: errno.errorcode.get(value, value))
def test_what_a_store_holds_outlasts_any_call_that_fails(volume: Path, name: str, number: int) -> None:
    scene = SCENES[name]
    scene.set_up(volume)
    users = users_of(volume)
    hold_when_failing(
        scene, volume, number, lambda before: assert_made_good(volume, before, users), FAULTS[name, number]
    )


@pytest.mark.timeout(900 if runs_every_case() else 120)
@pytest.mark.parametrize("name", SCENES)
def test_two_at_once_make_one_store_of_it(volume: Path, name: str) -> None:
    """The second one comes to its end while the first one has stopped before a call."""
    scene = SCENES[name]
    scene.set_up(volume)
    users = users_of(volume)

    def law(before: VolumeContents, *outcomes: int) -> None:
        assert WON in outcomes, outcomes
        assert BROKEN not in outcomes, outcomes
        assert_made_good(volume, before, users)

    def moments(calls: Sequence[NumberedCall]) -> list[int]:
        after_renames = {call.number + 1 for call in calls if call.name == "renameat2"}
        return sorted(after_renames | set(telling(calls)[:: 1 if runs_every_case() else 20]))

    hold_when_stopped(scene, volume, lambda: outcome(lambda: scene.act(volume, Kernel())), law, moments=moments)
