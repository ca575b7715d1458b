"""Rules of the source tree: layers of imports, and what a file may do, checked on each file's syntax tree."""

import ast
import gc
from collections.abc import Callable, Iterable, Iterator
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.support.source_modules import Module, all_modules, package_of

LAYERS = {
    "core": 0, "linux": 1, "store": 2, "engine": 3, "reaper": 4, "sweep": 4, "mount": 4, "service": 5, "plan": 5,
    "browse": 6, "cli": 7,
}  # fmt: skip
MOUNT_LAYERS = {"places": 0, "native": 1, "tables": 2, "tree": 3, "requests": 4, "plain": 5, "life": 6}
"""The packages of the mount, in layers of their own."""
LATE_FROM = LAYERS["engine"]
"""From here up commands import when they are called: `trashd swap` needs none of it."""
RUNS_FOR_YEARS = {"mount", "service"}
IMPURE = {
    "ctypes", "io", "os", "pathlib", "pyfuse3", "random", "secrets", "socket", "subprocess", "time", "trio",
}  # fmt: skip
KNOWS_PYFUSE3 = "fusefs.mount.plain."
LOADS_LIBRARIES = "fusefs.linux.syscalls"
LOADERS = {"CDLL", "PyDLL", "LibraryLoader", "cdll", "pydll"}
ERRORS_END = {"fusefs.mount.requests.fuse_requests", "fusefs.mount.plain.handlers", "fusefs.service.service"}
"""A request is answered with an errno, and a service goes on with its other volumes, whatever was wrong."""
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

Rule = Callable[[Module], Iterator[str]]


