"""The real command, really killed: strace sends SIGKILL at its k-th rename, `trashd doctor --repair` puts it right."""

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.crash_scenarios import CrashScenario, assert_nothing_lost, assert_settled, home
from tests.support.verb_scenarios import SCENES, only_id

pytestmark = pytest.mark.needs("root", "strace")

REPO = Path(__file__).resolve().parents[2]
RENAMES = ("renameat2", "renameat", "rename")
TRASHD = (sys.executable, "-m", "fusefs.cli.main")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPO), "PYTHONDONTWRITEBYTECODE": "1"}


def kill_at_rename(call: str, k: int, *arguments: str) -> bool:
    """Run the command; whether it was killed as it entered its k-th rename by that system call."""
    strace = ("strace", "-f", "-qq", "-o", "/dev/null", "-e", f"inject={call}:signal=KILL:when={k}")
    done = subprocess.run([*strace, *TRASHD, *arguments], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode != 0


def repair(volume: Path) -> subprocess.CompletedProcess[str]:
    command = [*TRASHD, "doctor", "--repair", str(volume)]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)


def arguments_of(verb: str, volume: Path) -> list[str]:
    match verb:
        case "restore":
            return ["restore", "--volume", str(volume), only_id(volume)]
        case _:
            return [verb, str(home(volume))]


def assert_law(scene: CrashScenario, volume: Path, verb: str) -> int:
    n_killed = 0
    for call in RENAMES:
        for k in itertools.count(1):
            before = scene.set_up(volume)
            if not kill_at_rename(call, k, *arguments_of(verb, volume)):
                break
            n_killed += 1
            assert not scene.is_gapless or home(volume).is_dir()
            done = repair(volume)
            assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), f"killed at {call} {k}"
            assert_settled(volume)
            assert_nothing_lost(scene, volume, before)
    return n_killed


@pytest.mark.parametrize(
    ("verb", "name", "n_renames"),
    [
        ("swap", "swap", 2),
        ("swap", "swap-two-rename", 3),
        ("rm", "rm", 2),
        ("restore", "restore-late", 5),
        ("restore", "restore-two-rename-late", 6),
    ],
)
def test_sigkill_at_any_rename_is_repaired_by_doctor(volume: Path, verb: str, name: str, n_renames: int) -> None:
    assert assert_law(SCENES[name], volume, verb) == n_renames
