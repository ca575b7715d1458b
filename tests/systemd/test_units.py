"""The unit files by themselves: systemd understands every line, and they are as hard as they can be."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from fusefs.cli.service import find_command
from tests.support.booted_systemd import REPO
from tests.support.trashd_command import done_well

pytestmark = pytest.mark.needs("systemd")

UNITS = REPO / "systemd"
REAPER, MOUNT, SLICE = "trashd-reaper.service", "trashd-mount@.service", "trashd.slice"
SWEEP, TIMER = "trashd-sweep.service", "trashd-sweep.timer"
# Ten times what systemd-analyze calls the exposure; lower is better.
EXPOSURE_MAX = {REAPER: 36, MOUNT: 55, SWEEP: 28}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root below which the units are installed."""
    root = tmp_path_factory.mktemp("root")
    done_well("service", "install", "--root", root)
    return root


def analyze(*words: str | Path) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "XDG_RUNTIME_DIR": "/tmp"}  # --user will not do without one, and uses none
    return subprocess.run(["systemd-analyze", *words], env=variables, capture_output=True, text=True, check=False)


def settings(path: Path) -> list[tuple[str, str]]:
    """Key and value of each line."""
    return re.findall(r"^(\w+)=(.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("unit", [REAPER, MOUNT, SLICE, SWEEP, TIMER])
def test_systemd_understands_every_line(installed: Path, unit: str) -> None:
    path = installed / "usr/local/lib/systemd/system" / unit
    done = analyze("verify", "--recursive-errors=yes", "--man=no", path)
    assert (done.returncode, done.stderr) == (0, "")


def test_systemd_understands_every_line_of_the_users_unit(installed: Path) -> None:
    path = installed / "usr/local/lib/systemd/user" / REAPER
    done = analyze("verify", "--user", "--recursive-errors=yes", "--man=no", path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("unit", EXPOSURE_MAX)
def test_it_is_as_hardened_as_it_was(installed: Path, unit: str) -> None:
    path = installed / "usr/local/lib/systemd/system" / unit
    done = analyze("security", "--offline=true", f"--threshold={EXPOSURE_MAX[unit]}", "--no-pager", path)
    assert done.returncode == 0, done.stdout.splitlines()[-1]


@pytest.mark.parametrize("path", sorted(UNITS.rglob("*.service")), ids=lambda path: str(path.relative_to(UNITS)))
def test_no_boot_needs_it(path: Path) -> None:
    keys = dict(settings(path))
    assert keys.get("WantedBy", "a timer") in ("multi-user.target", "default.target", "a timer")
    assert not {"Before", "RequiredBy", "DefaultDependencies"} & set(keys)


@pytest.mark.parametrize("path", ["trashd-reaper.service", "user/trashd-reaper.service"])
def test_no_target_waits_for_the_reaper(path: str) -> None:
    keys = dict(settings(UNITS / path))
    assert keys["WantedBy"] in keys["After"].split()


def test_what_mounts_has_no_mount_namespace() -> None:
    hides = re.compile(
        r"Protect(System|Home|KernelTunables|KernelModules|KernelLogs|ControlGroups|Proc)|Private(Tmp|Devices|Mounts|IPC)"
        r"|(Read(Write|Only)|Inaccessible|Exec|NoExec)Paths|Bind(ReadOnly)?Paths|MountFlags|ProcSubset|Root\w+|DynamicUser"
    )
    assert [key for key, _value in settings(UNITS / MOUNT) if hides.fullmatch(key)] == []


@pytest.mark.parametrize("unit", [REAPER, SWEEP])
def test_what_renames_in_volumes_puts_no_mount_into_them(unit: str) -> None:
    divides = re.compile(
        r"ProtectHome|PrivateTmp|(Read(Write|Only)|Inaccessible|Exec|NoExec|Bind(ReadOnly)?)Paths|Root\w+"
    )
    found = dict(settings(UNITS / unit))
    assert [key for key in found if divides.fullmatch(key)] == []
    assert found["ProtectSystem"] == "full"


@pytest.mark.parametrize("path", sorted(UNITS.rglob("*.service")), ids=lambda path: str(path.relative_to(UNITS)))
def test_what_is_installed_runs_this_installation(installed: Path, path: Path) -> None:
    kind = "user" if path.parent.name == "user" else "system"
    keys = dict(settings(installed / "usr/local/lib/systemd" / kind / path.name))
    assert keys["ExecStart"].startswith(find_command() + " ")
    assert os.access(find_command(), os.X_OK)
