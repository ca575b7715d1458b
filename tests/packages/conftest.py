"""For each release that `make packages` names, a machine of it with what was built installed; without it, nothing."""

import os
from collections.abc import Iterator

import pytest

from tests.packages.debian_machine import DebianMachine, booted_with_packages

RELEASES = os.environ.get("TRASHD_TEST_PACKAGES", "").split()
collect_ignore_glob = [] if RELEASES else ["*"]


@pytest.fixture(params=RELEASES)
def machine(request: pytest.FixtureRequest) -> Iterator[DebianMachine]:
    """It is the test's own."""
    with booted_with_packages(request.param) as installed:
        yield installed
