"""A user's own store stands in nobody's way: `.trashd` is root's alone, and each user has their own beside it."""

import errno
import json
import os
import shutil
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from fusefs.cli.main import run
from fusefs.core.errors import IsStore
from fusefs.core.identity import Identity
from fusefs.core.names import STORE, parse_user_store_name, user_store_name
from fusefs.linux.kernel import Kernel
from fusefs.store.backing_and_mount import BackingAndMount
from fusefs.store.layout import is_store_name
from fusefs.store.make_store import build_store
from fusefs.store.orphans import ListedContainer
from fusefs.store.stage import SwapOptions
from tests.support.crash_scenarios import changing
from tests.support.make_trees import Dir, make_tree
from tests.support.other_users import as_user
from tests.support.real_filesystems import tmpfs_volume
from tests.support.shared_memory_children import code_of_child
from tests.support.small_orphans import EXPIRED
from tests.support.store_verbs import (
    DyingAt,
    assert_silent,
    entries,
    init,
    numbered_calls,
    raw,
    reap_now,
    recover_all,
    restore,
    swap,
)
from tests.support.trashd_command import TRASHD, environment, trashd
from tests.support.user_homes import forget_stores

pytestmark = pytest.mark.needs("root")

R = TypeVar("R")

ALICE, BOB = 4711, 4712
LESS = ("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-all")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A volume in which all may make names, as a cluster's scratch, and on which nobody has said `trashd init`."""
    with tmpfs_volume(options=("mode=1777",)) as volume:
        yield volume


def own(volume: Path, uid: int) -> Path:
    return volume / os.fsdecode(user_store_name(uid))


def job(volume: Path, uid: int, name: str = "job") -> Path:
    return make_tree(volume / f"{name}-{uid}", Dir({"file": "x"}, owner=(uid, uid)))


def by(uid: int, function: Callable[[], R]) -> R:
    """What it returns, called by that user; root with all that root may."""
    return as_user(uid, function) if uid else function()


def swapped_by(volume: Path, uid: int, name: str = "job", options: SwapOptions | None = None) -> str:
    path = job(volume, uid, name)
    return by(uid, lambda: str(swap(path, options=options or SwapOptions()).id))


def listed(volume: Path, uid: int) -> set[str]:
    return by(uid, lambda: {entry.id for entry in entries(volume)})


def test_the_first_users_store_stops_nobody(shared: Path) -> None:
    ids = {uid: swapped_by(shared, uid) for uid in (ALICE, BOB, 0)}
    for uid in (ALICE, BOB):
        assert stat.S_IMODE(own(shared, uid).stat().st_mode) == 0o700
        assert own(shared, uid).stat().st_uid == uid
        assert list(own(shared, uid).glob(f"u/{uid}/orphans/{ids[uid]}"))
        assert listed(shared, uid) == {ids[uid]}
    assert list(shared.glob(f".trashd/u/0/orphans/{ids[0]}"))
    assert listed(shared, 0) == set(ids.values())
    for uid in (ALICE, BOB):
        as_user(uid, lambda uid=uid: [restore(shared, ids[uid]), None][1])  # type: ignore[misc]
        assert (shared / f"job-{uid}/file").read_text() == "x"
        as_user(uid, lambda: assert_silent(shared))


def test_a_users_store_names_its_own_identity(shared: Path) -> None:
    swapped_by(shared, ALICE)
    kernel = Kernel()
    with kernel.open_path(raw(own(shared, ALICE))) as fd:
        found = kernel.identify(fd)
    fields = json.loads((own(shared, ALICE) / "volume.json").read_text())["store"]
    assert Identity(**fields) == found


def test_after_roots_init_new_swaps_go_to_its_store_and_old_ones_stay_reached(shared: Path) -> None:
    before = swapped_by(shared, ALICE, "before", EXPIRED)
    again = swapped_by(shared, ALICE, "again")
    init(shared)
    after = swapped_by(shared, ALICE, "after")
    assert list(shared.glob(f".trashd/*/{ALICE}/orphans/{after}"))
    assert listed(shared, ALICE) == {before, again, after} == listed(shared, 0)
    as_user(ALICE, lambda: [restore(shared, again), None][1])
    assert as_user(ALICE, lambda: str(reap_now(shared, before).id)) == before
    assert listed(shared, ALICE) == {after}


def planted_file(place: Path) -> None:
    place.write_text("")


def planted_link(place: Path) -> None:
    place.symlink_to("/etc")


