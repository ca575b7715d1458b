"""The service as people run it: what is due goes by policy, it tells of itself, and ends without a trace."""

import fcntl
import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from fusefs.core.errors import Busy
from fusefs.core.service_status import VolumePhase
from fusefs.store.stage import SwapOptions
from tests.support.foreground_mount import trashd_mount
from tests.support.hostile_volume import ALICE, MALLORY, Shared
from tests.support.make_trees import fill, make_tree, roomy_volume, snapshot
from tests.support.other_users import as_user
from tests.support.peak_usage import peak_of
from tests.support.proc_stat import status_of
from tests.support.real_filesystems import tmpfs_volume, unmount
from tests.support.reap_process import is_claimed
from tests.support.replaced_package import ReplacedPackage, modules_ever
from tests.support.service_process import (
    QUICK,
    SCALED,
    SLOW,
    Service,
    aged,
    audited,
    begin_large,
    configure,
    next_due_s,
    outwait,
    service,
)
from tests.support.small_orphans import EXPIRED, ids, many_orphans, orphan_in, orphan_of, victim_in
from tests.support.store_verbs import assert_silent, entries, folder_of, init, restore, swap
from tests.support.trash_without_walk import gather
from tests.support.trashd_command import EXECUTED, done_well, trashd

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
    assert "the old one stays in use" in log


def test_second_service_of_a_user_says_that_one_runs(base: Path, volume: Path) -> None:
    with service(base, volume):
        second = trashd("service", "run", "--config", str(base), "--volume", volume, STATE_DIRECTORY=str(base))
    assert second.code == Busy.exit_code
    assert "another reaper service of this user is running" in second.err


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


@pytest.mark.parametrize(
    ("limit", "is_pinned", "why"),
    [
        ('free_space = { low = "90%", high = "95%" }\n', False, "space is low; no orphan is deleted early before "),
        ('quota = { bytes = "5M" }\n', False, "the quota is exceeded; no orphan is deleted early before "),
        ('quota = { bytes = "5M" }\n', True, "the quota is exceeded, but all orphans are pinned or named by keep"),
    ],
)
def test_an_idle_volume_with_too_much_trash_says_why_none_is_deleted(
    base: Path, volume: Path, limit: str, is_pinned: bool, why: str
) -> None:
    aged(volume, "young", 60, 10, SwapOptions(retention_s=None) if is_pinned else None)
    with service(base, volume, config=QUICK + limit) as running:
        running.until(lambda: running.volume(volume).why.startswith(why))
        running.until_phase(volume, VolumePhase.IDLE)
        assert f"idle: {why}" in trashd("status").out


def test_quota_holds_for_what_comes_later_too(base: Path, volume: Path) -> None:
    with service(base, volume, config="[defaults]\n" + AT_ANY_AGE + 'quota = { bytes = "15M" }\n') as running:
        first = aged(volume, "first", HOUR_S, 10)
        outwait(running, volume)
        assert ids(volume) == {first}
        second = aged(volume, "second", 0, 10)
        running.until(lambda: ids(volume) == {second})


def test_quota_holds_as_soon_as_orphans_are_old_enough(base: Path, volume: Path) -> None:
    config = '[defaults]\nminimum_age = "10s"\nquota = { bytes = "15M" }\n'
    with service(base, volume, config=config) as running:
        aged(volume, "first", 1, 10)
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
        assert running.until_phase(volume, VolumePhase.WINDOW).why.startswith("reaping is allowed only during")
        assert ids(volume) == {identifier}
        assert not running.volume(volume).is_known
        assert "backlog   unknown" in done_well("status").out
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
        assert "1 not read yet" in done_well("status").out


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


@pytest.mark.needs("fuse")
def test_a_mount_can_be_unmounted_while_an_orphan_is_reaped(base: Path) -> None:
    with (
        roomy_volume("tmpfs") as volume,
        trashd_mount(volume, expect_end=True) as mounted,
        service(base, volume, config=SLOW) as running,
    ):
        identifier = begin_large(running, volume)
        done_well("umount", mounted.path)
        assert is_claimed(volume, identifier)


MIB = 1024
HOUR_NS = 3600 * 10**9
MANY = 20_000
MORE_KIB, ALL_KIB = 16 * MIB, 120 * MIB
"""What very many orphans may need beyond what few do, in the service's own process; and all its processes together."""


def processes(running: Service) -> list[int]:
    return [running.process.pid, running.forker(), *running.children()]


def test_status_of_an_idle_volume_says_what_is_there_and_when_the_next_is_due(base: Path, volume: Path) -> None:
    orphan_in(volume, "one")
    orphan_in(volume, "two")
    with service(base, volume) as running:
        told = running.until_phase(volume, VolumePhase.IDLE)
    assert (told.n_users, told.n_orphans, told.n_due, told.n_quarantined) == (1, 2, 0, 0)
    assert told.next_due_ns is not None
    assert abs(told.next_due_ns - time.time_ns() - 24 * HOUR_NS) < HOUR_NS
    assert (told.filesystem, told.current, told.faults) == ("tmpfs", (), ())
    assert told.total_bytes == 64 << 20


