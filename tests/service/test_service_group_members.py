"""What a user plants as another user's folder: the service does not serve it, and one look tells."""

import os

import pytest

from fusefs.cli.main import run
from fusefs.core.service_status import VolumePhase
from fusefs.linux.kernel import Kernel
from fusefs.service.open_volume import open_volume
from tests.support.group_members import N_LIVE, TEAM, forge_store, live, plant
from tests.support.hostile_volume import ALICE, MALLORY, Shared
from tests.support.make_trees import make_tree, snapshot
from tests.support.other_users import as_user
from tests.support.real_filesystems import tmpfs_volume
from tests.support.service_process import places, service
from tests.support.small_orphans import EXPIRED
from tests.support.store_verbs import Counting, swap

pytestmark = [pytest.mark.needs("root"), pytest.mark.timeout(180)]


@pytest.mark.parametrize("name", ["13000", f"{ALICE}.0123456789ab"])
def test_a_folder_that_a_mate_planted_is_served_to_nobody(shared: Shared, name: str) -> None:
    """A mate may rename directories of that user's, not delete in them; one with a folder, and one without."""
    planted = plant(shared.volume, MALLORY, int(name.partition(".")[0]), name)
    before = snapshot(planted, with_times=True)
    with shared.served() as running:
        thrown = [shared.throw(uid) for uid in (ALICE, MALLORY)]
        running.until(lambda: all(map(shared.is_gone, thrown)))
        running.until(lambda: running.volume(shared.volume).refused)
        [told] = running.volume(shared.volume).refused
        assert told.where.endswith(f"new/{name}")
        assert "mode is 2775" in told.what
        running.until_phase(shared.volume, VolumePhase.IDLE)
    assert snapshot(planted, with_times=True) == before


def test_one_look_at_u_serves_all_its_users(shared: Shared) -> None:
    """However many names are planted: a few calls for each, and no second listing."""
    calls = Counting()

    def plant_many() -> None:
        for n in range(300):
            (shared.volume / f".trashd/new/{20_000 + n}").mkdir()

    as_user(MALLORY, plant_many)
    with open_volume(Kernel(calls), os.fsencode(shared.volume)) as opened:
        calls.calls.clear()
        census = opened.users()
    assert set(census.inos) == {0, ALICE, MALLORY}
    assert calls.calls.count("getdents") <= 6  # of new/, of u/, of the registry: to look first, and to take the census
    assert len(calls.calls) <= 2 * 3 * 300 + 30 * 3


def test_a_store_that_a_mate_made_of_roots_directories_is_served_to_nobody() -> None:
    """Its modes are right by now. Root's word makes a new one, in which what it held goes by no other user's."""
    with tmpfs_volume() as volume, places() as base:
        project = forge_store(volume, MALLORY, ALICE)

        def throw() -> str:
            return str(swap(make_tree(project / "job", {"results": "hers"}), options=EXPIRED).id)

        with service(base, project) as running:
            running.until(lambda: running.volume(project).phase is VolumePhase.UNPROVEN)
            assert f"trashd init --replace {project}" in running.volume(project).why
            assert live(project) == N_LIVE
            assert run(["init", "--replace", str(project)]) == 0
            thrown = as_user(ALICE, throw, groups=[TEAM])
            running.until(lambda: not any(thrown in names for _directory, names, _files in os.walk(project)))
        assert live(project) == N_LIVE
