"""What Mallory writes, plants and makes unreadable: she gets nothing that she could not, and none waits."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from fusefs.core.names import RelPath, make_id
from fusefs.core.service_status import VolumePhase
from fusefs.linux.kernel import Kernel
from fusefs.linux.syscalls import AT_FDCWD
from fusefs.store.stage import SwapOptions
from fusefs.store.user_folders import add_pointer
from tests.support.fuse_eio import broken_volume
from tests.support.fuse_silent import silent_fuse
from tests.support.hostile_volume import ALICE, MALLORY, Shared
from tests.support.make_trees import Dir, File, deep_chain, make_tree
from tests.support.other_users import as_user, become
from tests.support.reap_process import beside
from tests.support.service_process import events_in, places
from tests.support.small_orphans import EXPIRED
from tests.support.small_orphans import PINNED as KEPT
from tests.support.store_verbs import assert_silent, forge, init, own, place, raw, swap, users_own
from tests.support.trashd_command import done_well

pytestmark = [pytest.mark.needs("root"), pytest.mark.timeout(180)]


# Forged records


BAD_TIMES: dict[str, list[object]] = {
    "retention_s": [-1, 1 << 63, 1 << 80, 1e400, "0", []],
    "created_ns": [-1, 1 << 80, None],
}
Forgery = str | bytes | Mapping[str, object]
NO_RECORDS: list[Forgery] = [
    "mkfifo -m 600 record.json",
    "mknod -m 600 record.json c 1 5",  # /dev/zero: reading it never ends
    f"{sys.executable} -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"record.json\")'",
    'ln -s "$1" record.json',
    'ln "$1" record.json',
    "mv saved record.json; truncate -s 1G record.json",
    "mkdir record.json",
    "",
    *(b"", b"[]", b"[" * 60_000, b"\xff", b"{" + b" " * 65_600 + b"}"),
    *({"origin": origin} for origin in ("../canary/job", "/etc", "a/../../etc", "%2e%2e/x")),
    *({"id": text} for text in ("20200101T000000.000Z-other-00000000", "\x1b[2J", "../../canary")),
    {"volume": "0" * 32},
    *({key: time} for key, times in BAD_TIMES.items() for time in times),
    {"format": 2},
    {"note": "\n" * 65_000},
]
"""Made by a shell, which is told a file of root's; as a text; or as a record with other fields."""


def plant(shared: Shared, identifier: str, forgery: Forgery) -> None:
    record, secret = place(shared.volume, identifier) / "record.json", shared.volume / "canary/secret"
    saved = record.rename(record.parent / "saved")
    match forgery:
        case bytes():
            record.write_bytes(forgery)
        case Mapping():
            forge(saved.rename(record), **forgery)
        case _:
            subprocess.run(["sh", "-euc", forgery, "sh", secret], cwd=record.parent, check=True)
    for path in record.parent.iterdir():
        if not path.is_symlink() and not path.samefile(secret):
            os.chown(path, MALLORY, MALLORY)


def test_forged_records_are_kept_and_hold_nobody_up(shared: Shared) -> None:
    forged = [shared.throw(MALLORY, f"job{n}") for n in range(len(NO_RECORDS))]
    for identifier, forgery in zip(forged, NO_RECORDS, strict=True):
        plant(shared, identifier, forgery)
    honest = [shared.throw(uid, "honest") for uid in (MALLORY, ALICE)]
    with shared.served() as running:
        running.until(lambda: all(map(shared.is_gone, honest)))
        running.until_phase(shared.volume, VolumePhase.IDLE)
        running.until(lambda: running.volume(shared.volume).n_orphans == len(forged))
        later = shared.throw(ALICE, "later")
        running.until(lambda: shared.is_gone(later))
    for identifier in forged:
        tree = shared.folder(MALLORY) / "orphans" / identifier / "tree"
        assert (tree / "a").read_text() == "1", identifier


def test_records_forged_while_the_service_watches_are_kept(shared: Shared) -> None:
    forged = [shared.throw(MALLORY, f"job{n}", KEPT) for n in range(len(NO_RECORDS))]
    with shared.served() as running:
        running.until_phase(shared.volume, VolumePhase.IDLE)
        aside = shared.home(MALLORY)
        for identifier, forgery in zip(forged, NO_RECORDS, strict=True):
            plant(shared, identifier, forgery)
            container = place_in_orphans(shared, identifier)
            container.rename(aside / identifier)
            (aside / identifier).rename(container)
        later = [shared.throw(uid, "later") for uid in (MALLORY, ALICE)]
        running.until(lambda: all(map(shared.is_gone, later)))
    for identifier in forged:
        assert (place_in_orphans(shared, identifier) / "tree/a").read_text() == "1"


