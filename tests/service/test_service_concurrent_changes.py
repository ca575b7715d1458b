"""What goes wrong with one child, user or name, or by Mallory's doing, stays there: others are served."""

import errno
import json
import os
import resource
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import pytest
import trio

from fusefs.core.names import ContainerId
from fusefs.core.service_status import VolumePhase
from fusefs.linux.children import user_credentials
from fusefs.linux.kernel import Kernel
from fusefs.service.forker import Forker
from fusefs.service.messages import Page, ReadRecords
from fusefs.service.open_volume import open_volume
from fusefs.store.orphans import RetentionFromNow, write_retention
from fusefs.store.stage import SwapOptions
from tests.service.test_forker import all_answers, deputy_of, store_of
from tests.support.fuse_silent import silent_fuse
from tests.support.hostile_volume import ALICE, MALLORY, Shared, make_folder
from tests.support.make_trees import Dir, fill, make_tree
from tests.support.other_users import as_user, become
from tests.support.outside_tree import unmount_below
from tests.support.proc_stat import stat_of, status_of
from tests.support.real_filesystems import bind_mount, tmpfs_over
from tests.support.reap_process import beside
from tests.support.service_process import QUICK, SCALED, Service, audited, configure, events_in, service
from tests.support.small_orphans import EXPIRED, OTHER, TREE, orphan_of
from tests.support.store_verbs import assert_silent, own, recover_all, swap

pytestmark = [pytest.mark.needs("root"), pytest.mark.timeout(180)]


SLOWLY = '[defaults]\npaced = false\nmax_rate = "300/s"\n'
_PAUSE_S = 0.001
N_LOST = 5
"""So many children are killed one after the other; before each but the first their user waits, twice as long."""
HELD_UP_S = 50.0
"""A child that hangs is waited for longer than that."""
CPU_MOST = 0.5
"""Of one core: what the service may use while a user makes noise."""


def throw_large(shared: Shared, uid: int, n_files: int = 20_000) -> str:
    """An orphan that takes more than a minute at `SLOWLY`."""

    def act() -> str:
        return str(swap(fill(shared.home(uid) / "large", n_files), options=EXPIRED).id)

    return as_user(uid, act)


def child_of(running: Service, uid: int) -> int | None:
    for pid in running.children():
        with suppress(FileNotFoundError, ProcessLookupError):
            if os.stat(f"/proc/{pid}").st_uid == uid or status_of(pid)["Uid"][0] == str(uid):
                return pid
    return None


def signal_as(uid: int, pid: int, number: int) -> None:
    def act() -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    as_user(uid, act)


def n_lost(shared: Shared) -> int:
    return sum(event["event"] == "child-lost" for event in events_in(shared.base))


# Her own child


def stop_child(shared: Shared, running: Service, large: str) -> int:
    """Stop Mallory's child while it reaps; its pid."""
    running.until(lambda: shared.is_in(large, "reaping"))
    child = child_of(running, MALLORY)
    assert child is not None
    signal_as(MALLORY, child, signal.SIGSTOP)
    return child


def test_nobody_waits_until_a_stopped_child_is_replaced(shared: Shared) -> None:
    large = throw_large(shared, MALLORY)
    with shared.served(SLOWLY, SCALED._replace(silent_limit_s=3600.0)) as running:
        stop_child(shared, running, large)
        alices = shared.throw(ALICE)
        running.until(lambda: shared.is_gone(alices))
        assert n_lost(shared) == 0


def test_a_stopped_child_is_replaced(shared: Shared) -> None:
    large = throw_large(shared, MALLORY)
    with shared.served(SLOWLY) as running:
        stopped = stop_child(shared, running, large)
        running.until(lambda: child_of(running, MALLORY) not in (None, stopped))
        assert n_lost(shared) == 1
        configure(shared.base, QUICK)
        running.reload()
        running.until(lambda: shared.is_gone(large))