def test_only_users_who_have_orphans_are_counted(shared: Shared) -> None:
    with shared.served() as running:
        thrown = [shared.throw(ALICE, name, SwapOptions()) for name in ("one", "two")]
        running.until(lambda: running.volume(shared.volume).n_orphans == len(thrown))
        assert running.volume(shared.volume).n_users == 1  # not root, whose directory is empty


def test_status_of_a_reap_says_whose_orphan_it_is_and_how_far_it_is(base: Path) -> None:
    with roomy_volume("tmpfs") as volume, service(base, volume, config=SLOW) as running:
        identifier = begin_large(running, volume)
        running.until(lambda: running.volume(volume).removed_entries)
        told = running.volume(volume)
        assert told.phase in (VolumePhase.REAPING, VolumePhase.YIELDING)
        (current,) = told.current
        assert (current.uid, told.n_due, told.n_orphans) == (0, 1, 1)
        assert identifier.endswith(current.id_end)
        # Now and then it rests, and may nothing: not each look shows it.
        running.until(lambda: running.volume(volume).tempo_entries_per_s == 1000)


def test_status_counts_what_is_done(base: Path, volume: Path) -> None:
    with service(base, volume) as running:
        outwait(running, volume)
        outwait(running, volume)
        running.until(lambda: counts(running, volume) == (2, 10, 0))


def counts(running: Service, volume: Path) -> tuple[int, int, int]:
    """Orphans and entries that are gone, and what is left."""
    told = running.volume(volume)
    return told.n_reaped, told.removed_entries, told.n_orphans


def test_what_came_while_no_service_ran_is_told_once(base: Path, volume: Path) -> None:
    with service(base, volume) as running:
        running.stop()
    identifier = orphan_in(volume).id
    for _ in range(2):
        with service(base, volume) as running:
            outwait(running, volume)
            running.stop()
    assert [event["event"] for event in audited(base) if event["id"] == identifier] == ["found"]


def test_idle_service_sleeps(base: Path, volume: Path) -> None:
    orphan_in(volume)
    with service(base, volume) as running:
        running.until(lambda: is_asleep(running) and n_wakeups_in(running, 1.0) == 0)


def is_asleep(running: Service) -> bool:
    """Whether no child works for it any more, and it has told so."""
    observed_status = running.read_status()
    return observed_status is not None and observed_status.age_s > 1.0 and not running.children()


def n_wakeups_in(running: Service, seconds: float) -> int:
    """How often threads of the service and its forker go to sleep, for so long from now on."""
    pids, ends_at = processes(running), time.monotonic() + seconds
    before = n_sleeps(pids)
    running.until(lambda: time.monotonic() > ends_at)
    return n_sleeps(pids) - before


def n_sleeps(pids: list[int]) -> int:
    found = 0
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # that thread was not needed any more
                found += int(status_of(pid, f"task/{thread.name}/status")["voluntary_ctxt_switches"][0])
    return found


def pss_kib(pid: int) -> int:
    """The memory of a process, its share of what others have too; 0 if it has ended."""
    try:
        return int(status_of(pid, "smaps_rollup")["Pss"][0])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def test_very_many_orphans_need_little_memory(base: Path) -> None:
    with tmpfs_volume("1g", ["nr_inodes=500k"]) as volume:
        init(volume)
        with service(base, volume, command=EXECUTED) as running:
            outwait(running, volume)
            few_kib = peak_of(running.process.pid)
            running.stop()
        many_orphans(volume, MANY, retention_s=3600)
        with service(base, volume, command=EXECUTED) as running:
            running.until(lambda: running.volume(volume).n_orphans == MANY)
            outwait(running, volume)
            assert peak_of(running.process.pid) - few_kib < MORE_KIB
            assert sum(map(pss_kib, processes(running))) < ALL_KIB
            running.until(lambda: counts(running, volume)[::2] == (1, MANY))  # the marker came and is gone
            (status_result,) = done_well("status", "--json").objects()
            assert status_result["volumes"][0]["n_orphans"] == MANY


USER = 12_345


def test_a_running_service_loads_no_module_of_a_new_version(base: Path, volume: Path, tmp_path: Path) -> None:
    package = ReplacedPackage(tmp_path)
    orphan_in(volume, "kept")
    with service(base, volume, command=package.command) as running:
        had = package.replace()
        assert modules_ever("fusefs.service.service") <= had
        configure(base, f'{QUICK}[metrics]\ntextfile = "{base}/metrics"\nhttp = "127.0.0.1:0"\n')
        running.reload()
        of_root = orphan_in(volume, "mine", options=EXPIRED).id
        of_user = orphan_of(USER, volume, EXPIRED).id
        running.until(lambda: not {of_root, of_user} & ids(volume))
        victim_in(volume).rename(next((volume / ".trashd/u/0").glob("drop")) / "job")
        running.until(lambda: any("job" in name for name in ids(volume)))
        done_well("pause", volume)
        done_well("resume", volume)
        assert package.imported_since() == []
    assert package.imported_since() == []
