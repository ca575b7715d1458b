"""Authority: root's commands on a user's containers do what that user could have done, and no more (I13)."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from fusefs.core.container_states import State
from fusefs.core.errors import BadRecord, NotFound, NotPermitted, Refused, TrashdError
from fusefs.linux.kernel import Kernel
from fusefs.store.as_owner import seize, swap_for_owner
from fusefs.store.container import ClaimLost
from fusefs.store.orphans import ListedContainer, opened_folder
from fusefs.store.stage import SwapOptions
from fusefs.store.swap import Swapped, open_own_folder
from tests.support.crash_scenarios import changing
from tests.support.make_trees import IMMUTABLE, Dir, File, Spec, make_tree, set_flags, snapshot
from tests.support.other_users import as_user
from tests.support.real_filesystems import bind_mount
from tests.support.shared_memory_children import code_of_child
from tests.support.store_verbs import (
    ActingBefore,
    Counting,
    DyingAt,
    FailingAt,
    NumberedCall,
    assert_silent,
    entries,
    folder_of,
    numbered_calls,
    place,
    raw,
    reap_now,
    recover_all,
    remove,
    restore,
    swap,
    use,
)
from tests.support.two_users_store import ALICE, BOB, NOGROUP, canary_of, orphan_of, shared_store, stuck

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


CANARY: Spec = {"secret": "s", "job": {"record.json": "{}", "tree": {"results": "root's"}}}


@pytest.fixture
def seized_volume() -> Iterator[Path]:
    """A store of root's, a directory of Alice's, and the canary, which is root's."""
    with shared_store(CANARY, alice=ALICE) as path:
        before = canary_of(path)
        yield path
        assert canary_of(path) == before
        assert_silent(path)


def taken(seized_volume: Path, entry: ListedContainer, kernel: Kernel | None = None) -> Swapped | ClaimLost:
    with opened_folder(kernel or Kernel(), [raw(seized_volume)], entry) as folder, open_own_folder(folder.store) as own:
        return seize(folder, entry.id, own, "a note")


def path_of(entry: ListedContainer) -> Path:
    return Path(os.fsdecode(entry.path))


def test_it_is_an_orphan_of_roots_then_and_kept_until_asked_for(seized_volume: Path) -> None:
    entry = stuck(seized_volume)
    before = snapshot(path_of(entry))
    seized = taken(seized_volume, entry)
    assert isinstance(seized, Swapped)
    (orphan,) = entries(seized_volume)
    assert (orphan.id, orphan.uid, orphan.state, orphan.expires_ns) == (seized.id, 0, State.ORPHANS, None)
    assert orphan.note == "a note"
    assert snapshot(path_of(orphan) / "tree") == before


def test_it_is_restored_elsewhere_and_never_into_the_store(seized_volume: Path) -> None:
    entry = stuck(seized_volume)
    seized = taken(seized_volume, entry)
    assert isinstance(seized, Swapped)
    for inside in (None, b"tree/roots"):
        with pytest.raises(Refused) as raised:
            restore(seized_volume, seized.id, inside=inside)
        assert "--to" in raised.value.hint
    restore(seized_volume, seized.id, to=seized_volume / "left")
    assert (seized_volume / "left/tree/roots/file").read_text() == "root's"


def test_what_has_gone_is_a_race_lost(seized_volume: Path) -> None:
    entry = stuck(seized_volume)
    path_of(entry).rename(seized_volume / "alice/mine")
    assert taken(seized_volume, entry) is ClaimLost.GONE


@pytest.mark.parametrize("call", ["flock", "rename"])
def test_another_thing_at_the_name_is_left_where_it_is(seized_volume: Path, call: str) -> None:
    entry = stuck(seized_volume)

    def exchange() -> None:
        path_of(entry).rename(seized_volume / "alice/mine")
        make_tree(path_of(entry), Dir({"other": "thing"}, owner=(ALICE, ALICE)))

    kernel = Kernel(ActingBefore(call, exchange))
    if call == "flock":
        assert taken(seized_volume, entry, kernel) is ClaimLost.GONE
    else:
        with pytest.raises(Refused):
            taken(seized_volume, entry, kernel)
    assert (path_of(entry) / "other").read_text() == "thing"
    assert (seized_volume / "alice/mine/tree/roots/file").read_text() == "root's"
    assert list(folder_of(seized_volume, 0).glob("[!r]*/*")) == []
    (path_of(entry) / "other").unlink()
    path_of(entry).rmdir()


