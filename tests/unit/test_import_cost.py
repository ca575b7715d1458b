"""`trashd swap` starts at once: what it imports is counted, because each module costs milliseconds."""

import json
import subprocess
import sys

HEAVY = {
    "asyncio", "click", "dataclasses", "datetime", "hashlib", "inspect", "logging", "msgspec", "pathlib", "pyfuse3",
    "random", "rich", "shlex", "shutil", "subprocess", "tempfile", "threading", "trio", "urllib",
}  # fmt: skip


def list_modules(statement: str) -> set[str]:
    """Name the modules that a fresh interpreter holds after a statement."""
    program = f"{statement}\nimport sys; names = sorted(sys.modules); import json; print(json.dumps(names))"
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True)
    names: list[str] = json.loads(done.stdout)
    return set(names)


def list_heavy_imports(statement: str) -> set[str]:
    """Name the heavy modules that a statement adds to what the bare interpreter holds."""
    return HEAVY & (list_modules(statement) - list_modules("pass"))


def test_swap_starts_without_heavy_modules() -> None:
    assert list_heavy_imports("import fusefs.cli.main, fusefs.cli.fast") == set()


def test_a_heavy_import_is_found() -> None:
    assert "click" in list_heavy_imports("import click")
