"""The service beside people who are up to something: it deletes what was given away, and nothing that came in since."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from fusefs.core.service_status import VolumePhase
from tests.support.group_members import FORGED
from tests.support.hostile_steps import ALICE, BOB, DATA, MAPPED, OF_A_MATE, OF_THE_MAPPED, OF_THE_OWNER, ROOT, team
from tests.support.interrupted_command import ask, untold
from tests.support.make_trees import Dir, File, make_tree
from tests.support.plain_twin import MARK, Step, Twins, contents
from tests.support.privileges import Credentials
from tests.support.real_filesystems import ON_DISK, loop_volume, tmpfs_volume
from tests.support.service_process import QUICK, Service, places, service

pytestmark = [pytest.mark.needs("root"), pytest.mark.timeout(180)]

AS_ROOT = f'{QUICK}authority = "root"\nusers = ["{ALICE.uid}"]\n'
ROOTS = "team/project/roots"


@pytest.fixture(scope="module")
def volumes() -> Iterator[tuple[Path, Path]]:
    with tmpfs_volume() as first, tmpfs_volume() as plain:
        yield first, plain


def throw(twins: Twins, asker: Credentials, where: str, number: int) -> None:
    assert ask(twins, asker, f"swap --keep-for 0s VOLUME/{where}").code == 0
    twins.give(asker, where, number, is_swap=True)


def is_done(twins: Twins) -> bool:
    """Whether nothing waits to be reaped any more but what was planted."""
    return all(path.name == FORGED for state in ("orphans", "reaping") for path in containers(twins, state))


def containers(twins: Twins, state: str, whose: str = "*") -> list[Path]:
    return list(twins.first.volume.glob(f".trashd/*/{whose}/{state}/*Z-*"))


def act_before_its_look(twins: Twins, running: Service, act: Sequence[Step]) -> None:
    """Alice and root throw away while the service is stopped, and the hostile one acts before it goes on."""
    with running.held():
        throw(twins, ALICE, DATA, 1)
        throw(twins, ROOT, ROOTS, 2)
        for side in (twins.first, twins.plain):
            twins.act(side, act)


def hold(volumes: tuple[Path, Path], hostile: Credentials, act: Sequence[Step], config: str = QUICK) -> None:
    """Nothing is done that the twin doesn't show."""
    with team(*volumes, hostile) as twins, places() as base:
        if config == AS_ROOT:
            put_roots_into_hers(twins)
        before = contents(twins.first)
        with service(base, twins.first.volume, config=config) as running:
            running.until_phase(twins.first.volume, VolumePhase.IDLE)
            if config == AS_ROOT:
                twins.may_go |= twins.deletable(ROOT, DATA)
            act_before_its_look(twins, running, act)
            running.until(lambda: is_done(twins))
            running.until_phase(twins.first.volume, VolumePhase.IDLE)
            running.stop()
            assert "fault in trashd" not in running.log.read_text()
        assert (twins.faults(before), untold(twins)) == ([], [])


def put_roots_into_hers(twins: Twins) -> None:
    for side in (twins.first, twins.plain):
        make_tree(side.at(f"{DATA}/built"), Dir({"object": File(f"{MARK}built".encode())}))


@pytest.mark.parametrize("act", OF_A_MATE)
def test_service_beside_a_mate(volumes: tuple[Path, Path], act: str) -> None:
    hold(volumes, BOB, OF_A_MATE[act])


@pytest.mark.parametrize("act", OF_THE_MAPPED)
def test_service_beside_one_with_subordinate_ids(volumes: tuple[Path, Path], act: str) -> None:
    hold(volumes, MAPPED, OF_THE_MAPPED[act])


@pytest.mark.parametrize("act", ["moves in", "exchanges in", "moves files in", "goes up", "plants u", "takes out"])
def test_service_with_roots_authority_for_her_beside_a_mate(volumes: tuple[Path, Path], act: str) -> None:
    hold(volumes, BOB, OF_A_MATE[act], AS_ROOT)


def test_what_came_in_is_not_taken_out_of_its_owners_reach_by_roots_authority(volumes: tuple[Path, Path]) -> None:
    """It lies in quarantine beside what root was to delete for her; a service that starts finds it there again."""
    with team(*volumes, BOB) as twins, places() as base:
        put_roots_into_hers(twins)
        with service(base, twins.first.volume, config=AS_ROOT) as running:
            running.until_phase(twins.first.volume, VolumePhase.IDLE)
            act_before_its_look(twins, running, OF_A_MATE["moves in"])
            running.until(lambda: is_done(twins))
            later_is_gone(twins, running)
        with service(base, twins.first.volume, config=AS_ROOT) as running:
            running.until_phase(twins.first.volume, VolumePhase.IDLE)
            later_is_gone(twins, running)
        [kept] = containers(twins, "quarantine", f"{ALICE.uid}*")
        assert (kept / "tree/came-in/results/thesis").exists()
        assert (kept / "tree/built/object").exists()


def later_is_gone(twins: Twins, running: Service) -> None:
    """What is thrown away now, and what root took over before that, has been reaped."""
    assert ask(twins, ALICE, "swap --keep-for 0s VOLUME/alice/job").code == 0
    running.until(lambda: is_done(twins))
    running.until_phase(twins.first.volume, VolumePhase.IDLE)


@pytest.mark.parametrize("act", OF_THE_OWNER)
def test_service_with_roots_authority_for_one_who_plays_with_it(volumes: tuple[Path, Path], act: str) -> None:
    hold(volumes, ALICE, OF_THE_OWNER[act], AS_ROOT)


@pytest.mark.parametrize("filesystem", ON_DISK)
def test_service_leaves_what_came_in_on_each_filesystem(filesystem: str) -> None:
    steps = [*OF_A_MATE["exchanges in"], *OF_A_MATE["moves files in"]]
    with loop_volume(filesystem) as first, tmpfs_volume() as plain:
        hold((first, plain), BOB, steps)
