"""Commands start at once: what they import is counted, because each module costs milliseconds."""

import json
import subprocess
import sys

HEAVY = {
    "asyncio", "click", "collections", "contextlib", "dataclasses", "datetime", "enum", "functools", "hashlib",
    "inspect", "json", "logging", "msgspec", "operator", "pathlib", "pyfuse3", "random", "re", "rich", "shlex",
    "shutil", "signal", "subprocess", "tempfile", "threading", "trio", "typing", "urllib", "warnings",
}  # fmt: skip

OURS = {
    "cli.main", "cli.output", "cli.plain_line", "cli.swap_fast_lane",
    "core.durations", "core.errors", "core.escaped_bytes", "core.identity", "core.lean", "core.lean_json",
    "core.lifecycle", "core.names", "core.printable_names", "core.record",
    "linux.boot_id", "linux.directory_metadata", "linux.fd", "linux.identity_xattr", "linux.invocation", "linux.kernel",
    "linux.mountinfo", "linux.runtime_directories", "linux.syscalls",
    "store.backing_and_mount", "store.container", "store.folder_registry", "store.layout", "store.locate",
    "store.permission_loan", "store.refusals", "store.registry_lines", "store.reserve", "store.spare_space",
    "store.stage", "store.store_maker", "store.store_registry", "store.stores_inside", "store.swap", "store.swap_path",
    "store.user_folders", "store.victim_rename", "store.visible_move",
}  # fmt: skip
"""What a swap needs of the product. What one of these imports for another command's sake belongs into a function, or
into a module of its own."""


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
    assert list_heavy_imports("import fusefs.cli.main, fusefs.cli.swap_fast_lane") == set()


def test_swap_starts_with_no_more_of_ours_than_it_needs() -> None:
    loaded = list_modules("import fusefs.cli.main, fusefs.cli.swap_fast_lane")
    ours = {name for name in loaded if name.startswith("fusefs.") and name.count(".") > 1}
    assert ours == {f"fusefs.{name}" for name in OURS}


def test_a_sweep_starts_without_heavy_modules() -> None:
    on_the_way = "fusefs.cli.main, fusefs.cli.sweep_fast_lane, fusefs.engine.foreground_pacing, fusefs.sweep.run"
    assert list_heavy_imports(f"import {on_the_way}, fusefs.sweep.trash_action") == set()


def test_a_sweeps_workers_load_no_more_than_what_packs_their_slices() -> None:
    loaded = list_heavy_imports("import fusefs.cli.sweep_fast_lane, fusefs.sweep.run, fusefs.engine.worker_processes")
    assert loaded == list_heavy_imports("import _pickle")


def test_rm_starts_without_heavy_modules() -> None:
    assert list_heavy_imports("import fusefs.cli.main, fusefs.cli.rm_fast_lane") == set()


def test_a_reap_starts_without_heavy_modules() -> None:
    on_the_way = "fusefs.cli.main, fusefs.cli.reap_fast_lane, fusefs.engine.foreground_pacing, fusefs.reaper.reap"
    assert list_heavy_imports(f"import {on_the_way}, fusefs.service.clock_file") == set()


def test_a_mounts_options_are_told_without_its_daemon() -> None:
    assert not {"pyfuse3", "trio"} & list_heavy_imports("import fusefs.cli.mount")


def test_no_command_loads_what_browse_needs() -> None:
    """Not `trashd browse --help` either: packages go without it."""
    every = "from fusefs.cli.group import _COMMANDS, trashd\nfor name in _COMMANDS: trashd.get_command(None, name)"
    loaded = list_modules(every)
    assert "fusefs.cli.browse" in loaded
    assert not {name for name in loaded if name.startswith(("textual", "fusefs.browse"))}


def test_a_heavy_import_is_found() -> None:
    assert "click" in list_heavy_imports("import click")
