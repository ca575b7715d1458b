"""A model of the store for tests of histories: where everything is, and what the verbs promise to do with it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from fusefs.core.container_states import DEFAULT_RETENTION_S
from fusefs.store.recover import RESCUED_RETENTION_S

NAMES = ("a", "b", "c")
MAX_DEPTH = 3
NEW = "to come"
"""The id of an orphan that the verb is yet to make."""

Steps = tuple[str, ...]
"""A path from the directory that all victims are in, or from the top of a tree."""


class ModelDir(NamedTuple):
    """A directory; `ino` is None in the model for one that the verb is yet to make."""

    ino: int | None
    entries: Mapping[str, ModelNode]


ModelNode = str | ModelDir
"""A file is its content."""


class Orphan(NamedTuple):
    """A tree in the store; `tree` is None once a killed reaper has removed all of it, `fresh` what took its place.

    parts  what a restore moved out of it, by its record
    """

    tree: ModelNode | None
    origin: Steps | None
    retention_s: int | None
    fresh: int | None = None
    is_begun: bool = False
    parts: tuple[Steps, ...] = ()


class World(NamedTuple):
    """Everything that there is."""

    home: ModelDir
    orphans: Mapping[str, Orphan]

    def without(self, one: str) -> World:
        return self._replace(orphans={key: orphan for key, orphan in self.orphans.items() if key != one})

    def having(self, one: str, orphan: Orphan) -> World:
        """This world with an orphan more, or with another one in its place."""
        return self._replace(orphans={**self.orphans, one: orphan})


# Trees


def find_node(node: ModelNode | None, path: Steps) -> ModelNode | None:
    """Return the node at a path; None if there is none."""
    for name in path:
        node = node.entries.get(name) if isinstance(node, ModelDir) else None
    return node


def put(root: ModelDir, path: Steps, thing: ModelNode | None) -> ModelDir:
    """The tree with something else at a path, or nothing; the directories on the way are there."""
    name, *rest = path
    entries = dict(root.entries)
    if rest:
        below = entries[name]
        assert isinstance(below, ModelDir)
        entries[name] = put(below, tuple(rest), thing)
    elif thing is None:
        del entries[name]
    else:
        entries[name] = thing
    return root._replace(entries=entries)


def paths_of(node: ModelNode | None, above: Steps = ()) -> Iterator[Steps]:
    if isinstance(node, ModelDir):
        for name, child in node.entries.items():
            yield (*above, name)
            yield from paths_of(child, (*above, name))


def free_in(node: ModelNode | None) -> list[Steps]:
    """The paths in a tree at which something could be made."""
    directories = [path for path in [(), *paths_of(node)] if isinstance(find_node(node, path), ModelDir)]
    free = [(*path, name) for path in directories for name in NAMES if find_node(node, (*path, name)) is None]
    return [path for path in free if len(path) <= MAX_DEPTH]


def contents_of(node: ModelNode | None) -> list[str]:
    if isinstance(node, ModelDir):
        return [content for child in node.entries.values() for content in contents_of(child)]
    return [] if node is None else [node]


def inos_of(node: ModelNode | None) -> set[int]:
    """The inode numbers of all directories; a tmpfs gives none twice."""
    nodes = (find_node(node, path) for path in [(), *paths_of(node)])
    return {one.ino for one in nodes if isinstance(one, ModelDir) and one.ino is not None}


def read(path: Path) -> ModelNode:
    """A tree from the disk."""
    if not path.is_dir():
        return path.read_text()
    return ModelDir(path.stat().st_ino, {name: read(path / name) for name in sorted(os.listdir(path))})


def is_like(expected: ModelNode | None, actual: ModelNode | None, *, whole: bool = True) -> bool:
    """Return whether a tree is the expected one, with the same inodes for directories; whole=False: or a part of it."""
    if actual is None:
        return expected is None or not whole
    if not (isinstance(expected, ModelDir) and isinstance(actual, ModelDir)):
        return expected == actual
    if expected.ino not in (None, actual.ino) or (whole and expected.entries.keys() != actual.entries.keys()):
        return False
    return all(is_like(expected.entries.get(name), child, whole=whole) for name, child in actual.entries.items())


# What the verbs promise: the world after them, or None where they refuse


def swapped(world: World, path: Steps, retention_s: int | None = DEFAULT_RETENTION_S) -> World | None:
    victim = find_node(world.home, path)
    if not isinstance(victim, ModelDir):
        return None
    return World(put(world.home, path, ModelDir(None, {})), world.orphans).having(
        NEW, Orphan(victim, path, retention_s)
    )


def removed(world: World, path: Steps) -> World | None:
    victim = find_node(world.home, path)
    if victim is None:
        return None
    orphan = Orphan(victim, path, DEFAULT_RETENTION_S)
    return World(put(world.home, path, None), world.orphans).having(NEW, orphan)


def moved(world: World, source: Steps, target: Steps) -> World:
    """A rename by any user, to a free name."""
    return world._replace(home=put(put(world.home, source, None), target, find_node(world.home, source)))


def restored(world: World, one: str, to: Steps | None) -> World | None:
    orphan = world.orphans[one]
    path = orphan.origin if to is None else to
    if path is None or orphan.tree is None or not isinstance(find_node(world.home, path[:-1]), ModelDir):
        return None
    there = find_node(world.home, path)
    after = World(world.home, world.orphans).without(one)
    if there is not None:
        if to is not None or not isinstance(there, ModelDir) or there.ino != orphan.fresh:
            return None
        tree, there = merged(orphan.tree, there, orphan.parts)
        orphan = orphan._replace(tree=tree)
        if there.entries:
            after = after.having(NEW, Orphan(there, path, RESCUED_RETENTION_S))
    return after._replace(home=put(world.home, path, orphan.tree))


def merged(tree: ModelNode, fresh: ModelDir, parts: tuple[Steps, ...]) -> tuple[ModelNode, ModelDir]:
    """Both after a restore of the whole: the tree has the parts that the fresh directory had and that have room."""
    for part in parts:
        thing = find_node(fresh, part)
        if thing is None or find_node(tree, part) is not None or not isinstance(find_node(tree, part[:-1]), ModelDir):
            continue
        assert isinstance(tree, ModelDir)
        tree, fresh = put(tree, part, thing), put(fresh, part, None)
        for depth in range(len(part) - 1, 0, -1):
            emptied = find_node(fresh, part[:depth])
            if isinstance(emptied, ModelDir) and not emptied.entries:
                fresh = put(fresh, part[:depth], None)
    return tree, fresh


def restored_inside(world: World, one: str, inside: Steps, to: Steps | None) -> list[World]:
    """`trashd restore` of a part: the world before it, with each directory that it makes on the way, and after it.

    One world, the first, if it is refused.
    """
    orphan = world.orphans[one]
    path = to if to is not None else orphan.origin and (*orphan.origin, *inside)
    thing = find_node(orphan.tree, inside)
    if path is None or thing is None:
        return [world]
    worlds = [world]
    for depth in range(len(orphan.origin or ()) if to is None else len(path), len(path)):
        home = worlds[-1].home
        if find_node(home, path[:depth]) is None and isinstance(find_node(home, path[: depth - 1]), ModelDir):
            worlds.append(worlds[-1]._replace(home=put(home, path[:depth], ModelDir(None, {}))))
    home = worlds[-1].home
    if find_node(home, path) is not None or not isinstance(find_node(home, path[:-1]), ModelDir):
        return [world]
    assert isinstance(orphan.tree, ModelDir)
    done = World(put(home, path, thing), world.orphans)
    return [*worlds, done.having(one, orphan._replace(tree=put(orphan.tree, inside, None)))]


def not_restored(world: World, one: str) -> list[World]:
    """What a refused restore may leave: the same, but what a killed reaper had emptied ends with it."""
    return [world, world.without(one)] if world.orphans[one].tree is None else [world]


def taken_origins(world: World) -> dict[str, Steps]:
    """The origins, by orphan, that something is at."""
    origins = {one: orphan.origin for one, orphan in world.orphans.items()}
    return {one: path for one, path in origins.items() if path is not None and find_node(world.home, path) is not None}


def all_contents(world: World) -> list[str]:
    return contents_of(world.home) + [c for orphan in world.orphans.values() for c in contents_of(orphan.tree)]


def all_inos(world: World) -> set[int]:
    trees = (world.home, *(orphan.tree for orphan in world.orphans.values()))
    return {ino for tree in trees for ino in inos_of(tree)}
