"""A booted systemd on which trashd is installed, for all tests of a file."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.booted_systemd import System
from tests.systemd.machine import booted_with_trashd, containers, limit, volume_at


@pytest.fixture(scope="module")
def system(request: pytest.FixtureRequest) -> Iterator[System]:
    """It has what the file's `FSTAB` says in /etc/fstab, and boots what its `ENABLED` names."""
    fstab: str = getattr(request.module, "FSTAB", "")
    with booted_with_trashd(fstab, getattr(request.module, "ENABLED", ())) as booted:
        yield booted


@pytest.fixture
def volume(system: System, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A volume of the test's own; at the end it is empty, and the checker has nothing to say."""
    path = f"/srv/{re.sub('[^a-z_]', '_', request.node.name.removeprefix('test_'))}"
    made = volume_at(system, path)
    limit(system, None)
    yield made
    limit(system, None)
    system.wait_for(lambda: not containers(system.path(path)), "all is reaped")
    assert system.trashd("doctor", path) == ""
