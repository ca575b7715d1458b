"""The house stands: floors, doors and habits that a reader relies on, checked on each file's syntax tree."""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_LINES = 600
FLOORS = {
    "core": 0, "linux": 1, "store": 2, "engine": 3, "reaper": 4, "sweep": 4, "mount": 4, "service": 5, "plan": 5,
    "waiting": 6, "browse": 6, "cli": 7,
}  # fmt: skip
WINGS = {"places": 0, "tables": 1, "tree": 2, "requests": 3, "native": 4, "bridge": 4, "life": 5}
"""The parts of the mount, by floors of their own."""
LATE_FROM = FLOORS["engine"]
"""From here up commands import when they are called: `trashd swap` needs none of it."""
RUNS_FOR_YEARS = {"mount", "service"}
IMPURE = {
    "ctypes", "io", "os", "pathlib", "pyfuse3", "random", "secrets", "socket", "subprocess", "time", "trio",
}  # fmt: skip
KNOWS_PYFUSE3 = "fusefs.mount.bridge."
LOADS_LIBRARIES = "fusefs.linux.syscalls"
LOADERS = {"CDLL", "PyDLL", "LibraryLoader", "cdll", "pydll"}
# What is only ever added to may name what is gone since.
HISTORY = ("CHANGELOG.md", "docs/changes/")
PARTS = (".ci", "bench", "build_docs", "docs", "fusefs", "systemd", "tests")
TEXTS = ("*.md", "docs/**/*.md", "Makefile", ".ci/*", "systemd/**/*.*")
# A link's target; a module; a path; a file without its directory; a decision by its number.
NAMED = re.compile(
    r"\]\((?P<link>[^)\s#:]+)[)#]"
    r"|(?<![\w./<>$~*@-])(?:"
    r"(?P<module>(?:fusefs|tests|bench)(?:\.\w+)+)"
    r"|(?P<path>(?:\.?\w[\w-]*/)+[\w.{},*<>|-]*)"
    r"|(?P<file>(?<=`)\w+\.py|test_\w+\.py|[\w-]+\.md)"
    r"|[Dd]ecision (?P<decision>\d+))"
)
ERRORS_END = {"fusefs.mount.requests.failures", "fusefs.mount.bridge.pyfuse3_values", "fusefs.service.service"}
"""A request is answered with an errno, and a service goes on with its other volumes, whatever was wrong."""
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Module:
    """One source file: its dotted name (a package is named without `__init__`), text and tree."""

    def __init__(self, name: str, source: str, *, is_package: bool = False) -> None:
        self.name = name
        self.source = source
        self.is_package = is_package
        self.tree = ast.parse(source)
        self.nodes = list(ast.walk(self.tree))
        self.imports = list(imports_of(self.nodes))

    @property
    def room(self) -> str:
        return name_room(self.name)

    def early_imports(self) -> set[str]:
        """What is imported with the module; TYPE_CHECKING blocks count."""
        return self._early_imports(self.tree)

    def _early_imports(self, top: ast.AST) -> set[str]:
        found: set[str] = set()
        for child in ast.iter_child_nodes(top):
            if isinstance(child, ast.Import | ast.ImportFrom):
                found.update(imports_of([child]))
            elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                found |= self._early_imports(child)
        return found


Law = Callable[[Module], Iterator[str]]


