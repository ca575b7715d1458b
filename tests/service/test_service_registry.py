"""Stores in users' homes, which no mount point shows: both services serve them by what their owners registered."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from fusefs.core.service_status import VolumePhase
from fusefs.linux.runtime_directories import SYSTEM_RUNTIME
from tests.support.fuse_watchdog import device_for_all
from tests.support.make_trees import Dir, make_tree
from tests.support.real_filesystems import tmpfs_volume, unmount
from tests.support.service_process import QUICK, Service, service
from tests.support.store_verbs import users_own
from tests.support.trashd_command import done_well
from tests.support.user_homes import ALICE, BOB, SOON, outlasts, own_stores, phases, registry_of, thrown, trashd_as

pytestmark = [pytest.mark.needs("root"), pytest.mark.usefixtures("home")]

OFTEN = f'poll = "1s"\n{QUICK}'


@contextmanager
def service_of(uid: int, home: Path, config: str = QUICK) -> Iterator[Service]:
    base = make_tree(home / "service", Dir(owner=(uid, uid)))
    told = {"HOME": str(home), "XDG_STATE_HOME": "", "STATE_DIRECTORY": str(base)}
    with service(base, config=config, environment=told, user=uid) as running:
        yield running


def test_a_store_that_is_registered_later_is_served_when_it_is(base: Path, home: Mapping[int, Path]) -> None:
    thrown(ALICE, home[ALICE])
    with tmpfs_volume() as other, service(base) as running:
        running.until(lambda: own_stores(running))
        os.chown(other, ALICE, ALICE)
        place = make_tree(other / "place", Dir(owner=(ALICE, ALICE)))
        container = thrown(ALICE, place, *SOON)  # with a registry of its own, which root was not told of
        done = trashd_as(ALICE, home[ALICE], "init", container.parents[4])
        assert done.code == 0, done
        running.until(lambda: not container.exists())


def test_every_users_own_store_is_served_although_they_have_logged_out(base: Path, home: Mapping[int, Path]) -> None:
    kept = thrown(ALICE, home[ALICE])
    containers = [thrown(uid, home[uid], *SOON) for uid in (ALICE, BOB)]
    with service(base) as running:
        running.until(lambda: not any(container.exists() for container in containers))
        running.until(lambda: {one.owner for one in own_stores(running)} == {ALICE, BOB})  # told a breath later
        assert kept.exists()


def test_root_makes_nothing_in_a_users_store(base: Path, home: Mapping[int, Path]) -> None:
    container = thrown(ALICE, home[ALICE], *SOON)
    with service(base, config="") as running:  # paced: it probes the disk where it may write
        running.until(lambda: not container.exists())
        outlasts(running, ALICE, home[ALICE], thrown(ALICE, home[ALICE]))
    store = container.parents[3]
    assert {path.stat().st_uid for path in (store, *store.rglob("*"))} == {ALICE}
    assert not (store / "reaper.lock").exists()


def test_a_copy_of_a_registered_store_is_not_reaped_of(base: Path, home: Mapping[int, Path]) -> None:
    container = thrown(ALICE, home[ALICE], *SOON)
    with service(base) as running:
        running.until(lambda: not container.exists())
        kept = thrown(ALICE, home[ALICE])
        record = json.loads((kept / "record.json").read_text())
    aside = home[ALICE].with_name("backup")
    subprocess.run(["cp", "-a", home[ALICE], aside], check=True)
    shutil.rmtree(users_own(home[ALICE], ALICE))
    users_own(aside, ALICE).rename(users_own(home[ALICE], ALICE))  # restored from a backup, long after its time
    made_ns = record["created_ns"] - 10**9 * 86_400 * 10_000
    (kept / "record.json").write_text(json.dumps({**record, "created_ns": made_ns, "retention_s": 0}))
    with service(base, config=OFTEN) as running, tmpfs_volume():
        bobs = thrown(BOB, home[BOB], *SOON)
        running.until(lambda: not bobs.exists())
        outlasts(running, BOB, home[BOB], kept)
        assert {one.owner for one in own_stores(running)} == {BOB}


def test_a_store_that_is_taken_out_of_the_registry_is_left(base: Path, home: Mapping[int, Path]) -> None:
    kept = thrown(ALICE, home[ALICE])
    with service(base, config=OFTEN) as running:
        running.until(lambda: phases(running) == [VolumePhase.IDLE])
        registry_of(home[ALICE]).write_text("")
        running.until(lambda: not own_stores(running))
        assert kept.exists()


def test_what_is_in_a_home_is_told_of_only_as_far_as_all_may_see_it(base: Path, home: Mapping[int, Path]) -> None:
    with tmpfs_volume() as other:
        shut = make_tree(other / "shut", Dir({"plans-to-leave": Dir(owner=(ALICE, ALICE))}, mode=0o711))
        job = make_tree(shut / "plans-to-leave/job", Dir(owner=(ALICE, ALICE)))
        assert trashd_as(ALICE, home[ALICE], "swap", job).code == 0
        with service(base) as running:
            running.until(lambda: phases(running) == [VolumePhase.IDLE])
            (told,) = own_stores(running)
            assert told.root().endswith("/….".encode() + told.id[:8].encode())
            assert b"plans" not in Path(os.fsdecode(SYSTEM_RUNTIME + b"/status.json")).read_bytes()


def test_a_pause_above_a_users_store_holds_for_it(base: Path, home: Mapping[int, Path]) -> None:
    thrown(ALICE, home[ALICE])
    with service(base, config=OFTEN) as running:  # nothing announces a user's first store
        running.until(lambda: phases(running) == [VolumePhase.IDLE])
        done_well("pause", home[ALICE].parent)
        running.until(lambda: phases(running) == [VolumePhase.PAUSED])
        container = thrown(ALICE, home[ALICE], *SOON)
        bobs = thrown(BOB, home[BOB])
        running.until(lambda: phases(running) == [VolumePhase.PAUSED] * 2)
        assert all(path.exists() for path in (container, bobs))
        done_well("resume", home[ALICE].parent)
        running.until(lambda: not container.exists())


def test_what_the_configuration_says_of_a_volume_holds_for_users_stores_in_it(
    base: Path, home: Mapping[int, Path]
) -> None:
    container = thrown(ALICE, home[ALICE], *SOON)
    config = f'{QUICK}[[volume]]\npath = "{home[ALICE].parents[1]}"\nserve = false\n'
    with service(base, config=config) as running:
        running.until(lambda: phases(running) == [VolumePhase.PAUSED])
        assert container.exists()


def test_a_users_own_service_leaves_alone_what_he_has_not_registered(home: Mapping[int, Path]) -> None:
    with tmpfs_volume() as disk:
        os.chown(disk, ALICE, ALICE)
        container = thrown(ALICE, disk, *SOON)
        subprocess.run(["cp", "-a", users_own(disk, ALICE), disk / "copy"], check=True)
        shutil.rmtree(users_own(disk, ALICE))
        (disk / "copy").rename(users_own(disk, ALICE))
        with service_of(ALICE, home[ALICE]) as running:
            running.until(lambda: running.volume(disk).phase is VolumePhase.UNPROVEN)
            assert f"trashd init {disk}" in running.volume(disk).why
            outlasts(running, ALICE, home[ALICE], container)
            assert trashd_as(ALICE, home[ALICE], "init", disk).code == 0
            running.reload()
            running.until(lambda: not container.exists())


def test_a_users_own_service_leaves_his_stores_to_roots(base: Path, home: Mapping[int, Path]) -> None:
    thrown(ALICE, home[ALICE])
    with service(base) as roots:
        roots.until(lambda: phases(roots) == [VolumePhase.IDLE])
        with service_of(ALICE, home[ALICE]) as running:
            running.until_phase(home[ALICE], VolumePhase.ELSEWHERE)
            container = thrown(ALICE, home[ALICE], *SOON)
            roots.until(lambda: not container.exists())


@pytest.mark.needs("fuse")
def test_what_was_swapped_in_a_users_own_mount_is_reaped_when_that_is_gone(
    base: Path, home: Mapping[int, Path]
) -> None:
    at_home = home[ALICE]
    source = make_tree(at_home / "src", Dir({"d": Dir(owner=(ALICE, ALICE))}, owner=(ALICE, ALICE)))
    mounted = make_tree(at_home / "mnt", Dir(owner=(ALICE, ALICE)))
    with device_for_all(), service(base) as running:
        assert trashd_as(ALICE, at_home, "mount", source, mounted).code == 0
        (told,) = trashd_as(ALICE, at_home, "swap", "--json", *SOON, mounted / "d").objects()
        container = users_own(source, ALICE) / f"u/{ALICE}/orphans" / str(told["id"])
        assert container.exists()
        assert trashd_as(ALICE, at_home, "umount", mounted).code == 0
        running.until(lambda: not container.exists())


def test_a_user_pauses_neither_what_root_serves_of_his_nor_is_refused_for_what_it_serves_of_others(
    base: Path, home: Mapping[int, Path]
) -> None:
    thrown(ALICE, home[ALICE])
    with service(base) as running:
        running.until(lambda: phases(running) == [VolumePhase.IDLE])
        assert trashd_as(ALICE, home[ALICE], "pause", home[ALICE]).code == 4
        assert trashd_as(BOB, home[BOB], "pause").code == 0


def test_a_volume_with_users_stores_can_be_unmounted_once_it_is_paused(base: Path, home: Mapping[int, Path]) -> None:
    container = thrown(ALICE, home[ALICE], *SOON)
    disk = home[ALICE].parents[1]
    with service(base) as running:
        running.until(lambda: not container.exists())  # it stays open for a while
        done_well("pause", disk)
        assert not unmount(disk), "it was busy"
