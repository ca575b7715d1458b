"""python -m tests.renaming.same REV [REV2] MAP.toml…: whether two versions are the same but for what the maps say.

Every Python file is parsed on both sides and compared node by node. This knows nothing of how names were found: it
takes a pair of names as right if a map has it, and asks that within a file no two names become one. REV2 is the
working tree if it is left out. Several maps are taken as applied one after the other.
"""

import ast
import io
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tests.renaming.plan import SKIPPED, TOPS, Map, Project, Refused, module_of, path_of, read_map, tracked

_IDENTIFIERS = {
    (ast.Name, "id"), (ast.Attribute, "attr"), (ast.arg, "arg"), (ast.keyword, "arg"), (ast.FunctionDef, "name"),
    (ast.AsyncFunctionDef, "name"), (ast.ClassDef, "name"), (ast.ExceptHandler, "name"), (ast.Global, "names"),
    (ast.Nonlocal, "names"), (ast.MatchAs, "name"), (ast.MatchStar, "name"), (ast.MatchMapping, "rest"),
    (ast.MatchClass, "kwd_attrs"),
}  # fmt: skip
_MODULE = re.compile(r"(?<![\w.])(?:fusefs|tests|bench)(?:\.\w+)+")
_WORD = re.compile(r"\w+")


class Import(NamedTuple):
    """One imported name: from which module, as what; order and grouping don't count."""

    module: str
    name: str
    bound: str


@dataclass(frozen=True, slots=True)
class Allowed:
    """What the maps let a file's names become, read from the maps alone."""

    modules: Mapping[str, str]
    tops: Mapping[tuple[str, str], str]
    """(module, name) → new name"""
    pairs: frozenset[tuple[str, str]]
    """(old, new): the last parts of all entries, and of modules."""


@dataclass(slots=True)
class Compared:
    """What comparing two versions has found."""

    n_files: int = 0
    n_docstrings: int = 0
    differences: list[str] = field(default_factory=list)


