"""The Python files of the clone as syntax trees, for tests about the source."""

import ast
import io
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


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
    def package(self) -> str:
        return package_of(self.name)

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

    def prose(self) -> Iterator[str]:
        """Its docstrings, those below constants and fields too, and its comments."""
        for node in self.nodes:
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                yield node.value.value
        for token in tokenize.generate_tokens(io.StringIO(self.source).readline):
            if token.type == tokenize.COMMENT:
                yield token.string


def imports_of(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """What these nodes import, in functions and for type checks too: dotted names."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "fusefs":
            yield from (f"fusefs.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def package_of(imported: str) -> str:
    """The part below fusefs; empty for fusefs itself and for what is no part of it."""
    parts = imported.split(".")
    return parts[1] if parts[0] == "fusefs" and len(parts) > 1 else ""


def all_modules() -> Iterator[Module]:
    """Those of the product, its tests, the benchmarks and what builds the documents."""
    for part in ("fusefs", "tests", "bench", "build_docs"):
        yield from map(read_module, sorted((ROOT / part).rglob("*.py")))


def read_module(path: Path) -> Module:
    """What a file has, by its path in the clone."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    name = ".".join(parts[:-1] if is_package else parts)
    return Module(name, path.read_text(encoding="utf-8"), is_package=is_package)
