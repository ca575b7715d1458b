"""The volume of most tests here, a service's places, and homes; files that need more have their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.homes import ALICE, BOB, homes
from tests.support.service import places
from tests.support.store import tmpfs_store


@pytest.fixture
def volume() -> Iterator[Path]:
    """A tmpfs with a store; in the end the checker has nothing to say."""
    with tmpfs_store() as path:
        yield path


@pytest.fixture
def base() -> Iterator[Path]:
    """Where the service has its configuration and its log."""
    with places() as path:
        yield path


@pytest.fixture
def home() -> Iterator[Mapping[int, Path]]:
    """The homes of two users; nobody knows any store."""
    with homes(ALICE, BOB) as made:
        yield made