PLANTED: dict[str, Callable[[Path, Path], object]] = {
    "a FIFO": lambda record, _canary: os.mkfifo(record),
    "a directory": lambda record, _canary: record.mkdir(),
    "a link": lambda record, canary: record.symlink_to(canary / "secret"),
    "a hard link": lambda record, canary: record.hardlink_to(canary / "secret"),
    "a file of root's": lambda record, _canary: record.write_text("{}"),
    "a device": lambda record, _canary: os.mknod(record, 0o20666, os.makedev(240, 0)),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_what_is_no_record_of_its_owners_is_not_even_opened(seized_volume: Path, planted: str) -> None:
    entry = stuck(seized_volume)
    record = path_of(entry) / "record.json"
    record.rename(seized_volume / "alice/record")
    PLANTED[planted](record, seized_volume / "canary")
    counting = Counting()
    with pytest.raises(BadRecord):
        taken(seized_volume, entry, Kernel(counting))
    assert counting.calls[-1] == "fstat"
    record.rmdir() if planted == "a directory" else record.unlink()
    (seized_volume / "alice/record").rename(record)


def test_a_link_at_the_container_leads_nowhere(seized_volume: Path) -> None:
    entry = stuck(seized_volume)
    with linked(path_of(entry), seized_volume):
        assert taken(seized_volume, entry) is ClaimLost.GONE


def test_of_a_folder_with_a_link_for_its_quarantine_nothing_is_taken(seized_volume: Path) -> None:
    entry = stuck(seized_volume)
    with linked(folder_of(seized_volume, ALICE) / "quarantine", seized_volume), pytest.raises(NotFound):
        taken(seized_volume, entry)


@contextmanager
def linked(path: Path, seized_volume: Path) -> Iterator[None]:
    """A link to the canary in the place of a directory of Alice's."""
    path.rename(seized_volume / "alice/aside")
    path.symlink_to(seized_volume / "canary")
    yield
    path.unlink()
    (seized_volume / "alice/aside").rename(path)


def test_a_frozen_container_is_told(seized_volume: Path) -> None:
    entry = stuck(seized_volume)
    set_flags(path_of(entry), IMMUTABLE)
    with pytest.raises(NotPermitted) as raised:
        taken(seized_volume, entry)
    assert "chattr" in raised.value.hint
    set_flags(path_of(entry), IMMUTABLE, on=False)


def back(seized_volume: Path, entry: ListedContainer) -> None:
    (found,) = entries(seized_volume)
    if found.uid == 0:
        restore(seized_volume, found.id, to=path_of(entry))


def calls_of_taking(seized_volume: Path, entry: ListedContainer) -> list[NumberedCall]:
    calls = numbered_calls(partial(taken, seized_volume, entry))
    back(seized_volume, entry)
    return calls


def test_killed_at_any_call_it_is_in_exactly_one_place(seized_volume: Path) -> None:
    entry = stuck(seized_volume)
    before = snapshot(path_of(entry))
    for n in changing(calls_of_taking(seized_volume, entry)):
        code = code_of_child(partial(taken, seized_volume, entry, Kernel(DyingAt(n))))
        assert recover_all(seized_volume) == []
        back(seized_volume, entry)
        assert snapshot(path_of(entry)) == before, n
    assert code == 0


def test_whatever_call_fails_nothing_is_lost(seized_volume: Path) -> None:
    entry = stuck(seized_volume)
    before = snapshot(path_of(entry))
    for n in range(len(calls_of_taking(seized_volume, entry))):
        with suppress(TrashdError, OSError):
            taken(seized_volume, entry, Kernel(FailingAt(n, errno.EIO)))
        assert recover_all(seized_volume) == []
        back(seized_volume, entry)
        assert snapshot(path_of(entry)) == before, n
