"""Any history of sweeps, restores, kills and other people's work: each file is somewhere once, and where it belongs."""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from fusefs.core.errors import TrashdError
from fusefs.core.record_decoding import decode_record
from fusefs.linux.kernel import Kernel
from tests.support.crash_scenarios import wipe
from tests.support.real_filesystems import tmpfs_volume
from tests.support.store_model import ModelDir, ModelNode, Steps, contents_of, find_node, free_in, paths_of, put, read
from tests.support.store_verbs import DyingAt, folder_of, in_child, init, problems, recover_all, restore
from tests.support.trash_without_walk import gather

pytestmark = pytest.mark.needs("root")

DEATH = st.none() | st.integers(0, 150)
EMPTY = ModelDir(None, {})


def taken(home: ModelDir, paths: list[Steps]) -> ModelDir:
    for path in paths:
        if find_node(home, path) is not None:
            home = put(home, path, None)
    return home


def merged(tree: ModelNode, there: ModelNode | None) -> tuple[ModelNode, ModelNode | None]:
    """What a restore leaves where the tree belongs, and what stays of the tree; None if nothing does."""
    if there is None:
        return tree, None
    if not (isinstance(tree, ModelDir) and isinstance(there, ModelDir)):
        return there, tree
    entries, stays = dict(there.entries), {}
    for name, child in tree.entries.items():
        entries[name], left = merged(child, there.entries.get(name))
        if left is not None:
            stays[name] = left
    return ModelDir(None, entries), ModelDir(None, stays) if stays else None


def files(node: ModelNode | None, above: Steps = ()) -> dict[Steps, str]:
    """The files of a tree; directories are left out, since a killed sweep may leave an orphan of empty ones."""
    if isinstance(node, ModelDir):
        return {
            path: text for name, child in node.entries.items() for path, text in files(child, (*above, name)).items()
        }
    return {} if node is None else {above: node}


class SweepMachine(RuleBasedStateMachine):
    """A store on a tmpfs, and a directory in which everything happens."""

    volume: Path

    def __init__(self) -> None:
        super().__init__()
        wipe(self.volume)
        self.home = self.volume / "home"
        self.alive: Counter[str] = Counter()

    def now(self) -> ModelDir:
        home = read(self.home)
        assert isinstance(home, ModelDir)
        return home

    def orphans(self) -> dict[str, Path]:
        return {path.name: path for path in (folder_of(self.volume, 0) / "orphans").iterdir()}

    def origin(self, orphan: Path) -> Steps:
        origin = decode_record((orphan / "record.json").read_bytes()).origin
        assert origin is not None
        return tuple(os.fsdecode(origin).split("/"))[1:]

    def act(self, verb: Callable[[Kernel], object], death: int | None) -> bool:
        """Whether a verb came to its end; it may have been killed, or have refused."""
        if death is not None:
            return in_child(partial(verb, Kernel(DyingAt(death)))) == 0
        try:
            verb(Kernel())
        except TrashdError:
            return False
        return True

    def write(self, path: Steps) -> None:
        text = f"content {sum(self.alive.values())}"
        self.home.joinpath(*path).write_text(text)
        self.alive[text] += 1

    @initialize()
    def start(self) -> None:
        init(self.volume)
        self.home.mkdir()
        for path in (("a",), ("a", "b")):
            self.home.joinpath(*path).mkdir()
            self.write((*path, "c"))

    @invariant()
    def every_file_is_once_and_the_checker_is_silent(self) -> None:
        assert recover_all(self.volume) == []
        assert problems(self.volume) == []
        trees = [read(path / "tree") for path in self.orphans().values()]
        assert Counter(text for node in (self.now(), *trees) for text in contents_of(node)) == self.alive

    @rule(data=st.data(), death=DEATH)
    def sweep(self, data: st.DataObject, death: int | None) -> None:
        before = self.now()
        tops = [path for path in [(), *paths_of(before)] if isinstance(find_node(before, path), ModelDir)]
        top = data.draw(st.sampled_from(tops), "directory")
        inside = list(paths_of(find_node(before, top)))
        paths = data.draw(st.lists(st.sampled_from(inside), unique=True) if inside else st.just([]), "paths")
        verb = partial(gather, self.home.joinpath(*top), ["/".join(path) for path in paths])
        if self.act(verb, death):
            left = taken(before, [(*top, *path) for path in paths])
            assert files(self.now()) == files(left)

    @precondition(lambda self: bool(self.orphans()))
    @rule(data=st.data(), death=DEATH)
    def restore(self, data: st.DataObject, death: int | None) -> None:
        before = self.now()
        one, orphan = data.draw(st.sampled_from(sorted(self.orphans().items())), "orphan")
        tree, path = read(orphan / "tree"), self.origin(orphan)
        done = self.act(lambda kernel: restore(self.volume, one, kernel), death)
        if done and path:
            there, stays = merged(tree, find_node(before, path))
            assert files(self.now()) == files(put(before, path, there))
        elif done:
            there, stays = merged(tree, before)
            assert files(self.now()) == files(there)
        if done:
            assert files(read(orphan / "tree") if stays and files(stays) else EMPTY) == files(stays)

    @precondition(lambda self: bool(self.orphans()))
    @rule(data=st.data(), death=DEATH)
    def restore_inside(self, data: st.DataObject, death: int | None) -> None:
        parts = [(one, path) for one, orphan in self.orphans().items() for path in paths_of(read(orphan / "tree"))]
        if parts:
            one, inside = data.draw(st.sampled_from(sorted(parts)), "part")
            before = self.now()
            origin = self.origin(self.orphans()[one])
            thing = find_node(read(self.orphans()[one] / "tree"), inside)
            is_free = find_node(before, (*origin, *inside)) is None
            if self.act(lambda kernel: restore(self.volume, one, kernel, os.fsencode("/".join(inside))), death):
                assert files(find_node(self.now(), (*origin, *inside))) == files(thing) or not is_free

    @precondition(lambda self: bool(free_in(self.now())))
    @rule(data=st.data())
    def make(self, data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(free_in(self.now())), "path")
        if data.draw(st.booleans(), "directory") and len(path) < 3:
            self.home.joinpath(*path).mkdir()
        else:
            self.write(path)

    @precondition(lambda self: bool(self.now().entries))
    @rule(data=st.data())
    def rename(self, data: st.DataObject) -> None:
        before = self.now()
        source = data.draw(st.sampled_from(list(paths_of(before))), "source")
        targets = [path for path in free_in(before) if path[: len(source)] != source]
        if targets:
            self.home.joinpath(*source).rename(self.home.joinpath(*data.draw(st.sampled_from(targets), "target")))

    @rule()
    def clean_up(self) -> None:
        """As a cleaner does: empty directories go."""
        for path, directories, names in os.walk(self.home, topdown=False):
            if not directories and not names and path != str(self.home):
                os.rmdir(path)


@pytest.fixture(scope="module")
def bare() -> Iterator[Path]:
    with tmpfs_volume() as path:
        yield path


def test_no_history_of_sweeps_loses_a_file(bare: Path) -> None:
    class Histories(SweepMachine):
        volume = bare

    run_machine(Histories, settings=settings(max_examples=max(settings().max_examples // 8, 6)))