class Comparing:
    """One file under the maps; `pairs` are those of its own identifiers added."""

    def __init__(self, path: str, allowed: Allowed, pairs: frozenset[tuple[str, str]], compared: Compared) -> None:
        self._path = path
        self._allowed = allowed
        self._pairs = pairs
        self._compared = compared
        self._became: dict[str, set[str]] = {}
        self._came_from: dict[str, set[str]] = {}

    def compare(self, old: ast.Module, new: ast.Module) -> None:
        self._node(old, new)
        for name, news in sorted(self._became.items()):
            unmapped = sorted(new for new in news if new != name and (name, new) not in self._pairs)
            if unmapped:
                self._tell(1, f"{name} → {', '.join(unmapped)} is in no map")
        for name, olds in sorted(self._came_from.items()):
            if len(olds) > 1 and not all((old, name) in self._pairs for old in olds):
                self._tell(1, f"{', '.join(sorted(olds))} all → {name}")

    def _tell(self, line: int, difference: str) -> None:
        self._compared.differences.append(f"{self._path}:{line}: {difference}"[:300])

    def _node(self, old: ast.AST, new: ast.AST) -> None:
        if type(old) is not type(new):
            self._tell(getattr(old, "lineno", 1), f"{_shown(old)} → {_shown(new)}")
            return
        for name in old._fields:
            before, after = getattr(old, name, None), getattr(new, name, None)
            if (type(old), name) in _IDENTIFIERS:
                self._identifiers(old, before, after)
            elif isinstance(old, ast.Constant) and name == "value":
                self._constant(old, before, after)
            elif isinstance(before, list) and isinstance(after, list):
                self._list(old, before, after)
            else:
                self._part(old, before, after)

    def _part(self, owner: ast.AST, before: object, after: object) -> None:
        if isinstance(before, ast.AST) and isinstance(after, ast.AST):
            self._node(before, after)
        elif before != after or type(before) is not type(after):
            self._tell(getattr(owner, "lineno", 1), f"in {_shown(owner)}: {before!r} → {after!r}")

    def _list(self, owner: ast.AST, before: list[ast.AST], after: list[ast.AST]) -> None:
        old_statements, new_statements = list(_without_imports(before)), list(_without_imports(after))
        if any(isinstance(one, ast.stmt) for one in [*before, *after]):
            self._imports(before, after)
            if _has_docstring(owner, before) and _has_docstring(owner, after):
                self._compared.n_docstrings += ast.dump(old_statements[0]) != ast.dump(new_statements[0])
                old_statements, new_statements = old_statements[1:], new_statements[1:]
        if len(old_statements) != len(new_statements):
            line = getattr(owner, "lineno", 1)
            self._tell(line, f"{len(old_statements)} → {len(new_statements)} parts of {type(owner).__name__}")
            return
        for old, new in zip(old_statements, new_statements, strict=True):
            if _is_text(old) and _is_text(new):
                self._compared.n_docstrings += ast.dump(old) != ast.dump(new)
            else:
                self._part(owner, old, new)

    def _imports(self, before: list[ast.AST], after: list[ast.AST]) -> None:
        for old_run, new_run in _paired_runs(before, after):
            olds = {self._mapped(one) for one in _imported(old_run)}
            news = set(_imported(new_run))
            if olds != news:
                line = getattr(next(iter([*old_run, *before])), "lineno", 1)
                self._tell(line, f"imports {sorted(olds - news)} → {sorted(news - olds)}")
            for one in _imported(old_run):
                if one.name:
                    self._note(one.bound, self._mapped(one).bound)
                else:
                    self._pairs |= set(zip(one.module.split("."), self._mapped(one).module.split("."), strict=False))

    def _mapped(self, one: Import) -> Import:
        """What an import must have become."""
        allowed = self._allowed
        full = f"{one.module}.{one.name}" if one.name else one.module
        if one.name and full in allowed.modules:
            module, _, name = allowed.modules[full].rpartition(".")
        elif one.name:
            module = allowed.modules.get(one.module, one.module)
            name = allowed.tops.get((one.module, one.name), one.name)
        else:
            module, name = allowed.modules.get(one.module, one.module), ""
        if one.bound == (one.name or one.module):
            return Import(module, name, name or module)
        own = [new for old, new in self._pairs - allowed.pairs if old == one.bound]
        return Import(module, name, own[0] if len(own) == 1 else one.bound)

    def _identifiers(self, node: ast.AST, before: object, after: object) -> None:
        olds = before if isinstance(before, list) else [before]
        news = after if isinstance(after, list) else [after]
        if len(olds) != len(news):
            self._tell(getattr(node, "lineno", 1), f"{before} → {after}")
            return
        for old, new in zip(olds, news, strict=True):
            if (old is None) != (new is None):
                self._tell(getattr(node, "lineno", 1), f"{old} → {new}")
            elif isinstance(old, str) and isinstance(new, str):
                if old != new and (old, new) not in self._pairs:
                    self._tell(getattr(node, "lineno", 1), f"{old} → {new}")
                self._note(old, new)

    def _note(self, old: str, new: str) -> None:
        self._became.setdefault(old, set()).add(new)
        self._came_from.setdefault(new, set()).add(old)

    def _constant(self, node: ast.Constant, before: object, after: object) -> None:
        if type(before) is type(after) and before == after:
            return
        if isinstance(before, bytes) and isinstance(after, bytes):
            before, after = before.decode("latin-1"), after.decode("latin-1")
        if isinstance(before, str) and isinstance(after, str) and self._same_text(before, after):
            return
        self._tell(node.lineno, f"{before!r} → {after!r}")

    def _same_text(self, before: str, after: str) -> bool:
        """Whether a text differs by names of the maps only: dotted modules, their paths, one whole name."""
        if (before, after) in self._pairs:
            return True
        spaced = [text.replace("/", ".").replace(".py", " .py") for text in (before, after)]
        olds, news = (_MODULE.sub(self._module_text, spaced[0]).split(), spaced[1].split())
        if len(olds) != len(news):
            return False
        return all(old == new or self._same_token(old, new) for old, new in zip(olds, news, strict=True))

    def _same_token(self, old: str, new: str) -> bool:
        """Shorter paths (mount/gate.py), and names after a module (fusefs.mount.gate:Gate)."""
        for top in TOPS:
            if self._allowed.modules.get(f"{top}.{old}", "") == f"{top}.{new}":
                return True
        olds, news = _WORD.findall(old), _WORD.findall(new)
        same_gaps = _WORD.sub("", old) == _WORD.sub("", new)
        allowed = all(a == b or (a, b) in self._pairs for a, b in zip(olds, news, strict=False))
        return (same_gaps and len(olds) == len(news) and allowed and old.startswith(TOPS)) or self._is_type(
            olds, news, old, new
        )

    def _is_type(self, olds: list[str], news: list[str], old: str, new: str) -> bool:
        """A type in quotes: names and brackets."""
        return (
            len(olds) == len(news)
            and re.fullmatch(r"[\w\[\].,|\"]+", old) is not None
            and _WORD.sub("", old) == _WORD.sub("", new)
            and all(a == b or ((a, b) in self._pairs and a[:1].isupper()) for a, b in zip(olds, news, strict=True))
        )

    def _module_text(self, found: re.Match[str]) -> str:
        parts = found.group().split(".")
        for n in range(len(parts), 1, -1):
            module = ".".join(parts[:n])
            if module in self._allowed.modules:
                return ".".join([self._allowed.modules[module], *parts[n:]])
        return found.group()


