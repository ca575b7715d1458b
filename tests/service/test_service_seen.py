"""What the running service tells of itself, and what it costs a machine where there is nothing to do, or very much."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import pytest

from fusefs.core.service_status import VolumePhase
from tests.support.many_files import roomy_volume
from tests.support.peak_usage import peak_of
from tests.support.proc_stat import status_of
from tests.support.real_filesystems import tmpfs_volume
from tests.support.service_process import Service, service
from tests.support.small_orphans import many_orphans, orphan_in
from tests.support.store_verbs import init
from tests.support.trashd_command import EXECUTED, done_well
from tests.support.volume_under_service import SLOW, audited, begin_large, outwait

pytestmark = pytest.mark.needs("root")

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
    seen = running.seen()
    return seen is not None and seen.age_s > 1.0 and not running.children()


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
            (told,) = done_well("status", "--json").objects()
            assert told["volumes"][0]["n_orphans"] == MANY
