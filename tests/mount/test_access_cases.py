"""Any call by any user on any file: what it returns, and what is left, are as on the filesystem below.

A sample of all that `draw` can think of: TRASHD_TEST_SCENES of them for each kind of mount, from the number
TRASHD_TEST_FIRST_SCENE on. A scene that is told of as unlike is found again by its number, and TRASHD_TEST_SCENES=1.

No difference may give any user more than the filesystem below: what is explained here gives less, or is what the kernel
answers alone, as old as it may be.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from fusefs.linux.credentials import Capability
from tests.support.access_calls import ACTS, DEVICE, DIRECTORY, FD, FIFO, FILE, GIVEN, KERNEL, NAME, NAMES, THING
from tests.support.access_runner import (
    AFTER,
    AT_A_STROKE,
    AT_ONCE,
    BEFORE,
    BY,
    DURING,
    LATER,
    AccessScene,
    Actors,
    Came,
    Place,
    begin,
    draw,
    end,
    play,
)
from tests.support.foreground_mount import SHARED_LIMIT_S, trashd_mount
from tests.support.privileges import HE, PEOPLE
from tests.support.real_filesystems import loop_volume
from tests.support.transports import is_plain

_ALONE = "the kernel answers alone"
_MODE = re.compile(r"\b\d{5}\b")
"""As a listing tells it."""
_SHOWN = re.compile(r"[bcdlps-][-rwxsS]{8}[-xtT]")


class Case(NamedTuple):
    """A scene natively and through a mount."""

    scene: AccessScene
    native: Came
    mounted: Came
    is_behind: bool  # root changed something behind the mount
    is_old: bool  # so long ago that the kernel has asked again, where it asks

    @property
    def is_less(self) -> bool:
        """Who might below may not, and has changed nothing."""
        was_told = self.mounted.answer.startswith("ok")
        return self.native.answer.startswith("ok") and not was_told and self.mounted.left == self.mounted.before

    def differs(self) -> list[str]:
        """In words, a line each."""
        lines = [
            f"{what}: {native!r}, through the mount {mounted!r}"
            for what, native, mounted in (
                ("was told before", self.native.early_results, self.mounted.early_results),
                ("is told", self.native.answer, self.mounted.answer),
            )
            if native != mounted
        ]
        for what in ("before", "left"):
            ours, theirs = getattr(self.mounted, what), getattr(self.native, what)
            lines += [
                f"{what}, {path}: {theirs.get(path, 'nothing')}; through the mount {ours.get(path, 'nothing')}"
                for path in sorted({*ours, *theirs})
                if ours.get(path) != theirs.get(path)
            ]
        lines += [
            f"shown of {path}: {how}, which is {self.mounted.left.get(path)}"
            for path, how in self.mounted.shown.items()
        ]
        return lines


def why(case: Case) -> str | None:
    """The reason of a difference; None: there is none that we know, and it is a fault of ours."""
    if case.is_behind and case.scene.when == BEFORE:  # what the user looked at then
        case = case._replace(mounted=case.mounted._replace(early_results=case.native.early_results))
        if not case.differs():
            return _ALONE
    return next((reason for reason, explains in REASONS.items() if explains(case)), None)


def _has_no_handles(case: Case) -> bool:
    return case.scene.act == "handle"


def _takes_more_bits(case: Case) -> bool:
    """All is alike but for set-ID bits that are gone: those that below only some keep, or that are no program's."""
    people = (PEOPLE.get(name) for name in (case.scene.person, case.scene.change.partition(BY)[0]))
    keeps = any(who and (who.is_capable or who.maps or who.capability == Capability.FSETID) for who in people)
    modes = [(native, case.mounted.left.get(path, "")) for path, native in case.native.left.items()]
    fewer = all(_bits(mounted) <= _bits(native) for native, mounted in modes)
    return (
        _without_bits(case.native) == _without_bits(case.mounted)
        and fewer
        and (keeps or _has_no_program(case) or _may_be_old(case))
    )


def _may_be_a_write(case: Case) -> bool:
    """A change of nothing takes set-ID bits that a write would take; or there are none any more."""
    mounted = case.mounted._replace(answer=case.native.answer)
    is_alike = case.mounted.answer == "ok" and _without_bits(case.native) == _without_bits(mounted)
    may_be = case.scene.by in (FD, GIVEN) or case.mounted.left == case.mounted.before
    return case.scene.act == "chown to nobody else" and is_alike and may_be


def _has_lost_bits(case: Case) -> bool:
    """Below, a set-ID program is not to be given away by all that may give files away."""
    before = case.mounted._replace(answer=case.native.answer, left=case.native.left)
    may_give = PEOPLE[case.scene.person].capability == Capability.CHOWN
    return may_give and before != case.native and _without_bits(before) == _without_bits(case.native)


def _knows_not_all(case: Case) -> bool:
    """The root of a user namespace has rights over what that knows; for what takes two of them, over both or none."""
    return bool(PEOPLE[case.scene.person].maps) and case.is_less and ACTS[case.scene.act].reaches == NAMES


def _has_no_program(case: Case) -> bool:
    """A set-group-ID bit is on what the group may not execute."""
    return any(how[6] == "S" for how in (*case.native.before.values(), *case.native.left.values()))


def _bits(how: str) -> set[int]:
    """Where a mode, as in ls -l, has set-ID bits."""
    return {place for place in (3, 6) if how[place : place + 1] in "sS"}


