"""`trashd swap --wait` with the real service: it takes at once what is left to it, and what it says is told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fusefs.core.service_status import VolumePhase
from tests.support.make_trees import IMMUTABLE, make_tree, set_flags
from tests.support.other_users import run_as
from tests.support.service_process import places, service
from tests.support.trashd_command import TRASHD, Done, done_well, environment, trashd

pytestmark = [pytest.mark.needs("root"), pytest.mark.timeout(120)]

MIB = 1 << 20
USER = 1234


@pytest.fixture
def base() -> Iterator[Path]:
    """Where the service has its own files."""
    with places() as path:
        yield path


def make_victim(volume: Path, name: str = "victim") -> Path:
    return make_tree(volume / name, {"file": b"x" * (4 * MIB), "below": {"deep": "more"}})


def last(done: Done) -> dict[str, Any]:
    """What was told at the end."""
    told: dict[str, Any] = done.objects()[-1]
    return told


def kinds(told: dict[str, Any]) -> list[str]:
    return [reason["kind"] for reason in told["reasons"]]


@pytest.mark.parametrize("goal", ["--wait", "--wait=3M"])
def test_a_running_service_takes_it_at_once(base: Path, volume: Path, goal: str) -> None:
    done_well("swap", make_victim(volume, "before"))  # a plain one stays
    with service(base, volume) as running:
        running.until_phase(volume, VolumePhase.IDLE)
        done = trashd("swap", "--json", goal, make_victim(volume))  # by its poll it would take ten minutes
    assert (done.code, last(done)["is_reached"]) == (0, True)
    (kept,) = done_well("list", "--json", "--volume", volume).objects()
    assert kept["origin"] == str(volume / "before")


def test_a_user_whom_the_service_never_saw_is_served_too(base: Path, volume: Path) -> None:
    volume.chmod(0o777)
    victim = make_victim(volume)
    for path in (victim, *victim.rglob("*")):
        os.chown(path, USER, USER)
    with service(base, volume) as running:
        running.until_phase(volume, VolumePhase.IDLE)
        done = run_as(USER, [TRASHD, "swap", "--json", "--wait", victim], env=environment({}))
    assert done.returncode == 0, done
    assert json.loads(done.stdout.splitlines()[-1])["is_reached"]


def test_a_pause_is_told_and_what_it_left_goes_when_it_ends(base: Path, volume: Path) -> None:
    make_victim(volume)
    with service(base, volume) as running:
        running.until_phase(volume, VolumePhase.IDLE)
        done_well("pause", volume)
        running.until_phase(volume, VolumePhase.PAUSED)
        done = trashd("swap", "--json", "--wait", volume / "victim")
        assert (done.code, kinds(last(done))) == (13, ["paused"])
        done_well(*last(done)["hint"].split()[1:])
        running.until(lambda: not list(volume.glob(".trashd/u/0/reaping/*")))


def test_what_the_service_could_not_remove_is_told(base: Path, volume: Path) -> None:
    victim = make_victim(volume)
    set_flags(victim / "file", IMMUTABLE)
    with service(base, volume) as running:
        running.until_phase(volume, VolumePhase.IDLE)
        done = trashd("swap", "--json", "--wait", victim)
    (orphan,) = volume.glob(".trashd/u/0/quarantine/*")
    set_flags(orphan / "tree/file", IMMUTABLE, on=False)
    assert (done.code, kinds(last(done))) == (13, ["left"])


def test_a_retention_that_was_asked_for_is_kept_by_the_service_too(base: Path, volume: Path) -> None:
    with service(base, volume) as running:
        running.until_phase(volume, VolumePhase.IDLE)
        began = time.monotonic()
        done = trashd("swap", "--json", "--keep-for", "1s", "--wait", make_victim(volume))
        assert time.monotonic() - began > 1
    assert (done.code, last(done)["is_reached"]) == (0, True)


def test_a_service_that_is_killed_while_somebody_waits_ends_it(base: Path, volume: Path) -> None:
    window = f'[[volume]]\npath = "{volume}"\nwindows = ["{_closed_window()}"]\n'
    with service(base, volume, config=window) as running:
        running.until_phase(volume, VolumePhase.WINDOW)
        words = [TRASHD, "swap", "--json", "--wait", str(make_victim(volume))]
        with subprocess.Popen(words, env=environment({}), stdout=subprocess.PIPE) as process:
            running.until(lambda: list(volume.glob(".trashd/u/0/reaping/*")))
            assert process.poll() is None
            running.process.send_signal(signal.SIGKILL)
            out, _ = process.communicate(timeout=60)
    assert (process.returncode, kinds(json.loads(out.splitlines()[-1]))) == (13, ["nobody"])


def _closed_window() -> str:
    """An hour of the day that is far from now."""
    hour = (time.localtime().tm_hour + 12) % 24
    return f"{hour:02}:00-{hour:02}:30"
