"""Volumes come and go under the running service: it holds none busy, and takes none for another."""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from fusefs.core.service_status import VolumePhase
from fusefs.linux.fd import Fd
from fusefs.linux.mount_calls import clone_tree, move_mount
from fusefs.mount.places.runtime_dir import lock_directory
from tests.support.background_mounts import backing_of, kill_daemon, mount, our_mount, workbench
from tests.support.make_trees import roomy_volume
from tests.support.real_filesystems import bind_mount, loop_volume, tmpfs_volume, unmount
from tests.support.service_process import QUICK, SCALED, SLOW, Service, begin_large, events_in, outwait, service
from tests.support.small_orphans import EXPIRED, ids, orphan_in
from tests.support.store_verbs import assert_silent, init, tmpfs_store, tree_of
from tests.support.trashd_command import done_well, trashd

pytestmark = pytest.mark.needs("root")


@contextmanager
def two_places() -> Iterator[tuple[Path, Path]]:
    with tmpfs_store() as volume, tmpfs_volume() as elsewhere:
        (elsewhere / "place").mkdir()
        yield volume, elsewhere / "place"


def open_on(running: Service, volume: Path) -> list[str]:
    found = []
    for pid in (running.process.pid, running.forker()):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # it was closed meanwhile
                found.append(os.readlink(fd))
    return [target for target in found if target.startswith(str(volume))]


def has_store_watched(running: Service) -> bool:
    """Whether it would be told of what falls in."""
    for fd in Path(f"/proc/{running.process.pid}/fdinfo").iterdir():
        with suppress(FileNotFoundError):
            if "inotify wd:" in fd.read_text():
                return True
    return False


@pytest.mark.needs("loop")
@pytest.mark.parametrize("fs_type", ["ext4", pytest.param("xfs", marks=pytest.mark.needs("xfs"))])
def test_idle_service_keeps_no_volume_busy(base: Path, fs_type: str) -> None:
    with loop_volume(fs_type) as volume:
        init(volume)
        orphan_in(volume, "due", EXPIRED)
        orphan_in(volume, "kept")
        with service(base, volume) as running:
            running.until(lambda: len(ids(volume)) == 1)
            running.until(lambda: running.is_alone() and not open_on(running, volume))
            assert has_store_watched(running)
            assert not unmount(volume), "it was busy"


def test_unmounted_volume_is_gone_and_served_again_when_it_is_back(base: Path) -> None:
    with two_places() as (volume, place), ExitStack() as mounted:
        mounted.enter_context(bind_mount(volume, place))
        with service(base, place) as running:
            running.until_phase(place, VolumePhase.IDLE)
            mounted.close()
            running.until_phase(place, VolumePhase.GONE)
            identifier = orphan_in(volume, options=EXPIRED).id
            with bind_mount(volume, place):
                running.until(lambda: identifier not in ids(volume))
                running.stop()


def test_unmounted_volume_has_neither_its_old_free_space_nor_that_of_the_disk_below(base: Path) -> None:
    often = SCALED._replace(space_pause_s=0.02)
    with two_places() as (volume, place), ExitStack() as mounted:
        orphan_in(volume)
        st = os.statvfs(place)
        with (place / "full").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, st.f_bavail * st.f_frsize)
        mounted.enter_context(bind_mount(volume, place))
        with service(base, place, timers=often) as running:
            running.until(lambda: running.volume(place).free_bytes)
            running.until_phase(place, VolumePhase.IDLE)
            mounted.close()
            gone = running.until_phase(place, VolumePhase.GONE)
            running.stop()
        assert (gone.is_known, gone.free_bytes, gone.total_bytes, gone.free_trend_bytes_per_s) == (False, *[None] * 3)
        assert "low-space" not in {event["event"] for event in events_in(base)}


