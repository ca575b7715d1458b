"""Every verb, by root and by the victim, beside a hostile user: a plain twin shows what that user could do."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import pytest

from tests.support.covering_sets import is_soak, runs_every_case
from tests.support.hostile_steps import ALICE, BOB, DATA, MAPPED, OF_A_MATE, OF_THE_MAPPED, OF_THE_OWNER, ROOT, team
from tests.support.interrupted_command import COMPLETE, run_interrupted, unreported
from tests.support.other_users import query_without_fork
from tests.support.plain_twin import Step, Twins, contents
from tests.support.privileges import Credentials
from tests.support.real_filesystems import tmpfs_volume
from tests.support.store_verbs import entries

pytestmark = pytest.mark.needs("root")

HOMES = "homes/alice"
BACK = "srv/back"
AFTER = 1_000_000
"""A moment that comes when the command has ended."""


class Verb(NamedTuple):
    """A command, what it needs to find, and what it is that the asker does directly on the twin.

    words   ID: the orphan's; VOLUME: the volume; what begins with it is a path there
    thrown  who has swapped DATA away before
    gives   what the asker gives away by it
    back    where it puts the orphan
    """

    asker: Credentials
    words: str
    thrown: Credentials | None = None
    gives: str | None = None
    back: str | None = None


VERBS: Mapping[str, Verb] = {
    "init": Verb(ROOT, "init VOLUME", ALICE),
    "list": Verb(ROOT, "list --volume VOLUME", ALICE),
    "repair": Verb(ROOT, "doctor --repair VOLUME", ALICE),
    "root's reap": Verb(ROOT, "reap --volume VOLUME", ALICE),
    "root's reap of all": Verb(ROOT, "reap --all --now --volume VOLUME", ROOT),
    "root's reap of hers": Verb(ROOT, "reap --now ID --volume VOLUME", ALICE),
    "root's delete": Verb(ROOT, "reap --force --yes ID --volume VOLUME", ALICE),
    "root's restore": Verb(ROOT, "restore ID --volume VOLUME", ALICE, back=DATA),
    "restore to": Verb(ROOT, f"restore ID --to VOLUME/{BACK} --volume VOLUME", ALICE, back=BACK),
    "for owner": Verb(ROOT, f"swap --for-owner VOLUME/{HOMES}", gives=HOMES),
    "root's swap": Verb(ROOT, f"swap VOLUME/{DATA}", gives=DATA),
    "swap": Verb(ALICE, f"swap --keep-for 0s VOLUME/{DATA}", gives=DATA),
    "rm": Verb(ALICE, f"rm --keep-for 0s VOLUME/{DATA}", gives=DATA),
    "restore": Verb(ALICE, "restore ID --volume VOLUME", ALICE, back=DATA),
    "restore by path": Verb(ALICE, f"restore VOLUME/{DATA}", ALICE, back=DATA),
    "root's restore by path": Verb(ROOT, f"restore --user {ALICE.uid} VOLUME/{DATA}", ALICE, back=DATA),
    "undo": Verb(ALICE, "undo --volume VOLUME", ALICE, back=DATA),
    "root's undo": Verb(ROOT, "undo --volume VOLUME", ROOT, back=DATA),
    "du": Verb(ALICE, "du --volume VOLUME", ALICE),
    "root's du": Verb(ROOT, "du --volume VOLUME", ALICE),
    "root's count anew": Verb(ROOT, "du --count --volume VOLUME", ALICE),
    "complete": Verb(ALICE, COMPLETE, ALICE),
    "root's complete": Verb(ROOT, COMPLETE, ALICE),
    "reap": Verb(ALICE, "reap --now ID --volume VOLUME", ALICE),
    "keep": Verb(ALICE, "keep ID --volume VOLUME", ALICE),
    "sweep": Verb(ALICE, f"sweep --keep-for 0s VOLUME/{DATA}", gives=DATA),
    "with stores": Verb(ALICE, "reap --now --with-stores ID --volume VOLUME", ALICE),
    "root's keep": Verb(ROOT, "keep ID --volume VOLUME", ALICE),
    "root's sweep": Verb(ROOT, f"sweep --keep-for 0s VOLUME/{DATA}", gives=DATA),
    "root's with stores": Verb(ROOT, "reap --now --with-stores ID --volume VOLUME", ROOT),
    "root's with her stores": Verb(ROOT, "reap --now --with-stores ID --volume VOLUME", ALICE),
}


@pytest.fixture(scope="module")
def volumes() -> Iterator[tuple[Path, Path]]:
    with tmpfs_volume() as first, tmpfs_volume() as plain:
        yield first, plain


def play(twins: Twins, verb: Verb, moment: int, act: Sequence[Step]) -> bool:
    """The verb on one, its like on the other, the act in the midst; whether the verb came so far."""
    identifier = ""
    if verb.thrown is not None:
        twins.give(verb.thrown, DATA, 0, is_swap=True)
        assert run_interrupted(twins, verb.thrown, f"swap --keep-for 0s VOLUME/{DATA}").code == 0
        with query_without_fork():
            [identifier] = [entry.id for entry in entries(twins.first.volume)]
    if verb.gives is not None:
        twins.may_go |= twins.deletable(verb.asker, verb.gives)
    again = twins.act(twins.plain, act)
    ended = run_interrupted(twins, verb.asker, verb.words, identifier, moment, act)
    if not ended.acted:
        twins.act(twins.first, act)
    if verb.gives is not None:
        twins.give(verb.asker, verb.gives, 1, is_swap="swap" in verb.words)
    elif verb.back is not None and ended.code == 0:
        # What is there by now becomes an orphan of the asker, as by a swap.
        twins.may_go |= twins.deletable(verb.asker, verb.back)
        twins.take_back(verb.asker, 0, verb.back)
        twins.keep_from_now(verb.back)
    twins.act(twins.plain, again)
    run_interrupted(twins, ROOT, "doctor --repair VOLUME\nlist --volume VOLUME\nreap --volume VOLUME")
    return ended.acted


def hold(volumes: tuple[Path, Path], hostile: Credentials, verb: str, act: Sequence[Step], name: str) -> None:
    """Nothing is done that the twin doesn't show: the act at one moment of the verb, in `make soak-store` at many."""
    one = crc32(f"{verb} {name}".encode()) % 100
    for moment in range(0, 240, 8) if is_soak() else [one if one % 3 else AFTER]:
        with team(*volumes, hostile) as twins:
            before = contents(twins.first)
            play(twins, VERBS[verb], moment, act)
            assert (twins.faults(before), unreported(twins)) == ([], []), f"before call {moment}"


