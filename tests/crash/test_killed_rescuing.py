"""`doctor --rescue` and `--forget` killed, failing or met by another: what they move is whole, in exactly one place."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from fusefs.linux.kernel import Kernel
from fusefs.store.rescue import find_thing, forget, rescue
from tests.support.crash_invariants import hold_when_failing, hold_when_killed, hold_when_stopped, telling
from tests.support.crash_scenarios import (
    EVERY_CALL,
    HOME,
    LOST,
    USER,
    WON,
    Act,
    Before,
    Scene,
    assert_nothing_half_done,
    outcome,
    user_folders,
)
from tests.support.other_users import as_user
from tests.support.real_filesystems import loop_volume
from tests.support.store_calls import NumberedCall, recover_all, restore
from tests.support.verb_scenarios import make_orphan, make_read_only_orphan

pytestmark = pytest.mark.needs("root")

CUT = 40


def break_record(volume: Path) -> None:
    (record,) = (path for folder in user_folders(volume) for path in folder.glob("orphans/*/record.json"))
    os.truncate(record, CUT)


def broken(volume: Path) -> bytes:
    """The id of the one container that is there, found without the hook; killed halfway, of what is there now."""
    names = [path.name for folder in user_folders(volume) for path in folder.glob("*/*Z-*")]
    return os.fsencode(names[0] if names else "none")


def make_broken(volume: Path) -> None:
    make_orphan(volume)
    break_record(volume)


def make_broken_read_only(volume: Path) -> None:
    make_read_only_orphan(volume)
    break_record(volume)


def take_out(volume: Path, kernel: Kernel) -> object:
    volumes = [os.fsencode(volume)]
    entry = find_thing(kernel, volumes, broken(volume))
    return rescue(kernel, volumes, entry, os.fsencode(volume / HOME / "rescued"))


def take_out_too(volume: Path, kernel: Kernel) -> object:
    volumes = [os.fsencode(volume)]
    entry = find_thing(kernel, volumes, broken(volume))
    return rescue(kernel, volumes, entry, os.fsencode(volume / HOME / "rescued-too"))


def take_back(volume: Path, kernel: Kernel) -> object:
    return restore(volume, os.fsdecode(broken(volume)), kernel)


def give_up(volume: Path, kernel: Kernel) -> object:
    volumes = [os.fsencode(volume)]
    return forget(kernel, volumes, find_thing(kernel, volumes, broken(volume)))


SCENES = {
    "rescue": Scene(make_broken, take_out, is_gapless=True),
    "rescue-by-root": Scene(make_broken_read_only, take_out, uid=USER, by=0, is_gapless=True),
    "forget": Scene(make_broken, give_up, is_gapless=True),
    "forget-by-its-user": Scene(make_broken_read_only, give_up, uid=USER, is_gapless=True),
    "forget-by-root": Scene(make_broken_read_only, give_up, uid=USER, by=0, is_gapless=True),
}


def places(volume: Path) -> list[Path]:
    """Where what was broken may be: where it was, taken out, or the tree of an orphan of its own."""
    found = [path for folder in user_folders(volume) for path in folder.glob("*/*Z-*")]
    trees = [path / "tree" for path in found]
    return [path for path in (*found, *trees, *(volume / HOME).glob("rescued*")) if is_broken(path)]


def is_broken(path: Path) -> bool:
    record = path / "record.json"
    return record.is_file() and record.stat().st_size == CUT


def assert_whole(volume: Path, _before: Before) -> None:
    """It is in one place as it was, and nothing else is left half done."""
    recover_all(volume)
    assert_nothing_half_done(volume)
    (path,) = places(volume)
    found = [one.read_bytes() for one in (path / "tree").rglob("*") if one.is_file()]
    assert sorted(found) == [b"first", b"second", b"third"]
    assert len(list(volume.rglob("leaf"))) == 1


@pytest.mark.parametrize("name", SCENES)
def test_a_kill_before_any_call_leaves_it_whole(volume: Path, name: str) -> None:
    hold_when_killed(SCENES[name], volume, partial(assert_whole, volume))


@pytest.mark.needs("loop")
@pytest.mark.parametrize("name", ["rescue-by-root", "forget"])
def test_a_kill_before_any_call_leaves_it_whole_on_ext4(name: str) -> None:
    with loop_volume("ext4", 16) as ext4:
        hold_when_killed(SCENES[name], ext4, partial(assert_whole, ext4))


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=errno.errorcode.get)
@pytest.mark.parametrize("name", ["rescue", "forget", "forget-by-its-user"])
def test_any_call_that_fails_leaves_it_whole(volume: Path, name: str, number: int) -> None:
    hold_when_failing(SCENES[name], volume, number, partial(assert_whole, volume))


RACES: dict[str, tuple[str, Act, int]] = {
    "rescue-rescue": ("rescue", take_out_too, 0),
    "rescue-forget": ("rescue", give_up, 0),
    "forget-rescue": ("forget", take_out, 0),
    "forget-forget": ("forget", give_up, 0),
    "rescue-restore": ("rescue", take_back, 0),
    "rescue-by-root-forget-by-its-user": ("rescue-by-root", give_up, USER),
    "forget-by-its-user-rescue-by-root": ("forget-by-its-user", take_out, 0),
}


def now_and_then(calls: Sequence[NumberedCall]) -> list[int]:
    """Each call, in the soak; else some."""
    return telling(calls)[:: 1 if EVERY_CALL else 11]


@pytest.mark.parametrize("name", RACES)
def test_of_two_that_take_it_out_exactly_one_has_it(volume: Path, name: str) -> None:
    first, act, uid = RACES[name]

    def meanwhile() -> int:
        other = partial(outcome, partial(act, volume, Kernel()))
        return as_user(uid, other) if uid else other()

    def law(before: Before, code: int, other: int) -> None:
        assert sorted((code, other)) == [WON, LOST], (code, other)
        assert_whole(volume, before)

    hold_when_stopped(SCENES[first], volume, meanwhile, law, moments=now_and_then)
