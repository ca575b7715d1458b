"""The switch of the machine, as `trashd service install --uring` sets it for FUSE over io_uring, in a file here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fusefs.core.uring_choice import SWITCH
from tests.support.seccomp import IO_URING_SETUP, without

pytestmark = [
    pytest.mark.needs("root", "fuse"),
    pytest.mark.skipif(not Path(SWITCH).exists(), reason="this kernel has no FUSE over io_uring"),
]
_SET = """
import sys
from fusefs.cli import service
from fusefs.cli.service import FileOutcome, FileReport
if len(sys.argv) > 1:
    read_facts = service.read_facts
    service.read_facts = lambda: read_facts()._replace(release=sys.argv[1])
service.set_switch()
service.tell_what_stays([FileReport("/etc/tmpfiles.d/trashd-uring.conf", FileOutcome.REMOVED)])
"""


def stderr_of(stand_in: Path, *words: str, how: tuple[str, ...] = ()) -> str:
    """What is written to stderr. words: the release of the kernel, if it is to be another"""
    script = f'mount --bind "$1" {SWITCH} && shift && exec "$@"'
    command = ["sh", "-c", script, "sh", str(stand_in), *how, sys.executable, "-c", _SET, *words]
    done = subprocess.run(["unshare", "--mount", *command], capture_output=True, text=True, check=True)
    return done.stderr


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    path = tmp_path / "enable_uring"
    path.write_text("N\n")
    return path


def test_the_switch_is_set_and_what_outlives_an_uninstall_is_printed(stand_in: Path) -> None:
    stderr = stderr_of(stand_in)
    assert stand_in.read_text().startswith("Y")
    assert "switched on FUSE over io_uring for every FUSE mount of this machine" in stderr
    assert f"echo N >{SWITCH}" in stderr


@pytest.mark.needs("uring")
@pytest.mark.skipif(os.cpu_count() != len(os.sched_getaffinity(0)), reason="some cores are barred here")
def test_a_kernel_with_known_faults_is_a_warning(stand_in: Path) -> None:
    stderr = stderr_of(stand_in, "6.14.1")
    assert "Linux 6.14.1 may have faults in FUSE over io_uring" in stderr
    assert stand_in.read_text().startswith("Y")


def test_a_machine_that_denies_io_uring_is_a_warning(stand_in: Path) -> None:
    stderr = stderr_of(stand_in, how=tuple(without(IO_URING_SETUP)))
    assert "no mount of this machine can use io_uring" in stderr
