"""The map of names: what is renamed to what, and the project's modules as they are today.

[modules]                       "fusefs.reaper.crew" = "fusefs.engine.workers"     (a package: all that is in it)
[packages]                      "fusefs.engine" = "docstring of a new package";    "fusefs.old" = "" removes one
[names]                         "fusefs.mount.gate:Gate.lend" = "release_while"    (today's module, today's names)
[identifiers."fusefs/mount/*"]  gate = "tables_lock"      every variable, parameter, keyword, attribute of these files
[texts."docs/*.md"]             "the gate" = "the tables' lock"       whole words in prose: docstrings, comments, docs
"""

import builtins
import keyword
import subprocess
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

TOPS = ("fusefs", "tests", "bench")
SKIPPED = ("tests/renaming/", "docs/renames", "bench/results/")
"""Not rewritten: the tool, what tells old names, measurements."""


class Refused(Exception):
    """The map cannot be applied; each argument is one reason."""


class Edit(NamedTuple):
    """Bytes `start` to `end` of a file become `new`."""

    start: int
    end: int
    new: str


def module_of(path: str) -> str:
    """The dotted name of a Python file; a package is named without `__init__`."""
    parts = path.removesuffix(".py").split("/")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def path_of(module: str, *, is_package: bool) -> str:
    return module.replace(".", "/") + ("/__init__.py" if is_package else ".py")


def tracked(root: Path) -> list[str]:
    """What git tracks and is there, sorted; without what is never rewritten."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True, text=True).stdout
    paths = (path for path in listed.split("\0") if path and not path.startswith(SKIPPED))
    return sorted(path for path in paths if (root / path).is_file())


@dataclass(frozen=True, slots=True)
class Map:
    """One map, or several one after the other as one."""

    modules: dict[str, str] = field(default_factory=dict)
    packages: dict[str, str] = field(default_factory=dict)
    names: dict[str, dict[str, str]] = field(default_factory=dict)
    """For each of today's modules: name or Class.member → new last part."""
    identifiers: dict[str, dict[str, str]] = field(default_factory=dict)
    texts: dict[str, dict[str, str]] = field(default_factory=dict)

    def moved(self, module: str) -> str:
        return self.modules.get(module, module)

    def top_names(self, module: str) -> dict[str, str]:
        return {old: new for old, new in self.names.get(module, {}).items() if "." not in old}

    def members(self) -> list[tuple[str, str, str, str]]:
        """Module, class (maybe Outer.Inner), member, new name."""
        found = []
        for module, names in self.names.items():
            for old, new in names.items():
                owner, _, member = old.rpartition(".")
                if owner:
                    found.append((module, owner, member, new))
        return found

    def identifiers_in(self, path: str) -> dict[str, str]:
        return _of_globs(self.identifiers, path)

    def texts_in(self, path: str) -> dict[str, str]:
        return _of_globs(self.texts, path)


def _of_globs(globs: dict[str, dict[str, str]], path: str) -> dict[str, str]:
    merged: dict[str, str] = {}
    for glob, words in globs.items():
        if fnmatchcase(path, glob):
            merged |= words
    return merged


def read_map(path: Path) -> Map:
    """Raises  Refused for a table that the format does not have, or a name that is none"""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    unknown = set(table) - {"modules", "packages", "names", "identifiers", "texts"}
    if unknown:
        raise Refused(f"{path}: unknown tables {sorted(unknown)}")
    names: dict[str, dict[str, str]] = {}
    for key, new in table.get("names", {}).items():
        module, colon, old = key.partition(":")
        if not colon or not old:
            raise Refused(f"{path}: {key!r} is no module:name")
        if old.rpartition(".")[2] != new:
            names.setdefault(module, {})[old] = new
    found = Map(
        {old: new for old, new in table.get("modules", {}).items() if old != new},
        table.get("packages", {}),
        names,
        table.get("identifiers", {}),
        table.get("texts", {}),
    )
    complaints = list(_complaints(found))
    if complaints:
        raise Refused(*(f"{path}: {complaint}" for complaint in complaints))
    return found


def _complaints(names: Map) -> Iterable[str]:
    for module in names.modules.values():
        for part in module.split("."):
            if not _is_name(part):
                yield f"{module}: {part!r} is no name"
    for module, renamed in names.names.items():
        for old, new in renamed.items():
            if not _is_name(new):
                yield f"{module}:{old}: {new!r} is no name"
            elif "." not in old and hasattr(builtins, new):
                yield f"{module}:{old}: {new!r} is a builtin"
    for glob, words in names.identifiers.items():
        for old, new in words.items():
            if not _is_name(new) or hasattr(builtins, new):
                yield f"{glob}: {old} = {new!r} is no name, or a builtin"


def _is_name(word: str) -> bool:
    return word.isidentifier() and not keyword.iskeyword(word)


@dataclass(frozen=True, slots=True)
class Project:
    """The files of a tree, and which of them are modules and packages."""

    paths: list[str]
    modules: dict[str, str]
    """Module → path."""
    packages: set[str]

    @classmethod
    def of(cls, paths: list[str]) -> "Project":
        python = [path for path in paths if path.endswith(".py") and path.partition("/")[0] in TOPS]
        packages = {module_of(path) for path in python if path.endswith("/__init__.py")}
        return cls(paths, {module_of(path): path for path in python}, packages)

    def expand(self, names: Map) -> Map:
        """The map with each package's entry spread over what is in it.

        Raises  Refused where a module is unknown, or two would become one
        """
        wrong = [f"no module {module}" for module in [*names.modules, *names.names] if module not in self.modules]
        modules: dict[str, str] = {}
        for old, new in sorted(names.modules.items(), key=lambda pair: pair[0].count(".")):
            modules[old] = new
            if old in self.packages:
                inside = (module for module in self.modules if module.startswith(f"{old}."))
                modules |= {module: new + module.removeprefix(old) for module in inside}
        after: dict[str, str] = {}
        packages = {*names.packages, *(modules.get(package, package) for package in self.packages)}
        for module in self.modules:
            new = modules.get(module, module)
            if new in after:
                wrong.append(f"{module} and {after[new]} would both be {new}")
            after[new] = module
            parent = new.rpartition(".")[0]
            if new != module and parent not in packages:
                wrong.append(f"{new}: the package {parent} is new and has no docstring in [packages]")
        if wrong:
            raise Refused(*dict.fromkeys(wrong))
        return Map(
            {o: n for o, n in modules.items() if o != n}, names.packages, names.names, names.identifiers, names.texts
        )


def apply_edits(source: bytes, edits: Iterable[Edit]) -> bytes:
    """Raises  Refused where two edits meet that are not the same one"""
    pieces: list[bytes] = []
    at = 0
    for edit in sorted(set(edits)):
        if edit.start < at:
            raise Refused(f"two edits meet at byte {edit.start}: {source[edit.start : edit.end]!r} → {edit.new!r}")
        pieces += [source[at : edit.start], edit.new.encode()]
        at = edit.end
    return b"".join([*pieces, source[at:]])
