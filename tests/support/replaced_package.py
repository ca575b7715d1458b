"""A copy of trashd's modules that are replaced while a daemon of theirs runs, as an upgrade does it."""

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.support.booted_systemd import REPO

_UPGRADED = 'raise SystemError("a running daemon loaded a module of the new version")\n'
# Tells of each import that is no look at what is there already, by whichever process and however: an audit hook is not
# told of importlib's own.
_SITECUSTOMIZE = """
import os, sys
_log = os.open({log!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
class _Teller:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("fusefs"):
            os.write(_log, name.encode() + b"\\n")
sys.meta_path.insert(0, _Teller())
"""


class ReplacedPackage:
    """The modules, and what is imported of them."""

    def __init__(self, directory: Path) -> None:
        self._modules = directory / "fusefs"
        self._log = directory / "imported"
        self._n_before = 0
        shutil.copytree(REPO / "fusefs", self._modules)  # compiled, too
        (directory / "sitecustomize.py").write_text(_SITECUSTOMIZE.format(log=str(self._log)))
        self.command = ("env", f"PYTHONPATH={directory}", sys.executable, "-P", "-B", "-m", "fusefs.cli.main")

    def replace(self) -> set[str]:
        """Put others in their place; those that were imported before."""
        before = self._imported()
        self._n_before = len(before)
        for path in self._modules.rglob("*.py"):
            path.write_text(_UPGRADED)
        return set(before)

    def imported_since(self) -> list[str]:
        """What was imported since then."""
        return self._imported()[self._n_before :]

    def _imported(self) -> list[str]:
        return self._log.read_text().split()


def modules_ever(*modules: str) -> set[str]:
    """What these import, and what functions of that may import yet; commands are left out: they run before."""
    program = f"import sys, {', '.join(modules)}; print(*(name for name in sys.modules if name.startswith('fusefs')))"
    completed = subprocess.run([sys.executable, "-c", program], cwd=REPO, stdout=subprocess.PIPE, text=True, check=True)
    known_names = set(completed.stdout.split())
    late = {name for module in known_names for name in _late_imports(module)} - known_names
    return modules_ever(*modules, *sorted(late)) if late else known_names


def _late_imports(module: str) -> Iterator[str]:
    path = REPO / f"{module.replace('.', '/')}.py"
    if not module.startswith("fusefs.cli.") and path.is_file():
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _imports_of(function)


def _imports_of(function: ast.AST) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("fusefs"))
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("fusefs"):
            is_package = (REPO / node.module.replace(".", "/")).is_dir()
            yield from (f"{node.module}.{alias.name}" for alias in node.names) if is_package else (node.module,)
