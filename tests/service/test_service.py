"""The service as people run it: what is due goes, what is not stays; it comes, reloads and ends without a trace."""

from __future__ import annotations

import fcntl
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from fusefs.core.errors import Busy
from fusefs.store.stage import SwapOptions
from tests.support.make_trees import make_tree, snapshot
from tests.support.many_files import roomy_volume
from tests.support.reap_process import is_claimed
from tests.support.service_process import configure, service
from tests.support.service_timers import SCALED
from tests.support.small_orphans import EXPIRED, ids, orphan_in, victim_in
from tests.support.store_verbs import assert_silent, entries, folder_of, restore
from tests.support.trash_without_walk import gather
from tests.support.trashd_command import trashd
from tests.support.volume_under_service import SLOW, audited, begin_large, next_due_s, outwait

pytestmark = pytest.mark.needs("root")

COPIES_WAIT = SCALED._replace(copy_pause_s=3600.0)
"""Longer than any test: what is not adopted soon never is."""


def test_orphan_goes_when_its_time_comes(base: Path, volume: Path) -> None:
    with service(base, volume) as running:
        identifier = orphan_in(volume, options=SwapOptions(retention_s=1)).id
        running.until(lambda: "reaped" in [event["event"] for event in audited(base)])
        assert not ids(volume)
    (reaped,) = [event for event in audited(base) if event["event"] == "reaped"]
    assert reaped["id"] == identifier


def test_what_is_moved_into_drop_is_adopted(base: Path, volume: Path) -> None:
    with service(base, volume) as running:
        victim_in(volume).rename(folder_of(volume, 0) / "drop/job")
        running.until(lambda: ids(volume))
        running.until(lambda: audited(base))
    (entry,) = entries(volume)
    (dropped,) = audited(base)
    assert (dropped["event"], dropped["id"]) == ("dropped", entry.id)


def test_what_is_copied_into_drop_is_left_alone_while_it_may_be_written_to(base: Path, volume: Path) -> None:
    orphan_in(volume, "first", EXPIRED)
    with service(base, volume, timers=COPIES_WAIT) as running:
        running.until(lambda: not ids(volume))
        copy = shutil.copytree(victim_in(volume), folder_of(volume, 0) / "drop/job", symlinks=True)
        outwait(running, volume)
        running.until(lambda: 0 < next_due_s(running, volume) < 3601)
        assert snapshot(copy)[1:] == snapshot(volume / "job")[1:]


def test_what_was_copied_into_drop_is_adopted_when_nothing_more_comes(base: Path, volume: Path) -> None:
    with service(base, volume, timers=SCALED._replace(copy_pause_s=0.2)) as running:
        shutil.copytree(victim_in(volume), folder_of(volume, 0) / "drop/job", symlinks=True)
        running.until(lambda: ids(volume))


ONE_OF_A_NAME = {
    "numbered backups": 'mv --backup=numbered "$one"/report "$drop"/',
    "a new directory for each": 'd=$(mktemp -d .item.XXXXXX) && mv "$one"/report "$d" && mv "$d" "$drop"/',
}


@pytest.mark.parametrize("way", ONE_OF_A_NAME.values(), ids=ONE_OF_A_NAME)
def test_files_of_one_name_that_are_dropped_as_documented_are_an_orphan_each(
    base: Path, volume: Path, way: str
) -> None:
    drop, names = folder_of(volume, 0) / "drop", "abcde"
    for name in names:
        make_tree(volume / name, {"report": name})
    with service(base, volume) as running:
        script = f"drop=$1; for one in {' '.join(names)}; do {way} || exit; done"
        subprocess.run(["bash", "-c", script, "bash", drop], cwd=volume, check=True)
        running.until(lambda: not any(drop.iterdir()))
        running.until(lambda: len(ids(volume)) == len(names))
    contents = {path.read_text() for path in volume.rglob("orphans/*/tree/**/*") if path.is_file()}
    contents |= {path.read_text() for path in volume.rglob("orphans/*/tree") if path.is_file()}
    assert contents == set(names)


