"""Authority: root's commands on a user's containers do what that user could have done, and no more (I13)."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from fusefs.core.container_states import State
from fusefs.core.errors import NotPermitted, TrashdError
from fusefs.linux.kernel import Kernel
from fusefs.store.as_owner import swap_for_owner
from fusefs.store.stage import SwapOptions
from tests.support.make_trees import Dir, File, make_tree, snapshot
from tests.support.other_users import as_user
from tests.support.real_filesystems import bind_mount
from tests.support.store_verbs import (
    assert_silent,
    entries,
    folder_of,
    place,
    raw,
    reap_now,
    recover_all,
    remove,
    restore,
    swap,
    use,
)
from tests.support.two_users_store import ALICE, BOB, NOGROUP, orphan_of, shared_store

pytestmark = pytest.mark.needs("root")

VOLUME = partial(shared_store, alice=ALICE, bob=BOB)


# Restoring, and what a reap could not remove


def test_root_restores_a_users_orphan_as_that_user(volume: Path) -> None:
    identifier = orphan_of(volume, ALICE)
    os.chown(volume / "alice", 0, 0)
    with pytest.raises(NotPermitted):
        restore(volume, identifier)
    assert (place(volume, identifier) / "tree" / "results").read_text() == "his own"
    assert [entry.state for entry in entries(volume)] == [State.ORPHANS]
    assert_silent(volume)


def test_root_restores_a_part_as_that_user(volume: Path) -> None:
    identifier = orphan_of(volume, ALICE)
    os.chown(volume / "alice" / "job", 0, 0)
    with pytest.raises(NotPermitted):
        restore(volume, identifier, inside=b"results")
    assert (place(volume, identifier) / "tree" / "results").read_text() == "his own"
    os.chown(volume / "alice" / "job", ALICE, ALICE)
    restore(volume, identifier, inside=b"results")
    assert (volume / "alice" / "job" / "results").read_text() == "his own"
    assert_silent(volume)


def test_reasons_with_long_names_find_room_in_the_record(volume: Path) -> None:
    identifier = orphan_of(volume, ALICE)
    tree = place(volume, identifier) / "tree"
    path = tree
    for _ in range(12):
        path = path / ("\xe4" * 127)
        path.mkdir()
        os.chown(path, ALICE, ALICE)
    make_tree(path / "roots", {f"file{i}": "stays" for i in range(60)})
    reaped = reap_now(volume, identifier)
    assert reaped.report.n_failed == 60
    [entry] = entries(volume)
    assert (entry.state, entry.problem) == (State.QUARANTINE, "")
    assert entry.n_failed > 0
    assert_silent(volume)


def test_root_adopts_what_a_user_dropped_as_that_user(volume: Path) -> None:
    def drop() -> None:
        use(volume)
        make_tree(volume / "alice" / "job", {"results": "hers"})
        (volume / "alice" / "job").rename(folder_of(volume, ALICE) / "drop" / "job")

    as_user(ALICE, drop)
    assert recover_all(volume) == []
    [entry] = entries(volume)
    assert (entry.uid, entry.origin) == (ALICE, None)
    assert (place(volume, entry.id) / "record.json").stat().st_uid == ALICE
    assert_silent(volume)


# Users among themselves


@pytest.mark.parametrize("mode", [0o555, 0o000, 0o755])
def test_a_foreign_directory_in_ones_own_is_refused_as_the_kernel_meant_it(volume: Path, mode: int) -> None:
    make_tree(volume / "alice" / "foreign", Dir({"a": File(b"b")}, mode=mode))
    before = snapshot(volume / "alice")
    for verb in (swap, remove):
        with pytest.raises(TrashdError):
            as_user(ALICE, partial(verb, volume / "alice" / "foreign"))
    assert snapshot(volume / "alice") == before
    assert_silent(volume)


# --for-owner


def test_an_owner_finds_what_went_into_the_store_of_a_bind_mount_for_him(volume: Path) -> None:
    make_tree(volume / "shared", {"job": Dir({"results": "hers"}, owner=(ALICE, NOGROUP))})
    with bind_mount(volume / "shared", volume / "shared"):
        # Its own mount: the store is made in it, as high as the name's mount goes.
        swapped = swap_for_owner(Kernel(), raw(volume / "shared" / "job"), SwapOptions())
        assert swapped.id in [entry.id for entry in as_user(ALICE, lambda: entries(volume / "shared"))]
        as_user(ALICE, lambda: restore(volume / "shared", swapped.id, inside=b"results"), gid=NOGROUP)
        assert (volume / "shared" / "job" / "results").read_text() == "hers"
        assert_silent(volume / "shared")


def test_a_directory_of_a_group_that_its_owner_is_not_in_is_given_to_him_alike(volume: Path) -> None:
    make_tree(volume / "home", Dir({"results": "hers"}, mode=0o2750, owner=(ALICE, 4242)))
    swapped = swap_for_owner(Kernel(), raw(volume / "home"), SwapOptions())
    for path in (volume / "home", place(volume, swapped.id) / "tree"):
        st = path.stat()
        assert (st.st_uid, st.st_gid, st.st_mode & 0o7777) == (ALICE, 4242, 0o2750)
    assert_silent(volume)