def modules_of(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """What `from package import name` imports, if that is a module."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def mount_package_of(imported: str) -> str:
    """The part below fusefs.mount; empty for that itself and for what is no part of it."""
    parts = imported.split(".")
    return parts[2] if parts[:2] == ["fusefs", "mount"] and len(parts) > 2 else ""


def top_package_of(imported: str) -> str:
    return imported.partition(".")[0]


def every_package_has_a_layer(module: Module) -> Iterator[str]:
    if module.package and module.package not in LAYERS:
        yield f"{module.package} is in no layer"


def imports_point_down(module: Module) -> Iterator[str]:
    for imported in module.imports:
        package = package_of(imported)
        if module.package in LAYERS and LAYERS.get(package, -1) > LAYERS[module.package]:
            yield f"imports {imported} from a layer above"


def packages_of_a_layer_do_not_import_each_other(module: Module) -> Iterator[str]:
    for imported in module.imports:
        package = package_of(imported)
        if module.package in LAYERS and package != module.package and LAYERS.get(package) == LAYERS[module.package]:
            yield f"imports {imported} from another package of its layer"


def packages_of_the_mount_have_layers(module: Module) -> Iterator[str]:
    package = mount_package_of(module.name)
    if package and package not in MOUNT_LAYERS:
        yield f"{package} is in no layer of the mount"


def imports_in_the_mount_point_down(module: Module) -> Iterator[str]:
    """Packages of one layer do not import each other either; TYPE_CHECKING blocks count."""
    own = mount_package_of(module.name)
    for imported in module.imports:
        package = mount_package_of(imported)
        if own in MOUNT_LAYERS and package != own and MOUNT_LAYERS.get(package, -1) >= MOUNT_LAYERS[own]:
            yield f"imports {imported} from a layer of the mount that is not below"


def commands_import_late(module: Module) -> Iterator[str]:
    for imported in sorted(module.early_imports()) if module.package == "cli" else ():
        if LATE_FROM <= LAYERS.get(package_of(imported), -1) < LAYERS["cli"]:
            yield f"imports {imported} before it is called"


def core_is_pure(module: Module) -> Iterator[str]:
    for imported in module.imports:
        if module.package == "core" and top_package_of(imported) in IMPURE:
            yield f"imports {imported} in core"


def trio_stays_where_things_run_for_years(module: Module) -> Iterator[str]:
    for imported in module.imports:
        stranger = module.name.startswith("fusefs") and module.package not in RUNS_FOR_YEARS
        if stranger and top_package_of(imported) == "trio":
            yield "imports trio"


def pyfuse3_stays_in_plain_mode(module: Module) -> Iterator[str]:
    for imported in module.imports:
        stranger = module.name.startswith("fusefs") and not module.name.startswith(KNOWS_PYFUSE3)
        if stranger and top_package_of(imported) == "pyfuse3":
            yield "imports pyfuse3"


def textual_stays_in_browse(module: Module) -> Iterator[str]:
    for imported in module.imports:
        if module.package not in {"", "browse"} and top_package_of(imported) == "textual":
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


RULES: tuple[Rule, ...] = (
    every_package_has_a_layer,
    imports_point_down,
    packages_of_a_layer_do_not_import_each_other,
    packages_of_the_mount_have_layers,
    imports_in_the_mount_point_down,
    commands_import_late,
    core_is_pure,
    trio_stays_where_things_run_for_years,
    pyfuse3_stays_in_plain_mode,
    textual_stays_in_browse,
    imports_are_absolute,
    imports_name_what_they_take,
    packages_hold_only_a_docstring,
    modules_say_what_they_are,
    docstrings_stand_alone,
    one_file_calls_the_c_library,
    only_the_top_catches_all,
)


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    gc.disable()  # else it goes through all the trees again and again
    try:
        return list(all_modules())
    finally:
        gc.enable()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_file_follows(rule: Rule, modules: list[Module]) -> None:
    assert modules
    assert [f"{module.name}: {complaint}" for module in modules for complaint in rule(module)] == []


def find_import_cycle(modules: Iterable[Module]) -> list[str]:
    """Modules that import themselves by way of others, if there are such; imports in functions and for checks count."""
    graph = {module.name: set(module.imports) | set(modules_of(module.nodes)) for module in modules}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        cycle: list[str] = error.args[1]
        return cycle
    return []


def test_nothing_imports_itself_by_way_of_others(modules: list[Module]) -> None:
    assert find_import_cycle(modules) == []


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (every_package_has_a_layer, "fusefs.attic.box", ""),
        (imports_point_down, "fusefs.core.a", "from fusefs.linux.b import c"),
        (imports_point_down, "fusefs.linux.a", "import fusefs.store.swap"),
        (imports_point_down, "fusefs.store.a", "from fusefs import reaper"),
        (imports_point_down, "fusefs.store.a", "def f():\n    from fusefs.cli import main"),
        (imports_point_down, "fusefs.engine.a", "from fusefs.reaper.b import c"),
        (imports_point_down, "fusefs.reaper.a", "from fusefs.service.b import c"),
        (imports_point_down, "fusefs.sweep.a", "from fusefs.plan.b import c"),
        (imports_point_down, "fusefs.mount.a", "import fusefs.cli.main"),
        (packages_of_a_layer_do_not_import_each_other, "fusefs.mount.a", "from fusefs.reaper.reap import reap"),
        (packages_of_a_layer_do_not_import_each_other, "fusefs.reaper.a", "def f():\n    import fusefs.mount.tree.vfs"),
        (packages_of_a_layer_do_not_import_each_other, "fusefs.sweep.a", "from fusefs.reaper.reap import reap"),
        (packages_of_the_mount_have_layers, "fusefs.mount.a", ""),
        (imports_in_the_mount_point_down, "fusefs.mount.tree.a", "from fusefs.mount.plain import handlers"),
        (
            imports_in_the_mount_point_down,
            "fusefs.mount.tables.a",
            "def f():\n    from fusefs.mount.tree.vfs import Vfs",
        ),
        (imports_in_the_mount_point_down, "fusefs.mount.native.a", "from fusefs.mount.plain.handlers import session"),
        (packages_of_a_layer_do_not_import_each_other, "fusefs.plan.a", "from fusefs.service.service import serve"),
        (commands_import_late, "fusefs.cli.a", "import fusefs.service.service"),
        (commands_import_late, "fusefs.cli.a", "if True:\n    import fusefs.mount.life.daemon"),
        (commands_import_late, "fusefs.cli.a", "import fusefs.engine.workers"),
        (core_is_pure, "fusefs.core.a", "from os import open"),
        (core_is_pure, "fusefs.core.a", "def f():\n    import time"),
        (trio_stays_where_things_run_for_years, "fusefs.store.a", "import trio"),
        (pyfuse3_stays_in_plain_mode, "fusefs.mount.tree.vfs", "from pyfuse3 import FUSEError"),
        (pyfuse3_stays_in_plain_mode, "fusefs.reaper.a", "import pyfuse3.asyncio"),
        (textual_stays_in_browse, "fusefs.cli.a", "def f():\n    from textual.app import App"),
        (imports_are_absolute, "fusefs.store.a", "from . import swap"),
        (imports_name_what_they_take, "fusefs.store.a", "from os import *"),
        (modules_say_what_they_are, "fusefs.store.a", "a = 1"),
        (docstrings_stand_alone, "fusefs.store.a", '"""The same for files."""'),
        (docstrings_stand_alone, "fusefs.store.a", 'class A:\n    """The same, small."""'),
        (docstrings_stand_alone, "tests.store.a", 'class A:\n    def f(self):\n        """The same at once."""'),
        (docstrings_stand_alone, "bench.a", 'async def f():\n    """\n    The same of many.\n    """'),
        (one_file_calls_the_c_library, "fusefs.linux.a", "import ctypes\nlibc = ctypes.CDLL(None)"),
        (one_file_calls_the_c_library, "fusefs.mount.a", "from ctypes import PyDLL\nlibc = PyDLL(None)"),
        (only_the_top_catches_all, "fusefs.store.a", "try: f()\nexcept: pass"),
        (only_the_top_catches_all, "fusefs.store.a", "try: f()\nexcept Exception: raise ValueError"),
        (only_the_top_catches_all, "fusefs.store.a", "try: f()\nexcept (OSError, BaseException): pass"),
        (only_the_top_catches_all, "fusefs.store.a", "with contextlib.suppress(Exception): f()"),
    ],
)
def test_the_rule_finds_what_breaks_it(rule: Rule, name: str, source: str) -> None:
    assert list(rule(Module(name, source)))


def test_a_cycle_is_found() -> None:
    modules = [
        Module("fusefs.store.a", "def f():\n    from fusefs.store import b"),
        Module("fusefs.store.b", "if TYPE_CHECKING:\n    from fusefs.store.c import C"),
        Module("fusefs.store.c", "import fusefs.store.a, fusefs.store.d"),
        Module("fusefs.store.d", ""),
    ]
    assert set(find_import_cycle(modules)) == {"fusefs.store.a", "fusefs.store.b", "fusefs.store.c"}


def test_a_package_with_code_is_found() -> None:
    assert list(packages_hold_only_a_docstring(Module("fusefs.a", '"""A."""\nimport os', is_package=True)))


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("fusefs.linux.a", "import os\nfrom fusefs.core.names import Name"),
        ("fusefs.store.a", "from fusefs.linux.kernel import Kernel\nfrom fusefs.core.names import Name"),
        ("fusefs.service.a", "import trio\nfrom fusefs.reaper.reap import reap"),
        ("fusefs.mount.plain.a", "import pyfuse3\nfrom fusefs.mount.tree.b import c"),
        ("fusefs.sweep.a", "from fusefs.engine.pace import SlicePace"),
        ("fusefs.cli.a", "def f():\n    from fusefs.service.service import serve"),
        (LOADS_LIBRARIES, "import ctypes\nlibc = ctypes.CDLL(None)"),
        ("fusefs.linux.a", "import ctypes\nbuffer = ctypes.create_string_buffer(1)"),
        ("fusefs.mount.plain.handlers", "try: f()\nexcept Exception: pass"),
        ("fusefs.store.a", "try: f()\nexcept BaseException:\n    close()\n    raise"),
        ("tests.linux.a", "import pyfuse3, trio"),
    ],
)
def test_no_rule_forbids_what_the_design_allows(name: str, source: str) -> None:
    module = Module(name, f'"""A module."""\n{source}')
    assert [complaint for rule in RULES for complaint in rule(module)] == []
