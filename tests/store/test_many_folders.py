"""A user with 65,536 subordinate uids has a genuine folder for each: so many calls a folder, and no user waits."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from fusefs.core.results import Finding
from fusefs.linux.kernel import Kernel
from fusefs.linux.user_ids import read_subordinates
from fusefs.service.open_volume import open_volume
from fusefs.store import make_folder, standing
from fusefs.store.doctor import check_folder, check_store
from fusefs.store.find_stores import discover
from fusefs.store.layout import FOLDERS
from fusefs.store.make_folder import look_first
from fusefs.store.orphans import all_entries, each_folder
from fusefs.store.standing import take_census
from tests.support.covering_sets import is_soak
from tests.support.make_trees import Dir, make_tree
from tests.support.other_users import as_user
from tests.support.real_filesystems import tmpfs_volume
from tests.support.store_verbs import init, numbered_calls, opened, raw, swap

pytestmark = pytest.mark.needs("root")

BOB, FIRST = 1002, 100_000
ALICE = FIRST + 1_000_000
"""One whose number is none of Bob's, and higher than all of them."""
N_LISTED = 30
"""Each costs `list` and `doctor` a process."""
N_SEEN, N_MANY = (30_000, 65_536) if is_soak() else (300, 700)
A_LOOK = 300
OPENS = ("open", "openat2", "getdents")


@pytest.fixture
def volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A store of root's with room for very many folders, on a system that tells of Bob's uids."""
    (tmp_path / "subuid").write_text(f"{BOB}:{FIRST}:65536\n")
    told = partial(read_subordinates, bytes(tmp_path / "subuid"))
    monkeypatch.setattr(make_folder, "read_subordinates", told)
    with tmpfs_volume("2g", ("nr_inodes=0",)) as path:
        init(path)
        yield path


def make_folders(volume: Path, start: int, n: int) -> None:
    """What a user with all these subordinate uids would have made, as far as it can be seen."""
    for uid in range(FIRST + start, FIRST + start + n):
        folder = volume / ".trashd/new" / str(uid)
        for part in (folder, *(folder / os.fsdecode(name) for name in FOLDERS)):
            part.mkdir(0o700)
            os.chown(part, uid, uid)


def doctor(kernel: Kernel, volumes: Sequence[bytes]) -> object:
    with opened(Path(os.fsdecode(volumes[0]))) as store:
        found = list(check_store(store._replace(kernel=kernel)))
    return [*found, *each_folder(discover(kernel, volumes), check_folder, list[Finding])]


def serve(kernel: Kernel, volumes: Sequence[bytes]) -> object:
    """The service's look: which users there are to serve."""
    with open_volume(kernel, volumes[0]) as seen:
        return seen.users()


def calls(volume: Path, look: Callable[[Kernel, list[bytes]], object]) -> Counter[str]:
    """How often each call is made, by root and its children."""
    return Counter(call.name for call in numbered_calls(lambda kernel: look(kernel, [raw(volume)])))


@pytest.mark.parametrize(
    ("look", "n", "n_opens", "n_calls"),
    [
        pytest.param(all_entries, N_LISTED, 16, 40, id="list"),
        pytest.param(doctor, N_LISTED, 30, 80, id="doctor"),
        pytest.param(serve, N_SEEN, 3, 16, id="service"),
    ],
)
def test_each_folder_costs_a_look_so_many_calls(
    volume: Path, look: Callable[[Kernel, list[bytes]], object], n: int, n_opens: int, n_calls: int
) -> None:
    make_registered(volume, 0, n)
    some = calls(volume, look)
    make_registered(volume, n, n)
    more = calls(volume, look) - some
    assert sum(more[name] for name in OPENS) <= n_opens * n
    assert sum(more.values()) <= n_calls * n
    assert sum(more.values()) <= sum(some.values()) + 20, "a folder costs more where there are more"


def make_registered(volume: Path, start: int, n: int) -> int:
    """Such folders, and so many looks of root's that all are registered; how many."""
    make_folders(volume, start, n)
    n_looks = 0
    while os.listdir(volume / ".trashd/new"):
        look_with(Kernel(), volume)
        n_looks += 1
    return n_looks


def look_with(kernel: Kernel, volume: Path) -> None:
    with opened(volume) as store:
        look_first(store._replace(kernel=kernel))


def test_a_look_registers_so_many_and_each_persons_own_before_any_subordinates(volume: Path) -> None:
    make_folders(volume, 0, N_MANY)
    for uid in (ALICE, BOB):
        make_tree(volume / f"home-{uid}", Dir({"job": Dir({"a": "1"}, owner=(uid, uid))}, owner=(uid, uid)))
        as_user(uid, lambda uid=uid: swap(volume / f"home-{uid}/job").id)  # type: ignore[misc]
    counted = calls(volume, lambda kernel, _volumes: look_with(kernel, volume))
    assert counted["fsync"] <= 2 * A_LOOK
    served = os.listdir(volume / ".trashd/u")
    assert {str(ALICE), str(BOB)} <= set(served)
    assert len(served) <= A_LOOK + 1
    look_with(Kernel(), volume)
    assert len(os.listdir(volume / ".trashd/u")) > len(served)


def test_all_of_them_are_served_in_the_end(volume: Path) -> None:
    assert make_registered(volume, 0, N_MANY) <= N_MANY // A_LOOK + 1
    with opened(volume) as store:
        assert len(take_census(store).inos) == N_MANY + 1


def test_one_users_subordinate_uids_are_served_up_to_a_number_and_others_all(
    volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = partial(read_subordinates, bytes(tmp_path / "subuid"))
    monkeypatch.setattr("fusefs.linux.user_ids.read_subordinates", told)
    monkeypatch.setattr(standing, "MOST", 10)
    make_folders(volume, 0, 15)
    make_folders(volume, ALICE - FIRST, 1)
    look_with(Kernel(), volume)
    with opened(volume) as store:
        census = take_census(store)
    assert len(census.inos) == 10 + 2
    assert ALICE in census.inos
    [refused] = census.refused
    assert (refused.owner, refused.why[:2]) == (BOB, "5 ")
    assert len(os.listdir(volume / ".trashd/new")) == 5