def planted_open(place: Path) -> None:
    place.mkdir()
    os.chown(place, ALICE, ALICE)
    place.chmod(0o770)


def planted_others(place: Path) -> None:
    place.mkdir(0o700)
    os.chown(place, BOB, BOB)


def planted_private(place: Path) -> None:
    """Alice's own, which a group mate gave this name."""
    make_tree(place, Dir({"thesis": "x"}, mode=0o700, owner=(ALICE, ALICE)))


PLANTED = [planted_file, planted_link, planted_open, planted_others, planted_private]


@pytest.mark.parametrize("plant", PLANTED)
def test_a_squatted_name_is_left_and_another_one_is_found_again(shared: Path, plant: object) -> None:
    assert callable(plant)
    plant(own(shared, ALICE))
    before = own(shared, ALICE).lstat()
    ids = {swapped_by(shared, ALICE, name) for name in ("one", "two")}
    stores = [path for path in shared.iterdir() if parse_user_store_name(raw(path.relative_to(shared))) == ALICE]
    (other,) = [path for path in stores if path != own(shared, ALICE)]
    assert stat.S_IMODE(other.stat().st_mode) == 0o700
    assert own(shared, ALICE).lstat().st_ctime_ns == before.st_ctime_ns
    assert listed(shared, ALICE) == ids == listed(shared, 0)
    assert not (shared / ".trashd").exists()
    for one in ids:
        as_user(ALICE, lambda one=one: [restore(shared, one), None][1])  # type: ignore[misc]


def test_check_says_what_a_swap_does(shared: Path, capfd: pytest.CaptureFixture[str]) -> None:
    planted_others(own(shared, ALICE))
    path = job(shared, ALICE)
    assert as_user(ALICE, lambda: run(["check", "--json", str(path)])) == 0
    store = json.loads(capfd.readouterr().out)["store"]
    assert parse_user_store_name(os.fsencode(os.path.basename(store))) == ALICE
    assert os.path.basename(store) != own(shared, ALICE).name
    assert sorted(shared.glob(".trashd*")) == [own(shared, ALICE)]


def test_a_store_of_a_users_that_has_roots_name_is_still_that_users_and_nobody_elses(shared: Path) -> None:
    """As 0.3.0 made it."""
    old = stored_as_of_old(shared)
    assert listed(shared, ALICE) == {old}
    other = swapped_by(shared, BOB)
    assert list(own(shared, BOB).glob(f"u/{BOB}/orphans/{other}"))
    as_user(ALICE, lambda: [restore(shared, old), None][1])
    assert (shared / f"job-{ALICE}/file").read_text() == "x"


def stored_as_of_old(volume: Path) -> str:
    def make() -> str:
        kernel = Kernel()
        with kernel.open_path(raw(volume)) as fd:
            build_store(kernel, BackingAndMount(fd), user_store_name(ALICE))
        (volume / os.fsdecode(user_store_name(ALICE))).rename(volume / ".trashd")
        (volume / ".trashd").chmod(0o755)
        return str(swap(volume / f"job-{ALICE}").id)

    job(volume, ALICE)
    return as_user(ALICE, make)


@pytest.mark.parametrize("plant", [*PLANTED, None])
def test_what_has_the_name_of_roots_store_is_refused_until_root_replaces_it(shared: Path, plant: object) -> None:
    if callable(plant):
        plant(shared / ".trashd")
    else:
        stored_as_of_old(shared)
    inode = (shared / ".trashd").lstat().st_ino
    done = trashd("init", shared)
    assert done.code == 6, done
    assert f"trashd init --replace {shared}" in done.err
    path = job(shared, 0)
    done = trashd("swap", path)
    assert done.code == 6, done
    assert (shared / ".trashd").lstat().st_ino == inode
    assert sorted(os.listdir(path)) == ["file"]
    done = trashd("init", "--replace", shared)
    assert done.code == 0, done
    assert (shared / ".trashd").stat().st_uid == 0
    aside = [one for one in (shared / ".trashd").iterdir() if one.lstat().st_ino == inode]
    assert len(aside) == (0 if plant in (planted_open, planted_others) else 1)  # what is empty goes
    assert trashd("swap", path).code == 0
    if plant is None:
        (entry,) = as_user(ALICE, lambda: entries_of(shared))
        assert entry.origin == raw(shared / f"job-{ALICE}")
    assert_silent(shared)


