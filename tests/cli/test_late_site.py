"""The command as packages install it: Python starts without its `site`, which is made up for when it is needed."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.make_trees import make_tree

ROOT = Path(__file__).parents[2]


@pytest.fixture
def launcher(tmp_path: Path) -> Path:
    """The launcher of packages beside the product."""
    (tmp_path / "fusefs").symlink_to(ROOT / "fusefs")
    placed = tmp_path / "trashd"
    placed.write_text((ROOT / "debian/launchers/trashd").read_text())
    return placed


def list_imports(launcher: Path, *words: str | Path) -> list[str]:
    """What the command imports, started as its first line says."""
    options = launcher.read_text().partition("\n")[0].split()[1:]
    command = [sys.executable, *options, "-X", "importtime", launcher, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [line.rpartition("|")[2].strip() for line in done.stderr.splitlines()]


@pytest.mark.needs("root")
def test_a_swap_starts_without_site(launcher: Path, volume: Path) -> None:
    victim = make_tree(volume / "victim", {"file": "content"})
    list_imports(launcher, "swap", victim)
    again = list_imports(launcher, "swap", "--json", victim)
    assert "fusefs.store.swap" in again
    assert "site" not in again


def test_what_needs_more_gets_it(launcher: Path) -> None:
    assert {"site", "click"} <= {*list_imports(launcher, "--version")}
