"""What Mallory makes of her own files stops nobody else's service: what can't be read of hers is hers alone."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from fusefs.core.names import make_id
from fusefs.core.service_status import VolumePhase
from tests.support.fuse_silent import silent_fuse
from tests.support.make_trees import Dir, make_tree
from tests.support.other_users import as_user
from tests.support.shared_volume import ALICE, MALLORY, Shared
from tests.support.trashd_command import done_well

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
    with shared.served() as running:
        with silent_fuse(container, STRANGER):
            running.until(lambda: running.volume(shared.volume).refused)
        container.rmdir()
        thrown = shared.throw(STRANGER)
        running.until(lambda: shared.is_gone(thrown))
        running.until(lambda: not running.volume(shared.volume).refused)
