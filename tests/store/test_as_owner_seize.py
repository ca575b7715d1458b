"""Root takes what is in a user's quarantine: what its owner does meanwhile harms no other, and nothing is lost."""

from __future__ import annotations

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
from fusefs.store.as_owner import seize
from fusefs.store.container import ClaimLost
from fusefs.store.orphans import ListedContainer, opened_folder
from fusefs.store.swap import Swapped, own_folder
from tests.support.crash_scenarios import changing
from tests.support.make_trees import IMMUTABLE, Dir, Spec, make_tree, set_flags, snapshot
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
    raw,
    recover_all,
    restore,
)
from tests.support.two_users_store import ALICE, canary_of, shared_store, stuck

pytestmark = pytest.mark.needs("root")

CANARY: Spec = {"secret": "s", "job": {"record.json": "{}", "tree": {"results": "root's"}}}


@pytest.fixture
def volume() -> Iterator[Path]:
    """A store of root's, a directory of Alice's, and the canary, which is root's."""
    with shared_store(CANARY, alice=ALICE) as path:
        before = canary_of(path)
        yield path
        assert canary_of(path) == before
        assert_silent(path)


def taken(volume: Path, entry: ListedContainer, kernel: Kernel | None = None) -> Swapped | ClaimLost:
    with opened_folder(kernel or Kernel(), [raw(volume)], entry) as folder, own_folder(folder.store) as own:
        return seize(folder, entry.id, own, "a note")


def path_of(entry: ListedContainer) -> Path:
    return Path(os.fsdecode(entry.path))


def test_it_is_an_orphan_of_roots_then_and_kept_until_asked_for(volume: Path) -> None:
    entry = stuck(volume)
    before = snapshot(path_of(entry))
    seized = taken(volume, entry)
    assert isinstance(seized, Swapped)
    (orphan,) = entries(volume)
    assert (orphan.id, orphan.uid, orphan.state, orphan.expires_ns) == (seized.id, 0, State.ORPHANS, None)
    assert orphan.note == "a note"
    assert snapshot(path_of(orphan) / "tree") == before


def test_it_is_restored_elsewhere_and_never_into_the_store(volume: Path) -> None:
    entry = stuck(volume)
    seized = taken(volume, entry)
    assert isinstance(seized, Swapped)
    for inside in (None, b"tree/roots"):
        with pytest.raises(Refused) as told:
            restore(volume, seized.id, inside=inside)
        assert "--to" in told.value.hint
    restore(volume, seized.id, to=volume / "left")
    assert (volume / "left/tree/roots/file").read_text() == "root's"


def test_what_has_gone_is_a_race_lost(volume: Path) -> None:
    entry = stuck(volume)
    path_of(entry).rename(volume / "alice/mine")
    assert taken(volume, entry) is ClaimLost.GONE


@pytest.mark.parametrize("call", ["flock", "rename"])
def test_another_thing_at_the_name_is_left_where_it_is(volume: Path, call: str) -> None:
    entry = stuck(volume)

    def exchange() -> None:
        path_of(entry).rename(volume / "alice/mine")
        make_tree(path_of(entry), Dir({"other": "thing"}, owner=(ALICE, ALICE)))

    kernel = Kernel(ActingBefore(call, exchange))
    if call == "flock":
        assert taken(volume, entry, kernel) is ClaimLost.GONE
    else:
        with pytest.raises(Refused):
            taken(volume, entry, kernel)
    assert (path_of(entry) / "other").read_text() == "thing"
    assert (volume / "alice/mine/tree/roots/file").read_text() == "root's"
    assert list(folder_of(volume, 0).glob("[!r]*/*")) == []
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
def test_what_is_no_record_of_its_owners_is_not_even_opened(volume: Path, planted: str) -> None:
    entry = stuck(volume)
    record = path_of(entry) / "record.json"
    record.rename(volume / "alice/record")
    PLANTED[planted](record, volume / "canary")
    counting = Counting()
    with pytest.raises(BadRecord):
        taken(volume, entry, Kernel(counting))
    assert counting.calls[-1] == "fstat"
    record.rmdir() if planted == "a directory" else record.unlink()
    (volume / "alice/record").rename(record)


def test_a_link_at_the_container_leads_nowhere(volume: Path) -> None:
    entry = stuck(volume)
    with linked(path_of(entry), volume):
        assert taken(volume, entry) is ClaimLost.GONE


def test_of_a_folder_with_a_link_for_its_quarantine_nothing_is_taken(volume: Path) -> None:
    entry = stuck(volume)
    with linked(folder_of(volume, ALICE) / "quarantine", volume), pytest.raises(NotFound):
        taken(volume, entry)


@contextmanager
def linked(path: Path, volume: Path) -> Iterator[None]:
    """A link to the canary in the place of a directory of Alice's."""
    path.rename(volume / "alice/aside")
    path.symlink_to(volume / "canary")
    yield
    path.unlink()
    (volume / "alice/aside").rename(path)


def test_a_frozen_container_is_told(volume: Path) -> None:
    entry = stuck(volume)
    set_flags(path_of(entry), IMMUTABLE)
    with pytest.raises(NotPermitted) as told:
        taken(volume, entry)
    assert "chattr" in told.value.hint
    set_flags(path_of(entry), IMMUTABLE, on=False)


def back(volume: Path, entry: ListedContainer) -> None:
    (found,) = entries(volume)
    if found.uid == 0:
        restore(volume, found.id, to=path_of(entry))


def calls_of_taking(volume: Path, entry: ListedContainer) -> list[NumberedCall]:
    calls = numbered_calls(partial(taken, volume, entry))
    back(volume, entry)
    return calls


def test_killed_at_any_call_it_is_in_exactly_one_place(volume: Path) -> None:
    entry = stuck(volume)
    before = snapshot(path_of(entry))
    for n in changing(calls_of_taking(volume, entry)):
        code = code_of_child(partial(taken, volume, entry, Kernel(DyingAt(n))))
        assert recover_all(volume) == []
        back(volume, entry)
        assert snapshot(path_of(entry)) == before, n
    assert code == 0


def test_whatever_call_fails_nothing_is_lost(volume: Path) -> None:
    entry = stuck(volume)
    before = snapshot(path_of(entry))
    for n in range(len(calls_of_taking(volume, entry))):
        with suppress(TrashdError, OSError):
            taken(volume, entry, Kernel(FailingAt(n, errno.EIO)))
        assert recover_all(volume) == []
        back(volume, entry)
        assert snapshot(path_of(entry)) == before, n