def entries_of(volume: Path) -> list[ListedContainer]:
    run(["list", "--volume", str(volume)])
    return entries(volume)


def test_only_root_replaces(shared: Path) -> None:
    planted_others(shared / ".trashd")
    assert as_user(ALICE, lambda: run(["init", "--replace", str(shared)])) == 4
    assert as_user(ALICE, lambda: run(["init", str(shared)])) == 0
    assert own(shared, ALICE).is_dir()


def test_a_planter_who_comes_back_all_the_time_does_not_win(shared: Path) -> None:
    """A typed mv, then init, loses this race: between the two the name is free."""
    stop = threading.Event()

    def plant() -> None:
        while not stop.is_set():
            try:
                (shared / ".trashd").mkdir(0o777)
                os.chown(shared / ".trashd", BOB, BOB)
            except OSError:
                pass

    planter = threading.Thread(target=plant)
    planted_others(shared / ".trashd")
    planter.start()
    try:
        done = trashd("init", "--replace", shared)
    finally:
        stop.set()
        planter.join()
    assert done.code == 0, done
    assert (shared / ".trashd").stat().st_uid == 0
    assert (shared / ".trashd/volume.json").exists()


def test_an_exchange_that_is_killed_anywhere_leaves_one_store(shared: Path) -> None:
    """What a user had put there; tests/store/test_init_store.py has the one with a user's store."""

    def begin() -> None:
        forget_stores()
        for path in shared.iterdir():
            path.unlink() if path.is_symlink() or path.is_file() else shutil.rmtree(path)
        planted_others(shared / ".trashd")

    begin()
    for n in changing(numbered_calls(partial(init, shared))):
        begin()
        code = code_of_child(lambda n=n: init(shared, Kernel(DyingAt(n))))  # type: ignore[misc]
        init(shared)
        as_user(ALICE, lambda: recover_all(shared))
        recover_all(shared)
        assert listed(shared, 0) == set(), f"killed before call {n}"
        assert sorted(path.name for path in shared.glob(".*")) == [".trashd"], f"killed before call {n}"
    assert code == 0


def test_without_an_exchange_it_is_replaced_by_two_renames(shared: Path) -> None:
    def no_exchange(call: str) -> None:
        if call == "exchange":
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    old = stored_as_of_old(shared)
    init(shared, Kernel(no_exchange))
    as_user(ALICE, lambda: recover_all(shared))
    assert listed(shared, ALICE) == {old}
    assert (shared / ".trashd").stat().st_uid == 0


@pytest.mark.parametrize("uid", [ALICE, BOB, 0])
def test_a_directory_with_a_users_store_in_it_is_not_swapped(shared: Path, uid: int) -> None:
    team = make_tree(shared / "team", Dir({}, mode=0o1777, owner=(uid, uid)))
    (shared / "team/ALICE").mkdir(mode=0o777)
    with Kernel().open_path(raw(team)) as fd:
        as_user(ALICE, lambda: [build_store(Kernel(), BackingAndMount(fd), user_store_name(ALICE)), None][1])
    with pytest.raises(IsStore) as refused:
        by(uid, lambda: [swap(team), None][1])
    assert refused.value.detail == str(own(team, ALICE))


def test_a_reaper_spares_its_users_store_that_holds_something(shared: Path) -> None:
    """However deep, and noted nowhere."""
    init(shared)
    team = make_tree(shared / "team", Dir({"deep": Dir(owner=(ALICE, ALICE))}, owner=(ALICE, ALICE)))
    with Kernel().open_path(raw(team / "deep")) as fd:
        as_user(ALICE, lambda: [build_store(Kernel(), BackingAndMount(fd), user_store_name(ALICE)), None][1])
    folder = own(team / "deep", ALICE) / f"u/{ALICE}"
    container = folder / "orphans/20260101T000000.000Z-x-0123456789ab"
    container.mkdir(parents=True)
    for one in (folder, folder / "orphans", container):
        one.chmod(0o700)
        os.chown(one, ALICE, ALICE)
    identifier = as_user(ALICE, lambda: str(swap(team).id))
    as_user(ALICE, lambda: run(["reap", "--now", "--volume", str(shared), identifier]))
    assert list(shared.glob(f".trashd/*/{ALICE}/*/*/tree/deep/{own(shared, ALICE).name}/u/{ALICE}/orphans/*"))


