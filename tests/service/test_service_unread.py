"""What Mallory makes of her own files stops nobody else's service: what can't be read of hers is hers alone."""

from __future__ import annotations

import errno
import json
import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from fusefs.core.names import RelPath, make_id
from fusefs.core.service_status import VolumePhase
from fusefs.linux.kernel import Kernel
from fusefs.store.find_stores import add_pointer
from fusefs.store.stage import SwapOptions
from tests.support.fuse_eio import broken_volume
from tests.support.fuse_silent import silent_fuse
from tests.support.hostile_volume import ALICE, MALLORY, Shared
from tests.support.make_trees import Dir, make_tree
from tests.support.other_users import as_user, become
from tests.support.reap_process import beside
from tests.support.service_process import places
from tests.support.store_verbs import forge, init, own, raw, users_own
from tests.support.trashd_command import done_well
from tests.support.volume_under_service import events_in

pytestmark = [pytest.mark.needs("root"), pytest.mark.timeout(180)]

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