def _shown(node: ast.AST) -> str:
    return f"{type(node).__name__} {ast.unparse(node)[:60]!r}"


def _is_import(node: ast.AST) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def _without_imports(statements: list[ast.AST]) -> Iterator[ast.AST]:
    return (one for one in statements if not _is_import(one))


def _paired_runs(before: list[ast.AST], after: list[ast.AST]) -> Iterator[tuple[list[ast.AST], list[ast.AST]]]:
    """The imports before each other statement of a block, on both sides: they may not pass one."""
    olds, news = _runs(before), _runs(after)
    for place in sorted(olds.keys() | news.keys()):
        yield olds.get(place, []), news.get(place, [])


def _runs(statements: list[ast.AST]) -> dict[int, list[ast.AST]]:
    found: dict[int, list[ast.AST]] = {}
    n = 0
    for one in statements:
        if _is_import(one):
            found.setdefault(n, []).append(one)
        else:
            n += 1
    return found


def _imported(run: list[ast.AST]) -> Iterator[Import]:
    for one in run:
        if isinstance(one, ast.Import):
            for alias in one.names:
                yield Import(alias.name, "", alias.asname or alias.name)
        elif isinstance(one, ast.ImportFrom):
            for alias in one.names:
                yield Import("." * one.level + (one.module or ""), alias.name, alias.asname or alias.name)