def test_service_for_all_volumes_finds_one_that_is_mounted_later(base: Path) -> None:
    """With its store: one that is made where something is mounted already is found when `trashd init` says so."""
    with tmpfs_store() as volume, Fd(os.open(volume, os.O_PATH)) as fd:
        orphan_in(volume, options=EXPIRED)
        hidden = clone_tree(fd)
    place = base / "later"
    place.mkdir()
    with hidden, service(base) as running, Fd(os.open(place, os.O_PATH)) as fd:
        move_mount(hidden, fd)
        try:
            running.until(lambda: not ids(place))
            running.stop()
        finally:
            unmount(place)


def test_another_volume_at_its_place_is_another_one(base: Path) -> None:
    with two_places() as (volume, place), tmpfs_store() as other, ExitStack() as mounted:
        mounted.enter_context(bind_mount(volume, place))
        kept = {orphan_in(volume).id, orphan_in(other).id}
        with service(base, place) as running:
            before = running.until_phase(place, VolumePhase.IDLE)
            with running.held():  # it sees both changes at once, and the second mount mostly has the id of the first
                mounted.close()
                mounted.enter_context(bind_mount(other, place))
            outwait(running, other)
            running.until(lambda: running.volume(place).id == volume_id(other))
            assert before.id == volume_id(volume)
        assert ids(volume) | ids(other) == kept


def test_another_volume_over_it_in_the_middle_of_a_reap_is_served_next(base: Path) -> None:
    with roomy_volume("tmpfs") as volume, tmpfs_store() as other, service(base, volume, config=SLOW) as running:
        begin_large(running, volume, 1000)
        kept = orphan_in(other).id
        with bind_mount(other, volume):
            running.until(lambda: running.volume(volume).id == volume_id(other))
            outwait(running, other)
            assert ids(other) == {kept}


def volume_id(volume: Path) -> str:
    return str(json.loads((volume / ".trashd/volume.json").read_text())["id"])


@pytest.mark.needs("fuse")
def test_volume_mounted_over_itself_before_the_service_is_served_by_its_backing(base: Path) -> None:
    with workbench() as bench:
        init(bench / "source")
        orphan_in(bench / "source", "due", EXPIRED)
        mount(bench / "source")
        assert our_mount(bench / "source") is not None
        with service(base, bench / "source") as running:
            running.until(lambda: running.volume(bench / "source").n_reaped)
            running.until_phase(bench / "source", VolumePhase.IDLE)
            running.stop()
        assert_silent(bench / "source")


@pytest.mark.needs("fuse")
def test_volume_mounted_over_itself_while_it_is_served_goes_on_being_served(base: Path) -> None:
    with workbench() as bench:
        init(bench / "source")
        with service(base, bench / "source") as running:
            running.until_phase(bench / "source", VolumePhase.IDLE)
            mount(bench / "source")
            orphan_in(bench / "source", "due", EXPIRED)
            running.until(lambda: running.volume(bench / "source").n_reaped)
            running.until_phase(bench / "source", VolumePhase.IDLE)
            running.stop()
        assert_silent(bench / "source")


@pytest.mark.needs("fuse")
@pytest.mark.parametrize("is_over_itself", [True, False])
def test_volume_whose_mount_lost_its_daemon_is_not_served_by_another_name(base: Path, is_over_itself: bool) -> None:
    """Its rules are known by the mount's path: by that of its backing tree it would have those of any volume."""
    with workbench() as bench, ExitStack() as mounted:
        source, shown = bench / "source", bench / ("source" if is_over_itself else "target")
        init(source)
        if not is_over_itself:
            mounted.enter_context(bind_mount(source, source))
        places_of = [source] if is_over_itself else [source, shown]
        mount(*places_of)
        kept = f'[[volume]]\npath = "{shown}"\nretention = "9d"\n'
        with service(base, config=f'poll = "1s"\n{QUICK}retention = "0s"\nminimum_age = "0s"\n{kept}') as running:
            identifier = orphan_in(source, "kept").id
            running.until(lambda: running.volume(shown).n_orphans == 1)
            kill_daemon(shown)
            running.until_phase(shown, VolumePhase.GONE)
            with tmpfs_store() as other:  # once it is served, the service has seen all others
                orphan_in(other, "due", EXPIRED)
                running.until(lambda: not ids(other))
            assert identifier in ids(backing_of(shown))
            mount("--replace", *places_of)
            running.until_phase(shown, VolumePhase.IDLE)
            assert identifier in ids(shown)
            running.stop()
        assert_silent(shown)


