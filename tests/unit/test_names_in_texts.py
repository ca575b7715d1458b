"""What comments, docstrings and documents name exists: files, modules, classes, decisions."""

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.source_modules import ROOT, Module, all_modules

# What is only ever added to may name what is gone since.
HISTORY = ("CHANGELOG.md", "docs/changes/")
PARTS = (".ci", "bench", "build_docs", "docs", "fusefs", "systemd", "tests")
TEXTS = ("*.md", "docs/**/*.md", "Makefile", ".ci/*", "systemd/**/*.*")
# A link's target; a module; a path; a file without its directory; a decision by its number; a module or an object and
# what it has, but no manual page (systemd.unit(5)) and no host of a URL.
NAMED = re.compile(
    r"\]\((?P<link>[^)\s#:]+)[)#]"
    r"|(?<![\w./<>$~*@-])(?:"
    r"(?P<module>(?:fusefs|tests|bench)(?:\.\w+)+)"
    r"|(?P<path>(?:\.?\w[\w-]*/)+[\w.{},*<>|-]*)"
    r"|(?P<file>(?<=`)\w+\.py|test_\w+\.py|[\w-]+\.md)"
    r"|[Dd]ecision (?P<decision>\d+)"
    r"|(?P<dotted>(?>[a-z_]\w*(?:\.[A-Za-z_]\w*)+))(?!/|\(\d))"
)
SEE = re.compile(r"[Ss]ee (?P<see>[A-Z]\w*[a-z]\w*|[a-z]+(?:_[a-z]+)+)(?![\w/-]|\.\w)")
"""A class or function that has more to say; of docstrings and comments."""
PACKAGES = ("fusefs", "fusefs/mount", "tests", ".")
"""Where a package can be that is named without what is above it."""
PROGRAMS = {"mount.fuse3", "mount.lustre", "systemd.io", "systemd.condition", "systemd.run"}
"""And a host, and options of the kernel's command line."""
SUFFIXES = {"c", "h", "json", "jsonl", "lock", "md", "py", "service", "socket", "svg", "target", "timer", "toml", "yml"}


def find_gone_in_code(text: str, path: Path) -> Iterator[str]:
    """What a docstring or comment names of ours and the tree does not have."""
    yield from find_gone(text, path)
    yield from (f"says `{match[0]}`" for match in SEE.finditer(text) if match["see"] not in code().names)


def path_of(module: Module) -> Path:
    return ROOT / f"{module.name.replace('.', '/')}.py"


def find_gone(text: str, path: Path) -> Iterator[str]:
    """What this file's text names of ours and the tree does not have."""
    for match in NAMED.finditer(text):
        kind, word = str(match.lastgroup), match[str(match.lastgroup)].rstrip(".,/")
        if not ((path.parent / word).exists() if kind == "link" else FINDERS[kind](word)):
            yield f"names {match[0]}, which does not exist"


@cache
def file_names() -> frozenset[str]:
    paths = [*ROOT.iterdir(), *(path for part in PARTS for path in (ROOT / part).rglob("*"))]
    return frozenset(path.name for path in paths)


@cache
def is_module(word: str) -> bool:
    """Also what a module has: `fusefs.core.names.STORE`."""
    path = ROOT
    for part in word.split("."):
        if (path / f"{part}.py").is_file():
            return True
        path /= part
        if not path.is_dir():
            return False
    return True


@cache
def is_path(word: str) -> bool:
    """From the clone, `fusefs` or `tests`, a module with or without its suffix; what is in none of them is not ours.

    `<name>` stands for any. A path to a Python file is always taken for one of ours: its package may be what is gone.
    """
    head = word.partition("/")[0]
    tops = [ROOT] if head in PARTS else []
    tops += [ROOT / part for part in ("fusefs", "tests") if (ROOT / part / head).is_dir()]
    if (not tops and not word.endswith(".py")) or "<" in word or word.endswith(".h"):
        return True
    before, brace, rest = word.partition("{")
    if brace:
        inside, _, after = rest.partition("}")
        return all(is_path(before + one + after) for one in inside.split(","))
    member = re.sub(r"\.[A-Za-z_]+$", "", word)
    return any(
        any(top.glob(pattern)) for top in tops for pattern in (word, f"{word}.py", f"{word}-*.md", f"{member}.py")
    )