def pairs(verbs: Iterable[str], acts: Iterable[str]) -> list[tuple[str, str]]:
    """Every verb with acts: with `make every` with all of them, else with one in three, others for each."""
    found = [(verb, act) for verb in verbs for act in acts]
    return [one for one in found if runs_every_case() or crc32(" ".join(one).encode()) % 3 == 0]


@pytest.mark.parametrize(("verb", "act"), pairs(VERBS, OF_A_MATE))
def test_verb_beside_a_mate(volumes: tuple[Path, Path], verb: str, act: str) -> None:
    hold(volumes, BOB, verb, OF_A_MATE[act], act)


@pytest.mark.parametrize(("verb", "act"), pairs(VERBS, OF_THE_MAPPED))
def test_verb_beside_one_with_subordinate_ids(volumes: tuple[Path, Path], verb: str, act: str) -> None:
    hold(volumes, MAPPED, verb, OF_THE_MAPPED[act], act)


@pytest.mark.parametrize(
    ("verb", "act"), pairs((name for name, verb in VERBS.items() if verb.asker == ROOT), OF_THE_OWNER)
)
def test_verb_of_roots_on_what_its_owner_plays_with(volumes: tuple[Path, Path], verb: str, act: str) -> None:
    hold(volumes, ALICE, verb, OF_THE_OWNER[act], act)