def place_in_orphans(shared: Shared, identifier: str) -> Path:
    return shared.folder(MALLORY) / "orphans" / identifier


FOR_EVER: list[dict[str, object]] = [
    {"retention_s": (1 << 63) - 1},
    {"retention_s": (1 << 63) - 1, "created_ns": (1 << 63) - 1},
    {"retention_s": 100 * 365 * 86_400, "created_ns": 0},
]


def test_a_record_may_promise_any_time_that_can_be_written(shared: Shared) -> None:
    kept = [shared.throw(MALLORY, f"job{n}") for n in range(len(FOR_EVER))]
    for identifier, fields in zip(kept, FOR_EVER, strict=True):
        forge(place(shared.volume, identifier) / "record.json", **fields)
    from_the_future, alices = shared.throw(MALLORY), shared.throw(ALICE)
    forge(place(shared.volume, from_the_future) / "record.json", retention_s=1, created_ns=(1 << 63) - 1)
    with shared.served() as running:
        running.until(lambda: shared.is_gone(alices))
        running.until(lambda: shared.is_gone(from_the_future))  # its age counts from the first sight
        assert all(shared.is_in(identifier, "orphans") for identifier in kept)
    assert_silent(shared.volume)


def test_a_record_that_tells_another_uid_gives_nobody_more_rights(shared: Shared) -> None:
    identifier = shared.throw(MALLORY)
    container = place(shared.volume, identifier)
    forge(container / "record.json", uid=0, owner=0)
    make_tree(container / "tree/roots", Dir({"precious": File(b"root's")}, mode=0o755))
    with shared.served() as running:
        running.until(lambda: shared.is_in(identifier, "quarantine"))
    left = shared.folder(MALLORY) / "quarantine" / identifier / "tree/roots/precious"
    assert left.read_bytes() == b"root's"


POINTERS = [
    *(b"/etc", b"..", b"../..", b"home-12001", b".trashd/u/12001", b"canary", b"canary/job", b"a\0b"),
    *(b"\x1b[2J", b"x" * 70_000, b"lower", b"lower/../lower"),
]


def test_forged_pointers_lead_to_nothing_of_others(shared: Shared) -> None:
    """A store of hers at the place that a pointer tells is no store that root's service trusts for Alice."""
    kept, thrown = shared.throw(ALICE, "kept", KEPT), shared.throw(MALLORY)
    pointers = shared.folder(MALLORY) / "pointers"
    for n, text in enumerate(POINTERS):
        (pointers / f"{n:032x}").write_bytes(text)
        os.chown(pointers / f"{n:032x}", MALLORY, MALLORY)
    (pointers / "link").symlink_to("/etc/passwd")
    os.mkfifo(pointers / "fifo")
    (shared.volume / "lower").symlink_to("home-12001")
    with shared.served() as running:
        running.until(lambda: shared.is_gone(thrown))
        later = shared.throw(MALLORY, "later")
        running.until(lambda: shared.is_gone(later))
    assert (place(shared.volume, kept) / "tree/a").read_text() == "1"


# Planted folders


PLANTED = [
    'mkdir -p "$1/orphans/20200101T000000.000Z-x-00000000" "$1/drop"',
    'echo mine >"$1"',
    'ln -s ../../canary "$1"',
    'mkfifo -m 666 "$1"',
]


def test_planted_folders_keep_the_service_from_nobody(shared: Shared) -> None:
    victims = range(13_000, 13_000 + len(PLANTED))
    for uid, script in zip(victims, PLANTED, strict=True):
        planting = ["sh", "-euc", script, "sh", shared.folder(uid)]
        as_user(MALLORY, lambda planting=planting: subprocess.run(planting, check=True) and None)  # type: ignore[misc]
        make_tree(shared.home(uid), Dir(owner=(uid, uid)))
    early = [shared.throw(uid) for uid in victims]
    with shared.served() as running:
        running.until(lambda: all(map(shared.is_gone, early)))
        running.until_phase(shared.volume, VolumePhase.IDLE)
        late = [shared.throw(uid) for uid in victims]
        running.until(lambda: all(map(shared.is_gone, late)))