def _without_bits(came: Came) -> Came:
    def plain(seen: Mapping[str, str]) -> dict[str, str]:
        return {path: how[:10].replace("s", "x").replace("S", "-") + how[10:] for path, how in seen.items()}

    return came._replace(
        early_results=tuple(_MODE.sub(_plain_mode, one) for one in came.early_results),
        before=plain(came.before),
        left=plain(came.left),
        answer=_SHOWN.sub(lambda found: found[0].replace("s", "x").replace("S", "-"), came.answer),
    )


def _plain_mode(found: re.Match[str]) -> str:
    return str(int(found[0]) & ~0o6000)


def _is_gone(case: Case) -> bool:
    """It is not open in the daemon."""
    was_refused = not case.native.answer.startswith("ok") or case.is_less or case.native.answer == "ok True"
    is_so = case.mounted.answer in ("Stale file handle", "No such file or directory", "ok False")
    is_gone = case.scene.change.endswith(("f is gone", f"{BY}unlink", f"{BY}rmdir"))
    return is_gone and case.scene.by != NAME and is_so and was_refused


def _is_a_fifo(case: Case) -> bool:
    """What is written to it is the kernel's, and its times are told to no client."""

    def timeless(came: Came) -> Came:
        before, left = (
            {path: how.replace("now", "as before") if how[0] in "pc" else how for path, how in seen.items()}
            for seen in (came.before, came.left)
        )
        return came._replace(before=before, left=left)

    return timeless(case.native) == timeless(case.mounted) and case.scene.kind in (FIFO, DEVICE)


def _is_told_by_the_kernel(case: Case) -> bool:
    """A look, as old as it may be; and what FIFOs, devices and directories are opened for, no filesystem is asked."""
    scene = case.scene
    is_opened = scene.kind in (FIFO, DEVICE, DIRECTORY) and scene.act.startswith("open")
    was_opened = scene.kind == DIRECTORY and case.native.answer == "no f" and scene.act == "sync"
    return _may_be_old(case) and (ACTS[scene.act].reaches == KERNEL or is_opened or was_opened)


def _is_found_by_an_old_name(case: Case) -> bool:
    """The way to a name, and what it means, are as old as names may be; what is done with names below is not."""
    change, is_thing = case.scene.change, ACTS[case.scene.act].reaches == THING
    is_moved = change in ("f is replaced", "f is away", "f is gone")
    is_meant = is_moved and (is_thing or case.scene.act.startswith("link"))
    is_way = change.startswith("d ") and (is_thing or case.scene.act == "link elsewhere")
    return _may_be_old(case) and (is_meant or is_way or change == "d is replaced")


def _is_meant_to_be_now(case: Case) -> bool:
    """A user who may write to a file may set that anyway, and the kernel took the user for its owner."""
    is_so = case.mounted.answer == "ok" and case.mounted.left == {
        path: how.replace("as before as before", "now now") if path == "d/f" else how
        for path, how in case.mounted.before.items()
    }
    return _may_be_old(case) and case.scene.act == "times, this second" and is_so


def _is_not_allowed_yet(case: Case) -> bool:
    """The kernel refuses what it would allow if it asked again; or runs a program without the rights that it gives."""
    answer = case.mounted.answer
    both = not case.native.answer.startswith("ok") and not answer.startswith("ok")
    is_run = case.scene.act == "execute" and "euid" not in answer and "egid" not in answer
    is_same = case.mounted.left == case.mounted.before
    return _may_be_old(case) and (case.is_less or (is_same and (both or is_run)))


def _may_be_old(case: Case) -> bool:
    return case.is_behind and case.scene.change != "none" and not (case.is_old and case.scene.by == NAME)


REASONS: Mapping[str, Callable[[Case], bool]] = {
    "there are no file handles": _has_no_handles,
    "set-ID bits go with more writes and changes": _takes_more_bits,
    "somebody may be writing": _may_be_a_write,
    "set-ID bits are gone already": _has_lost_bits,
    "a user namespace knows not all that is moved": _knows_not_all,
    "what is gone, and not open in the daemon, is ESTALE": _is_gone,
    "a FIFO's times are nobody's": _is_a_fifo,
    _ALONE: _is_told_by_the_kernel,
    "a name is as old as it may be": _is_found_by_an_old_name,
    "a time of this minute is taken for now": _is_meant_to_be_now,
    "a right that somebody gets is found later": _is_not_allowed_yet,
}


pytestmark = pytest.mark.needs("root", "fuse", "loop", "userns")

N_SCENES = int(os.environ.get("TRASHD_TEST_SCENES", "60"))
FIRST = int(os.environ.get("TRASHD_TEST_FIRST_SCENE", "0"))
N_AT_A_TIME = 200
N_TOLD = 50
NOT_PLAIN = ("unnamed", "allocate", "punch", "copy")
"""Beginnings of what plain mode can't do."""


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
    acts = tuple(act for act in ACTS if not (is_plain() and act.startswith(NOT_PLAIN)))
    for first in range(FIRST, FIRST + N_SCENES, N_AT_A_TIME):
        yield [
            draw(number, has_changes=how.is_behind, acts=acts)
            for number in range(first, min(first + N_AT_A_TIME, FIRST + N_SCENES))
        ]


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
