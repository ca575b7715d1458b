"""What this machine allows of FUSE over io_uring; its switch is only ever set behind a bind mount here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.core.uring_choice import SWITCH
from fusefs.linux.uring_facts import parse_cores, read_facts

_ENABLE = """
import logging
from fusefs.linux.uring_facts import enable_uring, read_facts
logging.basicConfig(format="%(levelname)s %(message)s")
before = read_facts().is_enabled
enable_uring()
print(before, read_facts().is_enabled)
"""
has_switch = pytest.mark.skipif(not os.path.exists(SWITCH), reason="this kernel has no FUSE over io_uring")


def switched(stand_in: Path) -> subprocess.CompletedProcess[str]:
    """`enable` where a file stands in for the switch, before and after it."""
    script = f'mount --bind "$1" {SWITCH} && exec "$2" -c "$3"'
    words = ["sh", "-c", script, "sh", str(stand_in), sys.executable, _ENABLE]
    return subprocess.run(["unshare", "--mount", *words], capture_output=True, text=True, check=True)


@has_switch
@pytest.mark.needs("root", "fuse")
def test_a_switch_that_is_set_is_left_alone(tmp_path: Path) -> None:
    stand_in = tmp_path / "enable_uring"
    stand_in.write_text("Y\n")
    done = switched(stand_in)
    assert (done.stdout, done.stderr) == ("True True\n", "")


def test_a_core_that_this_thread_may_not_run_on_is_barred() -> None:
    allowed = os.sched_getaffinity(0)
    one = min(allowed)
    before = read_facts().barred
    try:
        os.sched_setaffinity(0, {one})
        assert read_facts().barred == before | (allowed - {one})
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.needs("uring")
def test_a_ring_is_had_where_io_uring_is() -> None:
    assert read_facts().refusal == 0


@given(st.sets(st.integers(0, 40)))
def test_lists_of_cores_are_read_as_the_kernel_writes_them(wanted: set[int]) -> None:
    ranges: list[list[int]] = []
    for core in sorted(wanted):
        if ranges and ranges[-1][-1] == core - 1:
            ranges[-1].append(core)
        else:
            ranges.append([core])
    assert parse_cores(",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in ranges)) == wanted
