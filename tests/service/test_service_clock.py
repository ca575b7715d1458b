"""The wall clock was set, weeks ahead or back, while a service watched: nothing goes early, and nothing stays for ever.

A test can't set the machine's clock. It tells the service what its predecessor remembers of another one instead, and
dates records as they would have been.
"""

import json
import time
from pathlib import Path

import pytest

from fusefs.core.orphan_age import Clock, Era, decode, encode
from fusefs.core.service_status import VolumePhase
from fusefs.linux.machine_identity import boot_id
from fusefs.store.stage import SwapOptions
from tests.support.reap_process import state_of
from tests.support.service_process import service
from tests.support.small_orphans import EXPIRED, orphan_in
from tests.support.store_verbs import forge, place

pytestmark = [pytest.mark.needs("root"), pytest.mark.timeout(180)]

NS = 1_000_000_000
DAY_S = 86_400
JUMP_S = 30 * DAY_S
WATCHED_S = 100
"""So long ago the wall clock was what it had always been."""
WEEK = SwapOptions(retention_s=7 * DAY_S)


def remember(base: Path, ahead_s: int) -> None:
    """What a service leaves that saw the wall clock run undisturbed, before it was set ahead by so much (or back)."""
    wall_ns, boot_ns = time.time_ns(), time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    seen_wall_ns, seen_boot_ns = wall_ns - (ahead_s + WATCHED_S) * NS, boot_ns - WATCHED_S * NS
    clock = Clock(seen_wall_ns, seen_boot_ns, seen_wall_ns - seen_boot_ns, (Era(0, 0),), boot_id())
    (base / "clock.json").write_bytes(encode(clock))


def dated(volume: Path, name: str, age_s: int, ahead_s: int = 0) -> str:
    """The id of an orphan with a week's retention, so old in truth, made before the wall clock was set ahead."""
    identifier = orphan_in(volume, name, WEEK).id
    created_ns = time.time_ns() - (age_s + ahead_s) * NS
    forge(place(volume, identifier) / "record.json", created_ns=created_ns)
    return identifier


def is_gone(volume: Path, identifier: str) -> bool:
    return state_of(volume, identifier) is None


@pytest.mark.parametrize("ahead_s", [JUMP_S, -JUMP_S, 0])
def test_ages_are_told_by_the_time_that_passed_and_not_by_the_clock(base: Path, volume: Path, ahead_s: int) -> None:
    old = dated(volume, "old", 8 * DAY_S, ahead_s)
    young = [dated(volume, f"young{n}", age_s, ahead_s) for n, age_s in enumerate((WATCHED_S + 60, 6 * DAY_S))]
    new = orphan_in(volume, "new", WEEK).id
    asked = orphan_in(volume, "asked", EXPIRED).id
    remember(base, ahead_s)
    with service(base, volume) as running:
        running.until(lambda: is_gone(volume, old) and is_gone(volume, asked))
        status = running.until_phase(volume, VolumePhase.IDLE)
        assert status.n_orphans == len([*young, new])
        assert not any(is_gone(volume, one) for one in [*young, new])


@pytest.mark.parametrize("set_s", [JUMP_S, -JUMP_S])
def test_without_a_memory_what_was_made_in_this_boot_has_its_age(base: Path, volume: Path, set_s: int) -> None:
    """The clock was set, and then the first service began: records tell the clock that is never set, too."""
    young, old = (orphan_in(volume, name, WEEK).id for name in ("young", "old"))
    for identifier, retention_s in ((young, 7 * DAY_S), (old, 0)):
        record = place(volume, identifier) / "record.json"
        told = json.loads(record.read_text())
        created_ns = told["created_ns"] - set_s * NS
        forge(record, created_ns=created_ns, boot_ns=told["boot_ns"], retention_s=retention_s)
    with service(base, volume) as running:
        running.until(lambda: is_gone(volume, old))
        running.until_phase(volume, VolumePhase.IDLE)
        assert not is_gone(volume, young)


def test_a_killed_service_leaves_what_it_knew_of_the_clock(base: Path, volume: Path) -> None:
    """The one after it would else take the new time for the true one, and reap weeks early."""
    young = dated(volume, "young", WATCHED_S + 60, JUMP_S)
    remember(base, JUMP_S)
    with service(base, volume) as running:
        running.until_phase(volume, VolumePhase.IDLE)
        running.kill()
    left = decode((base / "clock.json").read_bytes())
    assert left is not None
    assert [round(era.ahead_ns / NS / DAY_S) for era in left.eras] == [0, JUMP_S // DAY_S]
    with service(base, volume) as running:
        running.until_phase(volume, VolumePhase.IDLE)
    assert not is_gone(volume, young)


def test_a_first_service_that_is_killed_leaves_its_clock(base: Path, volume: Path) -> None:
    with service(base, volume) as running:
        running.kill()
    left = decode((base / "clock.json").read_bytes())
    assert left is not None
    assert abs(left.ahead_ns()) < NS