class Code(NamedTuple):
    """What the Python files have.

    names     all identifiers
    pairs     an object's name, without `_` before it, and what is read or written of it: of `self._store.path`
              (self, store) and (store, path)
    top       functions and classes of modules, with the last parts of the modules' names
    own       the identifiers of each module, by the last part of its name
    strings   all strings of the product
    prose     docstrings and comments, each with its file
    """

    names: frozenset[str]
    pairs: frozenset[tuple[str, str]]
    top: Mapping[str, set[str]]
    own: Mapping[str, set[str]]
    strings: str
    prose: Sequence[tuple[Path, str]]


@cache
def code() -> Code:
    pairs: set[tuple[str, str]] = set()
    strings: list[str] = []
    prose: list[tuple[Path, str]] = []
    top: defaultdict[str, set[str]] = defaultdict(set)
    own: defaultdict[str, set[str]] = defaultdict(set)
    for module in all_modules():
        stem = module.name.rpartition(".")[2]
        own[stem].update(name for node in module.nodes if (name := name_of(node)))
        for node in module.nodes:
            if isinstance(node, ast.Attribute) and (owner := name_of(node.value)):
                pairs.add((owner.lstrip("_"), node.attr))
        prose += ((path_of(module), text) for text in module.prose())
        if module.package:
            strings += strings_of(module)
        for node in module.tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                top[node.name].add(stem)
    return Code(frozenset().union(*own.values()), frozenset(pairs), top, own, "\n".join(strings), prose)


NAME_FIELDS = {
    ast.Name: "id", ast.Attribute: "attr", ast.arg: "arg", ast.keyword: "arg", ast.FunctionDef: "name",
    ast.AsyncFunctionDef: "name", ast.ClassDef: "name", ast.alias: "name",
}  # fmt: skip


def name_of(node: ast.AST) -> str | None:
    """The identifier that a node adds; of `import a.b` the last one."""
    name: str | None = getattr(node, NAME_FIELDS.get(type(node), ""), None)
    return name.rpartition(".")[2] if name else None


def strings_of(module: Module) -> Iterator[str]:
    """Its strings and bytes, without docstrings."""
    docstrings = {id(node.value) for node in module.nodes if isinstance(node, ast.Expr)}
    for node in module.nodes:
        if isinstance(node, ast.Constant) and id(node) not in docstrings:
            yield node.value if isinstance(node.value, str) else repr(node.value)


@cache
def is_dotted(word: str) -> bool:
    """A module below its package, and what it has; an object's attribute; a file; a string of the product, as a key is.

    What begins with no package and no module is taken for one of ours only if a function or class of ours follows.
    """
    head, name, *_more = word.split(".")
    if (
        word in PROGRAMS
        or word.rpartition(".")[2] in SUFFIXES
        or f"{head}.{name}" in file_names()
        or (head, name) in code().pairs
    ):
        return True
    if any((ROOT / top / head / "__init__.py").is_file() for top in PACKAGES):
        return any(is_below(ROOT / top, word) for top in PACKAGES) or word in code().strings
    if head in code().own:
        return name in code().own[head] or word in code().strings
    return name not in code().top or not ("_" in name.strip("_") or name[0].isupper())


def is_below(path: Path, word: str) -> bool:
    """A package, a module in it, or what the module has."""
    parts = word.split(".")
    for n, part in enumerate(parts, 1):
        if (path / f"{part}.py").is_file():
            return set(parts[n:]) <= code().own[part]
        path /= part
        if not path.is_dir():
            return False
    return True


