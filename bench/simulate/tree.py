"""Trees of any size: in memory is what is being removed. What goes twice, or is left below, is an error."""

from collections.abc import Callable
from functools import lru_cache
from math import exp
from random import Random
from typing import NamedTuple

from fusefs.store.layout import HOISTED

Shape = Callable[[Random, int, int], "Drawn"]
"""What is directly in a directory: of its numbers, of how many entries are below it, and of how deep it is."""
_NAMES = 1 << 17
_SEED_SHIFT = 40
"""So many bits number the directories of a tree; no two trees on a server have a number in common."""


@lru_cache(_NAMES)
def name_of(number: int) -> str:
    """A file's, as long as names are."""
    return f"sample-{number:012d}.dat"


class Drawn(NamedTuple):
    """So many files, and directories with so many entries below each."""

    n_files: int
    below: tuple[int, ...]


def project_tree(random: Random, n_below: int, depth: int) -> Drawn:
    """As what users have: directories of 40 files in the middle, 150 on the average, the largest of 100,000.

    The sizes are lognormal, the parts that subdirectories have of what is below exponential.
    """
    n_files = min(n_below, int(exp(random.gauss(3.7, 1.65)))) if depth else 0
    rest = n_below - n_files
    if not rest:
        return Drawn(n_files, ())
    parts = [random.expovariate(1.0) for _ in range(min(rest, 40 if not depth else random.randint(2, 30)))]
    total, given, below = sum(parts), 0.0, list[int]()
    for part in parts:
        before = int(given / total * rest)
        given += part
        n = int(given / total * rest) - before
        if n:
            below.append(n - 1)
    missing = rest - sum(below) - len(below)
    return Drawn(n_files + missing, tuple(below))


def regular_tree(n_directories: int, n_files: int) -> Shape:
    """Directories of so many files; none: one with all."""

    def draw(_random: Random, _n_below: int, depth: int) -> Drawn:
        return Drawn(0, (n_files,) * n_directories) if n_directories and not depth else Drawn(n_files, ())

    return draw


class Directory:
    """One that is being removed. key: its own on the server, whatever it is called"""

    def __init__(self, drawn: Drawn, seed: int, depth: int, key: int) -> None:
        self.drawn = drawn
        self.key = key
        self.depth = depth
        self._seed = seed
        self._n_listed = 0
        self._is_begun = not drawn.below
        self._files: set[str] = set()
        self._subdirs: dict[str, int] = {}
        self._moved_in: dict[str, Directory] = {}

    def list(self, window: int) -> tuple[list[str], list[str], bool]:
        """The next files, the directories, and whether that is all."""
        begins = self._n_listed
        ends = min(begins + window, self.drawn.n_files)
        files = [name_of(number) for number in range(begins, ends)]
        self._n_listed = ends
        self._files.update(files)
        subdirs: list[str] = []
        if not self._is_begun:
            self._is_begun = True
            self._subdirs = {f"run-{number:05d}": number for number in range(len(self.drawn.below))}
            subdirs = list(self._subdirs)
        return files, subdirs, ends == self.drawn.n_files

    def name_only(self, name: str) -> None:
        """The only directory in it has another name."""
        self._subdirs = {name: 0}

    def unlink(self, name: str) -> None:
        """Raises  KeyError: it is gone already"""
        self._files.remove(name)

    def rmdir(self, name: str) -> None:
        """Raises  KeyError: it is gone already"""
        if self._moved_in.pop(name, None) is None:
            del self._subdirs[name]

    def enter(self, name: str, shape: Shape, key: int) -> "Directory":
        """A directory in it, as it is drawn. Raises  KeyError: it is gone already"""
        if (moved := self._moved_in.get(name)) is not None:
            return moved
        number = self._subdirs[name]
        seed = hash((self._seed, number))
        return Directory(shape(Random(seed), self.drawn.below[number], self.depth + 1), seed, self.depth + 1, key)

    def move(self, name: str, to: "Directory", new: str, directory: "Directory") -> None:
        """A directory in it that nobody has begun gets another place."""
        del self._subdirs[name]
        to._moved_in[new] = directory

    def is_empty(self) -> bool:
        """Whether all that was drawn for it is gone."""
        return self._n_listed == self.drawn.n_files and not (self._files or self._subdirs or self._moved_in)


class Tree:
    """A container: `tree`, which has so many entries, itself among them; and `hoisted`, for what is too deep."""

    def __init__(self, shape: Shape, n_entries: int, seed: int = 0) -> None:
        self.n_entries = n_entries
        self.n_gone = 0
        self.gone: Callable[[], None] = lambda: None
        self._shape = shape
        self._n_drawn = (seed << _SEED_SHIFT) + 1
        self.container = Directory(Drawn(0, (n_entries - 1,)), seed, -1, self._n_drawn - 1)
        self.container.list(0)
        self.container.name_only("tree")
        self.hoisted = Directory(Drawn(0, ()), seed, 0, self._n_drawn)
        self.at: dict[bytes, Directory] = {b"": self.container, HOISTED: self.hoisted}

    def enter(self, within: Directory, name: str) -> Directory:
        """A directory in another one. Raises  KeyError: it is gone already"""
        self._n_drawn += 1
        return within.enter(name, self._shape, self._n_drawn)

    def hoist(self, within: Directory, name: str) -> str:
        """What is too deep moves up; its name there."""
        directory = self.enter(within, name)
        new = f"{directory.key:016x}"
        within.move(name, self.hoisted, new, directory)
        return new

    def unlink(self, directory: Directory, name: str) -> None:
        """A file goes. Raises  KeyError: it is gone already"""
        directory.unlink(name)
        self._count()

    def rmdir(self, within: Directory, name: str, directory: Directory) -> None:
        """An empty directory goes. Raises  KeyError: it is gone already; RuntimeError: it is not empty"""
        if not directory.is_empty():
            raise RuntimeError(f"{name} is not empty")
        within.rmdir(name)
        self._count()

    def _count(self) -> None:
        self.n_gone += 1
        self.gone()

    def is_gone(self) -> bool:
        """Whether each entry was removed."""
        return self.n_gone == self.n_entries and self.container.is_empty() and self.hoisted.is_empty()
