"""A program is run as what it is now, though the kernel was told something else: root may have given it away behind.

A write through the mount takes such rights from what the kernel believes; one behind it does not. The mount is
exclusive, so nothing tells the kernel, which believes what it knows for an hour.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.acls import CAN_BIND, CAPABILITY
from tests.support.mount_and_backing import Sides
from tests.support.other_users import as_user
from tests.support.privileges import HE, seen_and_behind

pytestmark = pytest.mark.needs("root", "fuse", "loop")

TEAM = 72_100
PROGRAM = "/usr/bin/id"


@pytest.fixture(scope="module", params=["native", "exclusive", "slow", "exclusive+passthrough=off"])
def place(request: pytest.FixtureRequest) -> Iterator[Sides]:
    way, *options = request.param.split("+")
    with seen_and_behind(way, *options) as both:
        yield Sides(*both)


def program(place: Sides, mode: int, name: str) -> Path:
    """One of root's and the team's, which was run, and looked at."""
    path = place.seen / f"{name} {mode:o}"
    shutil.copy(PROGRAM, path)
    os.chown(path, 0, TEAM)
    path.chmod(mode)
    run(path)
    os.listdir(place.seen)
    path.stat()
    return path


def run(path: Path, fd: int = -1) -> str:
    """The user that it finds itself to be, run by this one."""

    def do() -> str:
        what = str(path) if fd < 0 else f"/proc/self/fd/{fd}"
        fds = () if fd < 0 else (fd,)
        return subprocess.run([what], capture_output=True, text=True, check=True, pass_fds=fds).stdout

    return as_user(HE, do)


def give_away(place: Sides, path: Path) -> None:
    """Behind: from then on it is the user's, who writes anything to it."""
    behind = place.behind / path.name
    os.chown(behind, HE, HE)
    behind.write_bytes(Path(PROGRAM).read_bytes() + b"\0")


@pytest.mark.parametrize("mode", [0o4755, 0o2755, 0o6755])
@pytest.mark.parametrize("is_by_fd", [False, True])
def test_who_was_given_a_program_does_not_run_it_as_who_owned_it(place: Sides, mode: int, is_by_fd: bool) -> None:
    path = program(place, mode, "by fd" if is_by_fd else "by path")
    assert ("euid=0" in run(path), f"egid={TEAM}" in run(path)) == (bool(mode & 0o4000), bool(mode & 0o2000))
    fd = os.open(path, os.O_PATH) if is_by_fd else -1
    try:
        give_away(place, path)
        assert "euid" not in run(path, fd)
        assert "egid" not in run(path, fd)
    finally:
        if is_by_fd:
            os.close(fd)


def test_nor_with_the_capabilities_that_it_had(place: Sides) -> None:
    path = program(place, 0o755, "capable")
    os.setxattr(path, CAPABILITY, CAN_BIND)
    assert os.getxattr(path, CAPABILITY) == CAN_BIND
    give_away(place, path)
    with pytest.raises(OSError, match="No data"):
        os.getxattr(path, CAPABILITY)