def is_decision(number: str) -> bool:
    return any((ROOT / "docs/internals/decisions").glob(f"{int(number):04}-*.md"))


FINDERS: dict[str, Callable[[str], bool]] = {
    "module": is_module,
    "path": is_path,
    "file": lambda word: word in file_names(),
    "decision": is_decision,
    "dotted": is_dotted,
}


def test_every_comment_and_docstring_names_what_exists() -> None:
    assert code().prose
    assert [f"{path}: {gone}" for path, text in code().prose for gone in find_gone_in_code(text, path)] == []


def test_every_document_names_what_exists() -> None:
    paths = {
        path
        for pattern in TEXTS
        for path in ROOT.glob(pattern)
        if path.is_file() and not str(path.relative_to(ROOT)).startswith(HISTORY)
    }
    names = ("README.md", "CONTRIBUTING.md", "Makefile", "docs/internals/crash-windows.md")
    assert {ROOT / name for name in names} <= paths
    found = {path.name: list(find_gone(path.read_text(encoding="utf-8"), path)) for path in sorted(paths)}
    assert {name: gone for name, gone in found.items() if gone} == {}


@pytest.mark.parametrize(
    "text",
    [
        "`make attic` runs tests/attic/*.py",
        "`core/attic`",
        "attic/names.py",
        "`core/{names,attic}`",
        "`test_attic.py`",
        "`attic.py`",
        "attic.md",
        "[a plan](docs/attic.md#rules)",
        "[names](core/names.py)",
        "`python -m bench.attic`",
        "as core.attic has it",
        "`store.swap.attic`",
        "Source  linux.attic.Caller",
        "tables.attic",
        "support.attic",
        "attic.parse_time",
        "syscalls.ATTIC",
    ],
)
def test_a_document_that_names_what_is_gone_is_found(text: str) -> None:
    assert len(list(find_gone(text, ROOT / "README.md"))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "`core/{names,record}.py`, `core/names.STORE`, `fusefs.core.names.STORE`, `tests/unit/test_*.py`",
        "`fusefs/cli/<name>.py`, /etc/trashd/docs/attic.md, linux/fuse.h, https://a.org/docs/attic.md, results/a.csv",
        "store.swap, `core.names.STORE`, `names.STORE`, tree.vfs.Vfs, `store.path`, `volume.path`, `reaper.lock`",
        "mount.fuse.trashd, core.h, record.json, systemd.unit(5), os.pidfd_open, systemd.io/boot",
        "the sysctl kernel.io_uring_disabled, user.trashd.identity, old.log",
        "[plans](docs/man/mount.md#rules), [below](#how), [far](https://a.org/attic.md), [decision 1](docs/internals)",
    ],
)
def test_a_document_may_name_what_exists_and_what_is_not_ours(text: str) -> None:
    assert list(find_gone(text, ROOT / "README.md")) == []


def gone_in(source: str) -> list[str]:
    module = Module("fusefs.store.a", source)
    return [gone for text in module.prose() for gone in find_gone_in_code(text, path_of(module))]


@pytest.mark.parametrize(
    "source",
    [
        '"""As in store/attic.py."""',
        "def f():\n    a = 1  # fusefs.store.attic.Box",
        "# Source  docs/attic.md",
        "# docs/internals/decisions/9999, as decision 9999 has it",
        'class A:\n    b: int\n    """See Attic."""',
        "# as attic_of does it: see attic_of",
    ],
)
def test_a_docstring_or_comment_that_names_what_is_gone_is_found(source: str) -> None:
    assert gone_in(source)


@pytest.mark.parametrize("source", ['A = "docs/attic.md"  # and store/swap.py', '"""See Kernel, and see trashd."""'])
def test_code_and_what_exists_are_passed_over(source: str) -> None:
    assert gone_in(source) == []