def test_what_a_stopped_child_was_told_is_told_to_the_next(shared: Shared) -> None:
    large = throw_large(shared, ALICE)  # while that goes on, idle children stay
    first = shared.throw(MALLORY, "first")
    with shared.served(SLOWLY) as running:
        running.until(lambda: shared.is_gone(first))
        idle = child_of(running, MALLORY)
        assert idle is not None
        signal_as(MALLORY, idle, signal.SIGSTOP)
        second = shared.throw(MALLORY, "second")
        as_user(MALLORY, lambda: fill(shared.home(MALLORY) / "d", 1).rename(shared.folder(MALLORY) / "drop/d"))
        running.until(lambda: shared.is_gone(second))
        running.until(lambda: not any((shared.folder(MALLORY) / "drop").iterdir()))
        assert not shared.is_gone(large)


def test_the_service_computes_next_to_nothing_while_a_child_works(shared: Shared) -> None:
    large = throw_large(shared, ALICE)
    with shared.served(SLOWLY) as running:
        running.until(lambda: shared.is_in(large, "reaping"))
        assert any(share_of_a_core(running, 0.5) < CPU_MOST / 2 for _ in range(3))
        assert shared.is_in(large, "reaping")


def test_a_child_killed_again_and_again_is_replaced_ever_more_seldom(shared: Shared) -> None:
    large = throw_large(shared, MALLORY)
    with shared.served(SLOWLY) as running:
        alices: list[str] = []
        began_s = time.monotonic()

        def kill() -> bool:
            pid = child_of(running, MALLORY)
            if pid is not None:
                signal_as(MALLORY, pid, signal.SIGKILL)
                alices.append(shared.throw(ALICE, f"job{len(alices)}"))
            return n_lost(shared) >= N_LOST

        running.until(kill)
        rests_s = SCALED.child_pause_s * (2 ** (n_lost(shared) - 1) - 1)
        assert time.monotonic() - began_s >= rests_s
        running.until(lambda: all(map(shared.is_gone, alices)))
        assert not shared.is_gone(large)


def test_a_folder_made_anew_is_watched_as_the_old_one_was(shared: Shared) -> None:
    with shared.served() as running:
        running.until_phase(shared.volume, VolumePhase.IDLE)
        shared.folder(MALLORY).rename(shared.folder(MALLORY).with_name("old"))
        thrown = shared.throw(MALLORY)
        running.until(lambda: shared.is_gone(thrown))
        running.until_phase(shared.volume, VolumePhase.IDLE)
        later = shared.throw(MALLORY, "later")
        running.until(lambda: shared.is_gone(later))


def test_a_child_of_a_folder_that_vanished_does_not_work_in_the_next_one(shared: Shared) -> None:
    large = throw_large(shared, ALICE)
    with shared.served(SLOWLY) as running:
        first = shared.throw(MALLORY)
        running.until(lambda: shared.is_gone(first))
        shared.throw(MALLORY, "kept", SwapOptions())
        running.until(lambda: running.volume(shared.volume).n_users == 2)  # Alice, Mallory
        shared.folder(MALLORY).rename(shared.folder(MALLORY).with_name("old"))
        running.until(lambda: running.volume(shared.volume).n_users == 1)
        second = shared.throw(MALLORY)
        running.until(lambda: shared.is_gone(second))
        assert not shared.is_gone(large)  # all that was one session, with her first child in it


# Mounts, which root makes for her: the service sees none that she makes in a namespace of her own


@pytest.mark.parametrize("where", ["", "orphans", "reaping"])
@pytest.mark.parametrize("is_early", [True, False])
def test_a_mount_over_her_folder_is_nobody_elses_trouble(shared: Shared, where: str, is_early: bool) -> None:
    mallorys, mount_point = shared.throw(MALLORY), shared.folder(MALLORY) / where
    with ExitStack() as mounted:
        if is_early:
            mounted.enter_context(bind_mount(shared.volume / "canary", mount_point))
        with shared.served() as running:
            if not is_early:
                running.until(lambda: shared.is_gone(mallorys))
                mounted.enter_context(bind_mount(shared.volume / "canary", mount_point))
            alices = shared.throw(ALICE)
            running.until(lambda: shared.is_gone(alices))
            shared.assert_untouched()
            mounted.close()
            running.reload()
            running.until(lambda: shared.is_gone(mallorys))
    assert recover_all(shared.volume) == []
    assert_silent(shared.volume)


