"""Stores in users' homes: both services serve them by what their owners registered, whatever they wrote there."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from fusefs.core.service_status import VolumePhase
from fusefs.linux.runtime_directories import SYSTEM_RUNTIME
from fusefs.store.registry_lines import RegistryLine
from tests.support.fuse_silent import silent_fuse
from tests.support.fuse_watchdog import device_for_all
from tests.support.make_trees import Dir, make_tree
from tests.support.real_filesystems import tmpfs_volume, unmount
from tests.support.service_process import QUICK, Service, service
from tests.support.store_verbs import users_own
from tests.support.trashd_command import done_well, trashd
from tests.support.user_homes import (
    ALICE,
    BOB,
    SOON,
    bare_stores,
    line_of,
    outlasts,
    own_stores,
    phases,
    register,
    registry_of,
    thrown,
    trashd_as,
)

pytestmark = [pytest.mark.needs("root"), pytest.mark.usefixtures("home")]


OFTEN = f'poll = "1s"\n{QUICK}'


@contextmanager
def service_of(uid: int, home: Path, config: str = QUICK) -> Iterator[Service]:
    base = make_tree(home / "service", Dir(owner=(uid, uid)))
    variables = {"HOME": str(home), "XDG_STATE_HOME": "", "STATE_DIRECTORY": str(base)}
    with service(base, config=config, environment=variables, user=uid) as running:
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
            assert told.root_path().endswith("/….".encode() + told.id[:8].encode())
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
        (swap_result,) = trashd_as(ALICE, at_home, "swap", "--json", *SOON, mounted / "d").objects()
        container = users_own(source, ALICE) / f"u/{ALICE}/orphans" / str(swap_result["id"])
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


MOST_FDS = 150
"""Of the service: two stores of a user's are open at a time."""


def test_nobody_has_anothers_store_reaped_by_registering_it(base: Path, home: Mapping[int, Path]) -> None:
    kept = thrown(ALICE, home[ALICE], *SOON)
    registry_of(home[ALICE]).unlink()
    register(BOB, home[BOB], [line_of(home[ALICE])])
    with service(base, config=OFTEN) as running:
        outlasts(running, BOB, home[BOB], kept)
        # It is told of a breath after it is served.
        running.until(lambda: {one.owner for one in own_stores(running)} == {BOB})
        assert kept.exists()


@pytest.mark.parametrize(
    "lines",
    [lambda home: [line_of(home[ALICE])], lambda home: bare_stores(BOB, home[BOB], 1) * 10_000, None],
    ids=["of hers", "ten thousand", "a fifo"],
)
def test_a_registry_of_anothers_keeps_nobody_from_being_served(
    base: Path, home: Mapping[int, Path], lines: Callable[[Mapping[int, Path]], list[RegistryLine]] | None
) -> None:
    container = thrown(ALICE, home[ALICE], *SOON)
    register(BOB, home[BOB], lines(home) if lines else [])
    if lines is None:
        registry_of(home[BOB]).unlink()
        os.mkfifo(registry_of(home[BOB]))
        os.chown(registry_of(home[BOB]), BOB, BOB)
    with service(base) as running:
        running.until(lambda: not container.exists())
        running.until(lambda: {one.owner for one in own_stores(running)} == {ALICE})


def test_another_store_at_a_registered_place_is_not_served(base: Path, home: Mapping[int, Path]) -> None:
    kept = thrown(ALICE, home[ALICE], *SOON)
    line = line_of(home[ALICE])
    other = line._replace(identity=line.identity._replace(handle="1:" + "ab" * 12, ino=line.identity.ino + 1))
    register(ALICE, home[ALICE], [other])
    with service(base, config=OFTEN) as running:
        outlasts(running, BOB, home[BOB], kept)


def test_a_user_with_many_stores_has_so_many_served_and_others_all_of_theirs(
    base: Path, home: Mapping[int, Path]
) -> None:
    register(BOB, home[BOB], bare_stores(BOB, home[BOB], 300))
    container = thrown(ALICE, home[ALICE], *SOON)
    with service(base) as running:
        running.until(lambda: not container.exists())
        assert len(os.listdir(f"/proc/{running.process.pid}/fd")) < MOST_FDS
        running.until(lambda: [one.owner for one in own_stores(running)].count(BOB) == 100)
        done = trashd("status")
        assert done.code == 0
        assert f"not served: uid {BOB}: 200 of the stores in the user's registry" in done.out


@pytest.mark.needs("fuse")
@pytest.mark.parametrize(("n_stores", "uid"), [(5, 0), (1, BOB)], ids=["a disk", "a user's own mount"])
def test_what_hangs_holds_up_whose_stores_are_on_it_alone(
    base: Path, home: Mapping[int, Path], n_stores: int, uid: int
) -> None:
    register(BOB, home[BOB], bare_stores(BOB, home[BOB], n_stores))
    thrown(ALICE, home[ALICE])
    with service(base) as running:
        running.until(lambda: phases(running) == [VolumePhase.IDLE] * (n_stores + 1))
        with ExitStack() as hanging:
            for number in range(n_stores):
                hanging.enter_context(silent_fuse(home[BOB] / f"bare-{number}", uid))
            running.reload()
            container = thrown(ALICE, home[ALICE], *SOON)
            running.until(lambda: not container.exists())
            running.stop()


def test_a_store_that_its_owner_breaks_alarms_nobody_and_is_served_when_it_is_whole(
    base: Path, home: Mapping[int, Path]
) -> None:
    kept = thrown(BOB, home[BOB])
    volume = users_own(home[BOB], BOB) / "volume.json"
    text = volume.read_text()
    with service(base, config=OFTEN) as running:
        running.until(lambda: phases(running) == [VolumePhase.IDLE])
        volume.write_text(text.replace(volume_id(text), "0" * 32))
        thrown(ALICE, home[ALICE])
        running.reload()
        running.until(lambda: VolumePhase.BROKEN in phases(running))
        assert trashd("status").code == 0
        assert kept.exists()
        volume.write_text(text)
        running.reload()
        running.until(lambda: phases(running) == [VolumePhase.IDLE] * 2)


def volume_id(text: str) -> str:
    return next(word for word in text.split('"') if len(word) == 32)


def test_a_folder_that_is_a_link_or_open_to_others_is_not_served(base: Path, home: Mapping[int, Path]) -> None:
    kept = thrown(BOB, home[BOB], *SOON)
    folder = kept.parents[1]
    folder.chmod(0o755)
    with service(base, config=OFTEN) as running:
        outlasts(running, ALICE, home[ALICE], kept)
        running.until(lambda: any(one.refused for one in own_stores(running) if one.owner == BOB))
        aside = make_tree(home[BOB] / "aside", Dir(owner=(BOB, BOB)))
        folder.chmod(0o700)
        folder.rename(aside / "u")
        folder.symlink_to(aside / "u")
        running.reload()
        outlasts(running, ALICE, home[ALICE], aside / "u/orphans" / kept.name)


def test_a_store_in_which_others_make_names_is_told_and_not_reaped_of(base: Path, home: Mapping[int, Path]) -> None:
    kept = thrown(BOB, home[BOB], *SOON)
    kept.parents[2].chmod(0o1777)
    with service(base, config=OFTEN) as running:
        running.until(lambda: any(one.why for one in own_stores(running) if one.owner == BOB))
        outlasts(running, ALICE, home[ALICE], kept)
        # While the service checks the store again, the status shows no reason.
        running.until(lambda: "untrusted trash store" in trashd("status").out)
