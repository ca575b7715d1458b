"""For each release of Debian that `make packages` names, a machine of it with what was built installed.

TRASHD_TEST_PACKAGES  releases, rpm, tarball: what was built, and is tried; upgrade: all of that, from 0.3.0
"""

import os
from collections.abc import Iterator

import pytest

from tests.packages.debian_machine import DebianMachine, booted_with_packages

BUILT = os.environ.get("TRASHD_TEST_PACKAGES", "").split()
OTHERS = ("rpm", "tarball", "upgrade")
RELEASES = [name for name in BUILT if name not in OTHERS]
collect_ignore = [f"test_{name}.py" for name in OTHERS if name not in BUILT]
if not RELEASES:
    collect_ignore.append("test_debian.py")


@pytest.fixture(params=RELEASES)
def machine(request: pytest.FixtureRequest) -> Iterator[DebianMachine]:
    """It is the test's own."""
    with booted_with_packages(request.param) as installed:
        yield installed
