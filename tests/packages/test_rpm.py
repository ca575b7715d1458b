"""The packages of trashd.spec, as `make rpm` has built them: what is in them, and what they ask for."""

import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fusefs.cli.service import PACKAGES, pieces_for_all
from fusefs.core.version import VERSION

REPO = Path(__file__).parents[2]
BUILT = REPO / "build/packages/rpm"
PROJECT: dict[str, Any] = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OUR_OWN = ("/usr/lib/trashd/", "/usr/share/doc/trashd/", "/usr/share/licenses/trashd")


def asked(package: str, *what: str) -> list[str]:
    """What rpm says of one of them, line by line."""
    (file,) = BUILT.glob(f"{package}-{VERSION}-*[!c].rpm")
    return subprocess.run(
        ["rpm", "--query", "--package", *what, file], check=True, capture_output=True, text=True
    ).stdout.splitlines()


def files(package: str) -> set[str]:
    """Its files and links. A manual page is compressed where rpm can do it."""
    listed = (line.rpartition(" ") for line in asked(package, "--queryformat", "[%{FILEMODES:perms} %{FILENAMES}\\n]"))
    return {name.removesuffix(".gz") for mode, _, name in listed if not mode.startswith("d")}


def test_they_have_the_files_of_the_one_list_and_modules_and_documents() -> None:
    both = files("trashd") | files("trashd-mount")
    wanted = {piece.path for piece in pieces_for_all(PACKAGES)}
    assert wanted <= both
    assert {name for name in both - wanted if not name.startswith(OUR_OWN)} == set()
    modules = {f"/usr/lib/trashd/{path.relative_to(REPO)}" for path in (REPO / "fusefs").rglob("*.py")}
    assert modules <= both


def test_what_a_mount_needs_is_apart_as_for_debian() -> None:
    ours = {name for name in files("trashd-mount") if "/licenses/" not in name}
    listed = (REPO / "debian/trashd-mount.install").read_text(encoding="utf-8").split()
    assert ours == {f"/{name}" for name in listed}
    assert not files("trashd") & ours


@pytest.mark.parametrize("package", ["trashd", "trashd-mount"])
def test_they_ask_for_the_libraries_that_the_project_names(package: str) -> None:
    named = PROJECT["dependencies"] if package == "trashd" else PROJECT["optional-dependencies"]["mount"]
    wanted = {"python3dist({}) >= {}".format(*name.split(">=")) for name in named}
    assert {line for line in asked(package, "--requires") if line.startswith("python3dist")} == wanted


def test_an_administrators_configuration_is_kept() -> None:
    assert asked("trashd", "--configfiles") == ["/etc/trashd/config.toml"]


def test_removing_stops_the_service_and_an_upgrade_does_not() -> None:
    text = "\n".join(asked("trashd", "--scripts"))
    assert 'if [ "$1" -eq 0 ] && [ -d /run/systemd/system ]; then\n    systemctl --no-reload disable --now' in text
    assert "restart" not in text
    assert 'if [ "$1" -eq 0 ]; then set -- remove; else set -- upgrade; fi' in text


def test_rpmlint_finds_no_error() -> None:
    assert " 0 errors" in (BUILT / "rpmlint").read_text(encoding="utf-8")