@pytest.mark.needs("fuse")
def test_volume_whose_mount_is_being_replaced_is_not_served_by_another_name(base: Path) -> None:
    """The dead mount is detached before the new one stands; its daemon has claimed the mount point by then."""
    with workbench() as bench, ExitStack() as mounted:
        source, shown = bench / "source", bench / "target"
        init(source)
        mounted.enter_context(bind_mount(source, source))
        mount(source, shown)
        kept = f'[[volume]]\npath = "{shown}"\nretention = "9d"\n'
        with service(base, config=f'poll = "1s"\n{QUICK}retention = "0s"\nminimum_age = "0s"\n{kept}') as running:
            identifier = orphan_in(source, "kept").id
            running.until(lambda: running.volume(shown).n_orphans == 1)
            kill_daemon(shown)
            running.until_phase(shown, VolumePhase.GONE)
            with lock_directory(os.fsencode(shown)):
                assert not unmount(shown), "it was busy"
                with tmpfs_store() as other:  # once it is served, the service has seen all others
                    orphan_in(other, "due", EXPIRED)
                    running.until(lambda: not ids(other))
                assert identifier in ids(source)
            running.until(lambda: running.knows(source))
            running.until_phase(source, VolumePhase.UNPROVEN)  # no mount shows it any more: its rules are those of one
            assert identifier in ids(source)
            running.stop()


@pytest.mark.needs("fuse")
@pytest.mark.timeout(180)
def test_a_volume_is_served_by_its_own_path_soon_after_its_mount_is_gone(base: Path) -> None:
    """Whichever search for stores is the first to see that the daemon has ended; the next poll is ten minutes away."""
    with workbench() as bench:
        source, shown = bench / "source", bench / "target"
        init(source)
        with bind_mount(source, source):
            for _ in range(3):
                mount(source, shown)
                with service(base, config=QUICK) as running:
                    running.until_phase(shown, VolumePhase.IDLE)
                    # After this pause, a search begins with the unmount, and the daemon ends later.
                    time.sleep(2 * SCALED.find_pause_s)
                    done_well("umount", shown)
                    running.until(partial(running.knows, source))


@pytest.mark.needs("fuse")
def test_a_store_that_a_mount_shows_elsewhere_is_one_volume_until_its_disk_is_gone(base: Path) -> None:
    with workbench() as bench, tmpfs_volume() as volume:
        source, shown = volume / "source", bench / "target"
        source.mkdir()
        with service(base, config=QUICK) as running:
            for _ in range(2):
                mount(source, shown)  # the first one makes the store
                running.until(lambda: running.knows(shown) and not running.knows(source))
                running.until_phase(shown, VolumePhase.IDLE)
                running.until(lambda: trashd("umount", shown).code == 0)  # the service may be using it
                running.until(lambda: running.knows(source) and not running.knows(shown))
                running.until_phase(source, VolumePhase.IDLE)
            unmount(volume)
            running.until_phase(source, VolumePhase.GONE)