def test_hundreds_of_planted_folders_hold_nobody_up(shared: Shared) -> None:
    def plant_many() -> None:
        users = shared.volume / ".trashd/new"
        for uid in range(300):
            make_tree(
                users / f"{MALLORY}.{uid:012x}",
                {"orphans": {"20200101T000000.000Z-x-000000000000": {}}, "drop": {"x": {}}},
            )
            (users / f"{20_000 + uid}").mkdir()
            (users / f"{30_000 + uid}").symlink_to("../../canary")
            (users / f"-{uid}\x1b\n").write_text("")

    as_user(MALLORY, plant_many)
    with shared.served() as running:
        thrown = [shared.throw(uid) for uid in (ALICE, MALLORY)]
        running.until(lambda: running.volume(shared.volume).n_reaped == len(thrown))
        assert all(map(shared.is_gone, thrown))
        seen = running.until_phase(shared.volume, VolumePhase.IDLE)
        assert (seen.n_users, seen.n_orphans) == (0, 0)


# Her own folder, ruined


def _close(path: Path) -> None:
    path.chmod(0)


def _replace(path: Path, make: Callable[[Path], object]) -> None:
    """At once: a service makes a directory that is missing."""
    was = path.with_name(f"was-{path.name}")
    make(was)
    Kernel().exchange(AT_FDCWD, raw(was), AT_FDCWD, raw(path))


def _replace_by_link(path: Path) -> None:
    _replace(path, lambda was: was.symlink_to("/etc"))


def _replace_by_file(path: Path) -> None:
    _replace(path, Path.touch)


PARTS = ["orphans", "reaping", "drop", "stage", "quarantine", "restoring", "reserve", "pointers"]


@pytest.mark.parametrize("ruin", [_close, _replace_by_link, _replace_by_file])
def test_a_ruined_folder_is_nobody_elses_trouble(shared: Shared, ruin: Callable[[Path], None]) -> None:
    """One user for each part of a folder."""
    parts = [*PARTS, ""] if ruin is _close else PARTS
    for uid, part in enumerate(parts, 13_000):
        make_tree(shared.home(uid), Dir(owner=(uid, uid)))
        shared.throw(uid)
        as_user(uid, partial(ruin, shared.folder(uid) / part))
    with shared.served() as running:
        for name in ("early", "late"):
            alices = shared.throw(ALICE, name)
            running.until(partial(shared.is_gone, alices))
        assert running.volume(shared.volume).phase is not VolumePhase.BROKEN


def test_a_folder_ruined_and_mended_is_served_again(shared: Shared) -> None:
    mallorys = shared.throw(MALLORY, options=KEPT)
    orphans = shared.folder(MALLORY) / "orphans"
    with shared.served() as running:
        running.until_phase(shared.volume, VolumePhase.IDLE)
        as_user(MALLORY, lambda: _replace_by_link(orphans))
        alices = shared.throw(ALICE)
        running.until(lambda: shared.is_gone(alices))
        orphans.unlink()
        orphans.with_name("was-orphans").rename(orphans)
        forge(orphans / mallorys / "record.json", retention_s=0)
        running.reload()
        running.until(lambda: shared.is_gone(mallorys))


# Trees and names


def test_a_tree_of_thirty_thousand_levels_is_reaped_and_holds_nobody_up(shared: Shared) -> None:
    def act() -> str:
        return str(swap(deep_chain(shared.home(MALLORY) / "deep", 30_000), options=EXPIRED).id)

    deep = as_user(MALLORY, act)
    with shared.served() as running:
        alices = shared.throw(ALICE)
        running.until(lambda: shared.is_gone(alices))
        running.until(lambda: shared.is_gone(deep), 90)


NEWCOMER, STRANGER = 13_001, 13_002


def new_folder(shared: Shared, uid: int) -> Path:
    """A folder with one container in `new/` that a user made by hand; the container."""
    container = shared.volume / ".trashd/new" / str(uid) / "orphans" / make_id("20261121T000000", 0, b"x", bytes(6))
    state = container.parent
    for path in (state.parent, state, container):
        as_user(uid, partial(os.mkdir, path, 0o700))
    return container