def _has_docstring(owner: ast.AST, statements: list[ast.AST]) -> bool:
    may = isinstance(owner, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    return may and bool(statements) and _is_text(statements[0])


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def compose(maps: list[Map]) -> tuple[Map, Allowed]:
    """Maps that are applied one after the other, as one."""
    modules: dict[str, str] = {}
    tops: dict[tuple[str, str], str] = {}
    pairs: set[tuple[str, str]] = set()
    packages: dict[str, str] = {}
    for one in maps:
        back = {new: old for old, new in modules.items()}
        came = {(modules.get(module, module), new): (module, old) for (module, old), new in tops.items()}
        for module in one.names:
            for old, new in one.top_names(module).items():
                tops[came.get((module, old), (back.get(module, module), old))] = new
        modules = {old: one.moved(new) for old, new in modules.items()} | {
            old: new for old, new in one.modules.items() if old not in back
        }
        pairs = _chained(pairs, set(_pairs_of(one)))
        packages |= one.packages
    return Map(modules, packages), Allowed(modules, tops, frozenset(pairs))


def _pairs_of(one: Map) -> Iterator[tuple[str, str]]:
    for old, new in one.modules.items():
        yield old.rpartition(".")[2], new.rpartition(".")[2]
    for names in one.names.values():
        for old, new in names.items():
            yield old.rpartition(".")[2], new


def _chained(first: set[tuple[str, str]], then: set[tuple[str, str]]) -> set[tuple[str, str]]:
    return first | then | {(old, new) for old, middle in first for other, new in then if middle == other}


def _pairs_in(path: str, maps: list[Map]) -> set[tuple[str, str]]:
    """A file's own identifiers, wherever it is when each map is applied."""
    pairs: set[tuple[str, str]] = set()
    module, is_package = module_of(path), path.endswith("/__init__.py")
    for one in maps:
        pairs = _chained(pairs, set(one.identifiers_in(path_of(module, is_package=is_package)).items()))
        module = one.moved(module)
    return pairs


def compare(before: Mapping[str, bytes], after: Mapping[str, bytes], maps: list[Map]) -> Compared:
    """Two trees: path → source of every Python file.

    Raises  Refused for a map that does not fit
    """
    compared = Compared()
    at = Project.of(sorted(before))
    expanded = []
    for one in maps:
        expanded.append(at.expand(one))
        at = Project.of(sorted({*_moved_paths(at, expanded[-1]).values(), *_new_paths(one)}))
    whole, allowed = compose(expanded)
    places = _moved_paths(Project.of(sorted(before)), whole)
    removed = {path_of(package, is_package=True) for package, text in whole.packages.items() if not text}
    for path in sorted(set(after) - set(places.values()) - set(_new_paths(whole))):
        compared.differences.append(f"{path}: is new")
    for old, new in places.items():
        if new not in after:
            if old not in removed:
                compared.differences.append(f"{old}: there is no {new}")
            continue
        compared.n_files += 1
        pairs = allowed.pairs | _pairs_in(old, expanded)
        if before[old] != after[new]:
            comparing = Comparing(old, allowed, frozenset(pairs), compared)
            comparing.compare(ast.parse(before[old]), ast.parse(after[new]))
    return compared


def _moved_paths(project: Project, names: Map) -> dict[str, str]:
    return {
        path: path_of(names.moved(module), is_package=module in project.packages)
        for module, path in project.modules.items()
    }


def _new_paths(names: Map) -> list[str]:
    return [path_of(package, is_package=True) for package, text in names.packages.items() if text]


def tree_of(root: Path, revision: str | None) -> dict[str, bytes]:
    """Python files at a revision, or of the working tree."""
    if revision is None:
        paths = [path for path in tracked(root) if path.endswith(".py") and path.partition("/")[0] in TOPS]
        return {path: (root / path).read_bytes() for path in paths}
    archive = subprocess.run(["git", "archive", revision], cwd=root, check=True, capture_output=True).stdout
    found = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            file = tar.extractfile(member) if member.name.endswith(".py") else None
            if file is not None and member.name.partition("/")[0] in TOPS and not member.name.startswith(SKIPPED):
                found[member.name] = file.read()
    return found


def main(arguments: list[str]) -> int:
    revisions = [argument for argument in arguments if not argument.endswith(".toml")]
    paths = [Path(argument) for argument in arguments if argument.endswith(".toml")]
    if len(revisions) not in {1, 2}:
        print(__doc__)
        return 2
    root = Path.cwd()
    before, after = tree_of(root, revisions[0]), tree_of(root, revisions[1] if len(revisions) > 1 else None)
    try:
        compared = compare(before, after, [read_map(path) for path in paths])
    except Refused as refused:
        print(*(f"refused: {reason}" for reason in refused.args), sep="\n")
        return 1
    print(*compared.differences, sep="\n", end="\n" if compared.differences else "")
    if compared.differences:
        print(f"{len(compared.differences)} differences in {compared.n_files} files")
        return 1
    print(f"{compared.n_files} files the same under the map, {compared.n_docstrings} docstrings differ")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