@pytest.mark.needs("fuse")
def test_the_backing_tree_that_a_dead_mount_leaves_in_run_trashd_is_not_a_volume(base: Path) -> None:
    """After `umount` of the dead mount, and for a moment during `trashd mount --replace`, only the clone stands."""
    with workbench() as bench:
        source = bench / "source"
        init(source)
        mount(source)
        with service(base, config=QUICK) as running:
            running.until_phase(source, VolumePhase.IDLE)
            kill_daemon(source)
            clone = backing_of(source)
            assert not unmount(source), "it was busy"
            with tmpfs_store() as other:  # once it is served, the service has seen all others
                orphan_in(other, "due", EXPIRED)
                running.until(lambda: not ids(other))
            assert (clone / ".trashd").exists()
            assert not running.knows(clone)
            mount("--replace", source)
            running.until_phase(source, VolumePhase.IDLE)
            (source / "old").mkdir()
            (source / "old").rename(source / ".trashd/drop/old")
            running.until(lambda: any(event["event"] == "removed" for event in events_in(base)))
            running.stop()
        reported = [event["volume"] for event in events_in(base) if event["event"] == "removed"]
        assert reported == [str(source)]


def test_volume_of_another_reaper_is_left_to_it_and_taken_over_when_it_lets_go(base: Path, volume: Path) -> None:
    with service(base, volume) as running:
        running.until_phase(volume, VolumePhase.IDLE)
        with (volume / ".trashd/reaper.lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            first = orphan_in(volume, "first", EXPIRED).id
            running.until_phase(volume, VolumePhase.ELSEWHERE)
            assert ids(volume) == {first}
        orphan_in(volume, "second", EXPIRED)
        running.until(lambda: not ids(volume))


def test_volume_with_another_id_in_the_middle_is_left_alone(base: Path) -> None:
    with roomy_volume("tmpfs") as volume, service(base, volume, config=SLOW) as running:
        begin_large(running, volume, 2000)
        file = volume / ".trashd/volume.json"
        text = file.read_text()
        with running.held():
            swapped = orphan_in(volume, "due", EXPIRED)
            file.write_text(json.dumps({**json.loads(text), "id": "0" * 32}))
        running.until_phase(volume, VolumePhase.BROKEN)
        assert (tree_of(swapped) / "a").exists()
        file.write_text(text)
        running.reload()
        running.until(lambda: not ids(volume))


def test_store_whose_volume_json_is_removed_is_left_alone(base: Path, volume: Path) -> None:
    tree = tree_of(orphan_in(volume, options=EXPIRED))
    with tree.with_name("record.json").open("rb") as record:
        fcntl.flock(record, fcntl.LOCK_SH)
        with service(base, volume) as running:
            outwait(running, volume)
            aside = (volume / ".trashd/volume.json").rename(volume / "aside")
            fcntl.flock(record, fcntl.LOCK_UN)
            running.until_phase(volume, VolumePhase.BROKEN)
            assert (tree / "a").exists()
            aside.rename(volume / ".trashd/volume.json")
            running.reload()
            running.until(lambda: not ids(volume))


def test_store_that_is_removed_and_made_again_is_served_at_once(base: Path, volume: Path) -> None:
    """What the service finds gone it looks at again in ten minutes by itself."""
    with service(base, volume) as running:
        running.until_phase(volume, VolumePhase.IDLE)
        shutil.rmtree(volume / ".trashd")
        running.until_phase(volume, VolumePhase.GONE)
        done_well("init", volume)
        running.until_phase(volume, VolumePhase.IDLE)
        outwait(running, volume)


def test_store_that_is_there_and_not_roots_any_more_is_no_store_that_is_gone(base: Path, volume: Path) -> None:
    with service(base, volume) as running:
        running.until_phase(volume, VolumePhase.IDLE)
        (volume / ".trashd/u").chmod(0o777)
        running.reload()
        assert "untrusted trash store" in running.until_phase(volume, VolumePhase.BROKEN).why
        assert trashd("status").code == 14
        (volume / ".trashd/u").chmod(0o755)
        done_well("init", volume)
        running.until_phase(volume, VolumePhase.IDLE)
        outwait(running, volume)


def test_several_volumes_are_served_beside_each_other(base: Path, volume: Path) -> None:
    with roomy_volume("tmpfs") as other, service(base, volume, other, config=SLOW) as running:
        large = begin_large(running, other)
        outwait(running, volume)
        assert ids(other) == {large}
