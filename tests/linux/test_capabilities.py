"""Root that is less than root: what is dropped is gone for good, the rest stays, as another user too."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fusefs.linux.credentials import Capability

pytestmark = pytest.mark.needs("root")

DROP = """
from fusefs.linux.credentials import Capability, drop_capabilities, act_as_others_can
drop_capabilities(Capability.FSETID, Capability.SYS_RESOURCE)
"""
AS_OTHER = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
libc.setfsuid(1000)
"""
BOTH = sum(1 << capability for capability in (Capability.FSETID, Capability.SYS_RESOURCE))


def python(code: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run it in a process of its own: capabilities don't come back."""
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)


def sets_of(status: str) -> dict[str, int]:
    return {name: int(value, 16) for name, value in re.findall(r"^Cap(\w+):\s+([0-9a-f]+)$", status, re.MULTILINE)}


def test_what_is_dropped_is_in_no_set_and_nothing_else_is_lost() -> None:
    before = sets_of(Path("/proc/self/status").read_text())
    after = sets_of(python(DROP + "print(open('/proc/self/status').read())").stdout)
    assert after == {name: value & ~BOTH for name, value in before.items()}
    assert before["Eff"] & BOTH


def test_no_exec_brings_it_back() -> None:
    done = python(DROP + "import os; os.execvp('cat', ['cat', '/proc/self/status'])")
    assert all(not value & BOTH for value in sets_of(done.stdout).values())


def test_dropping_twice_is_no_error() -> None:
    assert python(DROP + DROP).returncode == 0


def test_a_write_clears_set_user_id_without_fsetid(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.touch()
    os.chown(program, 1000, 1000)
    program.chmod(0o4755)
    done = python(DROP + "import sys; open(sys.argv[1], 'w').write('other')", program)
    assert done.returncode == 0, done.stderr
    assert program.stat().st_mode & 0o7777 == 0o755


KEEPS = """
import ctypes
ctypes.CDLL(None).prctl(28, 1 << 2, 0, 0, 0)
"""


@pytest.mark.parametrize("acts", [True, False])
def test_who_acts_as_another_is_judged_as_him_though_it_was_started_to_keep_its_capabilities(
    tmp_path: Path, acts: bool
) -> None:
    (tmp_path / "closed").mkdir(0o700)
    request = "act_as_others_can(); act_as_others_can()" if acts else ""
    done = python(KEEPS + DROP + request + AS_OTHER + "os.listdir(sys.argv[1])", tmp_path / "closed")
    assert (done.returncode == 0) != acts, done.stderr