@pytest.mark.parametrize(
    ("name", "uid"),
    [
        (b".trashd-0", 0),
        (b".trashd-1000", 1000),
        (b".trashd-1000.0123456789ab", 1000),
        (b".trashd-4294967294", 4294967294),
        (b".trashd-4294967295", None),
        (b".trashd-01", None),
        (b".trashd-1000.0123", None),
        (b".trashd-1000.0123456789aB", None),
        (b".trashd-keep", None),
        (b".trashd-", None),
        (STORE, None),
    ],
)
def test_names_of_stores(name: bytes, uid: int | None) -> None:
    assert parse_user_store_name(name) == uid
    assert is_store_name(name) == (uid is not None or name == STORE)


# Containers


def in_a_container(*words: str | Path, home: Path) -> subprocess.CompletedProcess[str]:
    """A command of root's without CAP_SYS_ADMIN, and with nothing kept of the container before."""
    hidden = f'mount -t tmpfs lib /var/lib && export HOME={home} && exec {" ".join(LESS)} "$@"'
    argv = ["unshare", "-m", "--propagation", "private", "sh", "-c", hidden, "sh", TRASHD, *map(str, words)]
    return subprocess.run(argv, capture_output=True, text=True, env=environment({}), check=False)


def test_the_next_container_uses_the_store_of_the_last_one(shared: Path, tmp_path: Path) -> None:
    make_tree(shared / "cache", {"a": "1"})
    make_tree(shared / "more", {"b": "1"})
    assert in_a_container("swap", shared / "cache", home=tmp_path).returncode == 0
    assert [path.name for path in shared.glob(".trashd*")] == [".trashd-0"]
    for word, path in (("check", "more"), ("swap", "more"), ("swap", "cache")):
        done = in_a_container(word, shared / path, home=tmp_path)
        assert done.returncode == 0, done
    done = in_a_container("list", "--json", "--volume", shared, home=tmp_path)
    assert len(done.stdout.splitlines()) == 3, done
    done = in_a_container("reap", "--all", "--now", "--yes", "--volume", shared, home=tmp_path)
    assert done.returncode == 0, done
    assert list((shared / ".trashd-0").glob("u/0/orphans/*")) == []
    assert [path.name for path in shared.glob(".trashd*")] == [".trashd-0"]


def test_a_common_store_is_used_in_a_container_too(shared: Path, tmp_path: Path) -> None:
    init(shared)
    make_tree(shared / "cache", {"a": "1"})
    done = in_a_container("swap", shared / "cache", home=tmp_path)
    assert done.returncode == 0, done
    assert [path.name for path in shared.glob(".trashd*")] == [".trashd"]


def test_a_copy_of_roots_own_store_is_no_store_to_be_reaped(shared: Path, tmp_path: Path) -> None:
    make_tree(shared / "cache", {"a": "1"})
    assert in_a_container("swap", "--keep-for", "0s", shared / "cache", home=tmp_path).returncode == 0
    subprocess.run(["cp", "-a", shared / ".trashd-0", shared / "copy"], check=True)
    shutil.rmtree(shared / ".trashd-0")
    (shared / "copy").rename(shared / ".trashd-0")
    done = in_a_container("reap", "--volume", shared, home=tmp_path)
    assert list((shared / ".trashd-0").glob("u/0/orphans/*")), done


def test_in_a_user_namespace_check_agrees_with_swap_and_nothing_stands_in_the_way_outside(shared: Path) -> None:
    make_tree(shared / "rb", Dir({"job": Dir({"a": "1"}, owner=(ALICE, ALICE))}, owner=(ALICE, ALICE)))
    inside = f"mount --bind {shared}/rb /mnt && cd /mnt && {TRASHD} check job && {TRASHD} swap job && {TRASHD} list"
    argv = ["unshare", "-rm", "sh", "-c", inside]

    def unshared() -> tuple[int, str]:
        done = subprocess.run(argv, capture_output=True, text=True, env=environment({}), check=False)
        return done.returncode, done.stdout + done.stderr

    code, told = as_user(ALICE, unshared)
    if "unshare failed" in told:
        pytest.skip("this machine gives users no namespaces")
    assert code == 0, told
    assert [path.name for path in (shared / "rb").glob(".trashd*")] == [".trashd-0"]
    make_tree(shared / "rb/job2", Dir({"a": "1"}, owner=(ALICE, ALICE)))
    swapped = as_user(ALICE, lambda: str(swap(shared / "rb/job2").id))
    assert swapped in listed(shared / "rb", ALICE) | listed(shared, ALICE)
