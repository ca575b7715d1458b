"""Any history of people, some up to something, between any two calls of any command: a plain twin is the oracle.

Hypothesis draws who throws away, takes back and reaps what, what another user does with plain calls meanwhile, and
before which call. Whatever comes of it, nothing is gone, out of its owner's reach or readable that was not so, or
could not have been made so, on a volume where the same people have only their own calls.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from tests.support.hostile_steps import (
    ALICE,
    BOB,
    DATA,
    LIVE,
    MAPPED,
    OF_A_MATE,
    OF_THE_MAPPED,
    ROOT,
    link,
    make,
    move,
    remove,
    set_mode,
    team,
)
from tests.support.interrupted_command import run_interrupted, unreported
from tests.support.other_users import called_by
from tests.support.plain_twin import Exchange, Step, Twins, contents
from tests.support.privileges import Credentials
from tests.support.real_filesystems import tmpfs_volume
from tests.support.store_verbs import entries

pytestmark = pytest.mark.needs("root")

TOPS = ("data", "live", "more", "roots", "his", "new")
INNER = ("", "open", "other", "results", "private", "draft", "open/in")
SHARED = [f"team/project/{top}" for top in TOPS]
INSIDE = [f"{top}/{inner}".rstrip("/") for top in SHARED for inner in INNER]
HELD = [f"@{held}/{inner}" for held in ("data", "open", "live") for inner in INNER[1:]]
IN_STORE = [f".trashd/{area}/{ALICE.uid}{end}" for area in ("u", "new") for end in ("", ".0123456789ab")]
VICTIMS = [*SHARED, "team/project", "alice/job", "homes/alice", f"{DATA}/open", f"{DATA}/results"]
SCRIPTS: list[Sequence[Step]] = [*OF_A_MATE.values(), *OF_THE_MAPPED.values()]


def _steps() -> st.SearchStrategy[Sequence[Step]]:
    somewhere, place = st.sampled_from(INSIDE + HELD), st.sampled_from(INSIDE + HELD + IN_STORE)
    step = st.one_of(
        st.builds(move, somewhere, place),
        st.builds(move, st.sampled_from(SHARED), st.sampled_from(HELD)),
        st.builds(Exchange, somewhere, somewhere),
        st.builds(make, place),
        st.builds(link, place, st.sampled_from(["srv", "alice", "homes"])),
        st.builds(remove, somewhere),
        st.builds(set_mode, somewhere, st.sampled_from([0o700, 0o2775, 0o777])),
    )
    return st.lists(step, min_size=1, max_size=4) | st.sampled_from(SCRIPTS)


STEPS, MOMENTS, ASKERS = _steps(), st.integers(0, 160), st.sampled_from([ALICE, ROOT])


class HostileMachine(RuleBasedStateMachine):
    """Two volumes; the ids of the orphans on the first, with who threw each away and which one it was."""

    volumes: tuple[Path, Path]

    def __init__(self) -> None:
        super().__init__()
        self.owned = ExitStack()
        self.thrown: dict[str, tuple[Credentials, int]] = {}
        self.n_thrown = 0

    @initialize(hostile=st.sampled_from([BOB, MAPPED]))
    def start(self, hostile: Credentials) -> None:
        self.twins: Twins = self.owned.enter_context(team(*self.volumes, hostile))
        self.before = contents(self.twins.first)

    def teardown(self) -> None:
        self.owned.close()

    @invariant()
    def nothing_happened_that_the_twin_does_not_show(self) -> None:
        if hasattr(self, "twins"):
            assert self.twins.faults(self.before) == []
            assert unreported(self.twins) == []

    def beside(
        self, asker: Credentials, words: str, moment: int, steps: Sequence[Step], where: str = ""
    ) -> tuple[int, bool]:
        """A command's exit code, the steps before that call of it, or after it; whether they came after its change.

        where  the place at which another file is when the command has made its change
        """
        was, is_late = self.identity(where), [True]

        def look() -> None:
            is_late[0] = self.identity(where) != was

        ended = run_interrupted(self.twins, asker, words, "", moment, steps, look)
        if not ended.acted:
            self.twins.act(self.twins.first, steps)
        return ended.code, is_late[0]

    def follow(self) -> None:
        """On the plain one: what the hostile one could do on the first one, and no more.

        A name that is free on one and taken on the other, as in a store, would make two histories of one.
        """
        self.twins.act(self.twins.plain, self.twins.made)

    def identity(self, where: str) -> int:
        try:
            return self.twins.first.at(where).lstat().st_ino
        except OSError:
            return 0

    @rule(steps=STEPS)
    def act(self, steps: Sequence[Step]) -> None:
        self.twins.act(self.twins.first, steps)
        self.follow()

    @rule(where=st.sampled_from(SHARED))
    def open(self, where: str) -> None:
        """The user has one more directory open."""
        with suppress(OSError):
            for side in (self.twins.first, self.twins.plain):
                called_by(self.twins.hostile.be, lambda side=side: os.listdir(side.at(where)), "he")  # type: ignore[misc]
            for side in (self.twins.first, self.twins.plain):
                side.hold(where)

    @rule(
        asker=ASKERS,
        verb=st.sampled_from(["swap", "swap", "rm", "swap --for-owner"]),
        keep=st.sampled_from(["0s", "1d"]),
        where=st.sampled_from(VICTIMS),
        moment=MOMENTS,
        steps=STEPS,
    )
    def throw(self, asker: Credentials, verb: str, keep: str, where: str, moment: int, steps: Sequence[Step]) -> None:
        twins, known = self.twins, {entry.id for entry in entries(self.volumes[0])}
        asker = ROOT if "owner" in verb else asker
        twins.may_go |= twins.deletable(asker, where)
        _code, is_late = self.beside(asker, f"{verb} --keep-for {keep} VOLUME/{where}", moment, steps, where)
        self.n_thrown += 1
        if not is_late:
            self.follow()
        twins.give(asker, where, self.n_thrown, is_swap="swap" in verb)
        if is_late:
            self.follow()
        for entry in entries(self.volumes[0]):
            if entry.id not in known:
                self.thrown[entry.id] = (asker, self.n_thrown)

    @precondition(lambda self: self.thrown)
    @rule(data=st.data(), by=ASKERS, to=st.sampled_from(["", "srv/back", "alice/back"]), moment=MOMENTS, steps=STEPS)
    def restore(self, data: st.DataObject, by: Credentials, to: str, moment: int, steps: Sequence[Step]) -> None:
        twins, listed = self.twins, {str(entry.id): entry for entry in entries(self.volumes[0])}
        identifier = data.draw(st.sampled_from(sorted(self.thrown)))
        asker, number = self.thrown[identifier]
        where = to or os.fsdecode(listed[identifier].origin or b"") if identifier in listed else ""
        option = f"--to VOLUME/{to}" if to else ""
        code, is_late = self.beside(by, f"restore {option} {identifier} --volume VOLUME", moment, steps, where)
        if not is_late:
            self.follow()
        if code == 0 and identifier in listed:
            twins.take_back(asker if not to else by, number, where)
            twins.keep_from_now(where)
            del self.thrown[identifier]
        if is_late:
            self.follow()

    @rule(
        asker=ASKERS,
        words=st.sampled_from(["reap", "reap --all --now", "list", "du", "keep --release ID", "reap --now ID", "init"]),
        data=st.data(),
        moment=MOMENTS,
        steps=STEPS,
    )
    def tend(self, asker: Credentials, words: str, data: st.DataObject, moment: int, steps: Sequence[Step]) -> None:
        """What deletes nothing but what was given, and what deletes nothing at all."""
        identifier = data.draw(st.sampled_from(sorted(self.thrown))) if self.thrown else "none"
        words = words.replace("ID", identifier)
        told = "init VOLUME" if words == "init" else f"{words} --volume VOLUME"
        self.beside(asker, told, moment, steps)
        self.follow()

    @rule(moment=MOMENTS, steps=STEPS)
    def repair(self, moment: int, steps: Sequence[Step]) -> None:
        self.beside(ROOT, "doctor --repair VOLUME", moment, steps)
        self.follow()

    @rule(asker=ASKERS, where=st.sampled_from(VICTIMS))
    def drop(self, asker: Credentials, where: str) -> None:
        """The asker moves something into their own drop folder, if there is one."""
        twins, may_go = self.twins, self.twins.deletable(asker, where)
        self.n_thrown += 1

        def act() -> bool:
            for folder in twins.first.volume.glob(f".trashd/*/{asker.uid}*/drop"):
                with suppress(OSError):
                    twins.first.at(where).rename(folder / f"n{self.n_thrown}")
                    return True
            return False

        if called_by(asker.be, act, "who drops it"):
            twins.may_go |= may_go
            twins.give(asker, where, self.n_thrown, is_swap=False)


@pytest.fixture(scope="module")
def bare() -> Iterator[tuple[Path, Path]]:
    with tmpfs_volume() as first, tmpfs_volume() as plain:
        yield first, plain


@pytest.mark.long
def test_no_history_does_to_a_file_what_its_people_could_not(bare: tuple[Path, Path]) -> None:
    class Histories(HostileMachine):
        volumes = bare

    n_examples, is_soak = settings().max_examples, settings().max_examples > 1000
    # To shrink takes longer than a test may: its end at the limit would hide what was found.
    phases = set(Phase) if is_soak else {Phase.reuse, Phase.generate}
    bounded = settings(max_examples=n_examples // 8, stateful_step_count=60 if is_soak else 10, phases=phases)
    run_machine(Histories, settings=bounded)


def test_a_name_that_is_free_on_the_twin_alone_is_no_fault(bare: tuple[Path, Path]) -> None:
    """A folder planted where the twin had a free name went there, and was not exchanged with what root swapped."""

    class History(HostileMachine):
        volumes = bare

    history = History()
    try:
        history.start(BOB)
        history.throw(ALICE, "swap", "0s", LIVE, 0, [])
        history.throw(ROOT, "swap", "1d", DATA, 10_000, OF_A_MATE["plants new"])
        history.act(OF_A_MATE["exchanges in"])
        history.nothing_happened_that_the_twin_does_not_show()
    finally:
        history.teardown()