def test_what_is_moved_into_drop_does_not_wait_for_a_copy_that_begins_after_it(base: Path, volume: Path) -> None:
    drop = folder_of(volume, 0) / "drop"
    with service(base, volume, timers=COPIES_WAIT) as running:
        orphan_in(volume, "first", EXPIRED)
        running.until(lambda: not ids(volume))
        victim_in(volume).rename(drop / "job")
        (drop / "copy").touch()
        running.until(lambda: not (drop / "job").exists())


def test_restore_by_a_person_is_told(base: Path, volume: Path) -> None:
    with service(base, volume) as running:
        identifier = orphan_in(volume).id
        running.until(lambda: audited(base))
        restore(volume, identifier)
        running.until(lambda: len(audited(base)) == 2)
        running.until(lambda: running.volume(volume).next_due_ns is None)
    assert [event["event"] for event in audited(base)] == ["swapped", "restored"]
    assert {event["id"] for event in audited(base)} == {identifier}


def test_sweep_is_told_once_however_often_a_part_of_it_is_restored(base: Path, volume: Path) -> None:
    with service(base, volume) as running:
        job = victim_in(volume)
        identifier = gather(job, ["a", "sub/b"]).orphan or ""
        running.until(lambda: audited(base))
        (job / "a").write_text("new")
        for _ in range(2):
            assert restore(volume, identifier).n_left == 1
        outwait(running, volume)
        (job / "a").unlink()
        assert restore(volume, identifier).n_left == 0
        running.until(lambda: running.volume(volume).next_due_ns is None)
        running.until(lambda: "restored" in [event["event"] for event in audited(base)])
    assert [event["event"] for event in audited(base) if event["id"] == identifier] == ["swept", "restored"]


def test_orphan_whose_record_is_locked_is_left_alone_until_it_is_not(base: Path, volume: Path) -> None:
    identifier = orphan_in(volume, "held", EXPIRED).id
    record = folder_of(volume, 0) / "orphans" / identifier / "record.json"
    with record.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        with service(base, volume) as running:
            outwait(running, volume)
            assert ids(volume) == {identifier}
            fcntl.flock(file, fcntl.LOCK_UN)
            running.until(lambda: not ids(volume))


@pytest.mark.parametrize("ends", ["stop", "kill"])
def test_what_it_leaves_in_the_middle_its_successor_goes_on_with(base: Path, ends: str) -> None:
    with roomy_volume("tmpfs") as volume:
        with service(base, volume, config=SLOW) as running:
            identifier = begin_large(running, volume)
            getattr(running, ends)()
            assert running.process.returncode == (0 if ends == "stop" else -signal.SIGKILL)
        if ends == "stop":
            assert_silent(volume)
        assert is_claimed(volume, identifier)
        with service(base, volume) as running:
            running.until(lambda: not ids(volume))
        assert_silent(volume)


def test_another_configuration_is_in_force_after_a_reload(base: Path, volume: Path) -> None:
    identifier = orphan_in(volume).id
    with service(base, volume) as running:
        outwait(running, volume)
        assert ids(volume) == {identifier}
        configure(base, '[defaults]\nretention = "0s"\nminimum_age = "0s"\n')
        running.reload()
        running.until(lambda: not ids(volume))


def test_wrong_configuration_is_told_and_the_old_one_stays(base: Path, volume: Path) -> None:
    kept = orphan_in(volume).id
    with service(base, volume, config='[defaults]\nretention = "1h"\n') as running:
        configure(base, '[defaults]\nretention = "0s"\nminimum_age = "0s"\nretension = "0s"\n')
        running.reload()
        outwait(running, volume)
        assert ids(volume) == {kept}
        log = running.log.read_text()
    assert "retension" in log
    assert "the old one stays in force" in log


def test_second_service_of_a_user_says_that_one_runs(base: Path, volume: Path) -> None:
    with service(base, volume):
        second = trashd("service", "run", "--config", str(base), "--volume", volume, STATE_DIRECTORY=str(base))
    assert second.code == Busy.exit_code
    assert "Another reaper service" in second.err
