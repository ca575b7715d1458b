"""The machine's switch for FUSE over io_uring, as `trashd service install --uring` sets it: behind a bind mount here.

The kernel knows nothing of the file that stands in for it, so that what is tried of the kernel stands in too.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from fusefs.core.uring_reasons import SWITCH

pytestmark = [
    pytest.mark.needs("root", "fuse"),
    pytest.mark.skipif(not Path(SWITCH).exists(), reason="this kernel has no FUSE over io_uring"),
]
_SET = """
import sys
from fusefs.cli.service_install import FileOutcome, FileReport
from fusefs.cli.service_uring import is_all_that_lacks, set_switch, tell_what_stays
from fusefs.core import uring_reasons
from fusefs.core.errors import Refused
from fusefs.mount.life import uring_trial
uring_trial.failures = lambda: sys.argv[1:]
uring_reasons.is_trusted = lambda release: True
print(is_all_that_lacks())
try:
    set_switch()
except Refused as error:
    print(error.message())
tell_what_stays([FileReport("/etc/tmpfiles.d/trashd-uring.conf", FileOutcome.REMOVED)])
"""


def outcome(stand_in: Path, *wrong: str) -> tuple[list[str], str]:
    """What is printed, and said on the other side, if the trial tells what is wrong."""
    script = f'mount --bind "$1" {SWITCH} && shift && exec "$@"'
    words = ["sh", "-c", script, "sh", str(stand_in), sys.executable, "-c", _SET, *wrong]
    done = subprocess.run(["unshare", "--mount", *words], capture_output=True, text=True, check=True)
    return done.stdout.splitlines(), done.stderr


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    path = tmp_path / "enable_uring"
    path.write_text("N\n")
    return path


@pytest.mark.needs("uring")
def test_a_kernel_that_stands_the_trial_has_it_set(stand_in: Path) -> None:
    printed, said = outcome(stand_in)
    assert printed == ["True"]
    assert stand_in.read_text().startswith("Y")
    assert "switched on FUSE over io_uring for every FUSE mount of this machine" in said
    assert f"echo N >{SWITCH}" in said


@pytest.mark.needs("uring")
def test_a_kernel_that_does_not_is_refused_and_the_switch_is_as_it_was(stand_in: Path) -> None:
    _, refusal = outcome(stand_in, "a mount does not answer", "all hangs")[0]
    assert refusal.endswith("on this kernel: a mount does not answer; all hangs")
    assert stand_in.read_text().startswith("N")


@pytest.mark.needs("uring")
def test_a_switch_that_others_have_set_stays_whatever_the_trial_tells(stand_in: Path) -> None:
    stand_in.write_text("Y\n")
    printed, _ = outcome(stand_in, "all hangs")
    assert printed[0] == "False"
    assert stand_in.read_text().startswith("Y")
