"""Any history of verbs, kills, races and other people's work: the store stays sound, and no file is lost.

Hypothesis draws the history. Every file has content of its own; a model, which knows the verbs only from what they
promise, says where each must be. Whatever was killed, the next command finds one of the legal outcomes.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from fusefs.core.container_states import DEFAULT_RETENTION_S
from fusefs.core.record_decoding import decode_record
from fusefs.linux.kernel import CallHook, Kernel
from fusefs.store.stage import SwapOptions
from tests.support.covering_sets import is_soak
from tests.support.crash_scenarios import LOST, WON, forbid_exchange, outcome, wipe
from tests.support.real_filesystems import tmpfs_volume
from tests.support.shared_memory_children import code_of_child, end_process
from tests.support.small_orphans import command
from tests.support.store_model import (
    NAMES,
    NEW,
    ModelDir,
    ModelNode,
    Orphan,
    Steps,
    World,
    all_contents,
    all_inos,
    contents_of,
    find_node,
    free_in,
    inos_of,
    is_like,
    moved,
    not_restored,
    paths_of,
    put,
    read,
    removed,
    restored,
    restored_inside,
    swapped,
    taken_origins,
)
from tests.support.store_verbs import (
    ActingAt,
    DyingAt,
    folder_of,
    init,
    problems,
    reap_now,
    recover_all,
    remove,
    restore,
    swap,
)

pytestmark = pytest.mark.needs("root")

MOVES = frozenset({"mkdir", "rmdir", "link", "create", "unlink", "rename", "renameat2", "exchange"})
DEATHS = st.lists(st.integers(0, 8), max_size=3)
"""The move at which the verb is killed, then those at which the recoveries after it are."""

T = TypeVar("T")
Verb = Callable[[Kernel], object]


def at_moves(hook: CallHook) -> CallHook:
    """A hook that only calls pass that change a name; all the others have their turn in tests/crash."""
    return lambda call: hook(call) if call in MOVES else None


def _has_names(machine: Any) -> bool:
    return bool(machine.world.home.entries)


def _has_orphans(machine: Any) -> bool:
    return bool(machine.world.orphans)


def _has_room(machine: Any) -> bool:
    return bool(free_in(machine.world.home))


def _has_room_in_orphans(machine: Any) -> bool:
    return any(free_in(orphan.tree) for orphan in machine.world.orphans.values())


def draw(data: st.DataObject, label: str, every: Sequence[T], is_likely: Callable[[T], bool]) -> T:
    """One of the things, more often one with which the verb succeeds."""
    likely = [thing for thing in every if is_likely(thing)]
    return data.draw(st.sampled_from(likely) | st.sampled_from(every) if likely else st.sampled_from(every), label)


class StoreMachine(RuleBasedStateMachine):
    """A store on a tmpfs, and the model of it: `world` is where everything is, `legal` what the last step may leave.

    alive  the content of every file that was made and not reaped
    begun  the orphan that the last step may have reaped in part
    """

    volume: Path

    def __init__(self) -> None:
        super().__init__()
        wipe(self.volume)
        self.home = self.volume / "home"
        self.home.mkdir()
        self.alive: Counter[str] = Counter()
        self.n_files = 0
        self.begun: str | None = None
        self.exchange = True
        self.world = World(ModelDir(None, {}), {})
        self.legal = [self.world]

    def path(self, steps: Steps) -> Path:
        return self.home.joinpath(*steps)

    def make(self, top: Path, path: Steps, *, directory: bool) -> ModelNode:
        """Make a file with content of its own at a path, or a directory with two; what was made."""
        place = top.joinpath(*path)
        if directory:
            place.mkdir()
            for name in NAMES[:2]:
                self.make(place, (name,), directory=False)
        else:
            self.n_files += 1
            place.write_text(f"content {self.n_files}")
            self.alive[f"content {self.n_files}"] += 1
        return read(place)

    def seen(self) -> World:
        """What is on the disk. Nothing may be half done, and each orphan has its record (I3)."""
        folder = folder_of(self.volume, 0)
        for part in ("stage", "restoring", "quarantine", "drop"):
            assert os.listdir(folder / part) == []
        orphans = {}
        for part in ("orphans", "reaping"):
            for container in (folder / part).iterdir():
                record = decode_record((container / "record.json").read_bytes())
                origin = None if record.origin is None else tuple(os.fsdecode(record.origin).split("/"))
                assert origin is None or origin[0] == "home"
                tree = read(container / "tree") if (container / "tree").exists() else None
                parts = tuple(tuple(os.fsdecode(one).split("/")) for one in record.parts)
                orphan = Orphan(tree, origin and origin[1:], record.retention_s, None, part == "reaping", parts)
                assert container.name not in orphans, "in two states (I2)"
                orphans[container.name] = orphan
        home = read(self.home)
        assert isinstance(home, ModelDir)
        return World(home, orphans)

    def recognise(self, legal: World, seen: World) -> World | None:
        """What is seen as the model's world, if it is this one of the legal worlds."""
        if not is_like(legal.home, seen.home):
            return None
        made = inos_of(seen.home) - all_inos(self.world)
        orphans: dict[str, Orphan] = {}
        # Those that were there in their order, then the new ones in one that does not depend on their ids.
        unknown = sorted(seen.orphans.keys() - self.world.orphans.keys(), key=lambda one: repr(seen.orphans[one]))
        for one, expected in legal.orphans.items():
            key = unknown.pop(0) if one == NEW and unknown else one
            orphan = seen.orphans.get(key)
            if orphan is None or orphan[1:3] != expected[1:3] or not is_like(expected.tree, orphan.tree):
                return None
            if orphan.is_begun and not expected.is_begun:
                return None
            fresh = min(made, default=None) if one == NEW and expected.origin is not None else expected.fresh
            orphans[key] = orphan._replace(fresh=fresh)
        return World(seen.home, orphans) if orphans.keys() == seen.orphans.keys() else None

    def run(
        self,
        verb: Verb,
        deaths: Sequence[int],
        refused: Sequence[World],
        done: Sequence[World],
        killed: Sequence[World] = (),
        steady: Steps | None = None,
    ) -> None:
        """Let a verb act, or be killed, and recoveries after it; say what may be found then.

        refused, done  the worlds if it refused, and if it did what it promises
        killed         what else may be found if it was killed
        steady         the name that resolves at every moment where there is an exchange (I1)
        """
        act = partial(outcome, lambda: verb(Kernel(at_moves(DyingAt(deaths[0]))) if deaths else Kernel()))
        end = code_of_child(lambda: end_process(act())) if deaths else act()
        if steady is not None and self.exchange:
            assert os.path.lexists(self.path(steady))
        for n in deaths[1:]:
            assert code_of_child(partial(recover_all, self.volume, Kernel(at_moves(DyingAt(n))))) in (
                0,
                DyingAt.EXIT_CODE,
            )
        self.legal = list({WON: done, LOST: refused, DyingAt.EXIT_CODE: (*refused, *done, *killed)}[end])

    @initialize(exchange=st.booleans())
    def start(self, exchange: bool) -> None:
        self.exchange = exchange
        init(self.volume)
        if not exchange:
            forbid_exchange(self.volume)
        self.make(self.home, ("a",), directory=True)
        self.make(self.home, ("a", "c"), directory=True)
        self.legal = [self.seen()]

    @invariant()
    def nothing_is_lost_and_the_checker_is_silent(self) -> None:
        assert recover_all(self.volume) == []
        assert problems(self.volume) == []
        observed_status = self.seen()
        if self.begun is not None:
            self.take_as_reaped(self.begun, observed_status.orphans.get(self.begun))
            self.begun = None
        assert Counter(all_contents(observed_status)) == self.alive
        worlds = [
            world for world in (self.recognise(legal, observed_status) for legal in self.legal) if world is not None
        ]
        assert worlds, f"{observed_status} is none of {self.legal}"
        self.world = worlds[0]
        self.legal = [self.world]

    def take_as_reaped(self, one: str, left: Orphan | None) -> None:
        """What a reaper removed is gone; what it left, being killed, is a part of what was."""
        whole = self.world.orphans[one]
        self.alive -= Counter(contents_of(whole.tree)) - Counter(contents_of(left.tree if left else None))
        if left is not None and left.is_begun:
            assert is_like(whole.tree, left.tree, whole=False)
            self.legal = [self.world.having(one, whole._replace(tree=left.tree, is_begun=True))]

    # Verbs

    @precondition(_has_names)
    @rule(data=st.data(), retention_s=st.sampled_from([0, DEFAULT_RETENTION_S, None]), deaths=DEATHS)
    def swap(self, data: st.DataObject, retention_s: int | None, deaths: list[int]) -> None:
        paths = list(paths_of(self.world.home))
        path = draw(data, "victim", paths, lambda path: isinstance(find_node(self.world.home, path), ModelDir))
        verb = partial(swap, self.path(path), options=SwapOptions(retention_s))
        after = swapped(self.world, path, retention_s)
        self.run(verb, deaths, [self.world], [after] if after else [], steady=path)

    @precondition(_has_names)
    @rule(data=st.data(), deaths=DEATHS)
    def rm(self, data: st.DataObject, deaths: list[int]) -> None:
        path = data.draw(st.sampled_from(list(paths_of(self.world.home))), "victim")
        after = removed(self.world, path)
        assert after is not None
        self.run(partial(remove, self.path(path)), deaths, [self.world], [after])

    def draw_to(self, data: st.DataObject) -> Steps | None:
        """Where a restore goes: mostly to its origin."""
        targets = free_in(self.world.home) + list(paths_of(self.world.home))
        return data.draw(st.sampled_from(targets), "to") if targets and not data.draw(st.integers(0, 3)) else None

    @precondition(_has_orphans)
    @rule(data=st.data(), deaths=DEATHS)
    def restore(self, data: st.DataObject, deaths: list[int]) -> None:
        to = self.draw_to(data)
        one = draw(data, "orphan", list(self.world.orphans), lambda one: restored(self.world, one, to) is not None)
        after = restored(self.world, one, to)
        steady = taken_origins(self.world).get(one)
        verb = partial(self.restore_by, one, None, to)
        self.run(verb, deaths, not_restored(self.world, one), [after] if after else [], steady=steady)

    @precondition(_has_orphans)
    @rule(data=st.data(), deaths=DEATHS)
    def restore_inside(self, data: st.DataObject, deaths: list[int]) -> None:
        to = self.draw_to(data)
        orphans = self.world.orphans.items()
        parts = [(one, path) for one, orphan in orphans for path in [*paths_of(orphan.tree), ("absent",)]]
        one, inside = draw(data, "part", parts, lambda part: len(restored_inside(self.world, *part, to)) > 1)
        *on_the_way, done = restored_inside(self.world, one, inside, to)
        verb = partial(self.restore_by, one, inside, to)
        self.run(verb, deaths, not_restored(self.world, one), [done] if on_the_way else [], on_the_way)

    def restore_by(self, one: str, inside: Steps | None, to: Steps | None, kernel: Kernel) -> object:
        part = None if inside is None else os.fsencode("/".join(inside))
        return restore(self.volume, one, kernel, part, None if to is None else self.path(to))

    @precondition(_has_orphans)
    @rule(data=st.data(), deaths=DEATHS)
    def reap_now(self, data: st.DataObject, deaths: list[int]) -> None:
        self.begun = data.draw(st.sampled_from(list(self.world.orphans)), "orphan")
        verb = partial(reap_now, self.volume, self.begun)
        self.run(verb, deaths, [], [self.world.without(self.begun)], [self.world])

    @rule()
    def reap_expired(self) -> None:
        """Only those whose retention has ended, and those that a reaper had begun (I11)."""
        due = {one for one, orphan in self.world.orphans.items() if orphan.retention_s == 0 or orphan.is_begun}
        assert command(self.volume, "reap") == 0
        after = self.world
        for one in due:
            self.alive -= Counter(contents_of(self.world.orphans[one].tree))
            after = after.without(one)
        self.legal = [after]

    @precondition(_has_names)
    @rule(data=st.data(), deaths=DEATHS)
    def drop(self, data: st.DataObject, deaths: list[int]) -> None:
        path = data.draw(st.sampled_from(list(paths_of(self.world.home))), "victim")
        self.path(path).rename(folder_of(self.volume, 0) / "drop" / path[-1])
        after = removed(self.world, path)
        assert after is not None
        after = after.having(NEW, after.orphans[NEW]._replace(origin=None))
        self.run(partial(recover_all, self.volume), deaths, [], [after])

    @rule(deaths=DEATHS)
    def init(self, deaths: list[int]) -> None:
        self.run(partial(init, self.volume), deaths, [], [self.world])

    # Other people

    @precondition(_has_room)
    @rule(data=st.data(), directory=st.booleans())
    def write(self, data: st.DataObject, directory: bool) -> None:
        path = data.draw(st.sampled_from(free_in(self.world.home)), "path")
        made = self.make(self.home, path, directory=directory)
        self.legal = [self.world._replace(home=put(self.world.home, path, made))]

    @precondition(_has_room_in_orphans)
    @rule(data=st.data(), directory=st.booleans())
    def write_late(self, data: st.DataObject, directory: bool) -> None:
        """Who holds a directory of an orphan goes on writing there."""
        places = [(one, path) for one, orphan in self.world.orphans.items() for path in free_in(orphan.tree)]
        one, path = data.draw(st.sampled_from(places), "place")
        orphan = self.world.orphans[one]
        part = "reaping" if orphan.is_begun else "orphans"
        made = self.make(folder_of(self.volume, 0) / part / one / "tree", path, directory=directory)
        assert isinstance(orphan.tree, ModelDir)
        self.legal = [self.world.having(one, orphan._replace(tree=put(orphan.tree, path, made)))]

    def draw_move(self, data: st.DataObject, sources: list[Steps]) -> tuple[Steps, Steps]:
        source = data.draw(st.sampled_from(sources), "source")
        targets = [path for path in free_in(self.world.home) if path[: len(source)] != source]
        return source, data.draw(st.sampled_from(targets or [source]), "target")

    @precondition(_has_names)
    @rule(data=st.data())
    def rename(self, data: st.DataObject) -> None:
        source, target = self.draw_move(data, list(paths_of(self.world.home)))
        self.path(source).rename(self.path(target))
        self.legal = [moved(self.world, source, target)]

    @precondition(_has_names)
    @rule(data=st.data(), n=st.integers(0, 60), kind=st.sampled_from(["swap", "rm", "restore"]))
    def rename_during(self, data: st.DataObject, n: int, kind: str) -> None:
        """Another process renames what has the name, just before a call of the verb: that refuses, or both succeed."""
        at_origin = taken_origins(self.world)
        verb: Verb
        promise: Callable[[World], World | None]
        if kind == "restore" and at_origin:
            one = draw(data, "orphan", list(at_origin), lambda one: restored(self.world, one, None) is not None)
            source, target = self.draw_move(data, [at_origin[one]])
            verb, promise = partial(self.restore_by, one, None, None), partial(restored, one=one, to=None)
            refused = not_restored(self.world, one)
        else:
            act, world_after = (remove, removed) if kind == "rm" else (swap, swapped)
            sources = [path for path in paths_of(self.world.home) if world_after(self.world, path) is not None]
            source, target = self.draw_move(data, sources or list(paths_of(self.world.home)))
            promise = partial(world_after, path=source)
            verb, refused = partial(act, self.path(source)), [self.world]
        happened: list[bool] = []

        def interfere() -> None:
            if source != target and os.path.lexists(self.path(source)):
                self.path(source).rename(self.path(target))
                happened.append(True)

        end = outcome(lambda: verb(Kernel(ActingAt(n, interfere))))
        after = promise(self.world)
        if not happened:
            self.legal = list({WON: [after] if after else [], LOST: refused}[end])
        elif end == LOST:
            self.legal = [moved(world, source, target) for world in refused]
        else:
            first = promise(moved(self.world, source, target))
            self.legal = [*([moved(after, source, target)] if after else []), *([first] if first else [])]


@pytest.fixture(scope="module")
def bare() -> Iterator[Path]:
    """A tmpfs; each history begins with wiping it."""
    with tmpfs_volume() as path:
        yield path


@pytest.mark.long
def test_no_history_loses_a_file_or_breaks_the_store(bare: Path) -> None:
    class Histories(StoreMachine):
        volume = bare

    n_examples = settings().max_examples
    run_machine(Histories, settings=settings(max_examples=n_examples // (2 if is_soak() else 4)))
