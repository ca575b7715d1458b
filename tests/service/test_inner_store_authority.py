"""Stores in what its owner could not delete and root takes over (`delete_as = "root"`): no store goes by that."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from fusefs.core.container_states import State
from fusefs.core.names import ContainerId
from fusefs.core.results import STORE
from fusefs.core.service_status import VolumePhase
from fusefs.linux.kernel import Kernel
from fusefs.service.open_volume import open_volume
from fusefs.service.orphan_schedule import RootTakeover
from fusefs.service.work_session import take_over
from tests.support.make_trees import Dir, File, Spec, make_tree
from tests.support.nested_stores import own_store, plant_store, without_upper_store
from tests.support.other_users import as_user
from tests.support.reap_process import state_of
from tests.support.service_process import QUICK, Service, service
from tests.support.small_orphans import EXPIRED, PINNED
from tests.support.store_verbs import entries, folder_of, init, place, raw, reap_now, remove, restore, tmpfs_store
from tests.support.team_trees import tick

pytestmark = pytest.mark.needs("root")

ALICE, BOB = 1001, 1002
AS_ROOT = f'{QUICK}delete_as = "root"\nusers = ["{ALICE}"]\n'
LONG = "\u00e4" * 100
"""Names of which not all have room in a record."""


@pytest.fixture
def volume() -> Iterator[Path]:
    """A store of root's, and Alice's home."""
    with tmpfs_store() as path:
        make_tree(path / "alice", Dir(owner=(ALICE, ALICE)))
        yield path


def team_in(volume: Path, n_of_roots: int) -> Path:
    """A directory of Alice's in which are so many files that she can't delete, and a directory for a store."""
    closed: Spec = {f"{LONG}{n}": File(b"root's") for n in range(n_of_roots)}
    return make_tree(
        volume / "alice/team", Dir({"a": Dir(closed), "proj": Dir(owner=(ALICE, ALICE))}, owner=(ALICE, ALICE))
    )


def with_her_store(volume: Path, n_of_roots: int = 1) -> tuple[str, str]:
    """The ids of an orphan of hers like that, and of a pinned one in a store of her own in it."""
    team = team_in(volume, n_of_roots)
    with without_upper_store(volume):
        inner = as_user(ALICE, partial(own_store, team / "proj", PINNED))
    return as_user(ALICE, lambda: str(remove(team, options=EXPIRED).id)), inner


def until_done(running: Service, volume: Path) -> None:
    running.until(lambda: {entry.state for entry in entries(volume)} <= {State.QUARANTINE})
    running.until_phase(volume, VolumePhase.IDLE)


def assert_whole(volume: Path, inner: str) -> None:
    """What the inner store holds is all there, somewhere in an orphan."""
    (found,) = volume.glob(f".trashd/[un]*/*/*/*/**/.trashd*/u/*/orphans/{inner}")
    assert (found / "tree/a").read_text() == "1"


@pytest.mark.parametrize("n_of_roots", [1, 200])
def test_what_holds_a_store_of_its_owners_stays_his_whatever_else_he_could_not_delete(
    base: Path, volume: Path, n_of_roots: int
) -> None:
    team, inner = with_her_store(volume, n_of_roots)
    for _start in range(2):
        with service(base, volume, config=AS_ROOT) as running:
            until_done(running, volume)
        (entry,) = entries(volume)
        assert (entry.id, entry.uid, entry.state) == (team, ALICE, State.QUARANTINE)
        assert_whole(volume, inner)
    as_user(ALICE, lambda: restore(place(volume, team) / "tree/proj", inner, to=volume / "alice/back"))
    assert (volume / "alice/back/a").read_text() == "1"


def taken_over(volume: Path, identifier: str) -> str:
    """The id of root's orphan, of one that its owner's reaper left in quarantine."""
    reap_now(volume, identifier)
    with open_volume(Kernel(), raw(volume)) as opened:
        assert ALICE in opened.users().inos  # as the service, which first looks who is there
        taken = take_over(opened, RootTakeover(ALICE, raw(volume / ".trashd"), ContainerId(identifier), by_force=True))
    assert taken is not None
    return str(taken)


def test_roots_reaper_stops_at_a_store_of_whom_he_took_it_from(volume: Path) -> None:
    team, inner = with_her_store(volume)
    roots = taken_over(volume, team)
    assert [failure.call for failure in reap_now(volume, roots).report.failures] == [STORE]
    assert state_of(volume, roots) is State.QUARANTINE
    assert_whole(volume, inner)


def test_roots_reaper_stops_at_a_store_of_roots_that_holds_what_is_anybodys(volume: Path) -> None:
    team = team_in(volume, 1)
    make_tree(team / "roots", Dir({"job": Dir({"a": "1"}, owner=(BOB, BOB))}, mode=0o777))
    with without_upper_store(volume):
        init(team / "roots")
        inner = as_user(BOB, lambda: str(remove(team / "roots/job", None, PINNED).id))
    (team / "roots/.trashd/new" / str(BOB)).rename(team / "roots/.trashd/u" / str(BOB))
    roots = taken_over(volume, as_user(ALICE, lambda: str(remove(team, options=EXPIRED).id)))
    assert [failure.call for failure in reap_now(volume, roots).report.failures] == [STORE]
    assert_whole(volume, inner)


@pytest.mark.parametrize("uid", [0, ALICE, BOB])
def test_what_a_third_person_planted_keeps_nothing(base: Path, volume: Path, uid: int) -> None:
    team = team_in(volume, 1)
    make_tree(team / "open", Dir(mode=0o777))
    as_user(BOB, partial(plant_store, team / "open", uid))
    tick(volume)  # else it is not known what was there before the swap
    as_user(ALICE, lambda: remove(team, options=EXPIRED))
    with service(base, volume, config=AS_ROOT) as running:
        running.until(lambda: entries(volume) == [])


def test_why_nobody_noted_is_no_reason_for_root_to_take_it(base: Path, volume: Path) -> None:
    """A reaper on a full volume can't write down why something is in quarantine, and is killed."""
    team, inner = with_her_store(volume)
    folder = folder_of(volume, ALICE)
    (folder / "orphans" / team).rename(folder / "quarantine" / team)
    with service(base, volume, config=AS_ROOT) as running:
        running.until_phase(volume, VolumePhase.IDLE)
        as_user(ALICE, lambda: remove(make_tree(volume / "alice/later", {}), options=EXPIRED))
        until_done(running, volume)
    assert {(entry.id, entry.uid) for entry in entries(volume)} == {(team, ALICE)}
    assert_whole(volume, inner)