@pytest.mark.needs("fuse")
def test_a_mount_in_a_new_folder_is_its_users_alone(shared: Shared) -> None:
    make_tree(shared.home(NEWCOMER), Dir(owner=(NEWCOMER, NEWCOMER)))
    with silent_fuse(new_folder(shared, STRANGER), STRANGER):
        early = [shared.throw(uid) for uid in (ALICE, MALLORY)]
        with shared.served() as running:
            running.until(lambda: all(map(shared.is_gone, early)))
            running.until_phase(shared.volume, VolumePhase.IDLE)
            assert any(f"new/{STRANGER}" in one.where for one in running.volume(shared.volume).refused)
            later = [shared.throw(uid) for uid in (ALICE, NEWCOMER)]
            running.until(lambda: all(map(shared.is_gone, later)))
            done_well("init", shared.volume)


@pytest.mark.needs("fuse")
def test_a_new_folder_is_served_when_the_mount_in_it_has_gone(shared: Shared) -> None:
    make_tree(shared.home(STRANGER), Dir(owner=(STRANGER, STRANGER)))
    container = new_folder(shared, STRANGER)
    with ExitStack() as mounted, ExitStack() as service:
        mounted.enter_context(silent_fuse(container, STRANGER))
        running = service.enter_context(shared.served())
        running.until(lambda: running.volume(shared.volume).refused)
        mounted.close()
        container.rmdir()
        thrown = shared.throw(STRANGER)
        running.until(lambda: shared.is_gone(thrown))
        running.until(lambda: not running.volume(shared.volume).refused)


def lower_store(shared: Shared) -> tuple[Path, Path]:
    """A store of Mallory's own below the volume that a pointer of hers leads to; it, and a container in it."""
    kept = shared.folder(MALLORY) / "orphans" / shared.throw(MALLORY, options=SwapOptions(retention_s=None))
    lower = shared.home(MALLORY) / "lower"

    def act() -> None:
        lower.mkdir()
        init(lower)
        with own(lower) as folder:
            place = Path(os.fsdecode(folder.path())) / "orphans" / kept.name
        kept.rename(place)
        forge(place / "record.json", volume=volume_id(lower))
        with own(shared.volume) as folder:
            add_pointer(folder, RelPath(raw(lower.relative_to(shared.volume))))

    as_user(MALLORY, act)
    return users_own(lower, MALLORY), users_own(lower, MALLORY) / f"u/{MALLORY}/orphans" / kept.name


def test_a_lower_store_that_changes_its_id_all_the_time_gives_the_volume_no_rest(shared: Shared) -> None:
    store, container = lower_store(shared)
    here, other = store / "volume.json", store / "other.json"
    as_user(MALLORY, lambda: other.write_text(here.read_text().replace(volume_id(store.parent), "f" * 32)))

    def act(n: int) -> None:
        if n == 0:
            become(MALLORY)
        Kernel().exchange(-100, raw(here), -100, raw(other))
        if n % 10 == 0:
            container.rename(container.with_name("aside"))
            container.with_name("aside").rename(container)

    with shared.served() as running:
        running.until_phase(shared.volume, VolumePhase.IDLE)
        with beside(act, 0.001):
            running.until(lambda: os.strerror(errno.ESTALE) in running.log.read_text())
        thrown = shared.throw(ALICE)
        running.until(lambda: shared.is_gone(thrown))
    assert "broken" not in {event["event"] for event in events_in(shared.base)}


def volume_id(volume: Path) -> str:
    """What volume.json of her own store says."""
    return str(json.loads((users_own(volume, MALLORY) / "volume.json").read_text())["id"])


@pytest.mark.long
@pytest.mark.needs("fuse")
def test_errors_in_many_of_a_users_orphans_give_that_user_a_rest_alone() -> None:
    """Blocks that can't be read any more, say: the store's own directories can, and so can what others have."""
    with places() as base, broken_volume() as broken:
        shared = Shared(broken.path, base)
        for n in range(8):
            shared.throw(MALLORY, f"job{n}", spec={"unlink-a": "1"})
        with shared.served() as running:
            running.until(lambda: "in a row" in running.log.read_text())
            thrown = shared.throw(ALICE)
            running.until(lambda: shared.is_gone(thrown))
        assert "broken" not in {event["event"] for event in events_in(shared.base)}
