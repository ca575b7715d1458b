"""A wheel has the native core where there is a C compiler, and is one for all platforms where there is none."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from build_docs.man_pages import format_names, page_names, title_of
from hatch_build import write_man_pages

REPO = Path(__file__).parents[2]
LIBRARY = "fusefs/mount/native/_core.abi3.so"
pytestmark = pytest.mark.long
"""Each builds a wheel, the first one with a compiler."""


def build(to: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in {"CC", "TRASHD_NATIVE"}}
    return subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(to)],
        cwd=REPO, env=inherited | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_wheel_with_it_is_of_one_platform_and_many_pythons(tmp_path: Path) -> None:
    assert build(tmp_path, TRASHD_NATIVE="1").returncode == 0
    (wheel,) = tmp_path.iterdir()
    assert "-cp311-abi3-linux_" in wheel.name
    assert LIBRARY in zipfile.ZipFile(wheel).namelist()


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({"CC": "no-such-compiler"}, "no C compiler was found"),
        ({"CC": "false"}, "failed"),
        ({"TRASHD_NATIVE": "0"}, "=0"),
    ],
)
def test_a_wheel_without_it_is_of_all_and_says_why(tmp_path: Path, environment: dict[str, str], why: str) -> None:
    done = build(tmp_path, **environment)
    assert done.returncode == 0
    assert why in done.stderr
    (wheel,) = tmp_path.iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    assert LIBRARY not in inside
    assert {f"fusefs/share/man/man1/{title_of(name)}.1" for name in page_names()} <= inside
    assert {f"fusefs/share/man/man5/{name}" for name in format_names()} <= inside
    assert "fusefs/share/docs/json.schema.json" in inside
    assert not [name for name in inside if name.startswith("build_docs/")]


def test_where_it_must_be_there_is_no_wheel_without_it(tmp_path: Path) -> None:
    assert build(tmp_path, TRASHD_NATIVE="1", CC="no-such-compiler").returncode != 0
    assert not list(tmp_path.iterdir())


def test_manual_pages_are_written_by_the_tree_that_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pipx sets PYTHONSAFEPATH, with which Python does not search the current directory."""
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    (tmp_path / "build_docs").mkdir()
    (tmp_path / "build_docs/__init__.py").touch()
    (tmp_path / "build_docs/__main__.py").write_text("import sys\nopen(sys.argv[2], 'x').close()\n", encoding="utf-8")
    write_man_pages(tmp_path, tmp_path / "man")
    assert (tmp_path / "man").is_file()
