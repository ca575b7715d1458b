"""`-o uring=`: which mounts get their requests by io_uring, why others do not, and what sets the machine's switch."""

import os
import subprocess
from pathlib import Path

import pytest

from fusefs.core.uring_choice import SWITCH, why_not_trusted
from tests.support.background_mounts import mount
from tests.support.trashd_command import TRASHD, done_well

pytestmark = [
    pytest.mark.needs("root", "fuse", "fuse_uring"),
    pytest.mark.takes_engine,
]


def told_of_uring(target: Path) -> str:
    (told,) = done_well("mount", "--explain", "--json", target).objects()
    state = told["fast_paths"]["uring"]
    return f"{'on' if state['is_on'] else 'off'}: {state['why']}"


def behind_switch(bench: Path, switch: str, script: str) -> subprocess.CompletedProcess[str]:
    """Run a script of a shell, of `$T` (trashd), `$S` (a source) and `$M`, where a file stands in for the switch."""
    stand_in = bench / "enable_uring"
    stand_in.write_text(f"{switch}\n")
    words = ["sh", "-c", f'mount --bind "$0" {SWITCH} && {script}', str(stand_in)]
    env = {**os.environ, "T": TRASHD, "S": str(bench / "source"), "M": str(bench / "target")}
    return subprocess.run(["unshare", "--mount", *words], env=env, capture_output=True, text=True, check=False)


IS_TRUSTED = why_not_trusted(os.uname().release) is None


@pytest.mark.parametrize("uring", ["on", pytest.param("auto", marks=pytest.mark.skipif(not IS_TRUSTED, reason="old"))])
def test_requests_come_by_io_uring(bench: Path, uring: str) -> None:
    mount(bench / "source", bench / "target", "--uring", uring)
    assert told_of_uring(bench / "target").startswith("on: ")
    assert (bench / "target/file").read_text() == "content"


def test_auto_never_sets_the_switch(bench: Path) -> None:
    done = behind_switch(bench, "N", '"$T" mount "$S" "$M" && "$T" mount --explain "$M" && umount "$M"')
    assert done.returncode == 0, done
    assert ["uring", "off"] in [line.split()[:2] for line in done.stdout.splitlines()]
    assert (bench / "enable_uring").read_text() == "N\n"


def test_a_mount_names_the_switch_that_is_off_once_in_each_boot(bench: Path) -> None:
    script = 'mount -t tmpfs run /run && for i in 1 2; do "$T" mount "$S" "$M" && umount "$M"; done'
    said = [behind_switch(bench, switch, script).stderr for switch in ("N", "Y")]
    assert [text.count("`trashd service install --uring` switches it on") for text in said] == [1, 0]


def test_on_by_root_sets_it(bench: Path) -> None:
    done = behind_switch(bench, "N", '"$T" mount --uring on "$S" "$M" && "$T" mount --explain "$M" && umount "$M"')
    assert done.returncode == 0, done
    assert ["uring", "on"] in [line.split()[:2] for line in done.stdout.splitlines()]
    assert (bench / "enable_uring").read_text().startswith("Y")


def test_on_fails_with_the_reason_where_the_switch_can_not_be_set(bench: Path) -> None:
    done = behind_switch(bench, "N", f'mount -o remount,bind,ro {SWITCH} && "$T" mount --uring on "$S" "$M"')
    assert done.returncode != 0
    assert f"uring=on: {SWITCH} is N" in done.stderr
    assert not list((bench / "target").iterdir())


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this machine has one core")
def test_on_fails_with_the_reason_where_a_core_is_out_of_reach(bench: Path) -> None:
    words = [TRASHD, "mount", "--uring", "on", str(bench / "source"), str(bench / "target")]
    done = subprocess.run(["taskset", "-c", "0", *words], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "keeps the daemon from" in done.stderr
    assert not list((bench / "target").iterdir())
