"""What goes wrong with one child, one user or one name stays there: the volume and the others are served on."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
from pathlib import Path

import pytest
import trio

from fusefs.core.names import ContainerId
from fusefs.core.service_status import VolumePhase
from fusefs.linux.children import person
from fusefs.linux.kernel import Kernel
from fusefs.service.forker import Forker
from fusefs.service.messages import Page, ReadRecords
from fusefs.service.open_volume import open_volume
from fusefs.store.orphans import KeepFor, keep
from fusefs.store.stage import SwapOptions
from tests.service.test_forker import all_answers, deputy_of, store_of
from tests.service.test_service_concurrent_changes import SLOWLY, child_of, signal_as, throw_large
from tests.support.hostile_volume import ALICE, MALLORY, Shared
from tests.support.make_trees import make_tree
from tests.support.other_users import as_user
from tests.support.reap_process import beside
from tests.support.service_process import QUICK, service
from tests.support.small_orphans import EXPIRED, OTHER, TREE, orphan_of
from tests.support.store_verbs import own, swap
from tests.support.volume_under_service import audited

pytestmark = [pytest.mark.needs("root"), pytest.mark.timeout(180)]


def events(shared: Shared, identifier: str) -> list[str]:
    return [event["event"] for event in audited(shared.base) if event["id"] == identifier]


def test_a_child_that_does_not_park_in_time_is_no_fault_of_the_volumes(shared: Shared) -> None:
    large = throw_large(shared, MALLORY)
    with shared.served(SLOWLY) as running:
        running.until(lambda: shared.is_in(large, "reaping"))
        child = child_of(running, MALLORY)
        assert child is not None
        signal_as(MALLORY, child, signal.SIGSTOP)
        running.reload()
        alices = shared.throw(ALICE)
        running.until(lambda: shared.is_gone(alices))
        assert running.volume(shared.volume).phase is not VolumePhase.BROKEN


def test_names_like_hers_that_come_and_go_keep_nobody_from_being_served(shared: Shared) -> None:
    name = shared.folder(ALICE).with_name(f"{ALICE}.x")

    def act(n: int) -> None:
        if not n:
            os.setresuid(MALLORY, MALLORY, MALLORY)
        name.mkdir()
        name.rmdir()

    with shared.served() as running:
        running.until_phase(shared.volume, VolumePhase.IDLE)
        with beside(act, 0.001):
            alices = shared.throw(ALICE)
            running.until(lambda: shared.is_gone(alices))


def test_a_keep_of_what_an_earlier_service_knew_is_no_swap(shared: Shared) -> None:
    with shared.served() as running:
        thrown = shared.throw(ALICE, options=SwapOptions(retention_s=3600))
        running.until(lambda: events(shared, thrown) == ["swapped"])
    with shared.served() as running:
        running.until_phase(shared.volume, VolumePhase.IDLE)

        def pin() -> None:
            with own(shared.volume) as folder:
                keep(folder, ContainerId(thrown), KeepFor(None))

        as_user(ALICE, pin)
        marker = shared.throw(ALICE, "marker")
        running.until(lambda: shared.is_gone(marker))
        assert events(shared, thrown) == ["swapped"]


def test_a_page_of_long_ids_and_unreadable_records_fits_into_a_packet(shared: Shared) -> None:
    volume = shared.volume

    def plant() -> None:
        orphans = shared.folder(ALICE) / "orphans"
        for n in range(300):
            container = orphans / f"20240101T000000.000Z-{'x' * 120}-{n:012x}"
            container.mkdir()
            (container / "record.json").write_text(json.dumps({"format": "\x1b" * 5000}))

    as_user(ALICE, plant)

    async def body() -> list[str]:
        async with deputy_of(ALICE, volume) as child_handle:
            seen: list[str] = []
            last = ""
            while True:
                (page,) = await all_answers(child_handle, ReadRecords(store_of(volume), after=last))
                assert isinstance(page, Page)
                seen += [one.id for one in page.seen]
                last = page.last
                if not last:
                    return seen

    assert len(trio.run(body)) == 300


def test_forker_that_can_not_fork_says_why_and_lives(volume: Path) -> None:
    orphan_of(OTHER, volume, SwapOptions())

    async def body() -> None:
        with Forker() as forker, open_volume(Kernel(), os.fsencode(volume)) as opened:
            folder = opened.folder(OTHER)
            assert folder is not None
            with folder:
                limits = resource.prlimit(forker.pid, resource.RLIMIT_NOFILE)
                resource.prlimit(forker.pid, resource.RLIMIT_NOFILE, (0, limits[1]))
                with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
                    await forker.fork(folder, person(OTHER))
                resource.prlimit(forker.pid, resource.RLIMIT_NOFILE, limits)
                child_handle = await forker.fork(folder, person(OTHER))
                assert os.path.exists(f"/proc/{child_handle.pid}")
                child_handle.close()

    trio.run(body)


def test_all_that_was_reaped_is_told_when_the_service_is_stopped_in_the_middle(shared: Shared) -> None:
    def throw() -> list[str]:
        jobs = [make_tree(shared.home(MALLORY) / f"job{n}", TREE) for n in range(150)]
        return [str(swap(job, options=EXPIRED).id) for job in jobs]

    thrown = as_user(MALLORY, throw)
    with service(shared.base, shared.volume, config=QUICK + 'max_rate = "50/s"\n') as running:
        running.until(lambda: sum(map(shared.is_gone, thrown)) > 10)
        running.stop()
        gone = set(filter(shared.is_gone, thrown))
        assert gone == {event["id"] for event in audited(shared.base) if event["event"] == "reaped"}
        assert "fault in trashd" not in running.log.read_text()
        assert len(gone) < 150


def test_a_volume_has_its_policy_by_whatever_path_it_is_named(shared: Shared) -> None:
    kept = shared.throw(ALICE)
    config = f'{QUICK}[[volume]]\npath = "{shared.volume}"\nkeep = ["/*"]\n'
    by_the_way = shared.base / "link"
    by_the_way.symlink_to(shared.volume)
    with service(shared.base, by_the_way, config=config) as running:
        running.until_phase(shared.volume, VolumePhase.IDLE)
        assert not shared.is_gone(kept)