SILENT = ["", "orphans", "reaping", "restoring", "drop", "pointers", "reserve", "stage", "quarantine"]


@pytest.mark.needs("fuse")
@pytest.mark.parametrize("is_early", [True, False])
def test_mounts_that_never_answer_hold_nobody_up(shared: Shared, is_early: bool) -> None:
    """One user for each part of a folder, and one for each part of an orphan; only their own requests hang."""
    hers = dict(enumerate([*SILENT, "ID", "ID/tree", "ID/tree/sub"], 13_000))
    for uid in hers:
        make_tree(shared.home(uid), Dir(owner=(uid, uid)))
        as_user(uid, lambda: make_folder(shared.volume))
    recover_all(shared.volume)
    with ExitStack() as mounted:

        def mount_all() -> None:
            for uid, part in hers.items():
                identifier = shared.throw(uid)
                place = shared.folder(uid) / part.replace("ID", f"orphans/{identifier}")
                mounted.enter_context(silent_fuse(place, uid))

        if is_early:
            mount_all()
            running = mounted.enter_context(shared.served())
        else:
            known = [shared.throw(uid, "first") for uid in hers]
            running = mounted.enter_context(shared.served())
            running.until(lambda: all(map(shared.is_gone, known)))
            with running.held():
                mount_all()
        for name in ("a", "b"):
            alices = shared.throw(ALICE, name)
            running.until(partial(shared.is_gone, alices), HELD_UP_S)


def test_a_mount_over_all_folders_ends_with_the_mount(shared: Shared) -> None:
    with shared.served() as running:
        running.until_phase(shared.volume, VolumePhase.IDLE)
        with tmpfs_over(shared.volume / ".trashd/u"):
            running.reload()
            running.until_phase(shared.volume, VolumePhase.GONE, VolumePhase.BROKEN)
        running.reload()
        alices = shared.throw(ALICE)
        running.until(lambda: shared.is_gone(alices))


def test_a_mount_inside_her_orphan_keeps_what_is_mounted(shared: Shared) -> None:
    kept = shared.throw(MALLORY, options=SwapOptions(retention_s=2))
    inside = shared.folder(MALLORY) / "orphans" / kept / "tree/sub"
    with ExitStack() as mounted:
        mounted.enter_context(bind_mount(shared.volume / "canary", inside))
        with shared.served() as running:
            running.until(lambda: shared.is_in(kept, "quarantine"))
            alices = shared.throw(ALICE)
            running.until(lambda: shared.is_gone(alices))
        shared.assert_untouched()
        unmount_below(shared.folder(MALLORY))


# Noise


@pytest.fixture
def busy(shared: Shared) -> Callable[[Callable[[int], None]], None]:
    """Runs an act of Mallory's again and again beside the service: Alice is served, and the service has rests."""

    def measure(act: Callable[[int], None]) -> None:
        def by_mallory(n: int) -> None:
            if n == 0:
                become(MALLORY)
            act(n)

        with shared.served() as running, beside(by_mallory, _PAUSE_S) as n_done:
            large = throw_large(shared, ALICE, 10_000)
            n_before = n_done()
            share = share_of_a_core(running, 1.0)
            running.until(lambda: n_done() > n_before)
            running.until(lambda: shared.is_gone(large))
            alices = shared.throw(ALICE)
            running.until(lambda: shared.is_gone(alices))
        print(f"{share:.0%} of a core")
        assert share < CPU_MOST

    return measure


def share_of_a_core(running: Service, seconds: float) -> float:
    """What the service's own process computes, for so long from now on."""
    began, used_s = time.monotonic(), cpu_s(running.process.pid)
    running.until(lambda: time.monotonic() > began + seconds)
    return (cpu_s(running.process.pid) - used_s) / (time.monotonic() - began)


