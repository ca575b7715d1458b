"""The volume of most tests here; files that need more have their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.store_verbs import tmpfs_store


@pytest.fixture
def volume() -> Iterator[Path]:
    """A tmpfs with a store; in the end the checker has nothing to say."""
    with tmpfs_store() as path:
        yield path
