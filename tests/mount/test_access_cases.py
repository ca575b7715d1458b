"""Any call by any user on any file: what it returns, and what is left, are as on the filesystem below.

A sample of all that `draw` can think of: TRASHD_TEST_SCENES of them for each kind of mount, from the number
TRASHD_TEST_FIRST_SCENE on. A scene that is told of as unlike is found again by its number, and TRASHD_TEST_SCENES=1.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.access_calls import ACTS, FD, FILE, NAME
from tests.support.access_cases import AFTER, AT_A_STROKE, AT_ONCE, DURING, LATER, AccessScene, draw
from tests.support.access_differences import Case, why
from tests.support.access_runner import Actors, Came, Place, begin, end, play
from tests.support.foreground_mount import SHARED_LIMIT_S, trashd_mount
from tests.support.privileges import HE
from tests.support.real_filesystems import loop_volume
from tests.support.trashd_command import switched_off

pytestmark = pytest.mark.needs("root", "fuse", "loop", "userns")

N_SCENES = int(os.environ.get("TRASHD_TEST_SCENES", "60"))
FIRST = int(os.environ.get("TRASHD_TEST_FIRST_SCENE", "0"))
N_AT_A_TIME = 200
N_TOLD = 50
OF_DIRECT_REQUESTS = ("unnamed", "allocate", "punch", "copy")
IS_DIRECT = not {"seam", "direct-requests"} & switched_off()
DRAWN = tuple(act for act in ACTS if IS_DIRECT or not act.startswith(OF_DIRECT_REQUESTS))


class How(NamedTuple):
    """A mount's options, and whether root changes things behind it, or any user through it."""

    options: tuple[str, ...]
    is_behind: bool

    @property
    def is_shared(self) -> bool:
        return "coherence=shared" in self.options


_EXCLUSIVE, _SHARED = ("coherence=exclusive",), ("coherence=shared",)
HOW = {
    "exclusive": How(_EXCLUSIVE, is_behind=False),
    "exclusive, behind": How(_EXCLUSIVE, is_behind=True),
    "slow": How((*_EXCLUSIVE, "backing=slow"), is_behind=False),
    "slow, behind": How((*_EXCLUSIVE, "backing=slow"), is_behind=True),
    "shared": How(_SHARED, is_behind=False),
    "shared, behind": How(_SHARED, is_behind=True),
}


@pytest.fixture(scope="module")
def volume() -> Iterator[Path]:
    """Reading leaves no trace on it."""
    with loop_volume("ext4", 256, mount_options=["noatime"]) as path:
        yield path


def made(path: Path) -> Path:
    path.mkdir()
    path.chmod(0o755)
    return path


def scenes(how: How) -> Iterator[list[AccessScene]]:
    """Those of this run, some at a time."""
    for first in range(FIRST, FIRST + N_SCENES, N_AT_A_TIME):
        drawn = (
            draw(number, has_changes=how.is_behind, acts=DRAWN)
            for number in range(first, min(first + N_AT_A_TIME, FIRST + N_SCENES))
        )
        # Without the seam the umask applies beside a default ACL.
        yield [scene for scene in drawn if not scene.d_default or "seam" not in switched_off()]


@pytest.mark.parametrize("name", HOW)
def test_who_does_what_is_told_and_leaves_what_he_would_below(volume: Path, name: str) -> None:
    how = HOW[name]
    native, source = made(volume / f"native {name}"), made(volume / f"source {name}")
    told = []
    with (
        trashd_mount(source, options=how.options, limit_s=SHARED_LIMIT_S + N_SCENES) as mounted,
        ExitStack() as stack,
    ):
        actors = Actors(stack)
        for some in scenes(how):
            seen, behind = mounted.path / str(some[0].number), source / str(some[0].number)
            place = Place(seen, behind, behind if how.is_behind else seen)
            for scene, (below, came) in play(some, [_alone(native / behind.name), place], actors):
                case = Case(scene, below, came, how.is_behind, how.is_shared and scene.when == LATER)
                lines = case.differs()
                if lines and why(case) is None:
                    told.append("\n    ".join((str(scene), *lines)))
    assert not told, f"{len(told)} unlike:\n" + "\n".join(told[:N_TOLD])


@pytest.mark.parametrize("name", [name for name, how in HOW.items() if how.is_behind])
def test_who_acts_while_root_changes_something_comes_before_or_after(volume: Path, name: str) -> None:
    how = HOW[name]
    orders = {order: _alone(made(volume / f"{order}, {name}")) for order in (AT_ONCE, AFTER)}
    source = made(volume / f"races {name}")
    told = []
    with trashd_mount(source, options=how.options) as mounted, ExitStack() as stack:
        actors = Actors(stack)
        place = Place(mounted.path, source, source)
        for scene in (scene for some in scenes(how) for scene in some if scene.change in AT_A_STROKE):
            below = [played(replace(scene, when=order), where, actors) for order, where in orders.items()]
            scene = replace(scene, when=DURING)
            came = played(scene, place, actors)
            cases = [Case(scene, one, came._replace(before=one.before), is_behind=True, is_old=False) for one in below]
            if all(case.differs() and why(case) is None for case in cases):
                told.append("\n    ".join((str(scene), *cases[0].differs(), "or", *cases[1].differs())))
    assert not told, f"{len(told)} unlike:\n" + "\n".join(told[:N_TOLD])


def played(scene: AccessScene, place: Place, actors: Actors) -> Came:
    return end(scene, place, begin(scene, place, actors), actors)


def _alone(path: Path) -> Place:
    return Place(path, path, path)


def test_a_place_that_leaves_former_rights_is_found_out(volume: Path) -> None:
    """Where root's change does nothing, the one who had them has them still."""
    places = [_alone(made(volume / name)) for name in ("heard", "not heard")]
    scene = replace(
        draw(0, has_changes=True, acts=["chmod 4755"]),
        person="owner", by=FD, base=NAME, kind=FILE, mode=0o755, owner=(HE, HE), d_mode=0o755, d_acl="",
        change="f is root's", when=AT_ONCE,
    )  # fmt: skip
    with ExitStack() as stack:
        actors = Actors(stack)
        heard, not_heard = (
            played(one, place, actors)
            for one, place in zip((scene, replace(scene, change="none")), places, strict=True)
        )
    case = Case(scene, heard, not_heard, is_behind=True, is_old=False)
    assert any(line.startswith("is told") for line in case.differs())
    assert why(case) is None