def cpu_s(pid: int) -> float:
    fields = stat_of(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


Busy = Callable[[Callable[[int], None]], None]


def test_things_moved_in_and_out_of_a_drop_folder_all_day(shared: Shared, busy: Busy) -> None:
    drop, home = shared.folder(MALLORY) / "drop", shared.home(MALLORY)

    def act(n: int) -> None:
        (home / f"f{n}").touch()
        (home / f"f{n}").rename(drop / f"f{n}")
        with suppress(FileNotFoundError):
            (drop / f"f{n}").rename(home / "back")

    busy(act)


def test_names_made_and_removed_beside_the_users_folders_all_day(shared: Shared, busy: Busy) -> None:
    users = shared.volume / ".trashd/new"

    def act(n: int) -> None:
        (users / f"x{n}").mkdir()
        (users / f"x{n}").rmdir()

    busy(act)


def test_containers_renamed_between_states_all_day(shared: Shared, busy: Busy) -> None:
    folder = shared.folder(MALLORY)
    ids = [shared.throw(MALLORY, f"job{n}", SwapOptions(None)) for n in range(5)]
    states = ("orphans", "reaping", "quarantine", "stage", "restoring", "orphans", "drop")

    def act(n: int) -> None:
        identifier = ids[n % len(ids)]
        for state in states:
            with suppress(OSError):
                (folder / state / identifier).rename(folder / states[(n + 1) % len(states)] / identifier)

    busy(act)


def test_orphans_that_vanish_while_they_are_reaped_are_nobody_elses_trouble(shared: Shared) -> None:
    home, reaping = shared.home(MALLORY), shared.folder(MALLORY) / "reaping"
    large = throw_large(shared, MALLORY)
    with shared.served(SLOWLY) as running:
        running.until(lambda: shared.is_in(large, "reaping"))
        as_user(MALLORY, lambda: (reaping / large).rename(home / "mine"))
        thrown = [shared.throw(uid) for uid in (ALICE, MALLORY)]
        running.until(lambda: all(map(shared.is_gone, thrown)))


def test_events_that_were_lost_are_made_up_for_by_a_look(shared: Shared) -> None:
    n_queued = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    with shared.served() as running:
        running.until_phase(shared.volume, VolumePhase.IDLE)
        drop = shared.folder(MALLORY) / "drop"
        with running.held():
            for n in range(n_queued // 2 + 10):
                (drop / f"f{n % 2}").touch()
                (drop / f"f{n % 2}").rename(drop / f"g{n % 2}")
            alices = shared.throw(ALICE)
        running.until(lambda: shared.is_gone(alices))


def events_of(shared: Shared, identifier: str) -> list[str]:
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
        running.until(lambda: events_of(shared, thrown) == ["swapped"])
    with shared.served() as running:
        running.until_phase(shared.volume, VolumePhase.IDLE)

        def pin() -> None:
            with own(shared.volume) as folder:
                write_retention(folder, ContainerId(thrown), RetentionFromNow(None))

        as_user(ALICE, pin)
        marker = shared.throw(ALICE, "marker")
        running.until(lambda: shared.is_gone(marker))
        assert events_of(shared, thrown) == ["swapped"]


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
                seen += [one.id for one in page.entries]
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
                    await forker.fork(folder, user_credentials(OTHER))
                resource.prlimit(forker.pid, resource.RLIMIT_NOFILE, limits)
                child_handle = await forker.fork(folder, user_credentials(OTHER))
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
        assert "internal error in trashd" not in running.log.read_text()
        assert len(gone) < 150


def test_a_volume_has_its_policy_by_whatever_path_it_is_named(shared: Shared) -> None:
    kept = shared.throw(ALICE)
    config = f'{QUICK}[[volume]]\npath = "{shared.volume}"\nkeep = ["/*"]\n'
    by_the_way = shared.base / "link"
    by_the_way.symlink_to(shared.volume)
    with service(shared.base, by_the_way, config=config) as running:
        running.until_phase(shared.volume, VolumePhase.IDLE)
        assert not shared.is_gone(kept)