def imports_of(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """What these nodes import, in functions and for type checks too: dotted names."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "fusefs":
            yield from (f"fusefs.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def modules_of(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """What `from package import name` imports, if that is a module."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def name_room(imported: str) -> str:
    """The part below fusefs; empty for fusefs itself and for what is no part of it."""
    parts = imported.split(".")
    return parts[1] if parts[0] == "fusefs" and len(parts) > 1 else ""


def name_wing(imported: str) -> str:
    """The part below fusefs.mount; empty for that itself and for what is no part of it."""
    parts = imported.split(".")
    return parts[2] if parts[:2] == ["fusefs", "mount"] and len(parts) > 2 else ""


def name_package(imported: str) -> str:
    return imported.partition(".")[0]


def every_room_has_a_floor(module: Module) -> Iterator[str]:
    if module.room and module.room not in FLOORS:
        yield f"{module.room} stands on no floor"


def imports_point_down(module: Module) -> Iterator[str]:
    for imported in module.imports:
        room = name_room(imported)
        if module.room in FLOORS and FLOORS.get(room, -1) > FLOORS[module.room]:
            yield f"imports {imported} from a floor above"


def rooms_of_a_floor_do_not_meet(module: Module) -> Iterator[str]:
    for imported in module.imports:
        room = name_room(imported)
        if module.room in FLOORS and room != module.room and FLOORS.get(room) == FLOORS[module.room]:
            yield f"imports {imported} from another room of its floor"


def the_mount_has_wings(module: Module) -> Iterator[str]:
    wing = name_wing(module.name)
    if wing and wing not in WINGS:
        yield f"{wing} is no wing of the mount"


def wings_point_down(module: Module) -> Iterator[str]:
    """Wings of one floor don't meet either; TYPE_CHECKING blocks count."""
    own = name_wing(module.name)
    for imported in module.imports:
        wing = name_wing(imported)
        if own in WINGS and wing != own and WINGS.get(wing, -1) >= WINGS[own]:
            yield f"imports {imported} from a wing that is not below"


def commands_import_late(module: Module) -> Iterator[str]:
    for imported in sorted(module.early_imports()) if module.room == "cli" else ():
        if LATE_FROM <= FLOORS.get(name_room(imported), -1) < FLOORS["cli"]:
            yield f"imports {imported} before it is called"


def core_is_pure(module: Module) -> Iterator[str]:
    for imported in module.imports:
        if module.room == "core" and name_package(imported) in IMPURE:
            yield f"imports {imported} in core"


def trio_stays_where_things_run_for_years(module: Module) -> Iterator[str]:
    for imported in module.imports:
        stranger = module.name.startswith("fusefs") and module.room not in RUNS_FOR_YEARS
        if stranger and name_package(imported) == "trio":
            yield "imports trio"


def pyfuse3_stays_in_its_bridge(module: Module) -> Iterator[str]:
    for imported in module.imports:
        stranger = module.name.startswith("fusefs") and not module.name.startswith(KNOWS_PYFUSE3)
        if stranger and name_package(imported) == "pyfuse3":
            yield "imports pyfuse3"


def textual_stays_in_browse(module: Module) -> Iterator[str]:
    for imported in module.imports:
        if module.room not in {"", "browse"} and name_package(imported) == "textual":
            yield "imports textual"


def imports_are_absolute(module: Module) -> Iterator[str]:
    for node in module.nodes:
        if isinstance(node, ast.ImportFrom) and node.level:
            yield f"line {node.lineno}: a relative import"


def imports_name_what_they_take(module: Module) -> Iterator[str]:
    for node in module.nodes:
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            yield f"line {node.lineno}: a star import"


def packages_hold_only_a_docstring(module: Module) -> Iterator[str]:
    if module.is_package and len(module.tree.body) > 1:
        yield "an __init__ with code in it"


def modules_say_what_they_are(module: Module) -> Iterator[str]:
    if not ast.get_docstring(module.tree):
        yield "no docstring"


def docstrings_stand_alone(module: Module) -> Iterator[str]:
    """An editor shows one without the one above it."""
    for node in module.nodes:
        if isinstance(node, DOCUMENTED) and (ast.get_docstring(node) or "").startswith("The same"):
            yield f"line {getattr(node, 'lineno', 1)}: a docstring that begins with `The same`"


def files_fit_the_ceiling(module: Module) -> Iterator[str]:
    n_lines = len(module.source.splitlines())
    if n_lines > MAX_LINES:
        yield f"{n_lines} lines, {MAX_LINES} at most"


def one_file_calls_the_c_library(module: Module) -> Iterator[str]:
    """There each function has its prototype, once."""
    for node in module.nodes:
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if module.name.startswith("fusefs") and module.name != LOADS_LIBRARIES and name in LOADERS:
            yield f"line {getattr(node, 'lineno', 0)}: loads a library"


def only_the_top_catches_all(module: Module) -> Iterator[str]:
    """A handler that ends in a bare `raise` passes on what it caught, and may stand anywhere."""
    if not module.name.startswith("fusefs") or module.name in ERRORS_END:
        return
    for node in module.nodes:
        if isinstance(node, ast.ExceptHandler) and catches_all(node) and not passes_on(node):
            yield f"line {node.lineno}: catches everything"
        elif isinstance(node, ast.Call) and suppresses_all(node):
            yield f"line {node.lineno}: suppresses everything"


def names_all(expression: ast.expr) -> bool:
    return any(
        isinstance(node, ast.Name) and node.id in {"Exception", "BaseException"} for node in ast.walk(expression)
    )


def catches_all(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or names_all(handler.type)


def suppresses_all(call: ast.Call) -> bool:
    return ast.unparse(call.func).endswith("suppress") and any(names_all(argument) for argument in call.args)


def passes_on(handler: ast.ExceptHandler) -> bool:
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def texts_name_what_exists(module: Module) -> Iterator[str]:
    """Most files name nothing that is gone in strings or code either, and are not read a second time."""
    path = ROOT / f"{module.name.replace('.', '/')}.py"
    if not is_history(path) and any(find_gone(module.source, path)):
        yield from (gone for text in prose_of(module) for gone in find_gone(text, path))


def is_history(path: Path) -> bool:
    return str(path.relative_to(ROOT)).startswith(HISTORY)


def prose_of(module: Module) -> Iterator[str]:
    """Its docstrings and comments."""
    for node in module.nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
    for token in tokenize.generate_tokens(io.StringIO(module.source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def find_gone(text: str, path: Path) -> Iterator[str]:
    """What this file's text names of ours and the tree does not have."""
    for match in NAMED.finditer(text):
        kind, word = str(match.lastgroup), match[str(match.lastgroup)].rstrip(".,/")
        if not (exists_beside(path, word) if kind == "link" else FINDERS[kind](word)):
            yield f"names {match[0]}, which does not exist"


def exists_beside(path: Path, word: str) -> bool:
    return (path.parent / word).exists()


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


def is_decision(number: str) -> bool:
    return any((ROOT / "docs" / "decisions").glob(f"{int(number):04}-*.md"))


FINDERS: dict[str, Callable[[str], bool]] = {
    "module": is_module,
    "path": is_path,
    "file": lambda word: word in file_names(),
    "decision": is_decision,
}
LAWS: tuple[Law, ...] = (
    every_room_has_a_floor,
    imports_point_down,
    rooms_of_a_floor_do_not_meet,
    the_mount_has_wings,
    wings_point_down,
    commands_import_late,
    core_is_pure,
    trio_stays_where_things_run_for_years,
    pyfuse3_stays_in_its_bridge,
    textual_stays_in_browse,
    imports_are_absolute,
    imports_name_what_they_take,
    packages_hold_only_a_docstring,
    modules_say_what_they_are,
    docstrings_stand_alone,
    files_fit_the_ceiling,
    one_file_calls_the_c_library,
    only_the_top_catches_all,
    texts_name_what_exists,
)


def read_module(path: Path) -> Module:
    parts = path.relative_to(ROOT).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    name = ".".join(parts[:-1] if is_package else parts)
    return Module(name, path.read_text(encoding="utf-8"), is_package=is_package)


@pytest.fixture(scope="module")
def house() -> list[Module]:
    paths = (
        path for part in ("fusefs", "tests", "bench", "build_docs") for path in sorted((ROOT / part).rglob("*.py"))
    )
    return [read_module(path) for path in paths]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_every_file_keeps(law: Law, house: list[Module]) -> None:
    assert house
    assert [f"{module.name}: {complaint}" for module in house for complaint in law(module)] == []


def find_circle(house: Iterable[Module]) -> list[str]:
    """Modules that import themselves by way of others, if there are such; imports in functions and for checks count."""
    graph = {module.name: set(module.imports) | set(modules_of(module.nodes)) for module in house}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        return circle
    return []


def names_twice(house: Iterable[Module]) -> list[str]:
    """Names that two modules outside cli/ have, or two classes anywhere in fusefs."""
    ours = [module for module in house if module.room and not module.is_package]
    modules = Counter(module.name.rpartition(".")[2] for module in ours if module.room != "cli")
    classes = Counter(node.name for module in ours for node in module.tree.body if isinstance(node, ast.ClassDef))
    return [name for names in (modules, classes) for name, count in names.items() if count > 1]


def test_nothing_imports_itself_by_way_of_others(house: list[Module]) -> None:
    assert find_circle(house) == []


def test_modules_and_classes_have_names_of_their_own(house: list[Module]) -> None:
    assert names_twice(house) == []


def test_every_document_names_what_exists() -> None:
    paths = {path for pattern in TEXTS for path in ROOT.glob(pattern) if path.is_file() and not is_history(path)}
    assert {ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile", "docs/crash.md")} <= paths
    found = {path.name: list(find_gone(path.read_text(encoding="utf-8"), path)) for path in sorted(paths)}
    assert {name: gone for name, gone in found.items() if gone} == {}


@pytest.mark.parametrize(
    ("law", "name", "source"),
    [
        (every_room_has_a_floor, "fusefs.attic.box", ""),
        (imports_point_down, "fusefs.core.a", "from fusefs.linux.b import c"),
        (imports_point_down, "fusefs.linux.a", "import fusefs.store.swap"),
        (imports_point_down, "fusefs.store.a", "from fusefs import reaper"),
        (imports_point_down, "fusefs.store.a", "def f():\n    from fusefs.cli import main"),
        (imports_point_down, "fusefs.engine.a", "from fusefs.reaper.b import c"),
        (imports_point_down, "fusefs.reaper.a", "from fusefs.service.b import c"),
        (imports_point_down, "fusefs.sweep.a", "from fusefs.plan.b import c"),
        (imports_point_down, "fusefs.mount.a", "import fusefs.cli.main"),
        (rooms_of_a_floor_do_not_meet, "fusefs.mount.a", "from fusefs.reaper.reap import reap"),
        (rooms_of_a_floor_do_not_meet, "fusefs.reaper.a", "def f():\n    import fusefs.mount.tree.vfs"),
        (rooms_of_a_floor_do_not_meet, "fusefs.sweep.a", "from fusefs.reaper.reap import reap"),
        (the_mount_has_wings, "fusefs.mount.a", ""),
        (wings_point_down, "fusefs.mount.tree.a", "from fusefs.mount.bridge import pyfuse3_loop"),
        (wings_point_down, "fusefs.mount.tables.a", "def f():\n    from fusefs.mount.tree.vfs import Vfs"),
        (wings_point_down, "fusefs.mount.native.a", "from fusefs.mount.bridge.pyfuse3_loop import hook"),
        (rooms_of_a_floor_do_not_meet, "fusefs.plan.a", "from fusefs.service.service import serve"),
        (commands_import_late, "fusefs.cli.a", "import fusefs.service.service"),
        (commands_import_late, "fusefs.cli.a", "if True:\n    import fusefs.mount.life.daemon"),
        (commands_import_late, "fusefs.cli.a", "import fusefs.engine.workers"),
        (core_is_pure, "fusefs.core.a", "from os import open"),
        (core_is_pure, "fusefs.core.a", "def f():\n    import time"),
        (trio_stays_where_things_run_for_years, "fusefs.store.a", "import trio"),
        (pyfuse3_stays_in_its_bridge, "fusefs.mount.tree.vfs", "from pyfuse3 import FUSEError"),
        (pyfuse3_stays_in_its_bridge, "fusefs.reaper.a", "import pyfuse3.asyncio"),
        (textual_stays_in_browse, "fusefs.cli.a", "def f():\n    from textual.app import App"),
        (imports_are_absolute, "fusefs.store.a", "from . import swap"),
        (imports_name_what_they_take, "fusefs.store.a", "from os import *"),
        (modules_say_what_they_are, "fusefs.store.a", "a = 1"),
        (docstrings_stand_alone, "fusefs.store.a", '"""The same for files."""'),
        (docstrings_stand_alone, "fusefs.store.a", 'class A:\n    """The same, small."""'),
        (docstrings_stand_alone, "tests.store.a", 'class A:\n    def f(self):\n        """The same at once."""'),
        (docstrings_stand_alone, "bench.a", 'async def f():\n    """\n    The same of many.\n    """'),
        (files_fit_the_ceiling, "bench.a", "a = 1\n" * (MAX_LINES + 1)),
        (one_file_calls_the_c_library, "fusefs.linux.a", "import ctypes\nlibc = ctypes.CDLL(None)"),
        (one_file_calls_the_c_library, "fusefs.mount.a", "from ctypes import PyDLL\nlibc = PyDLL(None)"),
        (only_the_top_catches_all, "fusefs.store.a", "try: f()\nexcept: pass"),
        (only_the_top_catches_all, "fusefs.store.a", "try: f()\nexcept Exception: raise ValueError"),
        (only_the_top_catches_all, "fusefs.store.a", "try: f()\nexcept (OSError, BaseException): pass"),
        (only_the_top_catches_all, "fusefs.store.a", "with contextlib.suppress(Exception): f()"),
        (texts_name_what_exists, "fusefs.store.a", '"""As in store/attic.py."""'),
        (texts_name_what_exists, "tests.unit.a", "def f():\n    a = 1  # fusefs.store.attic.Box"),
        (texts_name_what_exists, "bench.a", "# Source  docs/attic.md"),
        (texts_name_what_exists, "bench.a", "# docs/decisions/9999, as decision 9999 has it"),
    ],
)
def test_the_law_finds_what_breaks_it(law: Law, name: str, source: str) -> None:
    assert list(law(Module(name, source)))


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
    ],
)
def test_a_document_that_names_what_is_gone_is_found(text: str) -> None:
    assert len(list(find_gone(text, ROOT / "README.md"))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "`core/{names,record}.py`, `core/names.STORE`, `fusefs.core.names.STORE`, `tests/unit/test_*.py`",
        "`fusefs/cli/<name>.py`, /etc/trashd/docs/attic.md, linux/fuse.h, https://a.org/docs/attic.md, results/a.csv",
        "[plans](docs/plan.md#rules), [below](#how), [far](https://a.org/attic.md), [decision 1](docs/decisions)",
    ],
)
def test_a_document_may_name_what_exists_and_what_is_not_ours(text: str) -> None:
    assert list(find_gone(text, ROOT / "README.md")) == []


def test_a_circle_is_found() -> None:
    house = [
        Module("fusefs.store.a", "def f():\n    from fusefs.store import b"),
        Module("fusefs.store.b", "if TYPE_CHECKING:\n    from fusefs.store.c import C"),
        Module("fusefs.store.c", "import fusefs.store.a, fusefs.store.d"),
        Module("fusefs.store.d", ""),
    ]
    assert set(find_circle(house)) == {"fusefs.store.a", "fusefs.store.b", "fusefs.store.c"}


def test_a_name_of_two_modules_or_classes_is_found() -> None:
    house = [
        Module("fusefs.store.a", "class A: ..."), Module("fusefs.mount.a", "class B: ..."),
        Module("fusefs.cli.a", "class A: ..."),
    ]  # fmt: skip
    assert names_twice(house) == ["a", "A"]


def test_a_package_with_code_is_found() -> None:
    assert list(packages_hold_only_a_docstring(Module("fusefs.a", '"""A."""\nimport os', is_package=True)))


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("fusefs.linux.a", "import os\nfrom fusefs.core.names import Name"),
        ("fusefs.store.a", "from fusefs.linux.kernel import Kernel\nfrom fusefs.core.names import Name"),
        ("fusefs.service.a", "import trio\nfrom fusefs.reaper.reap import reap"),
        ("fusefs.mount.bridge.a", "import pyfuse3\nfrom fusefs.mount.tree.b import c"),
        ("fusefs.sweep.a", "from fusefs.engine.slice_pace import SlicePace"),
        ("fusefs.cli.a", "def f():\n    from fusefs.service.service import serve"),
        (LOADS_LIBRARIES, "import ctypes\nlibc = ctypes.CDLL(None)"),
        ("fusefs.linux.a", "import ctypes\nbuffer = ctypes.create_string_buffer(1)"),
        ("fusefs.mount.bridge.pyfuse3_values", "try: f()\nexcept Exception: pass"),
        ("fusefs.store.a", "try: f()\nexcept BaseException:\n    close()\n    raise"),
        ("tests.linux.a", "import pyfuse3, trio"),
        ("fusefs.store.a", 'A = "docs/attic.md"  # and store/swap.py'),
    ],
)
def test_no_law_forbids_what_the_design_allows(name: str, source: str) -> None:
    module = Module(name, f'"""A module."""\n{source}')
    assert [complaint for law in LAWS for complaint in law(module)] == []
