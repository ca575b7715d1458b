"""Commands start at once: what they import is counted, because each module costs milliseconds."""

import json
import subprocess
import sys

HEAVY = {
    "asyncio", "click", "dataclasses", "datetime", "hashlib", "inspect", "logging", "msgspec", "pathlib", "pyfuse3",
    "random", "rich", "shlex", "shutil", "subprocess", "tempfile", "textual", "threading", "trio", "urllib",
}  # fmt: skip
"""What `swap` and `rm` have no time to load: each takes from one to thirty milliseconds."""


def list_modules(statement: str) -> set[str]:
    """Name the modules that a fresh interpreter holds after a statement."""
    program = f"{statement}\nimport sys; names = sorted(sys.modules); import json; print(json.dumps(names))"
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True)
    names: list[str] = json.loads(done.stdout)
    return set(names)


def list_heavy_imports(statement: str) -> set[str]:
    """Name the heavy modules that a statement adds to what the interpreter holds with ctypes, for the system calls.

    Python 3.14's ctypes imports sysconfig, which imports threading: together 1 ms.
    """
    return HEAVY & (list_modules(statement) - list_modules("import ctypes"))


def test_swap_starts_without_heavy_modules() -> None:
    assert list_heavy_imports("import fusefs.cli.main, fusefs.cli.swap_paths") == set()


def test_rm_starts_without_heavy_modules() -> None:
    assert list_heavy_imports("import fusefs.cli.main, fusefs.cli.rm_paths") == set()


def test_list_reap_restore_and_sweep_start_without_trio() -> None:
    commands = "import fusefs.cli.list, fusefs.cli.reap, fusefs.cli.restore, fusefs.cli.sweep"
    assert "trio" not in list_heavy_imports(commands)


def test_only_a_job_of_ranks_needs_mpi4py() -> None:
    """It is an optional package, and whoever imports MPI begins it."""
    loaded = list_modules("import fusefs.reaper.reap, fusefs.service.forker, fusefs.sweep.run_sweep")
    assert not {"mpi4py", "fusefs.engine.mpi_ranks"} & loaded


def test_a_mounts_options_are_told_without_its_daemon() -> None:
    assert not {"pyfuse3", "trio"} & list_heavy_imports("import fusefs.cli.mount")


def test_a_mount_with_the_engine_needs_no_pyfuse3() -> None:
    assert "pyfuse3" not in list_modules("import fusefs.mount.life.daemon")


def test_no_command_loads_what_browse_needs() -> None:
    """Not `trashd browse --help` either: packages go without it."""
    every = "from fusefs.cli.group import _COMMANDS, trashd\nfor name in _COMMANDS: trashd.get_command(None, name)"
    loaded = list_modules(every)
    assert "fusefs.cli.browse" in loaded
    assert not {name for name in loaded if name.startswith(("textual", "fusefs.browse"))}


def test_a_heavy_import_is_found() -> None:
    assert "click" in list_heavy_imports("import click")
