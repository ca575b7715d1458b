"""Every call of `trashd init`, and of root's first look, failing once: what stores hold stays listed, and is mended.

tests/store/test_upgrade.py says what else holds where a disk fails.
"""

from __future__ import annotations

import errno
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from fusefs.linux.kernel import Kernel
from tests.support.acts import TREE
from tests.support.laws import hold_when_failing
from tests.support.scenes import EVERY_CALL, HOME, USER, Before, Scene, look
from tests.support.store import entries, init, problems, recover_all, swap
from tests.support.tree import Dir, make_tree
from tests.support.users import as_user
from tests.support.volumes import tmpfs_volume

pytestmark = pytest.mark.needs("root")

SAMPLE = Path(__file__).parents[1] / "store/samples/store-1.tar.xz"
ERRNOS = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS)[: 4 if EVERY_CALL else 1]
STEP = 1 if EVERY_CALL else 31


@pytest.fixture(scope="module")
def volume() -> Iterator[Path]:
    with tmpfs_volume("4m") as path:
        yield path


def make_her_orphan(volume: Path) -> None:
    """A user's orphan in a folder that root has not looked at."""
    make_tree(volume / HOME / "hers", Dir({"job": Dir(TREE, owner=(USER, USER))}, owner=(USER, USER)))
    as_user(USER, lambda: swap(volume / HOME / "hers/job"))


def make_nothing(volume: Path) -> None:
    """No store."""
    shutil.rmtree(volume / ".trashd")


def make_first_format(volume: Path) -> None:
    """A store as the version before made it."""
    shutil.rmtree(volume / ".trashd")
    subprocess.run(["tar", "--numeric-owner", "-pxJf", str(SAMPLE), "-C", str(volume)], check=True)


def make_open(volume: Path) -> None:
    """A store in which others could make names, and root has nothing."""
    make_her_orphan(volume)
    shutil.rmtree(volume / ".trashd/u/0")
    recover_all(volume)
    (volume / ".trashd/u").chmod(0o777)


def make_copy(volume: Path) -> None:
    """A copy of a store in its place."""
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
    "init": Scene(make_nothing, _init),
    "init-of-the-first-format": Scene(make_first_format, _init),
    "init-of-an-open-store": Scene(make_open, _init),
    "init-of-a-copy": Scene(make_copy, _init),
    "upgrade-by-any-command": Scene(make_first_format, _tend),
    "first-look": Scene(make_her_orphan, _tend),
}


def listed(volume: Path) -> set[str]:
    """The ids that root is shown, and her own, which she is shown."""
    return {entry.id for entry in entries(volume)}


@pytest.mark.parametrize("number", ERRNOS, ids=errno.errorcode.get)
@pytest.mark.parametrize("name", SCENES)
def test_what_a_store_holds_outlasts_any_call_that_fails(volume: Path, name: str, number: int) -> None:
    users: list[int] = []

    def law(before: Before) -> None:
        for uid in users:
            as_user(uid, partial(listed, volume))
        listed(volume)
        init(volume)
        for uid in users:
            as_user(uid, partial(recover_all, volume))
        recover_all(volume)
        assert look(volume).trees == before.trees
        assert [path.name for path in volume.iterdir() if path.name.startswith(".trashd")] == [".trashd"]
        assert list((volume / ".trashd").glob("old-*")) == []
        assert list((volume / ".trashd/new").iterdir()) == []
        # Nothing in a copy is what a record says.
        assert {problem.what for problem in problems(volume)} <= {"its tree is not the one of its record (I2)"}

    scene = SCENES[name]
    scene.set_up(volume)
    users = sorted({path.stat().st_uid for path in (volume / ".trashd").glob("[un]*/*")} - {0})
    hold_when_failing(scene, volume, number, law, STEP)
