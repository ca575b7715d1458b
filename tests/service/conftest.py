"""A shared volume, a service's places, and homes; files that need more have their own."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.hostile_volume import Shared, shared_volume
from tests.support.service_process import places
from tests.support.user_homes import ALICE, BOB, homes


@pytest.fixture
def shared() -> Iterator[Shared]:
    """Alice's and Mallory's volume; in the end root's canary is what it was."""
    with shared_volume() as one:
        yield one


@pytest.fixture
def base() -> Iterator[Path]:
    """Where the service has its configuration and its log."""
    with places() as path:
        yield path


@pytest.fixture
def home() -> Iterator[Mapping[int, Path]]:
    """The homes of two users; no registry names a store."""
    with homes(ALICE, BOB) as made:
        yield made
