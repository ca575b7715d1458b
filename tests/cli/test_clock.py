"""The wall clock was set between two commands, forward or back: nothing goes early, and nothing stays for ever.

A test can't set the machine's clock. Records say what they would say had it been set since, and what the commands
before remember of it is written for them.
"""

import json
import os
import time
from pathlib import Path

import pytest

from fusefs.core.orphan_age import Clock, Era, encode_clock
from fusefs.linux.machine_identity import boot_id
from tests.support.make_trees import make_tree
from tests.support.store_verbs import forge
from tests.support.trashd_command import CommandResult, swapped, trashd

pytestmark = pytest.mark.needs("root")

S = 1_000_000_000
DAY_S = 86_400
SET_S = 30 * DAY_S


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Where the commands of a test remember."""
    return tmp_path / "state"


def made(volume: Path, name: str, age_s: int, set_s: int, *, in_another_boot: bool = False) -> str:
    """The id of an orphan so old, whose clock was set forward by so much since; a week's retention."""
    identifier = swapped(make_tree(volume / name, {"file": ""}), "--keep-for", "7d")["id"]
    boot_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - age_s * S
    record = volume / f".trashd/u/0/orphans/{identifier}/record.json"
    forge(record, created_ns=time.time_ns() - (age_s + set_s) * S, boot_ns=max(boot_ns, 0))
    if in_another_boot:
        forge(record, boot="another", boot_ns=0)
    return str(identifier)


def remember(state: Path, set_s: int, name: str = "clock-of-commands.json") -> None:
    """What a command left that saw the clock a moment before it was set forward by so much."""
    wall_ns, boot_ns = time.time_ns() - (set_s + 1) * S, time.clock_gettime_ns(time.CLOCK_BOOTTIME) - S
    state.mkdir(exist_ok=True)
    (state / name).write_bytes(encode_clock(Clock(wall_ns, boot_ns, wall_ns - boot_ns, (Era(0, 0),), boot_id())))


def reap(volume: Path, state: Path, *words: str) -> CommandResult:
    return trashd("reap", "--volume", volume, *words, STATE_DIRECTORY=str(state))


def left(volume: Path) -> set[str]:
    return set(os.listdir(volume / ".trashd/u/0/orphans"))


@pytest.mark.parametrize("set_s", [SET_S, -SET_S, 0])
def test_a_reap_goes_by_the_time_that_passed_and_not_by_the_clock(volume: Path, state: Path, set_s: int) -> None:
    young = made(volume, "young", 60, set_s)
    old = made(volume, "old", 0, set_s)
    forge(volume / f".trashd/u/0/orphans/{old}/record.json", retention_s=0)
    reap(volume, state)
    assert left(volume) == {young}


@pytest.mark.parametrize("name", ["clock.json", "clock-of-commands.json"])
@pytest.mark.parametrize("set_s", [SET_S, 0])
def test_over_a_boot_a_reap_goes_by_what_was_remembered(volume: Path, state: Path, set_s: int, name: str) -> None:
    young = made(volume, "young", 6 * DAY_S, set_s, in_another_boot=True)
    made(volume, "old", 8 * DAY_S, set_s, in_another_boot=True)
    remember(state, set_s, name)
    reap(volume, state)
    assert left(volume) == {young}


def test_a_reap_leaves_what_the_clock_is_for_the_next_one(volume: Path, state: Path) -> None:
    reap(volume, state)
    saved = json.loads((state / "clock-of-commands.json").read_text())
    assert abs(saved["wall_ns"] - time.time_ns()) < 600 * S
    remember(state, SET_S)
    made(volume, "young", 60, SET_S, in_another_boot=True)
    for _ in range(2):
        reap(volume, state)
    assert len(left(volume)) == 1


@pytest.mark.parametrize("set_s", [SET_S, -SET_S])
def test_a_reap_says_why_it_keeps_what_the_clock_calls_expired(volume: Path, state: Path, set_s: int) -> None:
    made(volume, "young", 60, set_s)
    said = "the wall clock was set forward by 4w2d: keeping 1 orphan that has not really expired"
    assert (said in reap(volume, state).err) == (set_s > 0)


@pytest.mark.parametrize("set_s", [SET_S, -SET_S])
def test_list_tells_the_time_that_is_left_by_the_time_that_passed(volume: Path, state: Path, set_s: int) -> None:
    made(volume, "young", 60, set_s)
    (list_result,) = trashd("list", "--json", "--volume", volume, STATE_DIRECTORY=str(state)).objects()
    assert 6 * DAY_S < list_result["restorable_for_s"] <= 7 * DAY_S - 60
    assert round(list_result["clock_set_ns"] / S / DAY_S) == set_s / DAY_S
    assert " 1m" in trashd("list", "--volume", volume, STATE_DIRECTORY=str(state)).out


@pytest.mark.parametrize("set_s", [SET_S, -SET_S])
def test_what_is_in_quarantine_is_as_old_as_the_time_that_passed(volume: Path, state: Path, set_s: int) -> None:
    identifier = made(volume, "young", 60, set_s)
    folder = volume / ".trashd/u/0"
    (folder / "orphans" / identifier).rename(folder / "quarantine" / identifier)
    assert " 1m" in trashd("list", "--volume", volume, STATE_DIRECTORY=str(state)).out


def files(volume: Path, set_s: int) -> Path:
    """A directory with a file of ten days and one of a minute, as the clock told before it was set."""
    top = make_tree(volume / "scratch", {"old": "", "young": ""})
    for name, age_s in (("old", 10 * DAY_S), ("young", 60)):
        at_s = time.time() - age_s - set_s
        os.utime(top / name, (at_s, at_s))
    return top


@pytest.mark.parametrize("command", ["plan", "sweep"])
@pytest.mark.parametrize("set_s", [SET_S, 0])
def test_files_are_as_old_as_the_time_that_passed(volume: Path, state: Path, set_s: int, command: str) -> None:
    top = files(volume, set_s)
    remember(state, set_s)
    (volume / "rules.toml").write_text(f'[[rule]]\ndirectory = "{top}"\nolder = "7d"\naction = "delete"\n')
    words = (
        ("plan", "apply", volume / "rules.toml") if command == "plan" else ("sweep", top, "--older", "7d", "--delete")
    )
    done = trashd(*words, STATE_DIRECTORY=str(state))
    assert (done.code, os.listdir(top)) == (0, ["young"]), done
    assert ("the wall clock was set forward by 4w2d" in done.err) == bool(set_s)
