"""Pointers: users write them, so that each may say anything; none leads to what its user could not have used."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from fusefs.core.errors import Exit, NotFound, TrashdError
from fusefs.linux.kernel import Kernel
from fusefs.store import doctor as check_module
from fusefs.store import find_stores as pointers_module
from fusefs.store import orphans
from fusefs.store.find_stores import lower_stores
from tests.support.make_trees import Dir, make_tree, snapshot
from tests.support.other_users import as_user
from tests.support.real_filesystems import btrfs_subvolume, loop_volume, tmpfs_volume
from tests.support.store_verbs import (
    assert_silent,
    entries,
    folder_of,
    init,
    own,
    problems,
    raw,
    reap_now,
    recover_all,
    remove,
    swap,
)
from tests.support.trashd_command import done_well

pytestmark = pytest.mark.needs("root")

ALICE, BOB = 1001, 1002
T = TypeVar("T")


def saying(says: bytes) -> Callable[[Path], object]:
    def point(pointer: Path) -> None:
        pointer.write_bytes(says)

    return point


HOSTILE: dict[str, Callable[[Path], object]] = {
    "absolute": lambda pointer: pointer.write_bytes(raw(pointer.parents[4] / "home" / "bob")),
    "dots": saying(b"home/alice/../bob"),
    "dots out of the volume": saying(b"../../.."),
    "itself": saying(b"."),
    "through a link": saying(b"home/alice/link"),
    "beyond a link": saying(b"home/alice/above/bob"),
    "another's store": saying(b"home/bob"),
    "empty": saying(b""),
    "a NUL": saying(b"home/bob\0"),
    "a FIFO": os.mkfifo,
    "a directory": lambda pointer: pointer.mkdir(),
    "a link": lambda pointer: pointer.symlink_to(pointer.parents[4] / "home" / "alice" / "says-bob"),
    "a hard link": lambda pointer: pointer.hardlink_to(pointer.parents[4] / "home" / "alice" / "says-bob"),
}


@pytest.fixture
def volume() -> Iterator[Path]:
    """A volume with a store, Alice's home, and Bob's with an own store, which was there before, and an orphan."""
    with tmpfs_volume() as path:
        make_tree(path / "home", {"alice": Dir(owner=(ALICE, ALICE)), "bob": Dir(owner=(BOB, BOB))})
        as_user(BOB, lambda: swap(make_tree(path / "home" / "bob" / "job", {"results": "his"})))
        init(path)
        yield path
        assert_silent(path)
        as_user(BOB, partial(assert_silent, path / "home" / "bob"))


def by_both(act: Callable[[], T]) -> tuple[T, T]:
    """What root gets, and what Alice does."""
    return act(), as_user(ALICE, act)


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_hostile_pointer_leads_nowhere_and_is_told(volume: Path, hostile: str) -> None:
    home, bobs = volume / "home" / "alice", volume / "home" / "bob"
    recover_all(volume)
    [kept] = bobs.glob(".trashd-*/u/*/orphans/*")
    before = snapshot(bobs, with_times=True)
    pointer = folder_of(volume, ALICE) / "pointers" / ("0" * 32)

    def act() -> None:
        (home / "link").symlink_to("../bob")
        (home / "above").symlink_to("..")
        (home / "says-bob").write_bytes(b"home/bob")
        init(volume)
        HOSTILE[hostile](pointer)

    as_user(ALICE, act)
    assert by_both(lambda: entries(volume)) == ([], [])
    assert by_both(lambda: recover_all(volume)) == ([], [])
    with pytest.raises(NotFound):
        reap_now(volume, kept.name)
    pointer = folder_of(volume, ALICE) / "pointers" / pointer.name
    told = [] if hostile == "another's store" else [str(pointer)]  # for her it is a directory without a store
    for problem in by_both(lambda: problems(volume)):
        assert [one.where for one in problem] == told
    assert snapshot(bobs, with_times=True) == before
    pointer.rmdir() if hostile == "a directory" else pointer.unlink()


@pytest.mark.needs("loop", "btrfs")
def test_the_commands_reach_a_users_lower_store_from_the_root_of_the_volume() -> None:
    with loop_volume("btrfs") as btrfs:
        init(btrfs)
        btrfs_subvolume(btrfs, "sub").chmod(0o755)
        make_tree(btrfs / "sub" / "home", Dir(owner=(ALICE, ALICE)))
        job = btrfs / "sub" / "home" / "job"
        as_user(ALICE, lambda: make_tree(job, {"results": "hers"}))
        identifier = as_user(ALICE, lambda: str(swap(job).id))
        [told] = done_well("list", "--json", "--volume", btrfs).objects()
        assert told["id"] == identifier
        done_well("restore", "--volume", btrfs, identifier)
        assert (job / "results").read_text() == "hers"
        identifier = as_user(ALICE, lambda: str(remove(job).id))
        done_well("reap", "--now", "--volume", btrfs, identifier)
        assert entries(btrfs) == []
        assert_silent(btrfs)


def test_many_pointers_to_one_store_have_it_read_once(volume: Path) -> None:
    lower = make_tree(volume / "home/alice/lower", Dir(owner=(ALICE, ALICE)))
    recover_all(volume)

    def act() -> int:
        init(lower)
        with own(volume) as folder:
            pointers = Path(os.fsdecode(folder.path())) / "pointers"
            for n in range(20):
                (pointers / f"{n:032x}").write_bytes(raw(lower.relative_to(volume)))
            stores = list(lower_stores(folder))
        for found in stores:
            found.__exit__()
        return len(stores)

    assert as_user(ALICE, act) == 1


def test_pointers_beyond_a_number_are_not_followed_and_that_is_told(
    volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pointers_module, "MOST_READ", 3)
    monkeypatch.setattr(check_module, "MOST_READ", 3)
    as_user(ALICE, lambda: swap(make_tree(volume / "home/alice/job", {})))
    recover_all(volume)
    pointers = folder_of(volume, ALICE) / "pointers"

    def act() -> None:
        for n in range(5):
            (pointers / f"{n:032x}").write_bytes(b"home/alice")

    as_user(ALICE, act)
    assert [one.where for one in as_user(ALICE, lambda: problems(volume))] == [str(pointers)]
    for pointer in pointers.iterdir():
        pointer.unlink()


def test_root_lists_no_more_of_one_user_than_an_answer_has_room_for(
    volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orphans, "_MOST_LISTED", 3)
    for n in range(4):
        as_user(ALICE, lambda n=n: swap(make_tree(volume / f"home/alice/job{n}", {})).id)  # type: ignore[misc]
    roots = swap(make_tree(volume / "job", {})).id
    recover_all(volume)
    lost: list[TrashdError] = []
    assert [entry.id for entry in orphans.all_entries(Kernel(), [raw(volume)], lost)] == [roots]
    assert [error.exit_code for error in lost] == [Exit.INCOMPLETE]
    assert len(as_user(ALICE, lambda: entries(volume))) == 4
