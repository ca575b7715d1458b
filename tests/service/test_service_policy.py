"""What an administrator wants, obeyed by the running service: space, quotas, windows, what is kept, pauses."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

import pytest

from fusefs.core.service_status import VolumePhase
from fusefs.store.stage import SwapOptions
from tests.support.hostile_volume import ALICE, MALLORY, Shared
from tests.support.many_files import fill, roomy_volume
from tests.support.other_users import as_user
from tests.support.real_filesystems import unmount
from tests.support.service_process import configure, service
from tests.support.small_orphans import EXPIRED, ids, orphan_in
from tests.support.store_verbs import assert_silent, swap
from tests.support.trashd_command import done_well
from tests.support.volume_under_service import SLOW, aged, audited, begin_large, outwait

pytestmark = pytest.mark.needs("root")

HOUR_S = 3600
AT_ANY_AGE = 'minimum_age = "0s"\n'


def window_in(hours: int) -> str:
    """A window of an hour that begins so many hours from now."""
    begins = (time.localtime().tm_hour + hours) % 24
    return f'windows = ["{begins:02d}:00-{(begins + 1) % 24:02d}:00"]\n'


@pytest.mark.parametrize(
    "limit",
    ['free_space = { low = "55%", high = "60%" }\n', 'quota = { bytes = "25M" }\n'],  # of 64 MiB: 34 are free
    ids=["low space", "quota"],
)
def test_the_oldest_are_taken_before_their_time_until_the_rest_is_within_the_limit(
    base: Path, volume: Path, limit: str
) -> None:
    oldest, older, young = (
        aged(volume, name, hours * HOUR_S, 10) for name, hours in (("oldest", 3), ("older", 2), ("young", 1))
    )
    with service(base, volume, config="[defaults]\n" + AT_ANY_AGE + limit) as running:
        running.until(lambda: oldest not in ids(volume))
        outwait(running, volume)
        assert ids(volume) == {older, young}
    assert ("low space" in running.log.read_text()) == ("free" in limit)


def test_low_on_inodes_takes_the_oldest_before_its_time(base: Path, volume: Path) -> None:
    fill(volume / "many", os.statvfs(volume).f_files // 50)
    identifier = swap(volume / "many").id
    low = 'free_inodes = { low = "99%", high = "99.9%" }\n'
    with service(base, volume, config="[defaults]\n" + AT_ANY_AGE + low) as running:
        running.until(lambda: identifier not in ids(volume))


def test_quota_holds_for_what_comes_later_too(base: Path, volume: Path) -> None:
    with service(base, volume, config="[defaults]\n" + AT_ANY_AGE + 'quota = { bytes = "15M" }\n') as running:
        first = aged(volume, "first", HOUR_S, 10)
        outwait(running, volume)
        assert ids(volume) == {first}
        second = aged(volume, "second", 0, 10)
        running.until(lambda: ids(volume) == {second})


def pin(home: Path, has_links: bool) -> None:
    """Six orphans of 4 MiB each that stay, or of one such file that has a name in each of them."""
    for n in range(6):
        job = home / f"pinned{n}"
        job.mkdir()
        if has_links and n:
            (job / "a").hardlink_to(home / "file")
        else:
            (job / "a").write_bytes(b"x" * (4 << 20))
            if has_links:
                (home / "file").hardlink_to(job / "a")
        swap(job, options=SwapOptions(retention_s=None))


@pytest.mark.parametrize("has_links", [True, False])
def test_what_mallory_pins_takes_nothing_from_alice(shared: Shared, has_links: bool) -> None:
    """More than the quota: names of one file, which take nothing, or files of hers, which count against her alone."""
    as_user(MALLORY, partial(pin, shared.home(MALLORY), has_links))
    alices = shared.throw(ALICE, options=SwapOptions())
    large = shared.throw(MALLORY, "large", SwapOptions(), {"a": b"x" * (15 << 20)})
    with shared.served("[defaults]\n" + AT_ANY_AGE + 'quota = { bytes = "13M" }\n') as running:
        running.until(lambda: shared.is_gone(large))
        outwait(running, shared.volume)
        assert shared.is_in(alices, "orphans")


def test_low_space_takes_the_largest_and_leaves_what_could_not_help(shared: Shared) -> None:
    alices = [shared.throw(ALICE, f"job{n}", SwapOptions()) for n in range(3)]
    large = shared.throw(MALLORY, "large", SwapOptions(), {"a": b"x" * (15 << 20)})
    low = 'free_space = { low = "90%", high = "95%" }\n'
    with shared.served("[defaults]\n" + AT_ANY_AGE + low) as running:
        running.until(lambda: shared.is_gone(large))
    assert all(shared.is_in(identifier, "orphans") for identifier in alices)


def test_low_space_that_no_orphan_takes_deletes_nobodys(shared: Shared) -> None:
    """Whoever fills the disk for a minute with files in use does not delete what all others could take back."""
    alices = [shared.throw(ALICE, f"job{n}", SwapOptions()) for n in range(3)]
    (shared.volume / "live").write_bytes(bytes(30 << 20))
    low = 'free_space = { low = "90%", high = "95%" }\n'
    with shared.served("[defaults]\n" + AT_ANY_AGE + low) as running:
        running.until(lambda: "low space" in running.log.read_text())
        outwait(running, shared.volume)
        running.until_phase(shared.volume, VolumePhase.IDLE)
        assert all(shared.is_in(identifier, "orphans") for identifier in alices)


def test_what_a_person_keeps_stays(base: Path, volume: Path) -> None:
    with service(base, volume) as running:
        identifier = orphan_in(volume, "kept", SwapOptions(retention_s=HOUR_S)).id
        running.until(lambda: running.volume(volume).next_due_ns is not None)
        done_well("keep", "--volume", volume, identifier)
        running.until(lambda: running.volume(volume).next_due_ns is None)
        assert ids(volume) == {identifier}


def test_rules_of_a_path_hold_for_what_came_from_there(base: Path, volume: Path) -> None:
    (volume / "ci").mkdir()
    ci, other = aged(volume, "ci/job", HOUR_S), aged(volume, "job", HOUR_S)
    rules = f'[[volume]]\npath = "{volume}"\n[[volume.rules]]\npath = "{volume}/ci"\nretention = "30m"\n'
    with service(base, volume, config=rules) as running:
        running.until(lambda: ci not in ids(volume))
        outwait(running, volume)
        assert ids(volume) == {other}


def test_outside_its_window_it_waits_until_a_reload_opens_one(base: Path, volume: Path) -> None:
    identifier = orphan_in(volume, options=EXPIRED).id
    with service(base, volume, config="[defaults]\n" + window_in(3)) as running:
        assert running.until_phase(volume, VolumePhase.WINDOW).why.startswith("it may work")
        assert ids(volume) == {identifier}
        assert not running.volume(volume).is_known
        assert "backlog   not known" in done_well("status").out
        configure(base, "")
        running.reload()
        running.until(lambda: not ids(volume))


def test_what_comes_outside_the_window_is_told_as_not_looked_at(base: Path, volume: Path) -> None:
    with service(base, volume) as running:
        outwait(running, volume)
        configure(base, "[defaults]\n" + window_in(3))
        running.reload()
        running.until_phase(volume, VolumePhase.WINDOW)
        orphan_in(volume, options=EXPIRED)
        running.until(lambda: running.volume(volume).n_unread == 1)
        assert "1 not looked at yet" in done_well("status").out


def test_volume_that_runs_full_does_not_wait_for_its_window(base: Path, volume: Path) -> None:
    identifier = aged(volume, "large", HOUR_S, 10)
    with service(base, volume) as running:
        outwait(running, volume)  # it knows that there is something to give up
        low = 'free_space = { low = "99%", high = "100%" }\n'
        configure(base, "[defaults]\n" + AT_ANY_AGE + low + window_in(3))
        running.reload()
        running.until(lambda: identifier not in ids(volume))


@pytest.mark.parametrize("is_named", [True, False])
def test_paused_volume_is_let_go_of_and_goes_on_when_resumed(base: Path, volume: Path, is_named: bool) -> None:
    named = [volume] if is_named else []
    with service(base, volume) as running:
        done_well("pause", *named)
        running.until_phase(volume, VolumePhase.PAUSED)
        identifier = orphan_in(volume, options=EXPIRED).id
        assert "paused by" in running.volume(volume).why
        assert ids(volume) == {identifier}
        done_well("resume", *named)
        running.until(lambda: not ids(volume))


def test_pause_ends_by_itself(base: Path, volume: Path) -> None:
    with service(base, volume) as running:
        began_ns = time.time_ns()
        done_well("pause", "--for", "1s", volume)
        identifier = orphan_in(volume, options=EXPIRED).id
        running.until(lambda: "reaped" in [event["event"] for event in audited(base)])
    (reaped,) = [event for event in audited(base) if event["event"] == "reaped"]
    assert reaped["id"] == identifier
    assert reaped["at_ns"] >= began_ns + 10**9


def test_pause_is_in_force_for_the_next_service_too(base: Path, volume: Path) -> None:
    orphan_in(volume, options=EXPIRED)
    done_well("pause")
    with service(base, volume) as running:
        running.until_phase(volume, VolumePhase.PAUSED)
        done_well("resume")
        running.until(lambda: not ids(volume))


def test_paused_in_the_middle_it_can_be_unmounted(base: Path) -> None:
    with roomy_volume("tmpfs") as volume, service(base, volume, config=SLOW) as running:
        begin_large(running, volume)
        done_well("pause", volume)
        running.until_phase(volume, VolumePhase.PAUSED)
        running.until(running.is_alone)
        assert_silent(volume)
        assert not unmount(volume), "it was busy"
